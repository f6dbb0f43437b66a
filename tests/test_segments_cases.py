"""The segment algebra on the concatenations of a real decoder, on directed cases, and in its refusals."""

from __future__ import annotations

from itertools import product
from math import prod
from typing import Any

import pytest

from cadence_fx.boxes import overlapping_pairs
from cadence_fx.errors import CadenceError
from cadence_fx.segments import Layout, LayoutError, NotMovement, Piece


def check(layout: Layout) -> None:
    """Pieces are disjoint and cover the shape."""
    boxes = [(piece.start, piece.size) for piece in layout.pieces]
    assert [(i, j) for i, j in overlapping_pairs(boxes, boxes) if i != j] == []
    assert sum(prod(size) for _, size in boxes) == prod(layout.shape)


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
