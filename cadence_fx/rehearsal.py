"""Running a callable before its capture: what it draws, what it writes, what it returns, and its kernels loaded."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree

from cadence_fx.bits import same_bits
from cadence_fx.graph_backend import GraphBackend
from cadence_fx.live_state import Generators, StartState
from cadence_fx.refusal import HOST_RANDOMNESS, HOST_VALUE, Refusal
from cadence_fx.staging import CapturedInput, nbytes_of

__all__ = ["Request"]


@dataclass
class Request:
    """What is asked to be captured, and its runs. See `cadence_fx.replay.ExactShapeReplay.capture` for the fields."""

    key: Hashable
    run: Callable[..., Any]
    inputs: Sequence[Any]
    aliased: Sequence[torch.Tensor]
    preserve: Sequence[torch.Tensor]
    compared: Sequence[torch.Tensor]
    reference: Callable[..., Any]
    alias: bool
    edit: Callable[[int], int] | None = None
    first: Callable[..., Any] | None = None
    plans: bool = False

    def prepare(self, backend: GraphBackend) -> None:
        """Save what must come back."""
        self.backend = backend
        self.generators = Generators(backend)
        self.state = StartState(self.aliased, self.preserve)
        self.held: list[CapturedInput] = []

    def put_back(self) -> None:
        """State and generators as they were."""
        self.state.put_back()
        self.generators.restore()
        self.backend.synchronize()

    def rewind(self) -> None:
        """State, generators and static inputs as they are at the start of a run."""
        self.state.start(0)
        self.generators.rewind()
        for held in self.held:
            held.stage(held.example)

    def run_static(self) -> Any:
        """Run on the static inputs."""
        return self.run(*[held.static for held in self.held])

    def watched(self) -> Any:
        return self.generators.watch("probe", self.run_static)

    def watched_first(self) -> Any:
        run, inputs = self.first or self.run, [held.static for held in self.held]
        return self.generators.watch("probe", lambda: self.backend.run_first(lambda: run(*inputs)))

    @property
    def draws(self) -> bool:
        """Whether the run moves the device's generator; known after the probe."""
        return self.generators.moved["probe"][1]

    def probe(self) -> int | Refusal:
        """Bytes of the static inputs and of the outputs, or what forbids a capture."""
        resident = {t.untyped_storage().data_ptr() for t in self.aliased}
        self.held = [CapturedInput(f"input {i}", value, resident) for i, value in enumerate(self.inputs)]
        outputs: list[Any] = []
        for _ in range(2):  # another thread's draw looks like ours, but hardly twice
            self.rewind()
            outputs = pytree.tree_leaves(self.watched_first())
            if not any(self.generators.moved["probe"]):
                break
        if self.generators.moved["probe"][0]:
            return Refusal(HOST_RANDOMNESS, "host randomness", "a graph would repeat the values drawn at capture")
        for held in self.held:
            held.written = bool(held.staged) and not same_bits(held.example, held.static)
        tensors = [t for t in outputs if isinstance(t, torch.Tensor)]
        kinds = {t.device for t in (*self.aliased, *self.inputs) if isinstance(t, torch.Tensor)}
        foreign = next((t.device for t in tensors if kinds and t.device not in kinds), None)
        if foreign is not None:
            return Refusal(HOST_VALUE, "host tensor", f"an output is on {foreign}")
        return sum(held.staged for held in self.held) + sum(nbytes_of(t) for t in tensors)

    def warm_up(self, stream: Any, runs: int) -> None:
        """Run on a side stream: kernels are loaded and library handles made."""
        for _ in range(runs):
            self.rewind()
            self.backend.run_on(stream, self.watched)
        self.backend.synchronize()
