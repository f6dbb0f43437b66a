"""Entry point of ``cadence-fx``. The commands are in `cadence_fx.cli_commands`, which needs the ``cli`` extra."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NoReturn

__all__ = ["main"]

EXTRA = ("typer", "rich")


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Runs the command line and exits: 0 ok, 1 a difference or a rejection, 2 wrong usage."""
    try:
        from cadence_fx.cli_commands import app
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in EXTRA:
            raise
        print("cadence-fx: the command line needs typer and rich: pip install 'cadence-fx[cli]'", file=sys.stderr)
        sys.exit(2)
    app(args=complete_json(sys.argv[1:] if arguments is None else arguments), prog_name="cadence-fx")
    sys.exit(0)


def complete_json(arguments: Sequence[str]) -> list[str]:
    """``--json`` at the end or before another option means standard output, as ``--json -`` does."""
    completed: list[str] = []
    for position, argument in enumerate(arguments, start=1):
        completed.append(argument)
        following = arguments[position] if position < len(arguments) else "--"
        if argument == "--json" and following != "-" and following.startswith("-"):
            completed.append("-")
    return completed
