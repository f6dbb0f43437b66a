"""One piece of a layout, and what can be done to it alone: cut, move, broadcast, join with a neighbour."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import TypeAlias

from cadence_fx.boxes import Ints, put

__all__ = ["Axes", "Piece", "Source"]

Source: TypeAlias = Hashable
Axes: TypeAlias = tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """One box of a tensor and the box of one source that it holds.

    Element x of the box is element ``origin[s] + x[axes[s]] - start[axes[s]]`` of the source in each of the source's
    dimensions s, or ``origin[s]`` where ``axes[s]`` is None. A tensor dimension that no axis names is broadcast.
    """

    start: Ints
    """Start of the box in the tensor."""
    size: Ints
    """Size of the box in the tensor; no entry is 0."""
    source: Source
    """What the box holds a part of."""
    origin: Ints
    """Start in the source, one entry per dimension of the source."""
    axes: Axes
    """Per dimension of the source, the tensor dimension that walks it, or None for a fixed index."""


def moved(piece: Piece, dim: int, by: int) -> Piece:
    """The same content, further along one dimension of the tensor."""
    if not by:
        return piece
    return Piece(put(piece.start, dim, piece.start[dim] + by), piece.size, piece.source, piece.origin, piece.axes)


def cut(piece: Piece, dim: int, lo: int, hi: int) -> Piece | None:
    """The part of a piece within [lo, hi) of one dimension, if any; the piece itself if it lies within."""
    start, end = piece.start[dim], piece.start[dim] + piece.size[dim]
    if lo <= start and end <= hi:
        return piece
    first, last = max(start, lo), min(end, hi)
    if first >= last:
        return None
    origin = piece.origin
    if first > start:
        origin = tuple(o + first - start if a == dim else o for o, a in zip(origin, piece.axes, strict=True))
    size = put(piece.size, dim, last - first)
    return Piece(put(piece.start, dim, first), size, piece.source, origin, piece.axes)


def inside(pieces: Iterable[Piece], bounds: Iterable[tuple[int, int, int]]) -> list[Piece]:
    """The parts of the pieces within [lo, hi) of every (dim, lo, hi)."""
    found = list(pieces)
    for dim, lo, hi in bounds:
        found = [part for part in (cut(piece, dim, lo, hi) for piece in found) if part]
    return found


def outside(pieces: Iterable[Piece], bounds: list[tuple[int, int, int]]) -> list[Piece]:
    """The parts of the pieces that `inside` leaves out."""
    found = list[Piece]()
    for piece in pieces:
        if all(piece.start[d] < hi and lo < piece.start[d] + piece.size[d] for d, lo, hi in bounds):
            rest: Piece | None = piece
            for dim, lo, hi in bounds:
                if rest:
                    sides = cut(rest, dim, 0, lo), cut(rest, dim, hi, rest.start[dim] + rest.size[dim])
                    found += [side for side in sides if side]
                    rest = cut(rest, dim, lo, hi)
        else:
            found.append(piece)
    return found


def broadcast(piece: Piece, shape: Ints, wide: set[int]) -> Piece:
    """The piece over the whole of its dimensions in ``wide``, where it had size 1."""
    size = tuple(shape[d] if d in wide else n for d, n in enumerate(piece.size))
    axes = tuple(None if a in wide else a for a in piece.axes)
    return Piece(piece.start, size, piece.source, piece.origin, axes)


def plain(piece: Piece) -> Piece:
    """The piece without the axes of size 1: walking one element and a fixed index are the same."""
    if 1 not in piece.size:
        return piece
    axes = tuple(None if a is None or piece.size[a] == 1 else a for a in piece.axes)
    return piece if axes == piece.axes else Piece(piece.start, piece.size, piece.source, piece.origin, axes)


def merged_along(pieces: list[Piece], dim: int) -> list[Piece]:
    """Runs of neighbours in one dimension, joined. The pieces are `plain`, and so is the result."""

    def row(piece: Piece) -> tuple[Ints, Ints]:
        return put(piece.start, dim, 0), put(piece.size, dim, 0)

    out = list[Piece]()
    for _, group in groupby(sorted(pieces, key=lambda p: (row(p), p.start[dim])), key=row):
        out += _joined_run(group, dim)
    return out


def _joined_run(run: Iterable[Piece], dim: int) -> Iterator[Piece]:
    last: Piece | None = None
    for piece in run:
        if last and (both := _joined(last, piece, dim)):
            last = both
            continue
        if last:
            yield last
        last = piece
    if last:
        yield last


def _joined(a: Piece, b: Piece, dim: int) -> Piece | None:
    """One piece for two neighbours in ``dim`` whose other bounds are equal, if the second continues the first."""
    if a.source != b.source or a.start[dim] + a.size[dim] != b.start[dim]:
        return None
    walker: int | None = None
    if a.size[dim] > 1 or b.size[dim] > 1:
        axes = a.axes if a.size[dim] > 1 else b.axes
        walker = axes.index(dim) if dim in axes else None
    else:
        # Two single indices: where they differ, they are the first two steps of a walk.
        walker = next((s for s, (x, y) in enumerate(zip(a.origin, b.origin, strict=True)) if x != y), None)
    for s, (x, y, p, q) in enumerate(zip(a.origin, b.origin, a.axes, b.axes, strict=True)):
        if s == walker:
            walks = (p == dim or (p is None and a.size[dim] == 1)) and (q == dim or (q is None and b.size[dim] == 1))
            if not walks or y - x != a.size[dim]:
                return None
        elif x != y or p != q:
            return None
    walked = tuple(dim if s == walker else p for s, p in enumerate(a.axes))
    return Piece(a.start, put(a.size, dim, a.size[dim] + b.size[dim]), a.source, a.origin, walked)


def same_where_both(a: Piece, b: Piece) -> bool:
    """Whether two pieces hold the same where they overlap."""
    bounds = [(d, s, s + n) for d, (s, n) in enumerate(zip(b.start, b.size, strict=True))]
    mine = inside([a], bounds)
    theirs = inside([b], [(d, s, s + n) for d, (s, n) in enumerate(zip(a.start, a.size, strict=True))])
    return [plain(piece) for piece in mine] == [plain(piece) for piece in theirs]
