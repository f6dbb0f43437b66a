"""What ``cadence-fx prove`` does and shows: a bar while it runs, then each operator's verdict."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from cadence_fx.cli_show import Show
from cadence_fx.known_operators import known_operators
from cadence_fx.proofs import ProofKey, Proofs, UnaryOperator, Verdict, prove
from cadence_fx.unary import DTYPES

__all__ = ["graph_operators", "named_operators", "prove_all"]

# A CPU takes hours for all of float32, so it looks at some inputs only, which proves nothing and is not kept.
CPU_LIMIT = 1 << 20


def named_operators(names: str | None, dtypes: str | None, device: str) -> list[UnaryOperator]:
    """The operators that ``--operators`` and ``--dtype`` name; ValueError if one is not known."""
    on_gpu = torch.device(device).type == "cuda"
    usual = [name for name, dtype in DTYPES.items() if on_gpu or dtype.itemsize == 2]
    return known_operators(None if names is None else _names(names), usual if dtypes is None else _names(dtypes))


def graph_operators(fast: Any, dtypes: str | None) -> list[UnaryOperator]:
    """The unary operators in the graphs of a transformed module, each once."""
    nodes = (node for program in fast.programs.values() for node in program.flat.graph.nodes)
    found = dict.fromkeys(operator for node in nodes if (operator := UnaryOperator.of(node)) is not None)
    return [operator for operator in found if dtypes is None or operator.dtype in _names(dtypes)]


def prove_all(show: Show, operators: Sequence[UnaryOperator], device: str, again: bool) -> dict[str, Any]:
    """Prove operators, keep what is complete and show all; the content of ``--json``.

    Raises:
        OSError: the cache cannot be written.
    """
    key = ProofKey.current(device)
    proofs = Proofs(key)
    proofs.add()  # that the file can be written shows before the work is done
    verdicts: list[Verdict] = []
    kept: set[UnaryOperator] = set()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=show.console, transient=True) as bar:
        task = bar.add_task("starting", total=len(operators))
        for operator in operators:
            bar.update(task, description=f"{operator} {operator.dtype}")
            verdict = None if again else proofs.lookup(operator)
            if verdict is None:
                partial = torch.device(device).type == "cpu" and operator.bits == 32
                verdict = prove(operator, device, key=key, limit=CPU_LIMIT if partial else None)
                if verdict.complete:
                    proofs.add(verdict)
            else:
                kept.add(operator)
            verdicts.append(verdict)
            bar.advance(task)
    _show(show, key, verdicts, kept)
    show.line(f"kept in {proofs.path}")
    rows = [v.to_dict() | {"exact": v.exact, "exact_contiguous": v.exact_contiguous} for v in verdicts]
    return {"key": key.to_dict(), "file": str(proofs.path), "verdicts": rows}


def _show(show: Show, key: ProofKey, verdicts: Sequence[Verdict], kept: set[UnaryOperator]) -> None:
    show.line(f"on {key.device}, torch {key.torch_version}, {key.compiler}")
    show.table(
        ("operator", "dtype", "seconds", "bits against eager"),
        [(str(v.operator), v.operator.dtype, "kept" if v.operator in kept else f"{v.seconds:.1f}", str(v))
         for v in verdicts],
    )  # fmt: skip
    exact, partial = sum(v.exact for v in verdicts), sum(not v.complete for v in verdicts)
    unproven = f"; {partial} were not compared on every input, which proves nothing" if partial else ""
    show.line()
    show.line(f"{exact} of {len(verdicts)} are exact on every input{unproven}")


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]
