"""Regimes: which extents a trace covers, and how that is read out of an exported program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
import torch.utils._pytree as pytree
from torch import fx

from cadence_fx.autocast import AutocastState
from cadence_fx.errors import TraceError

__all__ = ["Guard", "Trace", "as_trace", "evaluate", "holds", "outputs_of", "size_expr"]


@dataclass(frozen=True)
class Guard:
    """A condition on extents that a trace relied on, and the source line that asked."""

    expr: sympy.Basic
    where: str


@dataclass
class Trace:
    """A symbolic graph with the regime that it covers.

    Attributes:
        graph: pre-dispatch ATen; parameters, buffers and constants are placeholders named in ``attributes``.
        attributes: placeholder name -> dotted path of the attribute it stands for.
        constants: placeholder name -> value of a tensor that tracing itself lifted out of the code.
        shapes, strides: per user input, as sympy expressions.
        guards: conditions under which the graph is what the module would have done.
        out_spec: pytree structure of the result.
        autocast: the state under which it was traced: that of every node outside blocks of the module's own.
    """

    graph: fx.Graph
    attributes: dict[str, str]
    constants: dict[str, torch.Tensor]
    inputs: tuple[str, ...]
    shapes: tuple[tuple[sympy.Expr, ...], ...]
    strides: tuple[tuple[sympy.Expr, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    guards: tuple[Guard, ...]
    out_spec: pytree.TreeSpec
    autocast: AutocastState | None = None
    metas: dict[tuple[int, ...], Any] = field(default_factory=dict)

    def bind(
        self,
        shapes: Sequence[Sequence[int]],
        dtypes: Sequence[torch.dtype],
        strides: Sequence[Sequence[int]] | None = None,
    ) -> dict[sympy.Symbol, int] | str:
        """Values for the symbols if a call with these input shapes belongs to the regime; else the reason.

        ``strides`` matter for a boundary: what it may view, and what it copies, depends on them.
        """
        values: dict[sympy.Symbol, int] = {}
        reason = self._other_shapes(shapes, dtypes, values)
        if reason is None and strides is not None:
            reason = self._other_strides(shapes, strides, values)
        if reason is not None:
            return reason
        for guard in self.guards:
            if not holds(guard.expr, values):
                return f"the guard {guard.expr} does not hold ({guard.where})"
        return values

    def _other_shapes(
        self, shapes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype], values: dict[sympy.Symbol, int]
    ) -> str | None:
        composite: list[tuple[int, int, sympy.Expr, int]] = []
        for i, (expected, found) in enumerate(zip(self.shapes, shapes, strict=True)):
            if dtypes[i] != self.dtypes[i]:
                return f"input {i} is {dtypes[i]}, the trace has {self.dtypes[i]}"
            if len(expected) != len(found):
                return f"input {i} has {len(found)} dimensions, the trace has {len(expected)}"
            for dim, (expr, size) in enumerate(zip(expected, found, strict=True)):
                if expr.is_Symbol and values.setdefault(expr, size) != size:
                    return f"dimension {dim} of input {i} is {size}, expected {values[expr]} as elsewhere"
                if expr.is_Integer and int(expr) != size:
                    return f"dimension {dim} of input {i} is {size}, the trace has {expr}"
                if not expr.is_Symbol and not expr.is_Integer:
                    composite.append((i, dim, expr, size))
        for i, dim, expr, size in composite:
            if evaluate(expr, values) != size:
                return f"dimension {dim} of input {i} is {size}, expected {expr}"
        return None

    def _other_strides(
        self, shapes: Sequence[Sequence[int]], strides: Sequence[Sequence[int]], values: dict[sympy.Symbol, int]
    ) -> str | None:
        for i, (expected, found) in enumerate(zip(self.strides, strides, strict=True)):
            for dim, (expr, stride) in enumerate(zip(expected, found, strict=True)):
                if expr.is_Symbol:
                    values.setdefault(expr, stride)
                if shapes[i][dim] > 1 and evaluate(expr, values) != stride:
                    return f"stride {dim} of input {i} is {stride}, expected {expr}"
        return None


def evaluate(expr: sympy.Expr, values: dict[sympy.Symbol, int]) -> int:
    """The integer that an extent is for these symbol values."""
    found = sympy.sympify(expr.xreplace(_integers(values)))
    if not found.is_number:
        raise TraceError(
            f"extent {expr} is not fixed by the inputs; symbols left: {sorted(map(str, found.free_symbols))}"
        )
    return int(found)


def holds(expr: sympy.Basic, values: dict[sympy.Symbol, int]) -> bool:
    """True if a guard holds for these symbol values."""
    return bool(sympy.sympify(expr.xreplace(_integers(values))) == sympy.true)


def _integers(values: dict[sympy.Symbol, int]) -> dict[sympy.Basic, sympy.Basic]:
    return {symbol: sympy.Integer(value) for symbol, value in values.items()}


def size_expr(size: Any) -> sympy.Expr:
    """A size, symbolic or not, as a sympy expression."""
    return size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)


def outputs_of(graph: fx.Graph) -> list[Any]:
    """The leaves of a graph's result: nodes, and plain values where the result is the same in every call."""
    output = next(node for node in reversed(graph.nodes) if node.op == "output")
    return list(pytree.tree_leaves(output.args[0]))


def as_trace(
    program: torch.export.ExportedProgram, prefix: str, strip: str, autocast: AutocastState | None = None
) -> Trace:
    """Read graph, attribute names and guards out of an exported program."""
    from torch.export.graph_signature import InputKind

    attributes: dict[str, str] = {}
    constants: dict[str, torch.Tensor] = {}
    inputs: list[str] = []
    for spec in program.graph_signature.input_specs:
        name = getattr(spec.arg, "name", "")
        if spec.kind == InputKind.USER_INPUT:
            if type(spec.arg).__name__ == "TensorArgument":
                inputs.append(name)
            continue
        target = spec.target or ""
        if spec.kind == InputKind.CUSTOM_OBJ:
            raise TraceError("forward uses an object that a graph cannot hold, such as a generator of its own")
        path = target.removeprefix(strip)
        attributes[name] = f"{prefix}.{path}" if prefix else path
        if spec.kind == InputKind.CONSTANT_TENSOR:
            constants[name] = program.constants[target]
    placeholders = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    values = [placeholders[name].meta["val"] for name in inputs]
    return Trace(
        graph=program.graph,
        attributes=attributes,
        constants=constants,
        inputs=tuple(inputs),
        shapes=tuple(tuple(size_expr(s) for s in value.shape) for value in values),
        strides=tuple(tuple(size_expr(s) for s in value.stride()) for value in values),
        dtypes=tuple(value.dtype for value in values),
        guards=_guards(values, program),
        out_spec=program.call_spec.out_spec,
        autocast=autocast,
    )


def _guards(values: Sequence[Any], program: torch.export.ExportedProgram) -> tuple[Guard, ...]:
    env = next((v.fake_mode.shape_env for v in values if v.fake_mode is not None), None)
    if env is None:
        return ()
    guards = []
    for guard in env.guards:
        expr = env.replace(guard.expr)
        if expr != sympy.true:
            frame = getattr(guard.sloc, "framework_loc", guard.sloc)
            where = f"{frame.filename}:{frame.lineno} in {frame.name}" if hasattr(frame, "filename") else str(frame)
            guards.append(Guard(expr, where))
    for symbol, ranges in program.range_constraints.items():
        guards.append(Guard(sympy.And(symbol >= ranges.lower, symbol <= ranges.upper), "range"))
    return tuple(guards)
