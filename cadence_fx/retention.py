"""Retention rules: what bounds a region, as list arithmetic on one dimension.

Each rule maps the extent before truncation to the slices that stay. `START` stands for the region's extent
at the start of its lifetime (the prompt's length), so that one rule serves every prompt.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

__all__ = ["START", "KeepAll", "KeepEnds", "Pinned", "Retention", "Ring", "Window"]

START: Final = "start"
Slices: TypeAlias = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class KeepAll:
    """Nothing is dropped; the extent is unbounded and the region is excluded from capture."""

    def limit(self, start: int) -> int | None:
        return None

    def keep(self, extent: int, start: int) -> Slices:
        return ((0, extent),)

    def contradiction(self, start: int) -> str | None:
        return None


@dataclass(frozen=True)
class Pinned:
    """The extent never changes; a call replaces the content."""

    def limit(self, start: int) -> int | None:
        return start

    def keep(self, extent: int, start: int) -> Slices:
        return ((0, start),)

    def contradiction(self, start: int) -> str | None:
        return None


@dataclass(frozen=True)
class Ring:
    """A ring of ``length`` slots, all of which are always attended (under a mask of the module's own)."""

    length: int

    def limit(self, start: int) -> int | None:
        return self.length

    def keep(self, extent: int, start: int) -> Slices:
        return ((0, self.length),)

    def contradiction(self, start: int) -> str | None:
        if self.length < 1:
            return f"a ring has at least one slot, not {self.length}"
        return (
            None if start in (0, self.length) else f"a ring of {self.length} slots starts full ({self.length}) or at 0"
        )


@dataclass(frozen=True)
class Window:
    """Keep the newest ``length``; with ``high``, only once the extent exceeds ``high``.

    ``side`` says where the newest elements are: at the end (old-first order) or at the head (new-first order).
    """

    length: int
    high: int | None = None
    side: Literal["tail", "head"] = "tail"

    def limit(self, start: int) -> int | None:
        return self.length if self.high is None else self.high

    def keep(self, extent: int, start: int) -> Slices:
        if extent <= (self.length if self.high is None else self.high):
            return ((0, extent),)
        return ((extent - self.length, extent),) if self.side == "tail" else ((0, self.length),)

    def contradiction(self, start: int) -> str | None:
        if self.length < 1:
            return f"a window keeps at least one element, not {self.length}"
        if self.high is not None and self.high < self.length:
            return f"high ({self.high}) is below length ({self.length})"
        limit = self.limit(start)
        return f"the window holds {limit} elements at most" if limit is not None and start > limit else None


@dataclass(frozen=True)
class KeepEnds:
    """Once the extent exceeds head + tail, keep the first ``head`` and the last ``tail`` elements.

    In old-first order with ``head=START`` this is prompt + window. In new-first order the same two slices keep the
    newest ``head`` and the OLDEST ``tail``: order matters, and the shadow audit checks it.
    """

    head: int | Literal["start"]
    tail: int

    def ends(self, start: int) -> tuple[int, int]:
        return (start if self.head == START else self.head), self.tail

    def limit(self, start: int) -> int | None:
        return sum(self.ends(start))

    def keep(self, extent: int, start: int) -> Slices:
        head, tail = self.ends(start)
        return ((0, extent),) if extent <= head + tail else ((0, head), (extent - tail, extent))

    def contradiction(self, start: int) -> str | None:
        head, tail = self.ends(start)
        if head < 0 or tail < 1:
            return f"it keeps {head} elements at the head and {tail} at the tail; a tail has at least one"
        return f"it keeps {head + tail} elements at most" if start > head + tail else None


Retention: TypeAlias = KeepAll | Pinned | Ring | Window | KeepEnds
RULES: dict[str, type[Retention]] = {c.__name__: c for c in (KeepAll, Pinned, Ring, Window, KeepEnds)}
