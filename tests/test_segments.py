"""The segment algebra against torch on index tensors, and against the vendor's own concatenations."""

from __future__ import annotations

from itertools import count, pairwise, product
from math import prod
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cadence_fx.errors import CadenceError
from cadence_fx.segments import Layout, LayoutError, NotMovement, Piece

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


def line(layout: Layout) -> list[tuple[Any, int, int]]:
    """A 1-D layout as (source, start, stop) in order."""
    return [(p.source, p.origin[0], p.origin[0] + p.size[0]) for p in layout.merged().pieces]


P, F, TAIL = 302, 50, 100


def trimmed(layout: Layout, dim: int) -> Layout:
    """The vendor's truncation, word for word."""
    if layout.shape[dim] > P + TAIL:
        return Layout.cat([layout.slice(dim, None, P), layout.slice(dim, -TAIL)], dim)
    return layout


def test_estimator_cache_is_new_first_and_keeps_the_oldest_hundred() -> None:
    def chunks(last: int, first: int) -> list[tuple[str, int, int]]:
        return [(f"c{i}", 0, F) for i in range(last, first - 1, -1)]

    tail = ("prompt", P - TAIL, P)
    expected = {
        1: [*chunks(1, 1), ("prompt", 0, P)],
        2: [*chunks(2, 1), ("prompt", 0, P)],
        3: [*chunks(3, 1), ("prompt", 0, 152), tail],
        4: [*chunks(4, 1), ("prompt", 0, 102), tail],
        5: [*chunks(5, 1), ("prompt", 0, 52), tail],
        6: [*chunks(6, 1), ("prompt", 0, 2), tail],
        **{k: [*chunks(k, k - 5), (f"c{k - 6}", 0, 2), tail] for k in range(7, 11)},
    }
    state = Layout.whole("prompt", (P,))
    for call in range(1, 11):
        state = trimmed(Layout.cat([Layout.whole(f"c{call}", (F,)), state]), 0)
        check(state)
        assert line(state) == expected[call]


def test_estimator_state_written_through_the_solver_buffer_is_the_same_list() -> None:
    """Each step and block writes a packed key/value pair into its slot of one buffer, which is handed out as a view."""
    steps, blocks, head, length = 2, 3, 4, 402
    buffer = Layout.whole("stale", (steps, blocks, 1000, head))
    old = Layout.whole("old", (steps, blocks, length, head))
    whole = Layout.whole("buffer", buffer.shape)
    for s, b in product(range(steps), range(blocks)):
        packed = old.select(0, s).select(0, b)
        key, value = (
            Layout.cat([Layout.whole((name, s, b), (F, head // 2)), half], 0)
            for name, half in zip(("k", "v"), packed.chunk(-1, 2), strict=True)
        )
        view = whole.select(0, s).select(0, b).slice(0, 0, F + length).view_piece()
        assert view is not None
        buffer = buffer.write(view, Layout.cat([key, value], -1))
    handed = whole.slice(2, 0, F + length).view_piece()
    assert handed is not None
    state = trimmed(buffer.read(handed), 2).merged()
    check(state)
    # Old rows are one piece over all steps, blocks and halves; each new key and value is one piece.
    assert len(state.pieces) == 2 * steps * blocks + 2
    assert [(p.start[2], p.origin[2], p.size[2]) for p in state.pieces if p.source == "old"] == [
        (F, 0, P - F),
        (P, length - TAIL, TAIL),
    ]
    assert "stale" not in state.sources()


def conformer(calls: int) -> list[tuple[int, Layout]]:
    """The packed encoder cache after each call, and the keys that its token-rate layers attended in it."""
    token, mel, heads, dim = 2, 1, 2, 4

    def pack(first: Layout, second: Layout) -> Layout:
        return Layout.cat([first.repeat([1, 1, 1, 2, 1]), second], 0)

    state = pack(
        Layout.whole(("token", 0), (token, 1, heads, P // 2, dim)),
        Layout.whole(("mel", 0), (mel, 1, heads, P, dim)),
    )
    found = []
    for call in range(1, calls + 1):
        half = state.shape[3] // 2
        rates = (
            ("token", token, F // 2, state.slice(0, None, token).slice(3, None, half)),
            ("mel", mel, F, state.slice(0, token)),
        )
        new = []
        for rate, layers, fresh, cache in rates:
            grown = Layout.whole((rate, call), (layers, 1, heads, fresh, dim)).unbind(0)
            new.append(Layout.stack([Layout.cat([c, g], 2) for c, g in zip(cache.unbind(0), grown, strict=True)], 0))
        state = trimmed(pack(*new), 3)
        found.append((new[0].shape[3], state))
    return found


def test_conformer_mel_layers_are_old_first_and_keep_prompt_and_window() -> None:
    for call, (_, state) in enumerate(conformer(6), 1):
        times = [
            (p.source, p.origin[3], p.origin[3] + p.size[1]) for p in state.select(0, 2).select(0, 0).merged().pieces
        ]
        new = [(("mel", i), 0, F) for i in range(max(1, call - 1), call + 1)]
        assert times == [(("mel", 0), 0, P), *new]


def test_conformer_token_layers_freeze_at_the_first_201_entries() -> None:
    attended, kept = [], []
    for keys, state in conformer(6):
        check(state)
        first = state.slice(3, None, state.shape[3] // 2).select(0, 1).select(0, 0).merged()
        attended.append(keys)
        kept.append([(p.source[1], p.origin[3], p.origin[3] + p.size[1]) for p in first.pieces])  # type: ignore[index]
    assert attended == [176, 201, 226, 226, 226, 226]
    grown = [(0, 0, 151), (1, 0, 25), (2, 0, 25)]
    # Both grow; from the third call on the packed axis is cut, and the half that is read never changes again.
    assert kept == [grown[:2], grown, grown, grown, grown, grown]


def test_repeated_halves_are_one_piece_per_half_and_a_broadcast_is_one_piece() -> None:
    x = Layout.whole("x", (2, 3))
    assert len(x.repeat([1, 2]).merged().pieces) == 2
    assert x.unsqueeze(0).repeat([5, 1, 1]).merged() == x.expand([5, 2, 3]).merged()
    assert Layout.stack([x] * 5, 0).merged() == x.expand([5, 2, 3]).merged()


def test_taking_apart_and_joining_again_is_the_whole() -> None:
    x = Layout.whole("x", (4, 5, 6))
    for dim in range(3):
        assert Layout.stack(x.unbind(dim), dim).merged() == x
        assert Layout.cat(x.chunk(dim, 3), dim).merged() == x
    grid = [Layout.stack([y.select(0, j) for j in range(5)], 0) for y in x.unbind(0)]
    assert Layout.stack(grid, 0).merged() == x
    assert x.transpose(0, 2).permute([2, 1, 0]) == x


def test_a_pinwheel_agrees_with_another_cut_of_the_same_content() -> None:
    whole, buffer = Layout.whole("a", (3, 3)), Layout.whole("b", (3, 3))
    pinwheel = whole
    for rows, columns in (((0, 1), (0, 2)), ((0, 2), (2, 3)), ((2, 3), (1, 3)), ((1, 3), (0, 1))):
        view = buffer.slice(0, *rows).slice(1, *columns).view_piece()
        assert view is not None
        pinwheel = pinwheel.write(view, whole.slice(0, *rows).slice(1, *columns))
    assert len(pinwheel.merged().pieces) == 5
    assert pinwheel.merged() != whole
    assert pinwheel.agrees(whole)
    assert not pinwheel.agrees(buffer)
    assert not whole.agrees(whole.unsqueeze(0))


def test_single_elements_that_do_not_continue_stay_apart() -> None:
    x = Layout.whole("x", (4,))
    backwards = Layout.cat([x.slice(0, i, i + 1) for i in (3, 2, 1)])
    assert len(backwards.merged().pieces) == 3
    # A Hankel matrix would need one source dimension walked by two tensor dimensions.
    hankel = Layout.stack([x.slice(0, 0, 2), x.slice(0, 1, 3)], 0)
    assert len(hankel.merged().pieces) == 2


def test_broadcasts_along_different_dimensions_stay_apart() -> None:
    x = Layout.whole("x", (2,))
    rows, columns = x.unsqueeze(0).expand([2, 2]), x.unsqueeze(1).expand([2, 2])
    assert len(Layout.cat([rows, columns], 0).merged().pieces) == 2
    assert not rows.agrees(columns)


def test_legacy_empty_tensors_are_skipped_by_cat() -> None:
    x, empty = Layout.whole("x", (2, 3)), Layout.whole("e", (0,))
    assert Layout.cat([empty, x, empty], 1) == x
    assert Layout.cat([empty, empty]) == empty


def test_scalars_are_whole_and_can_be_expanded() -> None:
    x = Layout.whole("x", ())
    assert x.view_piece() == Piece((), (), "x", (), ())
    assert x.squeeze() == x == x.merged()
    assert x.expand([2]).pieces == (Piece((0,), (2,), "x", (), ()),)


def test_sources_are_listed_once() -> None:
    x, y = Layout.whole("x", (2,)), Layout.whole("y", (2,))
    assert Layout.cat([x, y, x]).sources() == ("x", "y")


X = Layout.whole("x", (4, 6))


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: X.slice(0, 0, 4, 2), "slice: step 2 takes single elements, not a box; only step 1 is tracked"),
        (lambda: X.reshape([24]), r"reshape: \(4, 6\) to \(24,\) regroups elements"),
        (lambda: X.reshape([6, -1]), r"reshape: \(4, 6\) to \(6, 4\) regroups elements"),
        (
            lambda: X.write(X.select(0, 0).expand([3, 6]).view_piece(), Layout.whole("v", (3, 6))),  # type: ignore[arg-type]
            r"write: the view of shape \(3, 6\) holds one element of the buffer several times",
        ),
    ],
)
def test_what_is_not_movement_is_refused_with_the_reason(call: Any, text: str) -> None:
    with pytest.raises(NotMovement, match=text):
        call()


VIEW = Piece((0, 0), (2, 6), "b", (3, 0), (0, 1))


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: X.select(0, 4), r"select: index 4 is out of range for dimension 0 of \(4, 6\)"),
        (lambda: X.slice(2), "dimension 2 is out of range for a tensor of 2 dimensions"),
        (lambda: Layout.cat([]), "cat: expected at least one tensor, found none"),
        (lambda: Layout.cat([X, X.transpose(0, 1)]), r"cat: shapes differ outside dimension 0: \(4, 6\) and \(6, 4\)"),
        (lambda: Layout.stack([]), "stack: expected tensors of one shape, found none"),
        (lambda: Layout.stack([X, X.unsqueeze(0)]), r"found \(4, 6\), \(1, 4, 6\)"),
        (lambda: X.split(1, [2, 3]), r"split: sizes \[2, 3\] do not add up to 6, dimension 1 of \(4, 6\)"),
        (lambda: X.split(1, 0), r"split: a size of 0 does not divide dimension 1 of \(4, 6\)"),
        (lambda: X.chunk(1, 0), "chunk: expected at least 1 chunk, found 0"),
        (lambda: X.permute([0, 0]), r"permute: \[0, 0\] is no order of the dimensions of \(4, 6\)"),
        (lambda: X.reshape([5, 5]), r"reshape: \(4, 6\) has 24 elements and cannot become \(5, 5\)"),
        (lambda: X.expand([8, 6]), r"expand: \(4, 6\) cannot be expanded to \(8, 6\)"),
        (lambda: X.expand([6]), r"expand: \(4, 6\) cannot be expanded to \(6,\)"),
        (lambda: X.repeat([2]), r"repeat: counts \[2\] do not fit \(4, 6\)"),
        (lambda: X.read(VIEW), r"reaches outside its buffer of shape \(4, 6\)"),
        (lambda: X.read(VIEW, (2, 5)), r"read: the view has shape \(2, 6\), expected \(2, 5\)"),
        (lambda: X.write(VIEW, X), r"write: the value has shape \(4, 6\), the view \(2, 6\)"),
        (lambda: X.unsqueeze(0).read(VIEW), r"is not a whole view of a buffer of shape \(1, 4, 6\)"),
    ],
)
def test_wrong_arguments_are_refused_with_what_was_found(call: Any, text: str) -> None:
    with pytest.raises(LayoutError, match=text) as caught:
        call()
    assert isinstance(caught.value, CadenceError)
