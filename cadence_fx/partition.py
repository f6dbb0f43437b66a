"""Split a flat graph into an ordered list of segments: what a device graph can record, and what must run by itself.

Nodes that look at device values on the host, or work on the host, form eager segments; everything else is capturable.
Granularity says where else to cut: "chunk" nowhere, "callable" at the outermost boundaries, "step" at every tick of
every boundary. Writes in place and random draws keep their order.

What crosses a cut is memory, not views of it: a segment takes the owner of the memory and makes the views that it needs
itself. So it does not matter whether a segment works on the owner or on a staged copy: it returns owners that it wrote,
and the next reader sees what was written through whatever view.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import networkx
import torch
from torch import fx

from cadence_fx.autocast import runnable
from cadence_fx.changes import Rejection
from cadence_fx.effects import base_of, is_random, view_input, written
from cadence_fx.errors import CadenceError
from cadence_fx.obstacles import obstacles
from cadence_fx.specialise import FlatGraph, TensorMeta, meta_of
from cadence_fx.staging import copy_of

__all__ = ["Granularity", "Partition", "Runner", "Segment", "partition"]

Granularity = Literal["chunk", "callable", "step"]


@dataclass(frozen=True, eq=False)
class Segment:
    """A convex part of a graph.

    Attributes:
        name: unique in its partition.
        capturable: a device graph can record it.
        reason: why it is cut off from its neighbours.
        where: the boundaries that it lies in.
        nodes: names of its operators, in order.
        inputs, outputs: names of the values that it takes and returns (a tuple); one that it writes in place is both.
        reads, writes: attributes whose memory it reads or writes.
        draws: it moves a generator.
        make: makes the module that runs it; attributes are those that `partition` was given.
    """

    name: str
    capturable: bool
    reason: str
    where: tuple[tuple[str, int], ...]
    nodes: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    reads: frozenset[str]
    writes: frozenset[str]
    draws: bool
    make: Callable[[], fx.GraphModule]

    @cached_property
    def module(self) -> fx.GraphModule:
        """Runs the segment. Made when first needed: a graph that is captured whole needs the cuts and not the code."""
        return self.make()


Runner = Callable[[Segment, Sequence[Any]], Sequence[Any]]


@dataclass(frozen=True, eq=False)
class Partition:
    """Segments in the order in which they run, and why they are not fewer."""

    segments: tuple[Segment, ...]
    rejections: tuple[Rejection, ...]
    inputs: tuple[str, ...]
    finish: Segment

    def run(self, inputs: Sequence[Any], runner: Runner | None = None, copy_outputs: bool = False) -> tuple[Any, ...]:
        """Run all segments.

        Args:
            inputs: of the graph, in order.
            runner: called with a segment and its inputs, returns its outputs; runs the segment's module if None. They
                may be static memory if nothing overwrites it before this returns.
            copy_outputs: give the caller memory of its own, needed where a runner returns static memory.
        """
        run = runner if runner is not None else lambda segment, values: segment.module(*values)
        env = dict(zip(self.inputs, inputs, strict=True))
        last = {name: i for i, segment in enumerate((*self.segments, self.finish)) for name in segment.inputs}
        for i, segment in enumerate(self.segments):
            results = run(segment, [env[name] for name in segment.inputs])
            for name, value in zip(segment.outputs, results, strict=True):
                if name in self.inputs:
                    _write_back(env[name], value)  # the caller's own tensor
                else:
                    env[name] = value
            del results
            for name in [*segment.inputs, *segment.outputs]:
                if last.get(name, -1) <= i and name not in self.inputs:
                    env.pop(name, None)
        outputs = self.finish.module(*[env[name] for name in self.finish.inputs])
        return tuple(copy_of(v) if copy_outputs and isinstance(v, torch.Tensor) else v for v in outputs)


def _write_back(tensor: torch.Tensor, value: torch.Tensor) -> None:
    if tensor is not value and tensor.data_ptr() != value.data_ptr():
        tensor.copy_(value)


def partition(
    flat: FlatGraph, granularity: Granularity = "chunk", attributes: Mapping[str, Any] | None = None
) -> Partition:
    """Split ``flat``; it is not changed.

    Args:
        flat: every tensor node with its metadata.
        granularity: where to cut beside where it must.
        attributes: value of every get_attr target; the graph's own constants if None.

    Raises:
        CadenceError: the granularity is unknown, or an operator returns memory that no rule covers.
    """
    if granularity not in ("chunk", "callable", "step"):
        raise CadenceError(f"granularity is {granularity!r}; expected 'chunk', 'callable' or 'step'")
    blocked, rejections = obstacles(flat)
    views = {n for n in flat.graph.nodes if _is_view(n)}
    work = [n for n in flat.graph.nodes if n.op == "call_function" and n not in views]
    place = _places(work, granularity, blocked, _dependencies(work))
    groups: dict[tuple[int, int], list[fx.Node]] = defaultdict(list)
    for node in work:
        groups[place[node]].append(node)
    cutter = _Cutter(flat, views, dict(flat.constants if attributes is None else attributes))
    ordered = [groups[key] for key in sorted(groups)]
    last_use = {owner: i for i, nodes in enumerate(ordered) for owner in cutter.owners(nodes)}
    last_use |= dict.fromkeys(cutter.owners([flat.output]), len(ordered))
    segments = tuple(
        cutter.segment(f"segment_{i}", nodes, {owner for owner in last_use if last_use[owner] > i}, blocked)
        for i, nodes in enumerate(ordered)
    )
    placeholders = tuple(n.name for n in flat.graph.nodes if n.op == "placeholder")
    return Partition(segments, rejections, placeholders, cutter.finish())


# ------------------------------------------------------------------------------------------- where to cut
def _region(node: fx.Node, granularity: Granularity) -> tuple[tuple[str, int], ...] | None:
    """The part of the boundaries' chain that separates segments; None for a node that a pass made."""
    where = node.meta.get("where")
    if where is None or granularity == "chunk":
        return None
    return tuple(where[:1] if granularity == "callable" else where)


def _dependencies(work: Sequence[fx.Node]) -> networkx.DiGraph:
    """Who must wait for whom: values, writes in place against all other uses of the same memory, and draws in order."""
    graph = networkx.DiGraph()
    graph.add_nodes_from(work)
    readers: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    writer: dict[fx.Node, fx.Node] = {}
    drawer: fx.Node | None = None
    for node in work:
        used = {base_of(a) for a in node.all_input_nodes}
        changed = {base_of(a) for a in written(node)}
        for base in used | changed:
            made = [*_makers(base, graph), *([writer[base]] if base in writer else [])]
            graph.add_edges_from((maker, node) for maker in made if maker is not node)
        # A view chain may pass an operator that copied: that is where the value was made.
        graph.add_edges_from((m, node) for a in node.all_input_nodes for m in _makers(a, graph) if m is not node)
        for base in changed:
            graph.add_edges_from((reader, node) for reader in readers.pop(base, []) if reader is not node)
            writer[base] = node
        for base in used - changed:
            readers[base].append(node)
        if is_random(node):
            if drawer is not None:
                graph.add_edge(drawer, node)
            drawer = node
    return graph


def _makers(node: fx.Node, graph: networkx.DiGraph) -> list[fx.Node]:
    """The node of the graph that made the memory of a value, itself or at the end of a chain of views."""
    found: fx.Node | None = node
    while found is not None and found not in graph:
        found = view_input(found)
    return [] if found is None else [found]


def _places(
    work: Sequence[fx.Node], granularity: Granularity, blocked: Mapping[fx.Node, str], graph: networkx.DiGraph
) -> dict[fx.Node, tuple[int, int]]:
    """Segment of each node as (run of one region in graph order, level in it).

    Levels alternate: even ones are capturable, odd ones eager. A node's level is the least that no dependency exceeds,
    so dependencies never point backwards and each level is as large as it can be.
    """
    place: dict[fx.Node, tuple[int, int]] = {}
    run, region = 0, None
    found: tuple[tuple[str, int], ...] | None
    for node in work:
        if node.target is operator.getitem and node.args[0] in place:
            place[node] = place[node.args[0]]  # type: ignore[index]
            continue
        found = _region(node, granularity)
        if found is not None and found != region:
            run, region = run + 1, found
        level = max((place[p][1] for p in graph.predecessors(node) if place[p][0] == run), default=0)
        place[node] = (run, level if level % 2 == (node in blocked) else level + 1)
    quotient = networkx.DiGraph((place[a], place[b]) for a, b in graph.edges if place[a] != place[b])
    if any(a > b for a, b in quotient.edges):
        raise CadenceError(
            "partition: a segment would run before a value that it needs; this is a fault of the library"
        )
    return place


# ------------------------------------------------------------------------------------------- memory and views
def _is_view(node: fx.Node) -> bool:
    """True if the value lies in its input's memory, for these very shapes: ``reshape`` and ``to`` may also copy."""
    source = view_input(node)
    if source is None or written(node):
        return False
    if node.target is operator.getitem:
        return _is_view(source)
    before, after = meta_of(source), meta_of(node)
    if before is not None and after is not None and before.device != after.device:
        return False
    given = {a: _meta_tensor(a) for a in node.all_input_nodes}
    args = fx.node.map_arg(_on_meta(node.args), given.__getitem__)
    kwargs = fx.node.map_arg(_on_meta(node.kwargs), given.__getitem__)
    try:
        # Inference mode keeps no books of views.
        with torch.inference_mode(False), torch.no_grad():
            result = node.target(*args, **kwargs)  # type: ignore[operator]
    except (RuntimeError, NotImplementedError, CadenceError) as error:
        raise CadenceError(f"partition: cannot tell whether {node.target} copies at {node.name}: {error}") from error
    first = result[0] if isinstance(result, (list, tuple)) else result
    return first is given[source] or first._is_view()


def _on_meta(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(_on_meta(v) for v in value)
    if isinstance(value, dict):
        return {k: _on_meta(v) for k, v in value.items()}
    return torch.device("meta") if isinstance(value, torch.device) else value


def _meta_tensor(node: fx.Node) -> Any:
    def tensor(value: Any) -> Any:
        if isinstance(value, TensorMeta):
            return value.empty("meta")
        return tuple(tensor(v) for v in value) if isinstance(value, (list, tuple)) else value

    return tensor(meta_of(node) or node.meta.get("val"))


class _Cutter:
    """Builds the segments' graphs."""

    def __init__(self, flat: FlatGraph, views: set[fx.Node], attributes: dict[str, Any]) -> None:
        self.flat, self.views, self.attributes = flat, views, attributes
        self.known: dict[fx.Node, fx.Node] = {}

    def owner(self, node: fx.Node) -> fx.Node:
        """The node whose value owns the memory; a node that writes in place returns the memory that it writes."""
        if node not in self.known:
            source = view_input(node) if node in self.views or written(node) else None
            self.known[node] = node if source is None else self.owner(source)
        return self.known[node]

    def owners(self, nodes: Iterable[fx.Node]) -> set[fx.Node]:
        return {self.owner(a) for node in nodes for a in node.all_input_nodes}

    def segment(
        self, name: str, nodes: Sequence[fx.Node], needed: set[fx.Node], blocked: Mapping[fx.Node, str]
    ) -> Segment:
        changed = {self.owner(a) for node in nodes for a in written(node)}
        out = [n for n in nodes if n in needed and self.owner(n) is n]
        out += [
            n for n in sorted(changed - set(nodes)) if n.op == "placeholder" or (n.op != "get_attr" and n in needed)
        ]
        reason = "; ".join(dict.fromkeys(blocked[n] for n in nodes if n in blocked))
        capturable = nodes[0] not in blocked
        return self.build(name, nodes, out, capturable, reason)

    def finish(self) -> Segment:
        """Makes the graph's outputs from their owners: views, constants and structure only."""
        return self.build("finish", (), self.flat.output.args[0], False, "outputs")

    def build(self, name: str, nodes: Sequence[fx.Node], results: Any, capturable: bool, reason: str) -> Segment:
        graph, env = fx.Graph(), dict[fx.Node, fx.Node]()
        inputs: list[fx.Node] = []
        # Placeholders come first in a graph, so what is imported must be known before anything is copied.
        for node in sorted(self.imported(nodes, results)):
            env[node] = graph.placeholder(node.name)
            env[node].meta = dict(node.meta)
            inputs.append(node)

        def fetch(node: fx.Node) -> fx.Node:
            if node not in env:
                if node.op == "call_function" and node not in self.views and written(node):
                    env[node] = fetch(self.written_value(node))  # made elsewhere: its memory came in
                elif node.op == "get_attr" or node in self.views:
                    env[node] = graph.node_copy(node, fetch)
                else:
                    raise CadenceError(f"partition: {node.name} does not reach {name}; this is a fault of the library")
            return env[node]

        for node in nodes:
            env[node] = graph.node_copy(node, fetch)
        graph.output(fx.node.map_arg(tuple(results), fetch))
        graph.lint()
        used = {n for n in self.owners(nodes) if n.op == "get_attr"}
        changed = {self.owner(a) for n in nodes for a in written(n)}
        names = tuple(r.name if isinstance(r, fx.Node) else "" for r in results)
        return Segment(
            name, capturable, reason, tuple(nodes[0].meta.get("where") or ()) if nodes else (),
            tuple(n.name for n in nodes), tuple(n.name for n in inputs), names,
            frozenset(str(n.target) for n in used), frozenset(str(n.target) for n in changed if n.op == "get_attr"),
            any(is_random(n) for n in nodes), lambda: self.module(graph),
        )  # fmt: skip

    def written_value(self, node: fx.Node) -> fx.Node:
        source = view_input(node)
        if source is None:
            raise CadenceError(f"partition: {node.target} at {node.name} writes memory that it does not return")
        return source

    def imported(self, nodes: Sequence[fx.Node], results: Any) -> set[fx.Node]:
        wanted = self.owners(nodes) | {self.owner(r) for r in results if isinstance(r, fx.Node)}
        return {n for n in wanted - set(nodes) if n.op != "get_attr"}

    def module(self, graph: fx.Graph) -> fx.GraphModule:
        holder = torch.nn.Module()
        targets = {str(n.target) for n in graph.nodes if n.op == "get_attr"}
        for target in targets:
            # Plain attributes, as in a compiled program: they are the very tensors of their owners.
            object.__setattr__(holder, target, self.attributes[target])
        module = fx.GraphModule(holder, graph)
        module.__dict__.update({target: self.attributes[target] for target in targets})
        return runnable(module.eval())
