"""From symbolic traces to one flat graph for one signature.

A `FlatGraph` has integers where the trace had symbols, and the body of the covering trace where it had a boundary.
Every tensor node carries a `TensorMeta`, the vendor's source line, the chain of boundaries (with the number of the
call) that it sits in, and the autocast state that it runs under: that of the traced call, of the boundary's call, or of
the block ``with torch.autocast(...)`` that it stood in.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import sympy
import torch
import torch.utils._pytree as pytree
from torch import fx

from cadence_fx.autocast import AutocastState, entered
from cadence_fx.errors import TraceError
from cadence_fx.regime import Trace, evaluate, size_expr
from cadence_fx.trace import BOUNDARY_OP, Site, Tracer

__all__ = ["FlatGraph", "TensorMeta", "meta_of", "source_of", "specialise"]

_AUTOCAST_BLOCK = torch.ops.higher_order.wrap_with_autocast


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """Shape, strides, dtype and device of a node's value, all concrete."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorMeta:
        """The metadata of a tensor."""
        return cls(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.device)

    def empty(self, device: str | None = None) -> torch.Tensor:
        """An uninitialised tensor of this form, on its own device by default."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device or self.device)

    @property
    def numel(self) -> int:
        n = 1
        for size in self.shape:
            n *= size
        return n

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


@dataclass
class FlatGraph:
    """A graph for one signature. ``attributes``: target of a get_attr node -> dotted path in the module."""

    graph: fx.Graph
    out_spec: pytree.TreeSpec
    attributes: dict[str, str] = field(default_factory=dict)
    constants: dict[str, torch.Tensor] = field(default_factory=dict)

    def copy(self) -> FlatGraph:
        """An independent copy; metadata is copied shallowly."""
        graph = fx.Graph()
        mapping: dict[fx.Node, fx.Node] = {}
        output = graph.graph_copy(self.graph, mapping)
        graph.output(output)
        return FlatGraph(graph, self.out_spec, dict(self.attributes), dict(self.constants))

    @property
    def output(self) -> fx.Node:
        found: fx.Node = next(node for node in reversed(self.graph.nodes) if node.op == "output")
        return found

    def calls(self) -> int:
        """Number of operators."""
        return sum(node.op == "call_function" for node in self.graph.nodes)


def meta_of(node: fx.Node) -> TensorMeta | None:
    """The node's tensor metadata, or None where it is no single tensor."""
    value = node.meta.get("val")
    return value if isinstance(value, TensorMeta) else None


def source_of(node: fx.Node) -> str:
    """The vendor's source line that made the node, as 'file:line in function'; empty if unknown."""
    return str(node.meta.get("source", ""))


def specialise(
    tracer: Tracer, trace: Trace, shapes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype], names: Sequence[str]
) -> FlatGraph:
    """The flat graph of a trace for these input shapes.

    Args:
        tracer: owner of the boundaries' traces; a boundary regime that is missing is traced here.
        names: name of each placeholder.

    Raises:
        TraceError: the trace does not cover the shapes; the text names the guard or the dimension.
    """
    bindings = trace.bind(shapes, dtypes)
    if isinstance(bindings, str):
        raise TraceError(f"the trace does not cover input shapes {[list(s) for s in shapes]}: {bindings}")
    flat = FlatGraph(fx.Graph(), trace.out_spec)
    inputs = []
    for name, placeholder in zip(names, trace.inputs, strict=True):
        node = flat.graph.placeholder(name)
        value = next(n for n in trace.graph.nodes if n.name == placeholder).meta["val"]
        node.meta["val"] = _Metas(trace, bindings)(value)
        inputs.append(node)
    results = _Inliner(tracer, flat).inline(trace, bindings, inputs, ())
    flat.graph.output(tuple(results))
    return flat


class _Metas:
    """Concrete metadata under symbol values, each distinct expression evaluated once."""

    def __init__(self, trace: Trace, values: dict[sympy.Symbol, int]) -> None:
        key = tuple(v for _, v in sorted(((str(k), v) for k, v in values.items())))
        self.memo: dict[Any, int] = trace.metas.setdefault(key, {})
        self.values = values

    def size(self, size: Any) -> int:
        if not isinstance(size, torch.SymInt):
            return int(size)
        expr = size_expr(size)
        if expr not in self.memo:
            self.memo[expr] = evaluate(expr, self.values)
        return self.memo[expr]

    def __call__(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            shape = tuple(self.size(s) for s in value.shape)
            return TensorMeta(shape, tuple(self.size(s) for s in value.stride()), value.dtype, value.device)
        if isinstance(value, (list, tuple)):
            return tuple(self(v) for v in value)
        if isinstance(value, torch.SymInt):
            return self.size(value)
        return value


@dataclass(frozen=True)
class _At:
    """Where the inliner stands: symbol values, boundaries around it, and the autocast state."""

    metas: _Metas
    where: tuple[tuple[str, int], ...]
    autocast: AutocastState | None


class _Inliner:
    def __init__(self, tracer: Tracer, flat: FlatGraph) -> None:
        self.tracer, self.flat = tracer, flat
        self.attribute_nodes: dict[str, fx.Node] = {}
        self.ticks: dict[str, int] = {}

    def inline(
        self,
        trace: Trace,
        bindings: dict[sympy.Symbol, int],
        inputs: Sequence[fx.Node],
        where: tuple[tuple[str, int], ...],
    ) -> list[Any]:
        at = _At(_Metas(trace, bindings), where, trace.autocast)
        env: dict[fx.Node, Any] = {}
        by_name = dict(zip(trace.inputs, inputs, strict=True))
        for node in trace.graph.nodes:
            if node.op == "placeholder":
                if node.name in by_name:
                    env[node] = by_name[node.name]
                elif node.name in trace.attributes and node.users:
                    env[node] = self.attribute(trace, node, at.metas)
        return self.body(trace.graph, env, at)

    def body(self, graph: fx.Graph, env: dict[fx.Node, Any], at: _At) -> list[Any]:
        """The operators of a trace, or of a block in it, with ``env`` holding its arguments; returns its results."""
        for node in graph.nodes:
            if node.op == "output":
                return [env.get(v, v) if isinstance(v, fx.Node) else v for v in pytree.tree_leaves(node.args[0])]
            if node.op == "get_attr":
                env[node] = _block(graph, node)
            elif node.op != "placeholder":
                env[node] = self.call(node, env, at)
        raise TraceError("a trace without an output node")

    def attribute(self, trace: Trace, node: fx.Node, metas: _Metas) -> fx.Node:
        path = trace.attributes[node.name]
        constant = trace.constants.get(node.name)
        target = _target(path, self.flat.attributes)
        if constant is not None:
            # Two traces may lift different values under one path.
            while target in self.flat.constants and not _same_bits(self.flat.constants[target], constant):
                target += "_"
            self.flat.constants[target] = constant
        if target not in self.attribute_nodes:
            found = self.flat.graph.create_node("get_attr", target)
            found.meta["val"] = metas(node.meta["val"])
            self.attribute_nodes[target] = found
            self.flat.attributes[target] = path
        return self.attribute_nodes[target]

    def call(self, node: fx.Node, env: dict[fx.Node, Any], at: _At) -> Any:
        value = node.meta.get("val")
        if isinstance(value, (torch.SymInt, int)) and not isinstance(value, bool):
            return at.metas.size(value)
        given: Any = fx.map_arg((node.args, node.kwargs), lambda n: env[n])
        args, kwargs = given
        if node.target is BOUNDARY_OP:
            return self.boundary(self.tracer.sites[int(args[1])], args[0], node, at.where)
        if node.target is _AUTOCAST_BLOCK:
            device_type, dtype, enabled, _, graph, *given = args  # casts are not cached while constants are hoisted
            inside = replace(at, autocast=entered(at.autocast, device_type, dtype, enabled))
            placeholders = [n for n in graph.nodes if n.op == "placeholder"]
            return self.body(graph, dict(zip(placeholders, given, strict=True)), inside)
        if node.target is operator.getitem and isinstance(args[0], list):
            return args[0][args[1]]
        made = self.flat.graph.create_node(node.op, node.target, args, kwargs, name=node.name)
        made.meta["val"] = at.metas(value)
        made.meta["source"] = _source_line(node)
        made.meta["where"] = at.where
        made.meta["autocast"] = at.autocast
        return made

    def boundary(
        self, site: Site, inputs: Sequence[fx.Node], node: fx.Node, where: tuple[tuple[str, int], ...]
    ) -> list[Any]:
        found = [meta_of(n) for n in inputs]
        concrete = [m for m in found if m is not None]
        shapes, dtypes = [m.shape for m in concrete], [m.dtype for m in concrete]
        trace, bindings = self.covering(site, shapes, dtypes, concrete, node)
        tick = self.ticks.get(site.path, 0)
        self.ticks[site.path] = tick + 1
        leaves = self.inline(trace, bindings, inputs, (*where, (site.path, tick)))
        return [leaf for leaf in leaves if isinstance(leaf, fx.Node)]  # the caller's trace holds plain values itself

    def covering(
        self, site: Site, shapes: Sequence[Any], dtypes: Sequence[Any], metas: Sequence[TensorMeta], node: fx.Node
    ) -> tuple[Trace, dict[sympy.Symbol, int]]:
        strides = [m.stride for m in metas]
        for trace in site.traces:
            bindings = trace.bind(shapes, dtypes, strides)
            if isinstance(bindings, dict):
                return trace, bindings
        tensors = [m.empty() for m in metas]
        symbolic: Any = node.args[0]
        vary = [
            {d for d, s in enumerate(arg.meta["val"].shape) if not size_expr(s).is_Integer and shape[d] > 1}
            for arg, shape in zip(symbolic, shapes, strict=True)
        ]
        trace = self.tracer.trace_site(site, tensors, vary)
        bindings = trace.bind(shapes, dtypes, strides)
        if isinstance(bindings, str):
            raise TraceError(
                f"boundary {site.path!r}: a trace made for shapes {list(shapes)} does not cover them: {bindings}"
            )
        return trace, bindings


def _block(graph: fx.Graph, node: fx.Node) -> fx.Graph:
    """The graph of a block that a node names.

    Raises:
        TraceError: the block is of another kind than autocast.
    """
    other = [user.target for user in node.users if user.target is not _AUTOCAST_BLOCK]
    found = getattr(graph.owning_module, str(node.target), None)
    if other or not isinstance(found, fx.GraphModule):
        name = getattr(other[0], "__name__", "block") if other else type(found).__name__
        raise TraceError(
            f"forward enters a context that tracing keeps as a block ({name}): enter it around the call, or convert "
            "tensors yourself"
        )
    return found.graph


def _target(path: str, taken: dict[str, str]) -> str:
    """A name for an attribute that no other path has (``a.b_c`` and ``a_b.c`` differ) and no buffer of the library."""
    target = re.sub(r"\W", "_", path)
    if target.startswith(("region_", "stage_", "constant_")):
        target = f"module_{target}"
    while taken.get(target, path) != path:
        target += "_"
    return target


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a is b or (a.shape == b.shape and a.dtype == b.dtype and a.device == b.device and torch.equal(a, b))


_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\w+)')


def _source_line(node: fx.Node) -> str:
    """The innermost frame that is not torch's own."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    for filename, line, function in reversed(frames):
        if "/torch/" not in filename:
            return f"{filename}:{line} in {function}"
    return f"{frames[-1][0]}:{frames[-1][1]} in {frames[-1][2]}" if frames else ""
