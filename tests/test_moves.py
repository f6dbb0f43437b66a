"""In-place moves against a simultaneous copy."""

from __future__ import annotations

from itertools import pairwise
from math import prod
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cadence_fx.boxes import overlap, overlapping_pairs
from cadence_fx.errors import CadenceError
from cadence_fx.moves import Copy, Fill, Move, MoveError, Spill, Step, block_copies, plan_moves

Ints = tuple[int, ...]


def box(start: Ints, size: Ints) -> tuple[slice, ...]:
    return tuple(slice(s, s + n) for s, n in zip(start, size, strict=True))


def at_once(moves: list[Move], buffer: torch.Tensor) -> torch.Tensor:
    out = buffer.clone()
    for move in moves:
        out[box(move.dst, move.size)] = buffer[box(move.src, move.size)]
    return out


def in_order(steps: tuple[Step, ...], buffer: torch.Tensor) -> torch.Tensor:
    """Run the steps, each checked for the overlap that a copy kernel must not see."""
    out, slots = buffer.clone(), dict[int, torch.Tensor]()
    for step in steps:
        match step:
            case Copy(dst, src, size):
                assert not overlap((dst, size), (src, size))
                out[box(dst, size)] = out[box(src, size)]
            case Spill(slot, src, size):
                assert slot not in slots
                slots[slot] = out[box(src, size)].clone()
            case Fill(slot, dst, size):
                assert slots[slot].shape == size
                out[box(dst, size)] = slots.pop(slot)
    assert not slots
    return out


def spilled(steps: tuple[Step, ...]) -> int:
    return sum(prod(step.size) for step in steps if isinstance(step, Spill))


def same(moves: list[Move], shape: Ints) -> tuple[Step, ...]:
    steps = plan_moves(moves)
    buffer = torch.arange(prod(shape)).reshape(shape)
    assert torch.equal(in_order(steps, buffer), at_once(moves, buffer)), (moves, steps)
    return steps


@st.composite
def move_sets(draw: Any) -> tuple[list[Move], Ints]:
    """Moves with disjoint destinations: a grid cut at random; some cells are moved to, from anywhere or from near."""
    shape = tuple(draw(st.lists(st.integers(1, 12), min_size=1, max_size=3)))
    cells: list[tuple[Ints, Ints]] = [((), ())]
    for n in shape:
        cuts = [0, *sorted(draw(st.sets(st.integers(1, n - 1), max_size=3)) if n > 1 else []), n]
        ranges = list(pairwise(cuts))
        cells = [((*s, lo), (*z, hi - lo)) for s, z in cells for lo, hi in ranges]
    moves = []
    for start, size in draw(st.permutations(cells)):
        if not draw(st.booleans()):
            continue
        src = []
        near = draw(st.booleans())
        for at, n, extent in zip(start, size, shape, strict=True):
            lo, hi = (max(at - 2, 0), min(at + 2, extent - n)) if near else (0, extent - n)
            src.append(draw(st.integers(lo, hi)))
        moves.append(Move(start, tuple(src), size))
    return moves, shape


@given(move_sets())
@settings(max_examples=500, deadline=None)
def test_any_set_of_moves_gives_the_simultaneous_result(case: tuple[list[Move], Ints]) -> None:
    moves, shape = case
    steps = same(moves, shape)
    assert steps == plan_moves(moves)
    # Every element that changes is written once, by a copy or a fill.
    written = sum(prod(step.size) for step in steps if not isinstance(step, Spill))
    assert written == sum(prod(move.size) for move in moves if move.dst != move.src)


@given(st.permutations(range(8)), st.integers(1, 3))
@settings(max_examples=100, deadline=None)
def test_permuting_slots_spills_one_slot_per_cycle(order: list[int], width: int) -> None:
    moves = [Move((i * width,), (j * width,), (width,)) for i, j in enumerate(order)]
    steps = same(moves, (8 * width,))
    seen, cycles = set[int](), 0
    for i in range(8):
        if i not in seen and order[i] != i:
            cycles += 1
        while i not in seen:
            seen.add(i)
            i = order[i]
    assert spilled(steps) == cycles * width


@given(st.integers(0, 40), st.integers(0, 40), st.integers(0, 30))
def test_blocks_cover_a_move_and_never_read_what_they_overwrote(dst: int, src: int, length: int) -> None:
    blocks = block_copies(dst, src, length)
    buffer = torch.arange(80)
    expected = buffer.clone()
    expected[dst : dst + length] = buffer[src : src + length]
    for to, at, n in blocks:
        assert 0 < n <= abs(to - at)
        buffer[to : to + n] = buffer[at : at + n].clone()
    assert torch.equal(buffer, expected)
    assert len(blocks) == (0 if dst == src else -(-length // abs(dst - src)))


def test_a_shift_to_the_end_runs_in_blocks_from_the_far_end() -> None:
    assert block_copies(52, 2, 300) == [(lo + 50, lo, 50) for lo in (252, 202, 152, 102, 52, 2)]
    assert block_copies(2, 52, 120) == [(2, 52, 50), (52, 102, 50), (102, 152, 20)]
    assert block_copies(52, 2, 120) == [(122, 72, 50), (72, 22, 50), (52, 2, 20)]


def test_the_estimators_retention_in_place_needs_no_temporary() -> None:
    """New-first order: the carry moves up by a chunk, its last two frames fall off, the prompt's tail stays."""
    steps = same([Move((50,), (0,), (2,)), Move((52,), (2,), (250,)), Move((302,), (302,), (100,))], (402,))
    assert steps == (*(Copy((lo + 50,), (lo,), (50,)) for lo in (202, 152, 102, 52, 2)), Copy((50,), (0,), (2,)))


def test_a_ring_that_slides_back_in_every_layer_needs_no_temporary() -> None:
    steps = same([Move((0, 302, 0), (0, 352, 0), (3, 50, 4))], (3, 402, 4))
    assert steps == (Copy((0, 302, 0), (0, 352, 0), (3, 50, 4)),)
    steps = same([Move((0, 0, 0), (0, 7, 0), (3, 30, 4))], (3, 402, 4))
    assert not spilled(steps)
    assert len(steps) == 5


def test_a_diagonal_shift_is_cut_where_it_makes_fewest_blocks() -> None:
    assert same([Move((1, 3), (0, 0), (6, 9))], (8, 12)) == (
        Copy((1, 9), (0, 6), (6, 3)),
        Copy((1, 6), (0, 3), (6, 3)),
        Copy((1, 3), (0, 0), (6, 3)),
    )


def test_a_chain_runs_from_its_free_end_in_either_direction() -> None:
    up = [Move((i + 1,), (i,), (1,)) for i in range(5)]
    assert [step.dst for step in same(up, (6,)) if isinstance(step, Copy)] == [(5,), (4,), (3,), (2,), (1,)]
    down = [Move((i,), (i + 1,), (1,)) for i in reversed(range(5))]
    assert [step.dst for step in same(down, (6,)) if isinstance(step, Copy)] == [(0,), (1,), (2,), (3,), (4,)]


def test_an_exchange_spills_one_side() -> None:
    steps = same([Move((0,), (4,), (4,)), Move((4,), (0,), (4,))], (8,))
    assert steps == (Spill(0, (4,), (4,)), Copy((4,), (0,), (4,)), Fill(0, (0,), (4,)))


def test_a_rotation_spills_the_smaller_part_only() -> None:
    assert spilled(same([Move((0,), (60,), (40,)), Move((40,), (0,), (60,))], (100,))) == 40
    assert spilled(same([Move((0,), (99,), (1,)), Move((1,), (0,), (99,))], (100,))) == 1


def test_a_spill_that_a_later_one_makes_needless_is_taken_back() -> None:
    """Of the blocks [0:20], [20:60] and the part [60:100], the smallest is on a cycle, but spilling the part does."""
    steps = plan_moves([Move((0,), (60,), (40,)), Move((40,), (0,), (60,))])
    assert [step for step in steps if isinstance(step, Spill)] == [Spill(0, (60,), (40,))]


def test_one_source_may_go_to_several_places() -> None:
    assert len(same([Move((4,), (0,), (2,)), Move((2,), (0,), (2,)), Move((0,), (6,), (2,))], (8,))) == 3


def test_moves_onto_themselves_and_empty_moves_are_dropped() -> None:
    assert plan_moves([Move((3, 0), (3, 0), (2, 2)), Move((0, 0), (1, 0), (0, 2))]) == ()
    assert plan_moves([]) == ()
    assert plan_moves([Move((), (), ())]) == ()


def test_overlapping_destinations_are_refused_by_name() -> None:
    a, b = Move((0,), (4,), (3,)), Move((2,), (8,), (2,))
    with pytest.raises(ValueError, match="write the same elements, so their order would decide") as caught:
        plan_moves([a, Move((6,), (0,), (1,)), b])
    assert str(a) in str(caught.value)
    assert str(b) in str(caught.value)
    assert isinstance(caught.value, CadenceError)
    # A box that stays where it is claims its place too.
    with pytest.raises(MoveError):
        plan_moves([Move((0,), (0,), (3,)), b])


@pytest.mark.parametrize(
    ("moves", "text"),
    [
        ([Move((0,), (0, 0), (1,))], "does not have one rank"),
        (
            [Move((0,), (1,), (1,)), Move((0, 0), (1, 1), (1, 1))],
            r"size=\(1, 1\)\) does not have one rank, the same as",
        ),
        ([Move((0,), (-1,), (1,))], "has a negative entry; starts and sizes count from 0"),
    ],
)
def test_moves_that_are_no_boxes_are_refused(moves: list[Move], text: str) -> None:
    with pytest.raises(MoveError, match=text):
        plan_moves(moves)


PAIR = st.tuples(st.integers(0, 6), st.integers(0, 6))
SIZE = st.tuples(st.integers(1, 4), st.integers(1, 4))
BOXES = st.lists(st.tuples(PAIR, SIZE))


@given(BOXES, BOXES)
def test_overlapping_pairs_are_all_pairs_that_overlap(left: list[Any], right: list[Any]) -> None:
    pairs = list(overlapping_pairs(left, right))
    assert sorted(pairs) == [(i, j) for i, a in enumerate(left) for j, b in enumerate(right) if overlap(a, b)]
    assert len(set(pairs)) == len(pairs)
