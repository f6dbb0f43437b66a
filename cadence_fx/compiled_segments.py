"""Segments of a plan as compiled functions, one for all segments of equal structure.

The plan inlines a solver's loop: its steps differ in nothing but the constants that they read and in the slice of a
state's buffer that they write. A segment becomes a closed graph here: what it reads as an attribute becomes an
argument, or, better, the slices of an attribute that it uses. Steps are then one function of other arguments, and are
compiled once.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from cadence_fx.autocast import without_autocast
from cadence_fx.exact_compile import Compile, inductor_entry
from cadence_fx.partition import Partition, Segment

__all__ = ["ClosedGraph", "Compile", "CompiledSegments", "close", "graph_text", "inductor", "layout"]

aten = torch.ops.aten

# Views at constant places: they lead from a buffer to the part of it that a segment is about.
_PLACES = frozenset({aten.slice.Tensor, aten.select.int})


@dataclass(frozen=True)
class ClosedGraph:
    """A segment's graph without attributes.

    Attributes:
        graph: its placeholders in the order of their first use.
        order: for each placeholder, the number of the segment's input or the tensor that an attribute gives.
        text: the graph with its nodes called by their position: equal for equal structure.
    """

    graph: fx.Graph
    order: tuple[int | torch.Tensor, ...]
    text: str

    def arguments(self, values: Sequence[Any]) -> list[Any]:
        """What the graph takes, from what the segment takes."""
        return [values[item] if isinstance(item, int) else item for item in self.order]


def close(segment: Segment) -> ClosedGraph:
    """The segment's graph with attributes as arguments; the segment itself is not changed."""
    source = segment.module.graph
    bound: dict[fx.Node, int | torch.Tensor] = {}
    passed: set[fx.Node] = set()  # attributes, and views on the way to what becomes an argument
    for number, node in enumerate(n for n in source.nodes if n.op == "placeholder"):
        bound[node] = number
    for node in source.nodes:
        if node.op == "get_attr":
            _spread([node], getattr(segment.module, str(node.target)), bound, passed)
    graph, env, order = fx.Graph(), dict[fx.Node, fx.Node](), list[int | torch.Tensor]()
    work = [n for n in source.nodes if n not in bound and n not in passed]
    argument: dict[int, fx.Node] = {}  # nodes that name one view share an argument
    for used in (a for node in work for a in node.all_input_nodes if a in bound):
        item = bound[used]
        identity = item if isinstance(item, int) else -id(item)
        if identity not in argument:
            argument[identity] = graph.placeholder(f"arg_{len(order)}")
            order.append(item)
        env[used] = argument[identity]
    for node in work:
        env[node] = graph.node_copy(node, env.__getitem__)
        env[node].meta = {}
    graph.lint()
    return ClosedGraph(graph, tuple(order), graph_text(graph))


def _spread(
    nodes: list[fx.Node], value: torch.Tensor, bound: dict[fx.Node, int | torch.Tensor], passed: set[fx.Node]
) -> None:
    """Make a view that ``nodes`` name an argument, or, where all its uses begin with constant slices of it, these.

    Slices that could share memory stay views of one argument, so arguments never overlap: a compiler may reorder what
    it does to different arguments.
    """
    parts: dict[Any, list[fx.Node]] = {}
    for user in (user for node in nodes for user in node.users):
        given = (*user.args[1:], *user.kwargs.values())
        if user.target not in _PLACES or any(isinstance(item, fx.Node) for item in given):
            parts.clear()
            break
        parts.setdefault((user.target, user.args[1:], tuple(user.kwargs.items())), []).append(user)
    views = {key: key[0](value, *key[1], **dict(key[2])) for key in parts}
    if not views or not _apart(list(views.values())):
        bound |= dict.fromkeys(nodes, value)
        return
    passed.update(nodes)
    for key, users in parts.items():
        _spread(users, views[key], bound, passed)


def _apart(views: Sequence[torch.Tensor]) -> bool:
    """True if the stretches of memory from the first to the last element of each view do not meet."""

    def stretch(view: torch.Tensor) -> tuple[int, int]:
        last: int = sum((size - 1) * stride for size, stride in zip(view.shape, view.stride(), strict=True))
        first = int(view.storage_offset())
        return first, first + last

    if any(view.numel() == 0 for view in views):
        return False
    ends = sorted(map(stretch, views))
    return all(a[1] < b[0] for a, b in itertools.pairwise(ends))


def graph_text(graph: fx.Graph) -> str:
    """A graph with its nodes called by their position: equal for equal structure."""
    number = {node: f"%{i}" for i, node in enumerate(graph.nodes)}

    def line(node: fx.Node) -> str:
        given = fx.node.map_arg((node.args, node.kwargs), lambda n: _Name(number[n]))
        return f"{number[node]} = {'' if node.op == 'placeholder' else node.target} {given}"

    return "\n".join(map(line, graph.nodes))


class _Name(str):
    """Printed without quotes, so that no string argument looks like a node."""

    __repr__ = str.__str__


@dataclass
class CompiledSegments:
    """Runs partitions with compiled segments. A segment is compiled when it first runs, with the values it then has.

    What lies outside the contract's boundaries and writes state, the retention, runs as it is in the plan: a compiler
    turns a move within a buffer into copies of the whole of it.

    Args:
        compile: a closed graph and example arguments -> a function of these arguments.

    Attributes:
        functions: compiled functions by structure and layout of the arguments.
        closed: segments that were compiled.
        seconds: that all compilations took.
    """

    compile: Compile
    functions: dict[Any, Callable[..., Any]] = field(default_factory=dict)
    closed: dict[Segment, ClosedGraph] = field(default_factory=dict)
    seconds: float = 0.0

    def run(self, parts: Partition, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """All segments in order; allocates and reads nothing that a graph could not hold once all are compiled."""
        return parts.run(inputs, self._run_segment)

    def _run_segment(self, segment: Segment, values: Sequence[Any]) -> Sequence[Any]:
        if not segment.capturable or (segment.writes and not segment.where):
            return segment.module(*values)  # type: ignore[no-any-return]
        if segment not in self.closed:
            self.closed[segment] = close(segment)
        closed = self.closed[segment]
        arguments = closed.arguments(values)
        key = (closed.text, *map(layout, arguments))
        if key not in self.functions:
            begin = time.perf_counter()
            module = fx.GraphModule(torch.nn.Module(), closed.graph)
            self.functions[key] = without_autocast(without_autocast(self.compile)(module, arguments))
            self.seconds += time.perf_counter() - begin
        return self.functions[key](*arguments)  # type: ignore[no-any-return]


def layout(value: Any) -> Any:
    """What of an argument a compiled function depends on."""
    if not isinstance(value, torch.Tensor):
        return value
    return tuple(value.shape), value.stride(), value.dtype, value.device


def inductor(module: fx.GraphModule, arguments: Sequence[Any]) -> Callable[..., Any]:
    """Compile with Inductor in its default mode, for exactly these shapes.

    Two settings differ from a plain ``torch.compile``. Random numbers come from ATen's kernels, so that outputs differ
    from stock's by rounding and not by other noise. Overlap-add stays ATen's: in some versions Inductor sums it with
    atomics, whose result changes from run to run, which no certificate allows.
    """
    from torch._inductor import config
    from torch._inductor.decomposition import decompositions

    settings = {"fallback_random": True, "triton.cudagraphs": False}
    overlap_add = aten.unfold_backward.default
    # Out of the global table meanwhile: some versions refuse an operator that is in it and falls back all the same.
    rule = decompositions.pop(overlap_add, None)
    try:
        with torch.no_grad(), config.patch(settings):
            compiled: Any = inductor_entry()(module, list(arguments), config_patches=settings)
    finally:
        if rule is not None:
            decompositions[overlap_add] = rule
    return compiled  # type: ignore[no-any-return]
