"""Running a schedule on side streams, once, under capture; what each operator launched is noted for graph edits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import fx

from cadence_fx.autocast import without_autocast
from cadence_fx.effects import view_input
from cadence_fx.graph_dump import checked, driver
from cadence_fx.schedule import Schedule, is_view
from cadence_fx.specialise import FlatGraph

__all__ = ["CudaStreams", "Launched", "Launcher", "OneStream", "StreamBackend", "run_scheduled"]

Launcher = Callable[[fx.Node, tuple[Any, ...], dict[str, Any]], Any]


@dataclass(frozen=True)
class Launched:
    """What one operator put into a graph under capture: the nodes from ``first`` up to, without, ``last``."""

    node: fx.Node
    stream: int
    first: int
    last: int


class StreamBackend(Protocol):
    """What running a schedule needs of a device."""

    def use(self, stream: int) -> None:
        """Work of this thread goes to that stream from now on. 0 is the one on which the run began."""

    def record(self, stream: int) -> Any:
        """An event after the work so far on a stream."""

    def wait(self, stream: int, event: Any) -> None:
        """Let a stream wait for an event."""

    def count(self) -> int | None:
        """Nodes that the capture under way has recorded so far; None where that cannot be read or nothing captures."""


@dataclass
class CudaStreams:
    """Streams of one device; stream 0 is the one that was current when the run began, which may be capturing."""

    device: torch.device
    side: list[torch.cuda.Stream] = field(default_factory=list)
    first: torch.cuda.Stream | None = None

    def _stream(self, index: int) -> torch.cuda.Stream:
        if index == 0:
            return torch.cuda.current_stream(self.device) if self.first is None else self.first
        while len(self.side) < index:
            self.side.append(torch.cuda.Stream(self.device))
        return self.side[index - 1]

    def use(self, stream: int) -> None:
        if self.first is None:
            self.first = torch.cuda.current_stream(self.device)
        torch.cuda.set_stream(self._stream(stream))
        if stream == 0:
            self.first = None

    def record(self, stream: int) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(self._stream(stream))
        return event

    def wait(self, stream: int, event: torch.cuda.Event) -> None:
        self._stream(stream).wait_event(event)

    def count(self) -> int | None:
        cu = driver()
        if cu is None or not torch.cuda.is_current_stream_capturing():
            return None
        found = checked(cu.cuStreamGetCaptureInfo(self._stream(0).cuda_stream))
        graph = next(value for value in found if isinstance(value, cu.CUgraph))
        return int(checked(cu.cuGraphGetNodes(graph))[1])


class OneStream:
    """Everything in order on the current stream, of whatever device."""

    def use(self, stream: int) -> None:
        """Nothing to switch."""

    def record(self, stream: int) -> None:
        """Nothing to wait for."""

    def wait(self, stream: int, event: Any) -> None:
        """What was recorded before has run before."""

    def count(self) -> int | None:
        return None


def _call(node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return node.target(*args, **kwargs)  # type: ignore[operator]


@dataclass
class _Run:
    """One run of a schedule: values that are still needed, events, and streams that have joined the capture."""

    planned: Schedule
    backend: StreamBackend
    launch: Launcher
    launched: list[Launched] | None
    env: dict[fx.Node, Any] = field(default_factory=dict)
    events: dict[fx.Node, Any] = field(default_factory=dict)
    forked: set[int] = field(default_factory=set)
    current: int = 0

    def __post_init__(self) -> None:
        self.recorded = None if self.launched is None else self.backend.count()
        waits = self.planned.waits
        self.waited_for = {p for found in waits.values() for p in found} | set(self.planned.joins)
        self.start = self.backend.record(0)

    def operator(self, node: fx.Node) -> None:
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: self.env[n])
        index = self.planned.stream.get(node, 0)
        if index and index not in self.forked:
            # A stream joins a capture by waiting for an event of the capturing stream.
            self.backend.wait(index, self.start)
            self.forked.add(index)
        for other in self.planned.waits.get(node, ()):
            self.backend.wait(index, self.events[other])
        self._use(index)
        self.env[node] = self.launch(node, args, kwargs)
        del args, kwargs
        if self.recorded is not None and node in self.planned.stream:
            self._note(node, index, self.recorded)
        if node in self.waited_for:
            self.events[node] = self.backend.record(index)
        for value in self.planned.release.get(node, ()):
            self._drop(value)

    def _use(self, stream: int) -> None:
        if stream != self.current:
            self.backend.use(stream)
            self.current = stream

    def _note(self, node: fx.Node, stream: int, first: int) -> None:
        self.recorded = self.backend.count()
        if self.launched is not None and self.recorded is not None:
            self.launched.append(Launched(node, stream, first, self.recorded))

    def _drop(self, value: fx.Node) -> None:
        """Forget a value and all views of it."""
        todo = [value]
        while todo:
            node = todo.pop()
            self.env.pop(node, None)
            todo += [user for user in node.users if is_view(user) and view_input(user) is node]

    def leave(self) -> None:
        """Back to the stream on which the run began, also after an error."""
        self._use(0)

    def join(self) -> None:
        for node in self.planned.joins:
            self.backend.wait(0, self.events[node])


@without_autocast
def run_scheduled(
    flat: FlatGraph,
    module: torch.nn.Module,
    planned: Schedule,
    backend: StreamBackend,
    inputs: Any,
    launch: Launcher = _call,
    launched: list[Launched] | None = None,
) -> tuple[Any, ...]:
    """Run a graph on its streams. Meant for a capture: replays do not come here. Autocast is off.

    Args:
        module: holds the graph's attributes.
        inputs: values of the placeholders in order.
        launch: runs one operator on its arguments.
        launched: gets what each operator put into the graph under capture, in order.

    Returns:
        The graph's outputs; all side streams have been joined.
    """
    run = _Run(planned, backend, launch, launched)
    given = iter(inputs)
    try:
        for node in flat.graph.nodes:
            if node.op == "placeholder":
                run.env[node] = next(given)
            elif node.op == "get_attr":
                run.env[node] = getattr(module, str(node.target))
            elif node.op == "call_function":
                run.operator(node)
    finally:
        run.leave()
    run.join()
    return tuple(fx.map_arg(flat.output.args[0], lambda n: run.env[n]))  # type: ignore[arg-type]
