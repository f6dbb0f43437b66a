"""Which operators of a graph become one kernel: groups along values, on the order that memory and draws impose too.

A group grows from producers to consumers while it stays one kernel: everything in it runs over the elements of the
group's largest result, so a smaller value may join only if nobody outside reads it (a row that is broadcast, a piece of
a concatenation), and a consumer that reads a part of a large value does not join. Groups contract to single nodes of
the graph of dependencies, which stays acyclic: a merge that would close a cycle through others is not made.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from torch import fx

from cadence_fx.effects import written
from cadence_fx.schedule import dependencies, leaving, memory_owners, operators, viewed
from cadence_fx.specialise import FlatGraph, meta_of

__all__ = ["FusionGroup", "fusion_groups"]

MOST_OPERATORS, MOST_INPUTS, MOST_PIECES = 48, 24, 8  # of a group; tensors that it reads; pieces of a concatenation


@dataclass(eq=False)
class FusionGroup:
    """Operators, in the order of the graph. ``numel``: elements of the largest result."""

    nodes: list[fx.Node]
    numel: int
    before: set[FusionGroup] = field(default_factory=set, repr=False)
    after: set[FusionGroup] = field(default_factory=set, repr=False)
    first: int = 0
    last: int = 0


def fusion_groups(flat: FlatGraph, admitted: Callable[[fx.Node], bool]) -> list[FusionGroup]:
    """Groups of two operators or more, in the order of their last operators.

    Args:
        admitted: whether an operator may be part of a fused kernel.
    """
    return _Grouping(flat, admitted).run()


class _Grouping:
    def __init__(self, flat: FlatGraph, admitted: Callable[[fx.Node], bool]) -> None:
        self.order = operators(flat)
        self.position = {node: i for i, node in enumerate(self.order)}
        self.kept = leaving(flat)
        self.fusible = {node for node in self.order if admitted(node) and self._fits(node)}
        self.producers = {node: list(self._producers(node)) for node in self.order}
        self.readers: dict[fx.Node, set[fx.Node]] = {}
        for node, found in self.producers.items():
            for producer in found:
                self.readers.setdefault(producer, set()).add(node)
        self.group = {node: FusionGroup([node], _numel(node), first=i, last=i) for i, node in enumerate(self.order)}
        for node, needs in dependencies(flat).items():
            for other in needs:
                self.group[node].before.add(self.group[other])
                self.group[other].after.add(self.group[node])

    @staticmethod
    def _fits(node: fx.Node) -> bool:
        pieces = node.args[0] if node.args and isinstance(node.args[0], (list, tuple)) else ()
        return meta_of(node) is not None and len(pieces) <= MOST_PIECES and _numel(node) > 0

    def _producers(self, node: fx.Node) -> Iterator[fx.Node]:
        """Operators whose results a node reads, through views; not what it writes."""
        writes = set(written(node))
        for argument in node.all_input_nodes:
            if argument not in writes:
                shown = viewed(argument)
                if shown in self.position:
                    yield shown

    def run(self) -> list[FusionGroup]:
        for node in self.order:
            if node not in self.fusible:
                continue
            # The nearest producer first: it is most likely to be on the same path.
            for producer in sorted(set(self.producers[node]), key=self.position.__getitem__, reverse=True):
                a, b = self.group[producer], self.group[node]
                if producer in self.fusible and a is not b and self._one_kernel(a, b) and not _reaches(a, b):
                    self._merge(a, b)
        found = {g for node in self.order if len((g := self.group[node]).nodes) > 1}
        return sorted(found, key=lambda g: g.last)

    def _one_kernel(self, a: FusionGroup, b: FusionGroup) -> bool:
        if len(a.nodes) + len(b.nodes) > MOST_OPERATORS or a.numel > b.numel:
            return False
        nodes = {*a.nodes, *b.nodes}
        inputs = {p for n in nodes for p in n.all_input_nodes if p not in nodes}
        if len(inputs) > MOST_INPUTS or self._touches_what_it_writes(nodes):
            return False
        return a.numel == b.numel or not any(self._leaves(n, nodes) for n in a.nodes if _numel(n) < b.numel)

    def _leaves(self, node: fx.Node, nodes: set[fx.Node]) -> bool:
        """True if something outside of the nodes sees what a node computes."""
        return node in self.kept or bool(written(node)) or not self.readers.get(node, set()) <= nodes

    @staticmethod
    def _touches_what_it_writes(nodes: set[fx.Node]) -> bool:
        """True if memory that one of the nodes writes in place is given to another, as far as can be seen."""
        given = [(owner, a in written(n), n) for n in nodes for a in n.all_input_nodes for owner in memory_owners(a)]
        writes = {(owner, n) for owner, is_written, n in given if is_written}
        return any(owner == other and (n is not m or not w) for owner, n in writes for other, w, m in given)

    def _merge(self, a: FusionGroup, b: FusionGroup) -> None:
        b.nodes = sorted([*a.nodes, *b.nodes], key=self.position.__getitem__)
        b.numel, b.first, b.last = max(a.numel, b.numel), min(a.first, b.first), max(a.last, b.last)
        for other in a.before:
            other.after.discard(a)
            other.after.add(b)
        for other in a.after:
            other.before.discard(a)
            other.before.add(b)
        b.before = (b.before | a.before) - {a, b}
        b.after = (b.after | a.after) - {a, b}
        for node in a.nodes:
            self.group[node] = b


def _reaches(a: FusionGroup, b: FusionGroup) -> bool:
    """True if there is a way from one group to another, which waits for it, through a third: a merge closes a cycle."""
    todo = [g for g in a.after if g is not b]
    seen = set(todo)
    while todo:
        group = todo.pop()
        if b in group.after:
            return True
        # What comes later than all of the target cannot lead to it, unless it has an operator before the target's end.
        new = {g for g in group.after if g.first < b.last} - seen - {b}
        seen |= new
        todo += new
    return False


def _numel(node: fx.Node) -> int:
    meta = meta_of(node)
    return 0 if meta is None else math.prod(meta.shape)
