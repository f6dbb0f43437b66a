"""From a signature of the catalog to a program: trace (once per regime), specialise, run the passes, build the code."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx

from cadence_fx.attributes import AttributeWatch
from cadence_fx.autocast import AutocastState, autocast_of, under
from cadence_fx.call_arguments import CallArguments
from cadence_fx.catalog import Signature
from cadence_fx.constants import ConstantPool
from cadence_fx.contract import Arg, Attr, Contract, Region, Result
from cadence_fx.effects import base_of, mutated_bases
from cadence_fx.errors import ContractError, TraceError
from cadence_fx.extents import retained
from cadence_fx.memory import Memory, dtype_of
from cadence_fx.pass_check import PassCheck
from cadence_fx.passes import DEFAULT_PASSES, FusePointwise
from cadence_fx.pipeline import GraphPass, Observer, PassContext, PassResult, RegionLink, run_passes
from cadence_fx.places import get_attr, get_path, set_attr
from cadence_fx.program import Program, build_module, describe
from cadence_fx.regime import Trace
from cadence_fx.specialise import FlatGraph, meta_of, specialise
from cadence_fx.tables import shrink_tables
from cadence_fx.trace import Tracer
from cadence_fx.twin import make_twin

__all__ = ["Compiler"]

CALL_HOOKS = (
    "_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_always_called",
)  # fmt: skip


@dataclass
class Compiler(CallArguments):
    """Traces and compiles signatures of one module under one contract. The module itself is never touched.

    Args:
        module: the user's module, or a twin of it; a twin of this is traced.
        parameters: signature of the module's forward.
        memory: the contract's buffers: programs read and write them.
        passes: in order; names in ``skip`` are left out.
        observer: sees the graph before and after each pass.
        debug: run each pass's result against its input, bit for bit.
    """

    module: torch.nn.Module
    contract: Contract
    memory: Memory
    parameters: inspect.Signature | None = None
    passes: Sequence[GraphPass] = DEFAULT_PASSES
    skip: frozenset[str] = frozenset()
    observer: Callable[[Signature, str, FlatGraph], None] | None = None
    debug: bool = False
    constants: ConstantPool = field(default_factory=ConstantPool)
    seconds: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        known = [*(p.name for p in self.passes), FusePointwise.name]  # the last one runs on what is captured
        unknown = self.skip.difference(known)
        if unknown:
            raise ContractError(f"skip names no pass: {sorted(unknown)}; passes are {known}")
        if self.parameters is None:
            self.parameters = inspect.signature(self.module.forward)
        self.stages: dict[str, torch.Tensor] = {}
        self.scratch = frozenset(place.path for place, _ in self.contract.scratch)
        self.restart()
        self.template()  # an argument that nobody declares is an error now and not at the first call

    def restart(self) -> None:
        """Trace a new twin, after the module's attributes, submodules or hooks changed; all traces are forgotten."""
        self.traced = make_twin(self.module, share_parameters=True)
        for name in CALL_HOOKS:  # those of the module itself run where it is called, around a replay too
            self.traced.__dict__[name].clear()
        if getattr(self.traced.__dict__.get("forward"), "cadence_stock", False):
            del self.traced.__dict__["forward"]  # the fallback's wrapper, which calls the module itself
        self.watch = AttributeWatch(self.module, self.traced, self.scratch)
        shrink_tables(self.traced, self.contract, self.memory.device)
        self._drop_scratch()
        self.tracer = Tracer(self.traced, [b.path for b in self.contract.boundaries])
        self.traces: dict[tuple[Any, ...], list[Trace]] = {}
        self.constants.clear()
        self.spare: dict[str, torch.Tensor] = {}

    @contextmanager
    def _scratch(self) -> Iterator[None]:
        """Demand-sized scratch for the time of a trace, so that tracing needs no more memory than serving."""
        for place, region in self.contract.scratch:
            set_attr(self.traced, place, self.memory.scratch(region))
        try:
            yield
        finally:
            self._drop_scratch()

    def _drop_scratch(self) -> None:
        for place, region in self.contract.scratch:
            get_attr(self.traced, place)  # names the path if the module lacks it
            set_attr(self.traced, place, torch.empty(0, dtype=dtype_of(region.dtype), device=self.memory.device))

    # ------------------------------------------------------------------------------------------- compiling
    def trace(self, signature: Signature) -> tuple[Trace, list[torch.Tensor]]:
        """The trace whose regime the signature belongs to (made now if there is none), and example tensors.

        It is a trace under the autocast state of this moment.
        """
        args, dynamic = self.arguments(signature)
        tensors = [leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, torch.Tensor)]
        shapes, dtypes = [tuple(t.shape) for t in tensors], [t.dtype for t in tensors]
        known = self.traces.setdefault((AutocastState.ambient(), *self.scalars(signature)), [])
        for trace in known:
            if isinstance(trace.bind(shapes, dtypes), dict):
                return trace, tensors
        start = time.perf_counter()
        with self._scratch(), self.watch.recording():
            trace = self.tracer.trace(args, dynamic)
        self.seconds["trace"] = self.seconds.get("trace", 0.0) + time.perf_counter() - start
        reason = trace.bind(shapes, dtypes)
        if isinstance(reason, str):
            raise TraceError(f"{describe(signature)} is not covered by the trace made for it: {reason}")
        known.append(trace)
        return trace, tensors

    def flat(self, signature: Signature) -> tuple[FlatGraph, tuple[Arg, ...], Trace]:
        """The graph before any pass, with the places of its placeholders."""
        trace, tensors = self.trace(signature)
        args, _ = self.arguments(signature)
        keyed, _ = pytree.tree_flatten_with_path(args)
        places = tuple(Arg(*(_key(k) for k in path)) for path, leaf in keyed if isinstance(leaf, torch.Tensor))
        names = ["_".join(str(k) for k in place.keys) for place in places]
        start = time.perf_counter()
        with self._scratch(), self.watch.recording():
            flat = specialise(self.tracer, trace, [t.shape for t in tensors], [t.dtype for t in tensors], names)
        self.seconds["specialise"] = self.seconds.get("specialise", 0.0) + time.perf_counter() - start
        return flat, places, trace

    def links(self, signature: Signature, flat: FlatGraph, places: Sequence[Arg]) -> tuple[RegionLink, ...]:
        """How each region enters and leaves the graph; new extents are the graph's, checked against retention."""
        outputs = list(flat.output.args[0])  # type: ignore[arg-type]
        indices = pytree.tree_unflatten(list(range(len(outputs))), flat.out_spec)
        links = []
        entry = dict(zip(places, _placeholders(flat), strict=True))
        for region in self.contract.states:
            if not isinstance(region.enters, Arg):
                continue
            index = get_path(indices, region.leaves) if isinstance(region.leaves, Result) else None
            buffer = self.memory[region.name]
            old = self.extent(signature, region)
            new = old
            if index is not None:
                meta = meta_of(outputs[index]) if isinstance(outputs[index], fx.Node) else None
                if meta is None:
                    raise ContractError(
                        f"Region {region.name!r}: leaves at {region.leaves}, where the module returns no tensor"
                    )
                if meta.dtype != buffer.tensor.dtype:  # under autocast perhaps, and not in the calls that are declared
                    raise TraceError(
                        f"Region {region.name!r}: after {describe(signature)} the module leaves {meta.dtype}, the "
                        f"contract says {region.dtype}; mend its dtype"
                    )
                new = self._new_extent(signature, region, meta.shape)
            name = entry[region.enters]
            links.append(
                RegionLink(region.name, name, index, f"region_{region.name}", tuple(buffer.tensor.shape), region.dim,
                           old if region.dim is not None else 0, new if region.dim is not None else 0,
                           buffer.offset(old) if region.dim is not None else 0,
                           buffer.offset(new) if region.dim is not None else 0,
                           self.contract.advance(region, self.contract.call(signature.call).ticks),
                           signature.state.variant)
            )  # fmt: skip
        return tuple(links)

    def _new_extent(self, signature: Signature, region: Region, shape: tuple[int, ...]) -> int:
        expected = list(self.memory[region.name].view(self.extent(signature, region)).shape)
        if region.dim is not None:
            grown = self.contract.advance(region, self.contract.call(signature.call).ticks)
            variant = signature.state.variant if len(region.starts) > 1 else 0
            expected[region.dim] = retained(
                region.retain, self.extent(signature, region) + grown, region.starts[variant]
            )
        if list(shape) != expected:
            raise ContractError(
                f"Region {region.name!r}: after {describe(signature)} the module leaves shape {list(shape)}, "
                f"the contract says {expected}; mend its retain ({region.retain}), growth ({region.growth}), order "
                "or shape"
            )
        return shape[region.dim] if region.dim is not None else 0

    def compile(self, signature: Signature) -> Program:
        """The program of a signature.

        Raises:
            TraceError: the module cannot be traced for it, or runs an operator under autocast that the graph cannot
                run without.
            ContractError: the trace contradicts the contract.
        """
        start = time.perf_counter()
        flat, places, _ = self.flat(signature)
        self._require_no_hidden_state(flat)
        links = self.links(signature, flat, places)
        entered = _placeholders(flat)
        before, mutated = flat.calls(), {n.name for n in mutated_bases(flat.graph.nodes) if n.op == "placeholder"}
        observer = self._observed(signature, flat, dict(zip(entered, places, strict=True)), links)
        context = PassContext(self.contract, links, self.scratch, self.fetch, self.constants)
        passes = [p for p in self.passes if p.name not in self.skip]
        with under(None):  # constants are computed on the way, and their casts are operators like others
            result = run_passes(flat, context, passes, observer, self.seconds)
        _require_lowered(result.flat)
        _own_outputs(result.flat)
        module = self.build(result.flat)
        kept = set(_placeholders(result.flat))
        inputs = tuple(place for place, name in zip(places, entered, strict=True) if name in kept)
        depends = frozenset().union(
            *(self.constants.depends.get(_identity(t), frozenset()) for t in result.flat.constants)
        )
        mutates = frozenset(link.name for link in links if link.input in mutated)
        return Program(
            signature, module.forward, module, result.flat, inputs, links, flat.out_spec,
            {link.name: link.output for link in links if link.output is not None}, result.changes, result.rejections,
            depends, mutates, before, result.flat.calls(), time.perf_counter() - start,
        )  # fmt: skip

    def _observed(
        self, signature: Signature, flat: FlatGraph, places: Mapping[str, Arg], links: Sequence[RegionLink]
    ) -> Observer | None:
        """What looks at the graph between passes: the observer, and in debug mode the comparison of bits."""
        watch = self.observer
        check = PassCheck(self, signature, places, links) if self.debug else None
        if watch is None and check is None:
            return None
        if watch is not None:
            watch(signature, "before", flat.copy())

        def look(name: str, before: FlatGraph, result: PassResult) -> None:
            if check is not None:
                check(name, before, result.flat)
            if watch is not None:
                watch(signature, name, result.flat.copy())

        return look

    def _require_no_hidden_state(self, flat: FlatGraph) -> None:
        """A tensor that a call writes in place must be declared: nobody else knows that it is state.

        Other signatures would take it for a constant, as they would any view of it, and a capture would advance it.

        Raises:
            TraceError: the graph writes an attribute of the module.
        """
        mutated = mutated_bases(flat.graph.nodes)
        for node in flat.graph.nodes:
            if node.op != "get_attr" or node not in mutated or flat.attributes[str(node.target)] in self.scratch:
                continue
            path = flat.attributes[str(node.target)]
            raise TraceError(
                f"a call writes {path!r} in place, which it did not make, so it is state, as is all that shares its "
                "memory: pass it as an argument and return it, and declare it as a Region"
            )

    def refresh(self) -> None:
        """Forget what was computed from weights and buffers; traces stay, since they hold no values."""
        self.constants.clear()
        kept = self.scratch | {r.enters.path for r in self.contract.regions if isinstance(r.enters, Attr)}
        for (prefix, mine), traced in zip(self.module.named_modules(), self.traced.modules(), strict=True):
            for name, buffer in mine._buffers.items():
                if f"{prefix}.{name}".lstrip(".") not in kept:
                    traced._buffers[name] = buffer

    def fetch(self, flat: FlatGraph, target: str) -> torch.Tensor:
        """The tensor behind a get_attr node: a constant, a region's buffer, or the module's own attribute."""
        if target in flat.constants:
            return flat.constants[target]
        if target.startswith("region_") and target[len("region_") :] in self.memory.buffers:
            return self.memory[target[len("region_") :]].tensor
        if target.startswith("stage_") and target[len("stage_") :] in self.memory.buffers:
            return self.stages.setdefault(target, torch.empty_like(self.memory[target[len("stage_") :]].tensor))
        path = flat.attributes[target]
        if path in self.scratch:
            return self._spare(path)
        value = get_attr(self.traced, path)
        assert isinstance(value, torch.Tensor)
        return value.detach()

    def _spare(self, path: str) -> torch.Tensor:
        """Memory for scratch that a graph still reads: its own, for the state's memory holds the live rows."""
        if path not in self.spare:
            region = next(region for place, region in self.contract.scratch if place.path == path)
            shape, dtype = self.memory.scratch_shape(region), dtype_of(region.dtype)
            self.spare[path] = torch.zeros(shape, dtype=dtype, device=self.memory.device)
        return self.spare[path]

    @contextmanager
    def spare_kept(self) -> Iterator[None]:
        """Scratch that graphs built within need goes with these graphs."""
        spare = dict(self.spare)
        try:
            yield
        finally:
            self.spare = spare

    def build(self, flat: FlatGraph) -> fx.GraphModule:
        """A GraphModule whose attributes are the very tensors of the module and of the contract."""
        return build_module(flat, self.fetch)


def _placeholders(flat: FlatGraph) -> list[str]:
    """Names of a graph's arguments in order; fx renames those that are words of Python (``input``, ``id``)."""
    return [node.name for node in flat.graph.nodes if node.op == "placeholder"]


def _require_lowered(flat: FlatGraph) -> None:
    """Programs run with autocast off.

    Raises:
        TraceError: a node was traced under autocast, and no pass has written its casts out.
    """
    left = next((node for node in flat.graph.nodes if autocast_of(node) is not None), None)
    if left is not None:
        raise TraceError(
            f"{left.target} runs under autocast ({autocast_of(left)}), and pass 'lower_autocast' is left out"
        )


def _own_outputs(flat: FlatGraph) -> None:
    """Outputs belong to the caller: one that is a view of a constant or of a region is copied."""
    outputs = list(flat.output.args[0])  # type: ignore[arg-type]
    for i, value in enumerate(outputs):
        if isinstance(value, fx.Node) and base_of(value).op == "get_attr":
            with flat.graph.inserting_before(flat.output):
                copy = flat.graph.call_function(torch.ops.aten.clone.default, (value,))
            copy.meta["val"] = value.meta["val"]
            outputs[i] = copy
    flat.output.args = (tuple(outputs),)


def _identity(target: str) -> int:
    prefix, _, number = target.rpartition("_")
    return int(number) if prefix == "constant" and number.isdigit() else -1


def _key(key: Any) -> str | int:
    found = getattr(key, "key", getattr(key, "idx", None))
    assert isinstance(found, (str, int))
    return found
