"""Tracing by regime: one symbolic graph for all extents that take the same branches.

`Tracer.trace` runs ``torch.export`` (non-strict, undecomposed, in-place operators kept) on a twin of the user's module,
with every dimension that traffic can change as a symbol. A branch on a shape becomes a guard; a `Trace` therefore
covers a set of extents, its regime, and `Trace.bind` says for one concrete call whether it belongs to it and if not,
why.

The idea that keeps this fast: a callable that a contract names as a `Boundary` (a solver step called ten times,
an encoder, a vocoder) is an opaque operator in the graph of its caller and has its own traces, made once and shared
by all callers, all steps and all regimes. `cadence_fx.specialise` puts them together for one signature. A plain export
of the ten-step solve spends about 2 ms on each of its 15,000 nodes; this way each operator of the source is traced
once.
"""

from __future__ import annotations

import contextlib
import os
import threading
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
import torch.utils._pytree as pytree
from torch import fx

from cadence_fx.autocast import AutocastState, under
from cadence_fx.errors import TraceError
from cadence_fx.places import get_attr, method
from cadence_fx.regime import Trace, as_trace, evaluate, outputs_of, size_expr

__all__ = ["BOUNDARY_OP", "Site", "Tracer"]

_LIBRARY = torch.library.Library("cadence_fx", "FRAGMENT")
_LIBRARY.define("boundary(Tensor[] inputs, int site) -> Tensor[]")
BOUNDARY_OP = torch.ops.cadence_fx.boundary.default
# A call without a live reader may still write buffers, so no one but us may remove it.
fx.node.has_side_effect(BOUNDARY_OP)

_active = threading.local()
_TENSOR = object()  # stands for a tensor among the flattened arguments of a boundary


@dataclass
class Site:
    """A boundary called with one structure of arguments under one autocast state; its traces are its regimes."""

    index: int
    path: str
    autocast: AutocastState | None
    spec: pytree.TreeSpec
    leaves: tuple[Any, ...]  # plain values, _TENSOR where a tensor goes
    traces: list[Trace] = field(default_factory=list)


class _SiteUncovered(Exception):
    """Control flow: an outer trace met a boundary call that no trace covers yet."""

    def __init__(self, site: Site, inputs: list[Any]) -> None:
        self.site, self.inputs = site, inputs
        super().__init__(site.path)


def _boundary_meta(inputs: Sequence[torch.Tensor], site: int) -> list[torch.Tensor]:
    """Result shapes of a boundary call, from the trace that covers it: no operator of the callable runs here."""
    tracer: Tracer = _active.tracer
    return tracer.site_meta(tracer.sites[site], inputs)


torch.library.register_fake("cadence_fx::boundary", _boundary_meta, lib=_LIBRARY)


class Tracer:
    """Traces a module and the boundaries in it. ``module`` is a twin of the user's: it gets patched."""

    def __init__(self, module: torch.nn.Module, boundaries: Sequence[str]) -> None:
        self.module = module
        self.sites: list[Site] = []
        self._by_key: dict[tuple[Any, ...], Site] = {}
        self._need: _SiteUncovered | None = None
        self.seconds: dict[str, float] = {}
        for path in boundaries:
            self._install(path)

    def _install(self, path: str) -> None:
        original = method(self.module, path)
        owner_path, _, name = path.rpartition(".")
        owner = get_attr(self.module, owner_path) if owner_path else self.module

        def boundary(*args: Any, **kwargs: Any) -> Any:
            leaves, spec = pytree.tree_flatten((args, kwargs))
            tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
            site = self.site(path, spec, leaves)
            results = iter(torch.ops.cadence_fx.boundary(tensors, site.index))
            trace = self._covering(site, tensors)
            assert trace is not None  # the operator has just found it
            values = [next(results) if isinstance(v, fx.Node) else v for v in outputs_of(trace.graph)]
            return pytree.tree_unflatten(values, trace.out_spec)

        owner.__dict__[name] = boundary
        self._originals = {**getattr(self, "_originals", {}), path: (original, owner)}

    def site(self, path: str, spec: pytree.TreeSpec, arguments: Sequence[Any]) -> Site:
        """The site of a boundary for flattened arguments under the autocast state of this moment.

        Tensors among the arguments count as places only.
        """
        leaves = tuple(_TENSOR if isinstance(v, torch.Tensor) else v for v in arguments)
        for leaf in leaves:
            if isinstance(leaf, (torch.SymInt, torch.SymBool, torch.SymFloat)):
                raise TraceError(
                    f"boundary {path!r} takes the symbolic number {leaf} as an argument; a boundary's arguments are "
                    "tensors, plain numbers and None. Declare a callable further in or out as the boundary."
                )
        autocast = AutocastState.ambient()
        key = (path, autocast, spec, leaves)
        if key not in self._by_key:
            self._by_key[key] = Site(len(self.sites), path, autocast, spec, leaves)
            self.sites.append(self._by_key[key])
        return self._by_key[key]

    # ------------------------------------------------------------------------------------------- tracing
    def trace(self, args: dict[str, Any], dynamic: dict[str, Any]) -> Trace:
        """Trace ``forward`` for the regime of these arguments under the autocast state of this moment.

        Args:
            args: every argument by name; tensors are only looked at for shape, strides, dtype and device.
            dynamic: the same structure with a set of varying dimensions for each tensor.

        Raises:
            TraceError: the module cannot be traced; the cause is chained.
        """
        return self._export(self.module, args, dynamic, "", AutocastState.ambient())

    def trace_site(self, site: Site, inputs: Sequence[Any], dynamic: Sequence[set[int]]) -> Trace:
        """Trace a boundary for the regime of these inputs, under its site's state, and keep the trace at the site."""
        original, owner = self._originals[site.path]
        examples = tuple(_example(t) for t in inputs)
        call = _BoundCall(owner, original, site)
        trace = self._export(
            call, {"inputs": examples}, {"inputs": tuple(dynamic)}, site.path.rpartition(".")[0], site.autocast
        )
        for value in outputs_of(trace.graph):
            if isinstance(value, fx.Node) and not isinstance(value.meta["val"], torch.Tensor):
                raise TraceError(
                    f"boundary {site.path!r} returns the symbolic number {value.meta['val']}; a boundary's results are "
                    "tensors, plain numbers and None. Declare a callable further in or out as the boundary."
                )
        site.traces.append(trace)
        return trace

    def _export(
        self, call: torch.nn.Module, args: dict[str, Any], dynamic: dict[str, Any], prefix: str,
        autocast: AutocastState | None,
    ) -> Trace:  # fmt: skip
        shapes = pytree.tree_map(
            lambda dims: dict.fromkeys(dims, torch.export.Dim.AUTO) or None, dynamic, is_leaf=_is_set
        )
        var_positional = isinstance(call, _BoundCall)
        positional = args["inputs"] if var_positional else ()
        keywords = {} if var_positional else args
        while True:
            try:
                with self._tracing(), under(autocast):
                    program = torch.export.export(call, positional, keywords, dynamic_shapes=shapes, strict=False)
                return as_trace(program, prefix, "owner." if var_positional else "", autocast)
            except Exception as error:
                need = self._need
                if need is None:
                    what = f"boundary {call.site.path!r}" if isinstance(call, _BoundCall) else type(call).__name__
                    raise TraceError(f"{what} cannot be traced: {type(error).__name__}: {error}") from error
            hints = [tuple(_hint(s) for s in t.shape) for t in need.inputs]
            vary = [{d for d, s in enumerate(t.shape) if not size_expr(s).is_Integer and hints[i][d] > 1}
                    for i, t in enumerate(need.inputs)]  # fmt: skip
            made = self.trace_site(need.site, need.inputs, vary)
            reason = made.bind(*_hints(need.inputs))
            if isinstance(reason, str):  # tracing again would go on for ever
                raise TraceError(
                    f"boundary {need.site.path!r}: the trace does not cover its own example {hints}: {reason}"
                )

    @contextlib.contextmanager
    def _tracing(self) -> Iterator[None]:
        previous = getattr(_active, "tracer", None)
        _active.tracer, self._need = self, None
        try:
            with torch.no_grad(), _user_frames():
                yield
        finally:
            _active.tracer = previous

    def site_meta(self, site: Site, inputs: Sequence[Any]) -> list[torch.Tensor]:
        """Fake results of a boundary call for fake inputs."""
        trace = self._covering(site, inputs)
        if trace is None:
            self._need = _SiteUncovered(site, list(inputs))
            raise self._need
        return self._results(trace, inputs)

    @staticmethod
    def _covering(site: Site, inputs: Sequence[Any]) -> Trace | None:
        hints = _hints(inputs)
        return next((trace for trace in site.traces if isinstance(trace.bind(*hints), dict)), None)

    def _results(self, trace: Trace, inputs: Sequence[Any]) -> list[torch.Tensor]:
        given = _given(trace, inputs)
        outer = {symbol: size_expr(size) for symbol, size in given.items()}
        hint = {symbol: _hint(size) for symbol, size in given.items()}
        env = next((t.fake_mode.shape_env for t in inputs if t.fake_mode.shape_env is not None), None)
        if env is not None:
            _adopt_regime(trace, inputs, outer, env)

        def size_of(size: Any) -> Any:
            inner = size_expr(size)
            if inner.is_Integer:
                return int(inner)
            expr = inner.xreplace(outer)
            if expr.is_Integer or env is None:
                return evaluate(inner, hint)
            return env.create_symintnode(expr, hint=evaluate(inner, hint))

        results = []
        for node in outputs_of(trace.graph):
            if not isinstance(node, fx.Node):
                continue
            value = node.meta["val"]
            sizes, strides = [size_of(s) for s in value.shape], [size_of(s) for s in value.stride()]
            results.append(torch.empty_strided(sizes, strides, dtype=value.dtype, device=value.device))
        return results


class _BoundCall(torch.nn.Module):
    """A boundary as a module of its own: tensors in, tensors out."""

    def __init__(self, owner: torch.nn.Module, function: Any, site: Site) -> None:
        super().__init__()
        self.owner, self.function, self.site = owner, function, site

    def forward(self, *inputs: torch.Tensor) -> Any:
        tensors = iter(inputs)
        leaves = [next(tensors) if leaf is _TENSOR else leaf for leaf in self.site.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self.site.spec)
        return self.function(*args, **kwargs)


@contextlib.contextmanager
def _user_frames() -> Iterator[None]:
    """Let nodes record the innermost frames outside torch, not only those of functions called 'forward'."""
    tracer: Any = fx.proxy.TracerBase
    original = getattr(tracer, "_filter_traceback_frames", None)
    if original is None:
        yield
        return

    own = os.path.dirname(__file__)  # adapters are in a folder below it

    def keep(self: Any, frames: traceback.StackSummary) -> traceback.StackSummary:
        user = [f for f in frames if "/torch/" not in f.filename and os.path.dirname(f.filename) != own]
        return traceback.StackSummary.from_list(user[-4:])

    tracer._filter_traceback_frames = keep
    try:
        yield
    finally:
        tracer._filter_traceback_frames = original


def _is_set(value: Any) -> bool:
    return isinstance(value, (set, frozenset))


def _hint(size: Any) -> int:
    return int(size.node.hint) if isinstance(size, torch.SymInt) else int(size)


def _hints(inputs: Sequence[Any]) -> tuple[list[tuple[int, ...]], list[torch.dtype], list[tuple[int, ...]]]:
    """Sizes, dtypes and strides of fake tensors in this trace's example."""
    shapes = [tuple(_hint(s) for s in t.shape) for t in inputs]
    return shapes, [t.dtype for t in inputs], [tuple(_hint(s) for s in t.stride()) for t in inputs]


def _given(trace: Trace, inputs: Sequence[Any]) -> dict[sympy.Symbol, Any]:
    """The caller's size, or stride, for each symbol of a boundary's trace."""
    found: dict[sympy.Symbol, Any] = {}
    for exprs, tensor in zip(trace.shapes, inputs, strict=True):
        for expr, size in zip(exprs, tensor.shape, strict=True):
            if expr.is_Symbol:
                found[expr] = size
    for exprs, tensor in zip(trace.strides, inputs, strict=True):
        for expr, stride in zip(exprs, tensor.stride(), strict=True):
            if expr.is_Symbol:
                found.setdefault(expr, stride)
    return found


def _adopt_regime(trace: Trace, inputs: Sequence[Any], outer: dict[sympy.Symbol, sympy.Expr], env: Any) -> None:
    """The caller of a boundary relies on the boundary's trace, so it takes over the conditions of that regime."""
    found: list[Any] = []
    for tensor, shape, strides in zip(inputs, trace.shapes, trace.strides, strict=True):
        found += [sympy.Eq(size_expr(s), e.xreplace(outer)) for s, e in zip(tensor.shape, shape, strict=True)]
        found += [
            sympy.Eq(size_expr(s), e.xreplace(outer))
            for s, e, size in zip(tensor.stride(), strides, tensor.shape, strict=True)
            if _hint(size) > 1
        ]
    for guard in trace.guards:
        expr = guard.expr.xreplace(outer)
        found += expr.args if isinstance(expr, sympy.And) else [expr]
    for expr in found:
        if expr != sympy.true:
            env.evaluate_expr(expr)


def _example(tensor: Any) -> torch.Tensor:
    """An uninitialised tensor of the sizes that a fake tensor has in this trace's example."""
    size, stride = [_hint(s) for s in tensor.shape], [_hint(s) for s in tensor.stride()]
    return torch.empty_strided(size, stride, dtype=tensor.dtype, device=tensor.device)
