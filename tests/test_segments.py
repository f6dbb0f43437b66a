"""The segment algebra against torch on index tensors: random programs, and writes and reads through views."""

from __future__ import annotations

from itertools import count, pairwise
from math import prod
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cadence_fx.segments import Layout

Pair = tuple[Layout, torch.Tensor]


def check(layout: Layout) -> None:
    """Pieces are disjoint and cover the shape: the boxes, counted elementwise, hit every element once."""
    hits = torch.zeros(layout.shape, dtype=torch.int64)
    for piece in layout.pieces:
        assert len(piece.start) == len(piece.size) == len(layout.shape)
        assert len(piece.origin) == len(piece.axes)
        assert all(n > 0 and s >= 0 for s, n in zip(piece.start, piece.size, strict=True))
        hits[tuple(slice(s, s + n) for s, n in zip(piece.start, piece.size, strict=True))] += 1
    assert bool((hits == 1).all()), layout


def execute(layout: Layout, tensors: dict[Any, torch.Tensor]) -> torch.Tensor:
    """The tensor that a layout describes, element by element from the definition of a piece."""
    check(layout)
    out = torch.full(layout.shape, -1, dtype=torch.int64)
    for piece in layout.pieces:
        source = tensors[piece.source]
        assert len(piece.origin) == source.dim()
        index: list[torch.Tensor] = []
        for origin, axis in zip(piece.origin, piece.axes, strict=True):
            walk = [1] * len(piece.size)
            if axis is not None:
                walk[axis] = piece.size[axis]
            steps = origin + torch.arange(prod(walk))
            assert origin >= 0
            assert int(steps[-1]) < source.shape[len(index)]
            index.append(steps.reshape(walk))
        box = tuple(slice(s, s + n) for s, n in zip(piece.start, piece.size, strict=True))
        out[box] = (source[tuple(index)] if index else source).expand(piece.size)
    return out


class World:
    """Sources of distinct numbers, so that equal tensors mean the same elements of the same sources."""

    def __init__(self) -> None:
        self.tensors: dict[Any, torch.Tensor] = {}
        self.next = count()
        self.top = 0

    def source(self, shape: tuple[int, ...]) -> Pair:
        name = f"s{next(self.next)}"
        tensor = torch.arange(self.top, self.top + prod(shape)).reshape(shape)
        self.top += prod(shape)
        self.tensors[name] = tensor
        return Layout.whole(name, shape), tensor

    def same(self, pair: Pair) -> None:
        layout, tensor = pair
        assert layout.shape == tuple(tensor.shape)
        assert torch.equal(execute(layout, self.tensors), tensor)
        merged = layout.merged()
        assert torch.equal(execute(merged, self.tensors), tensor)
        assert len(merged.pieces) <= len(layout.pieces)
        assert merged.merged() == merged
        assert layout.agrees(merged)


SHAPES = st.lists(st.integers(1, 4), max_size=4).map(tuple) | st.lists(st.integers(0, 4), max_size=3).map(tuple)
BOUNDS = st.none() | st.integers(-6, 6)


class Ops:
    """One method per operation: applied at random to the layout and, with torch, to the tensor.

    An operation that does not apply to the tensor gives nothing.
    """

    VIEWS = ("slice", "select", "transpose", "permute", "unsqueeze", "squeeze")
    ALL = (*VIEWS, "split", "chunk", "unbind", "cat", "stack", "repeat", "expand", "reshape")

    def __init__(self, draw: Any, world: World) -> None:
        self.draw, self.world = draw, world

    def apply(self, op: str, pair: Pair) -> list[Pair]:
        method: Any = getattr(self, op)
        results: list[Pair] = method(*pair)
        return results

    def dim(self, rank: int) -> int:
        return int(self.draw(st.integers(-rank, rank - 1)))

    def slice(self, layout: Layout, tensor: torch.Tensor) -> list[Pair]:
        if not (rank := tensor.dim()):
            return []
        dim, start, stop = self.dim(rank), self.draw(BOUNDS), self.draw(BOUNDS)
        index = [slice(None)] * rank
        index[dim] = slice(start, stop)
        return [(layout.slice(dim, start, stop), tensor[tuple(index)])]

    def select(self, layout: Layout, tensor: torch.Tensor) -> list[Pair]:
        if not tensor.dim() or not (extent := tensor.shape[dim := self.dim(tensor.dim())]):
            return []
        at = self.dim(extent)
        return [(layout.select(dim, at), tensor.select(dim, at))]

    def transpose(self, layout: Layout, tensor: torch.Tensor) -> list[Pair]:
        if not (rank := tensor.dim()):
            return []
        a, b = self.dim(rank), self.dim(rank)
        return [(layout.transpose(a, b), tensor.transpose(a, b))]

    def permute(self, layout: Layout, tensor: torch.Tensor) -> list[Pair]:
        rank = tensor.dim()
        dims = [d - rank if self.draw(st.booleans()) else d for d in self.draw(st.permutations(range(rank)))]
        return [(layout.permute(dims), tensor.permute(dims))]

    def unsqueeze(self, layout: Layout, tensor: torch.Tensor) -> list[Pair]:
        dim = self.dim(tensor.dim() + 1)
        return [(layout.unsqueeze(dim), tensor.unsqueeze(dim))]

    def squeeze(self, layout: Layout, tensor: torch.Tensor) -> list[Pair]:
        if not tensor.dim() or self.draw(st.booleans()):
            return [(layout.squeeze(), tensor.squeeze())]
        dim = self.dim(tensor.dim())
        return [(layout.squeeze(dim), tensor.squeeze(dim))]

    def split(self, layout: Layout, tensor: torch.Tensor) -> list[Pair]:
        if not tensor.dim():
            return []
        extent = tensor.shape[dim := self.dim(tensor.dim())]
        cuts = [0, *sorted(self.draw(st.lists(st.integers(0, extent), max_size=3))), extent]
        sizes = self.draw(st.integers(1, 4)) if self.draw(st.booleans()) else [b - a for a, b in pairwise(cuts)]
        return list(zip(layout.split(dim, sizes), torch.split(tensor, sizes, dim), strict=True))

    def chunk(self, layout: Layout, tensor: torch.Tensor) -> list[Pair]:
        if not tensor.dim():
            return []
        dim, n = self.dim(tensor.dim()), self.draw(st.integers(1, 5))
        return list(zip(layout.chunk(dim, n), tensor.chunk(n, dim), strict=True))

    def unbind(self, layout: Layout, tensor: torch.Tensor) -> list[Pair]:
        if not tensor.dim():
            return []
        dim = self.dim(tensor.dim())
        return list(zip(layout.unbind(dim), tensor.unbind(dim), strict=True))

    def cat(self, layout: Layout, tensor: torch.Tensor) -> list[Pair]:
        if not tensor.dim() or tensor.numel() > 1000:
            return []
        dim, shape = self.dim(tensor.dim()), list(tensor.shape)
        shape[dim] = self.draw(st.integers(0, 3))
        pair, like, empty = (layout, tensor), self.world.source(tuple(shape)), self.world.source((0,))
        pairs = self.draw(st.permutations([pair, like, empty, pair]))
        return [(Layout.cat([p[0] for p in pairs], dim), torch.cat([p[1] for p in pairs], dim))]

    def stack(self, layout: Layout, tensor: torch.Tensor) -> list[Pair]:
        if tensor.numel() > 1000:
            return []
        dim, pair = self.dim(tensor.dim() + 1), (layout, tensor)
        pairs = self.draw(st.permutations([pair, self.world.source(tuple(tensor.shape)), pair]))
        return [(Layout.stack([p[0] for p in pairs], dim), torch.stack([p[1] for p in pairs], dim))]

    def repeat(self, layout: Layout, tensor: torch.Tensor) -> list[Pair]:
        rank = tensor.dim()
        counts = self.draw(st.lists(st.integers(0, 3), min_size=rank, max_size=rank + 1))
        return [(layout.repeat(counts), tensor.repeat(counts))] if tensor.numel() * prod(counts) < 3000 else []

    def expand(self, layout: Layout, tensor: torch.Tensor) -> list[Pair]:
        sizes = [self.draw(st.integers(0, 3) if n == 1 else st.sampled_from([n, -1])) for n in tensor.shape]
        sizes = [*self.draw(st.lists(st.integers(1, 3), max_size=1)), *sizes]
        return [(layout.expand(sizes), tensor.expand(sizes))] if tensor.numel() < 1000 else []

    def reshape(self, layout: Layout, tensor: torch.Tensor) -> list[Pair]:
        shape = [n for n in tensor.shape if n != 1]
        for _ in range(self.draw(st.integers(0, 3))):
            shape.insert(self.draw(st.integers(0, len(shape))), 1)
        if shape and tensor.numel() and self.draw(st.booleans()):
            shape[self.dim(len(shape))] = -1
        return [(layout.reshape(shape), tensor.reshape(shape))]


@given(st.data())
@settings(max_examples=250, deadline=None)
def test_any_program_of_moves_describes_the_tensor_that_torch_computes(data: st.DataObject) -> None:
    world = World()
    ops, pool = Ops(data.draw, world), [world.source(data.draw(SHAPES))]
    for _ in range(data.draw(st.integers(1, 7))):
        pair = data.draw(st.sampled_from(pool[-4:]))
        found = ops.apply(data.draw(st.sampled_from(Ops.ALL)), pair)
        for result in found:
            world.same(result)
        pool += found


def value_for(draw: Any, shape: tuple[int, ...], world: World) -> Pair:
    """A value to write: permuted, broadcast or in two parts."""
    kind = draw(st.sampled_from(["permuted", "broadcast", "parts"]))
    if kind == "broadcast":
        small = tuple(draw(st.sampled_from([1, n])) for n in shape)
        layout, tensor = world.source(small)
        return layout.expand(shape), tensor.expand(shape)
    if kind == "parts" and shape and shape[-1] > 1:
        a, b = world.source((*shape[:-1], 1)), world.source((*shape[:-1], shape[-1] - 1))
        return Layout.cat([a[0], b[0]], -1), torch.cat([a[1], b[1]], -1)
    order = draw(st.permutations(range(len(shape))))
    layout, tensor = world.source(tuple(shape[d] for d in order))
    back = [order.index(d) for d in range(len(order))]
    return layout.permute(back), tensor.permute(back)


@given(st.data())
@settings(max_examples=250, deadline=None)
def test_writes_and_reads_through_views_describe_the_buffer(data: st.DataObject) -> None:
    world = World()
    shape = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple))
    content, buffer = world.source(shape)
    buffer = buffer.clone()
    for _ in range(data.draw(st.integers(1, 6))):
        view: Pair = (Layout.whole("buffer", shape), buffer)
        for op in data.draw(st.lists(st.sampled_from(Ops.VIEWS), max_size=4)):
            view = (Ops(data.draw, world).apply(op, view) or [view])[0]
        piece = view[0].view_piece()
        if piece is None:
            assert not view[1].numel()
            continue
        world.same((content.read(piece, view[1].shape), view[1].clone()))
        value = value_for(data.draw, tuple(view[1].shape), world)
        if data.draw(st.booleans()):
            value = (content.read(piece), view[1].clone())
        view[1].copy_(value[1])
        content = content.write(piece, value[0])
        world.same((content, buffer))
        if data.draw(st.booleans()):
            content = content.merged()
        wide = (view[0].unsqueeze(0).expand([2, *view[1].shape]), view[1].expand([2, *view[1].shape]))
        wide_piece = wide[0].view_piece()
        assert wide_piece is not None
        world.same((content.read(wide_piece), wide[1].clone()))


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_layouts_agree_exactly_when_their_tensors_are_equal(data: st.DataObject) -> None:
    world = World()
    base, buffer = world.source((3, 4))
    other = world.source((3, 4))
    results = []
    for _ in range(2):
        content, tensor = base, buffer.clone()
        for _ in range(data.draw(st.integers(0, 3))):
            lo = [data.draw(st.integers(0, n - 1)) for n in (3, 4)]
            hi = [data.draw(st.integers(a + 1, n)) for a, n in zip(lo, (3, 4), strict=True)]
            view = Layout.whole("b", (3, 4)).slice(0, lo[0], hi[0]).slice(1, lo[1], hi[1]).view_piece()
            assert view is not None
            value, numbers = data.draw(st.sampled_from([other, (base, buffer)]))
            content = content.write(view, value.slice(0, lo[0], hi[0]).slice(1, lo[1], hi[1]))
            box = tuple(slice(a, b) for a, b in zip(lo, hi, strict=True))
            tensor[box] = numbers[box]
        results.append((content, tensor))
    (a, x), (b, y) = results
    assert a.agrees(b) == b.agrees(a) == torch.equal(x, y)
