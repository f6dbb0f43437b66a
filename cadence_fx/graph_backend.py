"""What the replay engine needs from a device: capture, replay, generator positions, memory, events.

A `GraphBackend` is small enough to be faked on a CPU, so that every rule of the engine can be tested without a device.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch

from cadence_fx.graph_dump import launches
from cadence_fx.library_plans import FULL, PlanWatch

__all__ = ["CudaBackend", "CudaGraphHandle", "GraphBackend", "collector_paused"]


# Before per-capture generator states, beginning any capture put the default generator's state into capture mode.
_FLAGS_DEFAULT_GENERATOR = tuple(int(n) for n in torch.__version__.split(".")[:2]) < (2, 13)


class GraphBackend(Protocol):
    """The device operations that the engine uses. Positions are opaque byte tensors on the host."""

    def active(self) -> AbstractContextManager[Any]:
        """Makes the device current."""
        ...

    def is_capturing(self) -> bool:
        """True if work of this thread's current stream would be recorded by a capture."""
        ...

    def new_pool(self) -> Any:
        """A memory pool that graphs can share."""
        ...

    def new_stream(self) -> Any: ...

    def run_on(self, stream: Any, run: Callable[[], Any]) -> Any:
        """Run on a stream, ordered after the current stream's work and before what comes next on it."""
        ...

    def run_first(self, run: Callable[[], Any]) -> Any:
        """Run where libraries may set up what they make once, ordered like `run_on`."""
        ...

    @property
    def plans(self) -> PlanWatch:
        """Watches the plans that captured Fourier transforms use."""
        ...

    def capture(
        self, run: Callable[[], Any], pool: Any, stream: Any, draws: bool, edit: Callable[[int], int] | None = None
    ) -> tuple[Any, Any, int]:
        """Capture ``run``, let ``edit`` change what was recorded, and instantiate it.

        Returns:
            The graph, what ``run`` returned, and what ``edit`` returned: bytes that it took.

        A failure is raised after the device works again: no stream captures, no generator is held.
        """
        ...

    def launches(self, graph: Any) -> Counter[str] | None:
        """How often the graph launches each kernel, by name; None where that cannot be read."""
        ...

    def replay(self, graph: Any, draws: bool) -> None:
        """Launch on the current stream. If ``draws``, the device's generator is read and moved as the run would."""
        ...

    def drop(self, graphs: Sequence[Any], event: Any) -> None:
        """Destroy graphs, after the event of their last replay."""
        ...

    def position(self) -> torch.Tensor: ...

    def set_position(self, position: torch.Tensor) -> None: ...

    def seed(self, value: int) -> None: ...

    def reserved_bytes(self, pool: Any) -> int:
        """Memory that the pool has taken from the device."""
        ...

    def synchronize(self) -> None:
        """Wait for the current stream. Waiting for the device would break a capture of another thread."""
        ...

    def record(self) -> Any:
        """An event after all work of the current stream so far."""
        ...

    def wait(self, event: Any) -> None:
        """The current stream's next work comes after the event."""
        ...


@contextmanager
def collector_paused() -> Iterator[None]:
    """No cyclic collection within: a finaliser that frees device objects would break a capture."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


# Graphs whose capture broke. They are few and empty, and destroying one while somebody captures would break that too.
_abandoned: list[torch.cuda.CUDAGraph] = []


@cache
def _plan_watch(index: int) -> PlanWatch:
    """One for each device: whoever looks first after a drop, all engines of the device learn of it."""
    plans = torch.backends.cuda.cufft_plan_cache[index]

    def count() -> int:
        size = int(plans.size)
        return size if size < plans.max_size else FULL

    def mark() -> None:
        with torch.cuda.stream(torch.cuda.default_stream(index)):
            torch.fft.rfft(torch.zeros(3, 2, device=torch.device("cuda", index)))

    return PlanWatch(count, mark)


@dataclass(frozen=True, eq=False)
class CudaGraphHandle:
    """A graph and the generator whose state it was captured with, which is its own and nobody else's."""

    graph: torch.cuda.CUDAGraph
    generator: torch.Generator


class CudaBackend:
    """CUDA graphs.

    The device's default generator is never registered with a graph. A capture gets a private clone of its state, and a
    replay copies the position in and out. So a failed capture cannot leave the default generator in capture mode, and a
    replay serves whatever state the default generator has then, graph-safe exchanges included.

    Other threads may work during a capture, with one exception that torch leaves no way around: they may not draw from
    the device's default generator while a run that draws is captured, nor, before torch 2.13, in the instant in which
    any capture begins. Draws from generators of their own are always safe.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        torch.cuda.init()

    @property
    def generator(self) -> torch.Generator:
        return torch.cuda.default_generators[self.device.index]

    def active(self) -> AbstractContextManager[Any]:
        return torch.cuda.device(self.device)

    def is_capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def new_pool(self) -> Any:
        return torch.cuda.graph_pool_handle()

    def new_stream(self) -> Any:
        return torch.cuda.Stream(self.device)

    def run_on(self, stream: Any, run: Callable[[], Any]) -> Any:
        current = torch.cuda.current_stream(self.device)
        stream.wait_stream(current)
        try:
            with torch.cuda.stream(stream):
                return run()
        finally:
            current.wait_stream(stream)

    def run_first(self, run: Callable[[], Any]) -> Any:
        # cuFFT uploads a new plan's tables by the default stream; the plan's first transform on another stream does
        # not wait for that, and reads whatever lies there.
        return self.run_on(torch.cuda.default_stream(self.device), run)

    @property
    def plans(self) -> PlanWatch:
        return _plan_watch(self.device.index)

    def capture(
        self, run: Callable[[], Any], pool: Any, stream: Any, draws: bool, edit: Callable[[int], int] | None = None
    ) -> tuple[CudaGraphHandle, Any, int]:
        generator = self.generator
        shared, private = generator.graphsafe_get_state(), generator.clone_state()
        graph = torch.cuda.CUDAGraph(keep_graph=True)  # so that its kernels can be listed
        self.synchronize()
        # Memory cached outside the pool is of no use to the graph; torch.cuda.graph does the same.
        torch.cuda.empty_cache()
        # A cast that autocast caches while capturing would live in the pool and be handed to eager code later.
        torch.clear_autocast_cache()
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            if draws or _FLAGS_DEFAULT_GENERATOR:
                generator.graphsafe_set_state(private)
            try:
                # Other threads may go on: only unsafe calls of this thread end the capture.
                graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                if not draws:
                    generator.graphsafe_set_state(shared)  # other threads draw undisturbed
                result = run()
                graph.capture_end()
                added = 0 if edit is None else edit(graph.raw_cuda_graph())
                graph.instantiate()
            except BaseException:
                self._abandon(graph, pool)
                raise
            finally:
                generator.graphsafe_set_state(shared)
                torch.clear_autocast_cache()
        return CudaGraphHandle(graph, private), result, added

    def _abandon(self, graph: torch.cuda.CUDAGraph, pool: Any) -> None:
        """End a broken capture: the stream leaves capture mode, the allocator stops serving from the pool."""
        with suppress(Exception):  # a warning that the user turned into an error counts as little as the error itself
            graph.capture_end()
        try:
            # An invalidated capture raises in capture_end before it tells the allocator; else this raises.
            torch._C._cuda_endAllocateToPool(self.device.index, pool)
        except RuntimeError:
            pass
        else:
            torch._C._cuda_releasePool(self.device.index, pool)
        with suppress(Exception):
            graph.reset()
        # The pinned-memory allocator may keep a pointer to a graph whose capture never ended properly.
        _abandoned.append(graph)

    def launches(self, graph: CudaGraphHandle) -> Counter[str] | None:
        return launches(graph.graph.raw_cuda_graph())

    def replay(self, graph: CudaGraphHandle, draws: bool) -> None:
        if not draws:
            graph.graph.replay()
            return
        generator = self.generator
        graph.generator.set_state(generator.get_state())
        graph.graph.replay()
        generator.set_state(graph.generator.get_state())

    def drop(self, graphs: Sequence[CudaGraphHandle], event: Any) -> None:
        if event is not None:
            event.synchronize()
        for graph in graphs:
            graph.graph.reset()

    def position(self) -> torch.Tensor:
        return self.generator.get_state()

    def set_position(self, position: torch.Tensor) -> None:
        self.generator.set_state(position)

    def seed(self, value: int) -> None:
        self.generator.manual_seed(value)

    def reserved_bytes(self, pool: Any) -> int:
        segments = torch.cuda.memory_snapshot()
        return sum(s["total_size"] for s in segments if tuple(s.get("segment_pool_id", ())) == tuple(pool))

    def synchronize(self) -> None:
        torch.cuda.current_stream(self.device).synchronize()

    def record(self) -> Any:
        return torch.cuda.current_stream(self.device).record_event()

    def wait(self, event: Any) -> None:
        torch.cuda.current_stream(self.device).wait_event(event)
