"""The segment algebra: which box of which source does each box of a tensor hold, after pure data movement.

A streaming decoder moves its state with cat, slice, select, split, stack, repeat, transpose and ``copy_``. None of
these computes anything, so the result is a list of boxes of earlier tensors, and retention is arithmetic on it::

    old  = Layout.whole("old", (2, 8, 402, 64))
    new  = Layout.cat([Layout.whole("k", (2, 8, 50, 64)), old], 2)            # [k 0:50 | old 0:402]
    kept = Layout.cat([new.slice(2, 0, 302), new.slice(2, -100)], 2)          # [k 0:50 | old 0:252 | old 302:402]

Everything is a plain int: a graph is specialised to one signature before this runs. Operations take aten's arguments,
return a new layout and share the pieces that they leave alone. What is not movement raises `NotMovement`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod

from cadence_fx.boxes import Ints, overlapping_pairs, put
from cadence_fx.errors import CadenceError
from cadence_fx.pieces import (
    Piece,
    Source,
    broadcast,
    cut,
    inside,
    merged_along,
    moved,
    outside,
    plain,
    same_where_both,
)

__all__ = ["Layout", "LayoutError", "NotMovement", "Piece", "Source"]


class NotMovement(CadenceError):
    """An operation does not move boxes as boxes: a step other than 1, a reshape that regroups elements."""


class LayoutError(CadenceError, ValueError):
    """Arguments that aten would refuse as well: a dimension out of range, shapes that do not match."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The content of a tensor. Pieces are disjoint and cover the shape exactly; an empty tensor has none."""

    shape: Ints
    pieces: tuple[Piece, ...]

    @staticmethod
    def whole(source: Source, shape: Sequence[int]) -> Layout:
        """A tensor that is all of one source."""
        size, zeros = tuple(shape), (0,) * len(shape)
        return Layout(size, (Piece(zeros, size, source, zeros, tuple(range(len(size)))),) if prod(size) else ())

    @staticmethod
    def cat(layouts: Sequence[Layout], dim: int = 0) -> Layout:
        """``aten.cat``; like aten it skips empty 1-D tensors whatever the rank of the others."""
        parts = [part for part in layouts if part.shape != (0,)] or list(layouts[:1])
        if not parts:
            raise LayoutError("cat: expected at least one tensor, found none")
        first = parts[0].shape
        dim = _dim(dim, len(first))
        at, pieces = 0, list[Piece]()
        for part in parts:
            if part.shape[:dim] != first[:dim] or part.shape[dim + 1 :] != first[dim + 1 :]:
                raise LayoutError(f"cat: shapes differ outside dimension {dim}: {first} and {part.shape}")
            pieces += part.pieces if not at else [moved(piece, dim, at) for piece in part.pieces]
            at += part.shape[dim]
        return Layout(put(first, dim, at), tuple(pieces))

    @staticmethod
    def stack(layouts: Sequence[Layout], dim: int = 0) -> Layout:
        """``aten.stack``: equal shapes, joined along a new dimension."""
        shapes = list(dict.fromkeys(part.shape for part in layouts))
        if len(shapes) != 1:
            raise LayoutError(f"stack: expected tensors of one shape, found {', '.join(map(str, shapes)) or 'none'}")
        return Layout.cat([part.unsqueeze(dim) for part in layouts], _dim(dim, len(shapes[0]) + 1))

    def slice(self, dim: int = 0, start: int | None = None, stop: int | None = None, step: int = 1) -> Layout:
        """``aten.slice``: bounds may be negative and are clamped. Only step 1 is movement of boxes."""
        if step != 1:
            raise NotMovement(f"slice: step {step} takes single elements, not a box; only step 1 is tracked")
        dim = _dim(dim, len(self.shape))
        lo, hi, _ = slice(start, stop).indices(self.shape[dim])
        if (lo, hi) == (0, self.shape[dim]):
            return self
        parts = inside(self.pieces, [(dim, lo, hi)])
        return Layout(put(self.shape, dim, max(hi - lo, 0)), tuple(moved(part, dim, -lo) for part in parts))

    def select(self, dim: int, index: int) -> Layout:
        """``aten.select``: one index of a dimension, which goes away."""
        dim = _dim(dim, len(self.shape))
        extent = self.shape[dim]
        if not -extent <= index < extent:
            raise LayoutError(f"select: index {index} is out of range for dimension {dim} of {self.shape}")
        index %= extent
        return self.slice(dim, index, index + 1).squeeze(dim)

    def split(self, dim: int, sizes: int | Sequence[int]) -> list[Layout]:
        """``aten.split`` with one size for all parts, or ``aten.split_with_sizes``."""
        dim = _dim(dim, len(self.shape))
        extent = self.shape[dim]
        if isinstance(sizes, int):
            if sizes < 1 and (sizes or extent):
                raise LayoutError(f"split: a size of {sizes} does not divide dimension {dim} of {self.shape}")
            sizes = [min(sizes, extent - lo) for lo in range(0, extent, sizes)] if extent else [0]
        if sum(sizes) != extent or min(sizes, default=0) < 0:
            raise LayoutError(f"split: sizes {list(sizes)} do not add up to {extent}, dimension {dim} of {self.shape}")
        bounds = [0, *accumulate(sizes)]
        parts: list[list[Piece]] = [[] for _ in sizes]
        for piece in self.pieces:
            end = piece.start[dim] + piece.size[dim]
            # The last part that starts at or before the piece; parts of size 0 before it share that start.
            index = bisect_right(bounds, piece.start[dim]) - 1
            while index < len(parts) and bounds[index] < end:
                if part := cut(piece, dim, bounds[index], bounds[index + 1]):
                    parts[index].append(moved(part, dim, -bounds[index]))
                index += 1
        return [Layout(put(self.shape, dim, n), tuple(held)) for n, held in zip(sizes, parts, strict=True)]

    def chunk(self, dim: int, n: int) -> list[Layout]:
        """``aten.chunk``: parts of ceil(extent / n), so there may be fewer than n."""
        if n < 1:
            raise LayoutError(f"chunk: expected at least 1 chunk, found {n}")
        dim = _dim(dim, len(self.shape))
        size = -(-self.shape[dim] // n)
        return self.split(dim, size if size else [0] * n)

    def unbind(self, dim: int = 0) -> list[Layout]:
        """``aten.unbind``: every index of a dimension."""
        dim = _dim(dim, len(self.shape))
        return [part.squeeze(dim) for part in self.split(dim, [1] * self.shape[dim])]

    def unsqueeze(self, dim: int) -> Layout:
        """``aten.unsqueeze``: a new dimension of size 1."""
        dims: list[int | None] = list(range(len(self.shape)))
        dims.insert(_dim(dim, len(dims) + 1), None)
        return self._arranged(dims)

    def squeeze(self, dim: int | Sequence[int] | None = None) -> Layout:
        """``aten.squeeze``: without the given (or all) dimensions of size 1; others stay."""
        rank = len(self.shape)
        if not rank:
            return self
        dims = range(rank) if dim is None else [dim] if isinstance(dim, int) else dim
        gone = {d for d in (_dim(d, rank) for d in dims) if self.shape[d] == 1}
        return self._arranged([d for d in range(rank) if d not in gone]) if gone else self

    def permute(self, dims: Sequence[int]) -> Layout:
        """``aten.permute``."""
        order = [_dim(d, len(self.shape)) for d in dims]
        if sorted(order) != list(range(len(self.shape))):
            raise LayoutError(f"permute: {list(dims)} is no order of the dimensions of {self.shape}")
        return self._arranged(order)

    def transpose(self, a: int, b: int) -> Layout:
        """``aten.transpose``: two dimensions exchanged."""
        order = list(range(len(self.shape)))
        a, b = _dim(a, len(order)), _dim(b, len(order))
        order[a], order[b] = b, a
        return self._arranged(order)

    def reshape(self, shape: Sequence[int]) -> Layout:
        """``aten.reshape`` where it only inserts or removes dimensions of size 1; regrouping is not tracked."""
        target, numel = tuple(shape), prod(self.shape)
        if target.count(-1) == 1:
            known = prod(n for n in target if n != -1)
            target = tuple((numel // known if known else 0) if n == -1 else n for n in target)
        if prod(target) != numel or min(target, default=0) < 0:
            raise LayoutError(f"reshape: {self.shape} has {numel} elements and cannot become {tuple(shape)}")
        if not numel:
            return Layout(target, ())
        if [n for n in target if n != 1] != [n for n in self.shape if n != 1]:
            raise NotMovement(f"reshape: {self.shape} to {target} regroups elements; only sizes of 1 may come or go")
        kept = iter([d for d, n in enumerate(self.shape) if n != 1])
        return self._arranged([None if n == 1 else next(kept) for n in target])

    def expand(self, sizes: Sequence[int]) -> Layout:
        """``aten.expand``: dimensions of size 1 are broadcast, -1 keeps one, new ones come in front."""
        extra = len(sizes) - len(self.shape)
        old = (1,) * max(extra, 0) + self.shape
        target = tuple(m if n == -1 and d >= extra else n for d, (n, m) in enumerate(zip(sizes, old, strict=False)))
        if extra < 0 or any(n != m and (m != 1 or n < 0) for n, m in zip(target, old, strict=True)):
            raise LayoutError(f"expand: {self.shape} cannot be expanded to {tuple(sizes)}")
        wide = {d for d, (n, m) in enumerate(zip(target, old, strict=True)) if n != m}
        if not prod(target) or not (wide or extra):
            return self if target == self.shape else Layout(target, ())
        return Layout(target, tuple(broadcast(p, target, wide) for p in self._leading(extra).pieces))

    def repeat(self, counts: Sequence[int]) -> Layout:
        """``aten.repeat``: the tensor laid side by side; counts beyond the rank add dimensions in front."""
        extra = len(counts) - len(self.shape)
        if extra < 0 or min(counts, default=0) < 0:
            raise LayoutError(f"repeat: counts {list(counts)} do not fit {self.shape}")
        out = self._leading(extra)
        # A dimension of size 1 repeated is the same content as one broadcast, in one piece instead of many.
        out = out.expand([c if n == 1 else n for c, n in zip(counts, out.shape, strict=True)])
        for dim, (count, n) in enumerate(zip(counts, self._leading(extra).shape, strict=True)):
            if n != 1 and count != 1:
                out = Layout.cat([out] * count, dim) if count else out.slice(dim, 0, 0)
        return out

    def read(self, view: Piece, shape: Sequence[int] | None = None) -> Layout:
        """The content of a view of a buffer, given the buffer's content `self`.

        ``view`` maps the view's elements to the buffer's; ``shape`` (the view's) is checked against it if given.
        """
        if shape is not None and tuple(shape) != view.size:
            raise LayoutError(f"read: the view has shape {view.size}, expected {tuple(shape)}")
        walked = {axis for axis in view.axes if axis is not None}
        pieces = list[Piece]()
        for piece in inside(self.pieces, self._bounds(view)):
            # Broadcast dimensions of the view hold the same everywhere, so each piece spans them.
            start, size = [0] * len(view.size), [1 if d in walked else n for d, n in enumerate(view.size)]
            for axis, lo, at, n in zip(view.axes, view.origin, piece.start, piece.size, strict=True):
                if axis is not None:
                    start[axis], size[axis] = at - lo, n
            axes = tuple(None if axis is None else view.axes[axis] for axis in piece.axes)
            pieces.append(Piece(tuple(start), tuple(size), piece.source, piece.origin, axes))
        return Layout(view.size, tuple(pieces))

    def write(self, view: Piece, value: Layout) -> Layout:
        """The content of a buffer `self` after ``view.copy_(value)``; the value is already broadcast to the view."""
        if value.shape != view.size:
            raise LayoutError(f"write: the value has shape {value.shape}, the view {view.size}")
        buffer_dim = {axis: d for d, axis in enumerate(view.axes) if axis is not None}
        if any(n != 1 and d not in buffer_dim for d, n in enumerate(view.size)):
            raise NotMovement(f"write: the view of shape {view.size} holds one element of the buffer several times")
        pieces = outside(self.pieces, self._bounds(view))
        for piece in value.pieces:
            start = tuple(
                lo if axis is None else lo + piece.start[axis] for lo, axis in zip(view.origin, view.axes, strict=True)
            )
            size = tuple(1 if axis is None else piece.size[axis] for axis in view.axes)
            axes = tuple(None if axis is None else buffer_dim.get(axis) for axis in piece.axes)
            pieces.append(Piece(start, size, piece.source, piece.origin, axes))
        return Layout(self.shape, tuple(pieces))

    def view_piece(self) -> Piece | None:
        """The one piece that covers everything, if there is one: how a view of a buffer is described."""
        return self.pieces[0] if len(self.pieces) == 1 else None

    def sources(self) -> tuple[Source, ...]:
        """Every source of a piece, once, in the order of the pieces."""
        return tuple(dict.fromkeys(piece.source for piece in self.pieces))

    def merged(self) -> Layout:
        """Neighbours that continue each other become one piece; pieces are sorted by their start.

        Equal content gives equal layouts unless boxes tile in ways that no joining along one dimension undoes (a
        pinwheel); `agrees` decides those.
        """
        pieces, count = [plain(piece) for piece in self.pieces], -1
        while count != len(pieces):
            count = len(pieces)
            for dim in reversed(range(len(self.shape))):
                pieces = merged_along(pieces, dim)
        return Layout(self.shape, tuple(sorted(pieces, key=lambda piece: piece.start)))

    def agrees(self, other: Layout) -> bool:
        """Whether both hold the same element of the same source everywhere, however it is cut into pieces."""
        if self.shape != other.shape:
            return False
        a, b = self.merged(), other.merged()
        pairs = overlapping_pairs([(p.start, p.size) for p in a.pieces], [(p.start, p.size) for p in b.pieces])
        return a == b or all(same_where_both(a.pieces[i], b.pieces[j]) for i, j in pairs)

    def _leading(self, count: int) -> Layout:
        """With ``count`` new dimensions of size 1 in front."""
        return self._arranged([*[None] * count, *range(len(self.shape))]) if count else self

    def _arranged(self, dims: Sequence[int | None]) -> Layout:
        """The dimensions in a new order; None is a new one of size 1, and those left out have size 1."""
        where = {old: new for new, old in enumerate(dims) if old is not None}
        pieces = [
            Piece(
                tuple([0 if d is None else p.start[d] for d in dims]),
                tuple([1 if d is None else p.size[d] for d in dims]),
                p.source,
                p.origin,
                tuple([None if a is None else where.get(a) for a in p.axes]),
            )
            for p in self.pieces
        ]
        return Layout(tuple(1 if d is None else self.shape[d] for d in dims), tuple(pieces))

    def _bounds(self, view: Piece) -> list[tuple[int, int, int]]:
        """The view's box in the buffer as (dim, lo, hi), without the dimensions that it covers fully."""
        if any(view.start) or len(view.origin) != len(self.shape):
            raise LayoutError(f"{view} is not a whole view of a buffer of shape {self.shape}")
        sizes = (1 if axis is None else view.size[axis] for axis in view.axes)
        box = [(d, lo, lo + n) for d, (lo, n) in enumerate(zip(view.origin, sizes, strict=True))]
        if any(lo < 0 or hi > self.shape[d] for d, lo, hi in box):
            raise LayoutError(f"the view {view} reaches outside its buffer of shape {self.shape}")
        return [(d, lo, hi) for d, lo, hi in box if hi - lo != self.shape[d]]


def _dim(dim: int, rank: int) -> int:
    """A dimension counted from the front, checked."""
    if not -rank <= dim < rank:
        raise LayoutError(f"dimension {dim} is out of range for a tensor of {rank} dimensions")
    return dim % rank
