"""A graph backend without a device: a 'replay' runs the captured callable again on the static inputs.

Faults can be injected: see the attributes.
"""

from __future__ import annotations

import contextlib
import gc
from collections import Counter
from typing import Any

import torch
import torch.utils._pytree as pytree

from cadence_fx.library_plans import PlanWatch
from cadence_fx.staging import writable


class FakeGraph:
    def __init__(self, run: Any, outputs: Any) -> None:
        self.run, self.outputs = run, outputs
        self.position: torch.Tensor | None = None


class FakeBackend:
    """``generator`` plays the device's default generator: functions under test draw from it."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(5)
        self.log: list[str] = []
        self.outer = False  # the caller captures
        self.capture_error: BaseException | None = None
        self.flip_on_replay: int | None = None  # number of the replay whose output gets one wrong bit
        self.frozen = False  # replays draw what the first one drew, and move the generator all the same
        self.unmoved = False  # replays leave the generator where it was
        self.grows = 100  # bytes that a capture adds to the pool
        self.replays = 0
        self.pools = 0
        self.dropped: list[Any] = []
        self.reserved = 0
        self.collecting_during_capture: bool | None = None
        self.listed: Counter[str] | None = None  # what the graph dump shows
        self.cached_plans = 2
        self.plans = PlanWatch(lambda: self.cached_plans, lambda: self.log.append("mark"))

    def active(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def is_capturing(self) -> bool:
        return self.outer

    def new_pool(self) -> int:
        self.pools += 1
        return self.pools

    def new_stream(self) -> str:
        return f"stream {len(self.log)}"

    def run_first(self, run: Any) -> Any:
        self.log.append("first")
        return run()

    def run_on(self, stream: Any, run: Any) -> Any:
        self.log.append("warm-up")
        return run()

    def capture(self, run: Any, pool: Any, stream: Any, draws: bool, edit: Any = None) -> tuple[FakeGraph, Any, int]:
        self.log.append("capture")
        self.collecting_during_capture = gc.isenabled()
        if self.capture_error is not None:
            raise self.capture_error
        position = self.position()
        outputs = run()
        self.set_position(position)  # a capture records draws and makes none
        self.reserved += self.grows
        return FakeGraph(run, outputs), outputs, 0 if edit is None else edit(0)

    def replay(self, graph: FakeGraph, draws: bool) -> None:
        self.log.append("replay")
        self.replays += 1
        before = self.position()
        if self.frozen:
            graph.position = before if graph.position is None else graph.position
            self.set_position(graph.position)
        fresh = graph.run()
        if self.frozen:
            self.set_position(before)
            torch.randn(3, 4, generator=self.generator)  # what the runs under test draw
        after = self.position()
        self.set_position(before if self.unmoved else after)
        for static, new in zip(pytree.tree_leaves(graph.outputs), pytree.tree_leaves(fresh), strict=True):
            if isinstance(static, torch.Tensor):
                writable(static).copy_(writable(new))
        if self.replays == self.flip_on_replay:
            first = pytree.tree_leaves(graph.outputs)[0]
            first.view(-1).view(torch.int32)[1] ^= 1

    def launches(self, graph: FakeGraph) -> Counter[str] | None:
        return self.listed

    def drop(self, graphs: Any, event: Any) -> None:
        self.dropped += list(graphs)

    def position(self) -> torch.Tensor:
        return self.generator.get_state()

    def set_position(self, position: torch.Tensor) -> None:
        self.generator.set_state(position)

    def seed(self, value: int) -> None:
        self.generator.manual_seed(value)

    def reserved_bytes(self, pool: Any) -> int:
        return self.reserved

    def synchronize(self) -> None:
        pass

    def record(self) -> str:
        self.log.append("record")
        return "event"

    def wait(self, event: Any) -> None:
        self.log.append("wait")
