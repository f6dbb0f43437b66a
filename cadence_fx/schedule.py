"""Independent branches on side streams, inside one capture.

A graph captured from one stream is a chain: each kernel waits for the one before it, whether it needs it or not. Here
the true dependencies are worked out (values, memory that is read or written in place box by box, the order of random
draws), reduced to the edges that are not implied by others, and covered by the fewest chains along these edges: each
chain is a stream, so that no operator waits for one that it does not depend on. This is the assignment of Nimble
(Kwon et al., NeurIPS 2020, section 4.2: minimum equivalent graph, then a maximum matching); streams are reused where
that adds no false wait.

A value that another stream reads is kept until its own stream has waited for that read, since the allocator would hand
its memory out again on its own stream at once. `cadence_fx.scheduled_run` runs a schedule.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import networkx
import torch
from torch import fx

from cadence_fx.boxes import overlap
from cadence_fx.effects import is_random, view_input, written
from cadence_fx.movement import view_piece
from cadence_fx.specialise import FlatGraph

aten = torch.ops.aten

__all__ = [
    "Schedule", "dependencies", "is_view", "leaving", "memory_owners", "operators", "readers", "schedule", "viewed",
]  # fmt: skip

Box = tuple[tuple[int, ...], tuple[int, ...]]
# Operators that are views or copies depending on strides count as work.
_MAY_COPY = frozenset({
    aten.reshape.default, aten.contiguous.default, aten.to.dtype, aten.to.device, aten.to.dtype_layout,
})  # fmt: skip


@dataclass(frozen=True)
class Schedule:
    """Where and after what each operator runs.

    Attributes:
        stream: node -> index of its stream; 0 is the capturing one. Views run nowhere and have no entry.
        waits: node -> nodes on other streams that it waits for.
        release: node -> values that may be freed once it has been launched.
        streams: number of streams.
        joins: last nodes of the side streams, which the end waits for.
        longest: operators of the longest chain of which each waits for the one before.
    """

    stream: dict[fx.Node, int]
    waits: dict[fx.Node, tuple[fx.Node, ...]]
    release: dict[fx.Node, tuple[fx.Node, ...]]
    streams: int
    joins: tuple[fx.Node, ...]
    longest: int = 0

    @property
    def worthwhile(self) -> bool:
        """False where streams could take less than one in twenty launches off the chain that everything waits for."""
        return 20 * self.longest <= 19 * len(self.stream)

    def summary(self) -> str:
        """Operators off the first stream and waits, for reports."""
        side = sum(s != 0 for s in self.stream.values())
        waits = sum(map(len, self.waits.values()))
        return f"{side} of {len(self.stream)} operators on {self.streams - 1} side streams, {waits} waits"


def dependencies(flat: FlatGraph) -> dict[fx.Node, set[fx.Node]]:
    """For each operator that computes or copies, the operators that must precede it."""
    found: dict[fx.Node, set[fx.Node]] = {}
    accesses: dict[fx.Node, list[tuple[Box | None, fx.Node, bool]]] = {}
    last_draw: fx.Node | None = None
    for node in flat.graph.nodes:
        if node.op != "call_function" or is_view(node):
            continue
        needs: set[fx.Node] = set()
        writes = set(written(node))
        touched = [(owner, _box(a, owner), a in writes) for a in node.all_input_nodes for owner in memory_owners(a)]
        for owner, box, writes_it in touched:
            if owner in found:
                needs.add(owner)
            for other_box, other, is_write in accesses.get(owner, ()):
                if (is_write or writes_it) and (box is None or other_box is None or overlap(box, other_box)):
                    needs.add(other)
        for owner, box, writes_it in touched:
            accesses.setdefault(owner, []).append((box, node, writes_it))
        if is_random(node):
            if last_draw is not None:
                needs.add(last_draw)
            last_draw = node
        needs.discard(node)
        found[node] = needs
    return found


def operators(flat: FlatGraph) -> list[fx.Node]:
    """What launches something, in the order of the graph."""
    return [n for n in flat.graph.nodes if n.op == "call_function" and not is_view(n)]


def leaving(flat: FlatGraph) -> set[fx.Node]:
    """The operators whose memory the graph's outputs may show."""
    return {owner for n in flat.output.all_input_nodes for owner in memory_owners(n)}


def is_view(node: fx.Node) -> bool:
    """True for a node that launches nothing: its value is a view of an argument."""
    return view_input(node) is not None and not written(node) and node.target not in _MAY_COPY


def viewed(node: fx.Node) -> fx.Node:
    """What a chain of views shows; the node itself if it is no view."""
    while is_view(node) and (parent := view_input(node)) is not None:
        node = parent
    return node


def memory_owners(node: fx.Node) -> Iterator[fx.Node]:
    """The operators whose memory a value may show: views lead to one, a view-or-copy leads further."""
    while True:
        node = viewed(node)
        yield node
        parent = view_input(node)
        if parent is None:
            return
        node = parent


def _box(node: fx.Node, owner: fx.Node) -> Box | None:
    """The box of the owner that a view shows; None for all of it, or where it is no box."""
    if node is owner:
        return None
    piece = view_piece(node, owner)
    if piece is None:
        return None
    size = tuple(1 if axis is None else piece.size[axis] for axis in piece.axes)
    return piece.origin, size


def schedule(flat: FlatGraph, max_streams: int = 4) -> Schedule:
    """Assign streams to the operators of a graph.

    Args:
        flat: the graph; its order is kept as the order of launches.
        max_streams: each stream costs a workspace of the matrix library; chains beyond share the first stream.
    """
    order = operators(flat)
    position = {node: i for i, node in enumerate(order)}
    needs = dependencies(flat)
    before, edges = _reduced(order, position, needs)
    chain_of = _chains(order, edges)
    stream = _streams(order, position, before, chain_of, max_streams)
    waits = {node: tuple(p for p in edges[node] if stream[p] != stream[node]) for node in order}
    waits = {node: _latest(found, stream, position) for node, found in waits.items() if found}
    last = {stream[node]: node for node in order}
    joins = tuple(node for s, node in sorted(last.items()) if s != 0)
    before = _with_stream_order(order, position, stream, waits)
    return Schedule(
        stream, waits, _releases(flat, order, position, stream, before), max(stream.values(), default=0) + 1, joins,
        _longest(order, edges),
    )  # fmt: skip


def _longest(order: list[fx.Node], edges: dict[fx.Node, list[fx.Node]]) -> int:
    length: dict[fx.Node, int] = {}
    for node in order:
        length[node] = 1 + max((length[p] for p in edges[node]), default=0)
    return max(length.values(), default=0)


def _reduced(
    order: list[fx.Node], position: dict[fx.Node, int], needs: dict[fx.Node, set[fx.Node]]
) -> tuple[list[int], dict[fx.Node, list[fx.Node]]]:
    """Ancestors of each operator as bit sets, and the dependencies that no other dependency implies."""
    before: list[int] = []
    edges: dict[fx.Node, list[fx.Node]] = {}
    for node in order:
        found = sorted(needs[node], key=position.__getitem__, reverse=True)
        implied, kept = 0, []
        for other in found:
            bit = 1 << position[other]
            if not implied & bit:
                kept.append(other)
                implied |= before[position[other]] | bit
        edges[node] = kept
        before.append(implied)
    return before, edges


def _chains(order: list[fx.Node], edges: dict[fx.Node, list[fx.Node]]) -> dict[fx.Node, int]:
    """The fewest chains along reduced edges that cover all operators, by a maximum matching.

    Operators are numbers to the matching, whose result depends on the order in which sets are walked: the same graph
    has the same schedule in every process.
    """
    count = len(order)
    position = {node: i for i, node in enumerate(order)}
    bipartite = networkx.Graph()
    bipartite.add_nodes_from(range(2 * count))  # first as predecessors, then as successors
    bipartite.add_edges_from((position[p], count + i) for i, node in enumerate(order) for p in edges[node])
    matching = networkx.bipartite.hopcroft_karp_matching(bipartite, top_nodes=range(count))
    chain: list[int] = []
    chains = 0
    for i in range(count):
        before = matching.get(count + i)
        if before is None:
            chain.append(chains)
            chains += 1
        else:
            chain.append(chain[before])
    return dict(zip(order, chain, strict=True))


def _streams(
    order: list[fx.Node], position: dict[fx.Node, int], before: list[int], chain_of: dict[fx.Node, int], most: int
) -> dict[fx.Node, int]:
    """Chains to streams: the longest chain is stream 0, others take a stream whose last operator they follow anyway."""
    lengths: dict[int, int] = {}
    for chain in chain_of.values():
        lengths[chain] = lengths.get(chain, 0) + 1
    longest = max(lengths, key=lengths.__getitem__, default=0)
    stream_of: dict[int, int] = {longest: 0}
    last: dict[int, fx.Node] = {}
    stream: dict[fx.Node, int] = {}
    open_until: dict[int, int] = {}
    for i, node in enumerate(order):
        open_until[chain_of[node]] = i
    busy: dict[int, int] = {0: len(order)}
    for i, node in enumerate(order):
        chain = chain_of[node]
        if chain not in stream_of:
            stream_of[chain] = _pick(i, node, before, position, last, busy, most)
            if stream_of[chain] != 0:
                busy[stream_of[chain]] = open_until[chain]
        stream[node] = stream_of[chain]
        last[stream[node]] = node
    return stream


def _pick(
    i: int,
    node: fx.Node,
    before: list[int],
    position: dict[fx.Node, int],
    last: dict[int, fx.Node],
    busy: dict[int, int],
    most: int,
) -> int:
    for s in range(1, most):
        if s not in busy:
            return s
        if busy[s] < i and before[i] >> position[last[s]] & 1:
            return s
    idle = [s for s in range(1, most) if busy[s] < i]
    # A false wait on a side stream that has ended is better than one on the critical chain.
    return min(idle, key=lambda s: position[last[s]]) if idle else 0


def _latest(
    found: tuple[fx.Node, ...], stream: dict[fx.Node, int], position: dict[fx.Node, int]
) -> tuple[fx.Node, ...]:
    """Of several operators on one stream, waiting for the last is enough."""
    latest: dict[int, fx.Node] = {}
    for node in sorted(found, key=position.__getitem__):
        latest[stream[node]] = node
    return tuple(latest.values())


def _with_stream_order(
    order: list[fx.Node],
    position: dict[fx.Node, int],
    stream: dict[fx.Node, int],
    waits: dict[fx.Node, tuple[fx.Node, ...]],
) -> list[int]:
    """Ancestors under the schedule: by stream order and by waits."""
    before: list[int] = []
    last: dict[int, int] = {}
    for i, node in enumerate(order):
        found = 0
        sources = [position[p] for p in waits.get(node, ())]
        if stream[node] in last:
            sources.append(last[stream[node]])
        for p in sources:
            found |= before[p] | 1 << p
        before.append(found)
        last[stream[node]] = i
    return before


def _releases(
    flat: FlatGraph, order: list[fx.Node], position: dict[fx.Node, int], stream: dict[fx.Node, int], before: list[int]
) -> dict[fx.Node, tuple[fx.Node, ...]]:
    """After which operator each value may be dropped: its own stream must have waited for all who read it."""
    used_by = readers(flat, order, position)
    kept = leaving(flat)
    by_stream: dict[int, list[int]] = {}
    for i, node in enumerate(order):
        by_stream.setdefault(stream[node], []).append(i)
    release: dict[fx.Node, list[fx.Node]] = {}
    for value in order:
        if value in kept or written(value):
            continue
        used = used_by.get(value, set()) | {position[value]}
        crossing = [i for i in used if stream[order[i]] != stream[value]]
        if not crossing:
            release.setdefault(order[max(used)], []).append(value)
            continue
        mask = sum(1 << i for i in crossing)
        # Freed before the next allocation on its stream that follows all foreign readers.
        for i in by_stream[stream[value]]:
            if i > max(used) and before[i] & mask == mask:
                release.setdefault(order[i - 1], []).append(value)
                break
    return {node: tuple(values) for node, values in release.items()}


def readers(flat: FlatGraph, order: list[fx.Node], position: dict[fx.Node, int]) -> dict[fx.Node, set[int]]:
    """Positions of the operators that need each value."""
    found: dict[fx.Node, set[int]] = {}
    last = -1
    for node in flat.graph.nodes:
        if node.op != "call_function":
            continue
        last = position.get(node, last)
        # A view runs on the host before the next operator; it too needs its arguments (view_as has two).
        at = last if node in position else min(last + 1, len(order) - 1)
        for argument in node.all_input_nodes:
            for owner in memory_owners(argument):
                found.setdefault(owner, set()).add(at)
    return found
