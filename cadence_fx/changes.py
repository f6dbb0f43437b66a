"""What passes report: changes that were made, and rejections of what was left alone.

Both are values. A rejection has a stable code; the fixed text of a code is in `CODES`, everything that depends on
the node is in the rejection's own explanation.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass

from cadence_fx.errors import CadenceError

__all__ = ["CODES", "Change", "Rejection", "register"]

CODES: dict[str, str] = {}
_FORM = re.compile(r"CX\d{3}")


def register(code: str, title: str) -> str:
    """Give ``code`` its fixed text, and return the code.

    Raises:
        CadenceError: the code is taken, is not of the form CX103, or the title is empty.
    """
    if not _FORM.fullmatch(code):
        raise CadenceError(f"code is {code!r}; codes look like CX103")
    if code in CODES:
        raise CadenceError(f"code {code} is taken by {CODES[code]!r}; pick a free number for {title!r}")
    if not title.strip():
        raise CadenceError(f"code {code} has an empty title; say in a few words what it means")
    CODES[code] = title
    return code


def short_source(source: str) -> str:
    """A source line as people read it: the last three parts of its path."""
    path, colon, line = source.rpartition(":")
    return f"{'/'.join(path.split('/')[-3:])}{colon}{line}"


@dataclass(frozen=True)
class Change:
    """One rewrite that a pass made.

    Args:
        pass_name: the pass.
        what: the rewrite: "hoisted", "writeback".
        where: name of the node or the group of nodes.
        why: the property that permits it.
        source: the user's line that the nodes come from, if known.
        count: number of nodes rewritten alike.
    """

    pass_name: str
    what: str
    where: str
    why: str
    source: str = ""
    count: int = 1

    def to_dict(self) -> dict[str, object]:
        """JSON-safe values."""
        return asdict(self)

    def __str__(self) -> str:
        times = f" ({self.count}x)" if self.count != 1 else ""
        at = f" [{short_source(self.source)}]" if self.source else ""
        return f"{self.pass_name}: {self.what} {self.where}{times}: {self.why}{at}"


@dataclass(frozen=True)
class Rejection:
    """One place that a pass could have rewritten and did not.

    Args:
        code: stable code such as "CX103", see `CODES`.
        pass_name: the pass.
        node: name of the node.
        explanation: what was expected and what was found.
        hints: what the user can do, one sentence each.
        source: the user's line that the node comes from, if known.
    """

    code: str
    pass_name: str
    node: str
    explanation: str
    hints: tuple[str, ...] = ()
    source: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "hints", tuple(self.hints))

    @property
    def title(self) -> str:
        """The fixed text of the code; empty if nobody registered it."""
        return CODES.get(self.code, "")

    def to_dict(self) -> dict[str, object]:
        """JSON-safe values, the title included."""
        return {**asdict(self), "hints": list(self.hints), "title": self.title}

    def __str__(self) -> str:
        title = f" {self.title}" if self.title else ""
        at = f" [{short_source(self.source)}]" if self.source else ""
        hints = "".join(f"\n  hint: {hint}" for hint in self.hints)
        return f"{self.code}{title}: {self.pass_name} left {self.node} alone: {self.explanation}{at}{hints}"
