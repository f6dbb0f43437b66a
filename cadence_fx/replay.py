"""Exact-shape replay: one captured graph per signature, replayed only where it gives stock's bits.

A capture is invisible: a probe on rewound generators, warm-up runs, the capture, a certificate against stock, and then
state and generators are as before, also when a step fails. A replay is admitted by integer compares and fails closed:
the caller gets the reason and runs as stock. The engine knows callables and tensors, and nothing of what they compute.

Graphs share one pool and are dropped together: all of them use a library workspace that the first capture allocated.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.utils._pytree as pytree

from cadence_fx import refusal as codes
from cadence_fx.certify import certify
from cadence_fx.graph_backend import CudaBackend, GraphBackend, collector_paused
from cadence_fx.refusal import Refusal, refusal_of
from cadence_fx.rehearsal import Request
from cadence_fx.staging import CapturedInput, copies_of

__all__ = ["Binding", "CudaBackend", "ExactShapeReplay", "GraphBackend", "Refusal"]

# Retired graphs, the event of their last replay and the memory they use: nothing may be destroyed while a capture is
# active, and no memory handed out again before the last replay has ended.
_deferred: list[tuple[GraphBackend, list[Any], Any, list[Any]]] = []
_one_capture = threading.RLock()  # at a time in the process; always taken after an engine's own lock


@dataclass(frozen=True, eq=False)
class Binding:
    """A captured signature. The engine owns the graph; a binding of a retired generation is only a name.

    Attributes:
        draws: the run moves the device's generator.
        alias: outputs are the static ones, overwritten by a later replay of this engine.
        any_alignment: stock gives the same bits at every address that is a multiple of `SAFE_ALIGNMENT`.
        predicted_bytes, measured_bytes: of static inputs and outputs; of all memory that the binding added.
        seconds: that the capture took, certificate included.
    """

    key: Hashable
    generation: int
    draws: bool
    alias: bool
    any_alignment: bool
    predicted_bytes: int
    measured_bytes: int
    seconds: float


@dataclass
class _Entry:
    binding: Binding
    graph: Any
    inputs: list[CapturedInput]
    aliased: list[tuple[torch.Tensor, int]]
    outputs: list[Any]
    spec: pytree.TreeSpec
    plan_drops: int | None  # see PlanWatch, where the run uses plans


class ExactShapeReplay:
    """Captures callables for exact signatures and replays them. Calls may come from any thread and any stream.

    Args:
        device: of all tensors.
        backend: `CudaBackend` by default.
        max_graphs: live graphs; more are refused, none is evicted.
        max_bytes: memory that bindings may add, or None.
        warmup_runs: before each capture, on a side stream.
    """

    def __init__(
        self, device: torch.device | str, *, backend: GraphBackend | None = None, max_graphs: int,
        max_bytes: int | None = None, warmup_runs: int = 2,
    ) -> None:  # fmt: skip
        self.device = torch.device(device)
        self.backend: GraphBackend = CudaBackend(self.device) if backend is None else backend
        self.max_graphs, self.max_bytes, self.warmup_runs = max_graphs, max_bytes, warmup_runs
        self._lock = threading.RLock()
        self._entries: dict[Hashable, _Entry] = {}
        self._failed: dict[Hashable, Refusal] = {}
        self._refusals, self._misses, self._counts = Counter[str](), Counter[str](), Counter[str]()
        self._pool: Any = None
        self._stream: Any = None
        self._warm: Any = None
        self._event: Any = None
        self._graphs: list[Any] = []
        self._kept: list[Any] = []
        self._generation = 0
        self._sealed, self._broken = False, ""

    # ------------------------------------------------------------------------------------------- capture
    def capture(
        self, key: Hashable, run: Callable[..., Any], inputs: Sequence[Any], *, aliased: Sequence[torch.Tensor] = (),
        preserve: Sequence[torch.Tensor] = (), reference: Callable[..., Any] | None = None,
        compared: Sequence[torch.Tensor] | None = None, alias: bool = False, edit: Callable[[int], int] | None = None,
        first: Callable[..., Any] | None = None, plans: bool = False,
    ) -> Binding | Refusal:  # fmt: skip
        """Capture ``run(*inputs)`` and prove its replay.

        Args:
            key: names the signature; a key that failed is never tried again, one that is captured is returned.
            run: reads its arguments and ``aliased``, and nothing else that changes. It is held as long as the graph,
                and with it the constants that it reads.
            inputs: an example of its arguments: tensors, or plain values that stay fixed.
            aliased: buffers at fixed addresses that ``run`` reads or writes in place. Inputs in them are not staged.
            preserve: those whose content must be as before; floats in others are overwritten. Constants are neither.
            reference: stock, on the same buffers; ``run`` itself if None.
            compared: what of the buffers must agree afterwards; all of ``aliased`` if None.
            alias: replays return the static outputs instead of copies.
            edit: gets the recorded graph's handle before it is instantiated, may change it, and returns the bytes of
                memory that this took. It is held as long as the graph, and with it the memory that it brought in.
            first: computes the same on one stream; runs first, while libraries set themselves up. ``run`` if None.
            plans: the run uses plans of `cadence_fx.library_plans`; no replay once one may have been dropped.
        """
        with self._lock, _one_capture, self.backend.active(), torch.inference_mode(False), torch.no_grad():
            known = self._entries.get(key)
            if known is not None:
                return known.binding
            found: Binding | Refusal | None = self._failed.get(key) or self._closed(inputs)
            if found is None:
                _bury()
                compared = aliased if compared is None else compared
                found = self._attempt(
                    Request(key, run, inputs, aliased, preserve, compared, reference or run, alias, edit, first, plans)
                )
                if isinstance(found, Refusal) and found.code not in (codes.BYTE_LIMIT, codes.PLAN_CACHE_FULL):
                    self._failed[key] = found
            if isinstance(found, Refusal):
                self._refusals[found.code] += 1
            return found

    def _closed(self, inputs: Sequence[Any]) -> Refusal | None:
        """Why nothing can be captured now, whatever it computes."""
        if self._sealed or self._broken:
            return Refusal(codes.SEALED, "sealed", self._broken or "seal() was called")
        if self.backend.is_capturing():
            return Refusal(codes.ALREADY_CAPTURING, "outer capture", "the caller's own capture records this call")
        if len(self._graphs) >= self.max_graphs:
            return Refusal(codes.GRAPH_LIMIT, "graph limit", f"max_graphs={self.max_graphs} graphs are in the pool")
        for i, value in enumerate(inputs):
            if isinstance(value, torch.Tensor) and value.device.type != self.device.type:
                return Refusal(codes.HOST_VALUE, "host tensor", f"input {i} is on {value.device}, not on {self.device}")
        return None

    def _attempt(self, request: Request) -> Binding | Refusal:
        begin = time.perf_counter()
        self._fence()
        self.backend.synchronize()
        request.prepare(self.backend)
        stage = codes.RUN_FAILED, "run failed"
        try:
            if request.plans and not self.backend.plans.begin():
                return Refusal(codes.PLAN_CACHE_FULL, "plan cache full", "raise its max_size, or clear() it first")
            predicted = request.probe()
            if isinstance(predicted, Refusal):
                return predicted
            refusal = self._over_budget(predicted)
            if refusal is not None:
                return refusal
            self._warm = self.backend.new_stream() if self._warm is None else self._warm
            request.warm_up(self._warm, self.warmup_runs)
            stage = codes.CAPTURE_FAILED, "capture failed"
            entry = self._record(request, predicted)
            stage = codes.RUN_FAILED, "run failed"
            proof = certify(
                self.backend, lambda *given: self._launch(entry, given), request.reference, request.inputs,
                [bool(held.staged) for held in request.held], request.compared, request.state, request.generators,
            )  # fmt: skip
            if isinstance(proof, Refusal):
                return proof
            seconds = time.perf_counter() - begin
            entry.binding = replace(entry.binding, any_alignment=proof.any_alignment, seconds=seconds)
            for held in entry.inputs:
                held.forget_example()
            self._entries[request.key] = entry
            self._counts["captures"] += 1
            return entry.binding
        except Exception as error:  # noqa: BLE001 - whatever a run raises, the key runs as stock from now on
            return refusal_of(error, *stage)
        finally:
            self._put_back(request)

    def _over_budget(self, predicted: int) -> Refusal | None:
        used = self._counts["measured_bytes"]
        if self.max_bytes is None or used + predicted <= self.max_bytes:
            return None
        detail = f"max_bytes={self.max_bytes}, in use {used}, inputs and outputs need {predicted}"
        return Refusal(codes.BYTE_LIMIT, "byte limit", detail)

    def _record(self, request: Request, predicted: int) -> _Entry:
        if self._pool is None:
            # A stream that no warm-up used: library workspaces then come from the pool and live as long as its graphs.
            self._pool, self._stream = self.backend.new_pool(), self.backend.new_stream()
        pool, stream, drops = self._pool, self._stream, self.backend.plans.drops() if request.plans else None
        before = self.backend.reserved_bytes(pool)
        # Until the capture succeeds: the allocator does not take up a pool again whose last capture broke. Graphs that
        # such a pool already serves keep it alive and stay good.
        self._pool = None
        with collector_paused():
            graph, result, added = self.backend.capture(request.run_static, pool, stream, request.draws, request.edit)
        self._pool = pool
        self._kept.append((request.run, request.edit))
        self._graphs.append(graph)  # also one that is refused later: no graph leaves the pool alone
        measured = added + max(0, self.backend.reserved_bytes(pool) - before)
        measured += sum(held.staged for held in request.held)
        self._counts["measured_bytes"] += measured
        self._counts["predicted_bytes"] += predicted
        outputs, spec = pytree.tree_flatten(result)
        binding = Binding(request.key, self._generation, request.draws, request.alias, False, predicted, measured, 0.0)
        return _Entry(binding, graph, request.held, [(t, t.data_ptr()) for t in request.aliased], outputs, spec, drops)

    def _put_back(self, request: Request) -> None:
        try:
            request.put_back()
        except RuntimeError as error:
            self._broken = f"state could not be put back after a capture: {error}"
            raise

    # ------------------------------------------------------------------------------------------- replay
    def replay(self, binding: Binding, inputs: Sequence[Any]) -> Any:
        """Replay a binding on ``inputs``: its outputs, which belong to the caller, or the reason (a str) why not.

        Nothing is written when a reason is returned.
        """
        with self._lock, self.backend.active(), torch.no_grad():
            entry = self._entries.get(binding.key)
            reason = self._inadmissible(binding, entry, inputs)
            if reason is not None or entry is None:
                self._misses[str(reason).partition(":")[0]] += 1
                return reason
            _bury()
            self._fence()
            try:
                static = self._launch(entry, inputs)
            except Exception as error:
                self._broken = f"a replay failed: {error}"
                raise
            found = static if binding.alias else copies_of(static)
            self._event, self._counts["replays"] = self.backend.record(), self._counts["replays"] + 1
            return found

    def _inadmissible(self, binding: Binding, entry: _Entry | None, inputs: Sequence[Any]) -> str | None:
        if self._broken:
            return f"engine disabled: {self._broken}"
        if entry is None or binding.generation != self._generation:
            return "retired"
        if self.backend.is_capturing():
            return "outer capture"
        if len(inputs) != len(entry.inputs):
            return f"number of inputs: {len(inputs)}, captured with {len(entry.inputs)}"
        for held, value in zip(entry.inputs, inputs, strict=True):
            reason = held.mismatch(value, entry.binding.any_alignment)
            if reason is not None:
                return reason
        if entry.plan_drops is not None and entry.plan_drops != self.backend.plans.drops():
            return "FFT plans were dropped: refresh() and warmup() capture anew"
        for i, (tensor, pointer) in enumerate(entry.aliased):
            if tensor.data_ptr() != pointer:
                return f"buffer {i} moved"
        return None

    def _launch(self, entry: _Entry, inputs: Sequence[Any]) -> Any:
        for held, value in zip(entry.inputs, inputs, strict=True):
            held.stage(value)
        self.backend.replay(entry.graph, entry.binding.draws)
        for held, value in zip(entry.inputs, inputs, strict=True):
            held.unstage(value)
        return pytree.tree_unflatten(entry.outputs, entry.spec)

    def _fence(self) -> None:
        """Static buffers are free only after the last replay's outputs were copied, on whatever stream that was."""
        if self._event is not None:
            self.backend.wait(self._event)

    def launches(self, binding: Binding) -> Counter[str] | None:
        """How often a replay launches each kernel, by name; None where the backend cannot tell, or it is retired."""
        with self._lock:
            entry = self._entries.get(binding.key)
            return None if entry is None else self.backend.launches(entry.graph)

    # ------------------------------------------------------------------------------------------- life
    def seal(self) -> None:
        """Capture nothing any more."""
        self._sealed = True

    def retire(self) -> None:
        """Drop all graphs, at once; while a capture is active, at the next chance after it. Failed keys stay failed."""
        with self._lock:
            if self._graphs:
                _deferred.append((self.backend, self._graphs, self._event, self._kept))
            self._counts["retired"] += len(self._graphs)
            self._counts["predicted_bytes"] = self._counts["measured_bytes"] = 0
            self._graphs, self._kept, self._pool, self._stream = [], [], None, None
            self._generation += 1
            self._entries.clear()
            _bury()

    def __del__(self) -> None:
        with suppress(Exception):  # half-made engines, and modules gone at exit
            self.retire()

    def stats(self) -> dict[str, Any]:
        """Counters since the start, as plain values."""
        with self._lock:
            return {
                **{k: self._counts[k] for k in ("captures", "replays", "retired", "predicted_bytes", "measured_bytes")},
                "graphs": len(self._entries), "max_graphs": self.max_graphs, "max_bytes": self.max_bytes,
                "sealed": self._sealed, "broken": self._broken,
                "refusals": dict(self._refusals), "misses": dict(self._misses),
                "failed": {str(key): refusal.to_dict() for key, refusal in self._failed.items()},
                "seconds": {str(key): entry.binding.seconds for key, entry in self._entries.items()},
                "bytes": {str(key): entry.binding.measured_bytes for key, entry in self._entries.items()},
            }  # fmt: skip


def _bury() -> None:
    """Destroy graphs of retired generations, unless a capture is active."""
    if not _deferred or not _one_capture.acquire(blocking=False):
        return
    try:
        for item in [i for i in _deferred if not i[0].is_capturing()]:
            _deferred.remove(item)
            backend, graphs, event, _ = item
            with backend.active():
                backend.drop(graphs, event)
    finally:
        _one_capture.release()
