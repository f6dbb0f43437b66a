"""Ordering in-place copies inside one buffer.

Retention in place is a set of moves meant simultaneously: every source is read before any destination is written. On
one buffer they run one after another, so their order decides whether the bits are right. Example, new-first order
with a carry of 402 that keeps its head and tail, before and after::

    Move(dst=(52,), src=(2,), size=(300,)), Move(dst=(50,), src=(0,), size=(2,))
    Copy(302 <- 252, 50), Copy(252 <- 202, 50), ..., Copy(52 <- 2, 50), Copy(50 <- 0, 2)

The shift by 50 overlaps itself, so it runs in blocks of 50 from the far end, and nothing needs a temporary. Only a
true cycle (an exchange, a rotation) does: one box of the cycle is spilled, and filled in at its turn.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import TypeAlias

import networkx as nx

from cadence_fx.boxes import Ints, overlap, overlapping_pairs, put
from cadence_fx.errors import CadenceError

__all__ = ["Copy", "Fill", "Move", "MoveError", "Spill", "Step", "block_copies", "plan_moves"]


class MoveError(CadenceError, ValueError):
    """Moves that have no simultaneous meaning: two of them write the same element, or ranks and sizes are wrong."""


@dataclass(frozen=True, slots=True)
class Move:
    """One box of a buffer to another place in the same buffer, simultaneous with all others."""

    dst: Ints
    src: Ints
    size: Ints


@dataclass(frozen=True, slots=True)
class Copy:
    """Copy between two boxes of the buffer that do not overlap."""

    dst: Ints
    src: Ints
    size: Ints


@dataclass(frozen=True, slots=True)
class Spill:
    """Copy a box of the buffer into a temporary of its size."""

    slot: int
    src: Ints
    size: Ints


@dataclass(frozen=True, slots=True)
class Fill:
    """Copy a temporary back into a box of the buffer."""

    slot: int
    dst: Ints
    size: Ints


Step: TypeAlias = Copy | Spill | Fill


def block_copies(dst: int, src: int, length: int) -> list[tuple[int, int, int]]:
    """A 1-D move as (dst, src, length) copies that do not overlap, in the order that reads before it overwrites.

    A move by less than its length runs in blocks of the distance, from the end that it moves towards.
    """
    distance = abs(dst - src)
    if not distance or length < 1:
        return []
    if distance >= length:
        return [(dst, src, length)]
    if dst < src:
        offsets = [(lo, min(distance, length - lo)) for lo in range(0, length, distance)]
    else:
        offsets = [(max(hi - distance, 0), min(distance, hi)) for hi in range(length, 0, -distance)]
    return [(dst + lo, src + lo, n) for lo, n in offsets]


def plan_moves(moves: Sequence[Move]) -> tuple[Step, ...]:
    """Steps that, run in order, give what the moves give when all of them happen at once.

    Moves onto themselves are dropped. The result is a function of the moves and their order alone.

    Raises:
        MoveError: two moves write the same element, or a move is not one box; the text names the moves.
    """
    _check(moves)
    copies = [copy for move in moves for copy in _blocks(move)]
    # An edge runs from a copy to each copy that overwrites what it reads, which must come later.
    graph: nx.DiGraph[int] = nx.DiGraph()
    graph.add_nodes_from(range(len(copies)))
    reads = [(copy.src, copy.size) for copy in copies]
    writes = [(copy.dst, copy.size) for copy in copies]
    graph.add_edges_from(overlapping_pairs(reads, writes))
    steps: list[Step] = []
    slots = 0
    # Groups of copies that wait for each other, each after every group that must read before it writes.
    condensed = nx.condensation(graph)
    first = {group: min(members) for group, members in condensed.nodes(data="members")}
    for group in nx.lexicographical_topological_sort(condensed, key=first.__getitem__):
        members = graph.subgraph(condensed.nodes[group]["members"])
        slot_of = {index: slots + n for n, index in enumerate(_spilled(members, copies))}
        slots += len(slot_of)
        # Nothing in an earlier group overwrites these sources, so the start of the group is early enough.
        steps += [Spill(slot, copies[index].src, copies[index].size) for index, slot in slot_of.items()]
        for index in nx.lexicographical_topological_sort(_without_reads(members, slot_of)):
            copy = copies[index]
            steps.append(Fill(slot_of[index], copy.dst, copy.size) if index in slot_of else copy)
    return tuple(steps)


def _check(moves: Sequence[Move]) -> None:
    for move in moves:
        if not len(move.dst) == len(move.src) == len(move.size) or len(move.dst) != len(moves[0].dst):
            raise MoveError(f"{move} does not have one rank, the same as {moves[0]}")
        if min((*move.dst, *move.src, *move.size), default=0) < 0:
            raise MoveError(f"{move} has a negative entry; starts and sizes count from 0")
    moves = [move for move in moves if prod(move.size)]
    boxes = [(move.dst, move.size) for move in moves]
    for i, j in overlapping_pairs(boxes, boxes):
        if i < j:
            raise MoveError(f"{moves[i]} and {moves[j]} write the same elements, so their order would decide")


def _blocks(move: Move) -> list[Copy]:
    """The move as copies that do not overlap themselves."""
    if move.dst == move.src or not prod(move.size):
        return []
    if not overlap((move.src, move.size), (move.dst, move.size)):
        return [Copy(move.dst, move.src, move.size)]
    # Any dimension with a shift will do; the one with the fewest blocks launches least.
    shifted = [d for d in range(len(move.size)) if move.dst[d] != move.src[d]]
    dim = min(shifted, key=lambda d: -(-move.size[d] // abs(move.dst[d] - move.src[d])))
    return [
        Copy(put(move.dst, dim, dst), put(move.src, dim, src), put(move.size, dim, length))
        for dst, src, length in block_copies(move.dst[dim], move.src[dim], move.size[dim])
    ]


def _spilled(graph: nx.DiGraph[int], copies: Sequence[Copy]) -> list[int]:
    """Copies to route through a temporary so that the group has an order: of each cycle, the smallest source."""

    def cost(index: int) -> tuple[int, int]:
        return prod(copies[index].size), index

    spilled: list[int] = []
    left = nx.DiGraph(graph)
    while cycles := [part for part in nx.strongly_connected_components(left) if len(part) > 1]:
        for part in cycles:
            spilled.append(min(part, key=cost))
            left.remove_edges_from(list(left.out_edges(spilled[-1])))
    # A later spill may have broken the cycle of an earlier one too: take back what is not needed, largest first.
    for index in sorted(spilled, key=cost, reverse=True):
        edges = list(graph.out_edges(index))
        left.add_edges_from(edges)
        if nx.is_directed_acyclic_graph(left):
            spilled.remove(index)
        else:
            left.remove_edges_from(edges)
    return sorted(spilled)


def _without_reads(graph: nx.DiGraph[int], spilled: Iterable[int]) -> nx.DiGraph[int]:
    """The order that is left to keep once the spilled copies have read their source."""
    left = nx.DiGraph(graph)
    left.remove_edges_from(list(graph.out_edges(spilled)))
    return left
