"""Replay without the state rule: the cells R and Rc of the benchmark.

The stock module stays as it is, its buffers at their own sizes. Callables of it (those that the contract names as
boundaries, or the whole call) are captured for the exact shapes that a stream passes through: all of their arguments,
state among them, are copied into static inputs before each replay, and all results are copied out. A shape that has no
graph runs as stock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

from cadence_fx.bench_cell import CellUnavailable
from cadence_fx.catalog import settling
from cadence_fx.contract import Contract
from cadence_fx.effects import mutated_bases
from cadence_fx.families import Family
from cadence_fx.graph_backend import GraphBackend
from cadence_fx.partition import Granularity
from cadence_fx.passes import EliminateDead, HoistConstants, Normalise, RemoveHostSyncs
from cadence_fx.pipeline import GraphPass, PassContext, run_passes
from cadence_fx.places import get_attr, method, owner_of
from cadence_fx.program import build_module
from cadence_fx.replay import Binding, ExactShapeReplay
from cadence_fx.specialise import FlatGraph, specialise
from cadence_fx.staging import twin_of
from cadence_fx.trace import Site, Tracer
from cadence_fx.traffic import SessionMemory
from cadence_fx.twin import make_twin

__all__ = ["ReplayOnly", "replay_only"]

PASSES: tuple[GraphPass, ...] = (Normalise(), RemoveHostSyncs(), HoistConstants(host_only=True), EliminateDead())
WHOLE_CALL = "forward"


def replay_only(family: Family, device: str, seed: int, granularity: Granularity) -> nn.Module:
    """A stock decoder whose callables replay, all shapes of the steady cadence captured.

    Args:
        granularity: "step" for the contract's boundaries, "chunk" for the whole call.

    Raises:
        CellUnavailable: there is no CUDA device.
    """
    if torch.device(device).type != "cuda":
        raise CellUnavailable("captures need a CUDA device")
    module, contract = family.build_random(device, seed), family.contract()
    replays = ReplayOnly(module, contract, granularity)
    replays.learn(family, seed)
    return module


@dataclass
class _Captured:
    """One callable for one structure and form of its arguments; ``binding`` is None where the capture was refused."""

    binding: Binding | None
    spec: pytree.TreeSpec


class ReplayOnly:
    """Puts itself in front of callables of ``module`` and replays them where it can.

    Args:
        module: the stock module; the callables are replaced on it, `stats` is put on it, nothing else is changed.
        backend: of the engine; the CUDA one by default.
    """

    def __init__(
        self, module: nn.Module, contract: Contract, granularity: Granularity, backend: GraphBackend | None = None
    ) -> None:
        device = next(module.parameters()).device
        self.module, self.contract, self.learning = module, contract, False
        boundaries = [boundary.path for boundary in contract.boundaries]
        self.paths = boundaries if granularity != "chunk" else [WHOLE_CALL]
        self.traced_paths = list(dict.fromkeys([*self.paths, *boundaries]))
        self.engine = ExactShapeReplay(device, backend=backend, max_graphs=contract.max_graphs)
        self.originals = {path: method(module, path) for path in self.paths}
        self.captured: dict[Any, _Captured] = {}
        self.counts, self.refused = Counter[str](), Counter[str]()
        self.scratch = {place.path for place, _ in contract.scratch}
        self._tracer: Tracer | None = None
        for path in self.paths:
            owner, name = owner_of(module, path)
            owner.__dict__[name] = self._in_front_of(path)
        module.__dict__["stats"] = self.stats

    def learn(self, family: Family, seed: int) -> None:
        """Play the cadence until its shapes repeat, and capture each shape that is met."""
        self.learning = True
        try:
            memory = SessionMemory.of(self.contract)
            for step in family.stream(self.module, self.contract, seed, settling(self.contract) + 3):
                step.action(self.module, memory)
        finally:
            self.learning = False
            self.counts.clear()

    def stats(self) -> dict[str, Any]:
        """Calls of the callables that replayed and that ran as stock, and why captures were refused."""
        counts = {"replays": self.counts["replays"], "stock": self.counts["stock"]}
        engine = self.engine.stats()
        captured = {"captures": engine["captures"], "measured_bytes": engine["measured_bytes"]}
        return {**counts, **captured, "refused": dict(self.refused), "misses": engine["misses"]}

    # ------------------------------------------------------------------------------------------- calls
    def _in_front_of(self, path: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            leaves, spec = pytree.tree_flatten((args, kwargs))
            tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
            key = (path, spec, tuple(_form(leaf) for leaf in leaves))
            if key not in self.captured and self.learning:
                # The run may write memory that an argument is a view of, so a capture works on copies of all.
                tensors = [twin_of(tensor) for tensor in tensors]
                copies = iter(tensors)
                leaves = [next(copies) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
                args, kwargs = pytree.tree_unflatten(leaves, spec)
                self.captured[key] = self._capture(key, path, spec, leaves, tensors)
            found = self.captured.get(key)
            if found is not None and found.binding is not None:
                outputs = self.engine.replay(found.binding, tensors)
                if not isinstance(outputs, str):
                    self.counts["replays"] += 1
                    return pytree.tree_unflatten(list(outputs), found.spec)
            self.counts["stock"] += 1
            return self.originals[path](*args, **kwargs)

        return call

    def _capture(
        self, key: Any, path: str, spec: pytree.TreeSpec, leaves: Sequence[Any], tensors: Sequence[torch.Tensor]
    ) -> _Captured:
        flat, fetch = self._flat(path, spec, leaves, tensors)

        def reference(*given: torch.Tensor) -> tuple[Any, ...]:
            values = iter(given)
            bound = [next(values) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
            args, kwargs = pytree.tree_unflatten(bound, spec)
            return tuple(pytree.tree_leaves(self.originals[path](*args, **kwargs)))

        written = {str(n.target) for n in mutated_bases(flat.graph.nodes) if n.op == "get_attr"}
        kept = [fetch(flat, target) for target in sorted(written) if flat.attributes[target] not in self.scratch]
        run = build_module(flat, fetch).forward
        found = self.engine.capture(key, run, tensors, aliased=kept, preserve=kept, reference=reference, plans=True)
        if isinstance(found, Binding):
            return _Captured(found, flat.out_spec)
        self.refused[f"{path}: {found}"] += 1
        return _Captured(None, flat.out_spec)

    # ------------------------------------------------------------------------------------------- graphs
    def _flat(
        self, path: str, spec: pytree.TreeSpec, leaves: Sequence[Any], tensors: Sequence[torch.Tensor]
    ) -> tuple[FlatGraph, Callable[[FlatGraph, str], torch.Tensor]]:
        """The vendor's operators for these very shapes, without what no graph can hold."""
        tracer = self._tracer = self._tracer or self._make_tracer()
        site: Site = tracer.site(path, spec, leaves)
        trace = tracer.trace_site(site, tensors, [set() for _ in tensors])
        names = [f"input_{i}" for i in range(len(tensors))]
        flat = specialise(tracer, trace, [t.shape for t in tensors], [t.dtype for t in tensors], names)

        def fetch(graph: FlatGraph, target: str) -> torch.Tensor:
            if target in graph.constants:
                return graph.constants[target]
            found: torch.Tensor = get_attr(tracer.module, graph.attributes[target]).detach()
            return found

        context = PassContext(self.contract, (), frozenset(), fetch)
        return run_passes(flat, context, PASSES).flat, fetch

    def _make_tracer(self) -> Tracer:
        """A tracer of a twin, made at the first capture: vendors move tables to the device in their first call."""
        twin = make_twin(self.module)
        for path in self.paths:
            owner, name = owner_of(twin, path)
            del owner.__dict__[name]
        return Tracer(twin, self.traced_paths)


def _form(leaf: Any) -> Any:
    """What of an argument selects a graph: a plain value itself, a tensor's shape, strides and dtype."""
    return (leaf.shape, leaf.stride(), leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf
