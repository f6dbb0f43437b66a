"""Requirement cases against stock on every backend: operator by operator, on fake captures, and on CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from cadence_fx.bits import first_difference
from cadence_fx.captures import Captures
from cadence_fx.contract import Arg, Call, Clock, Contract, Input, Region, Result
from cadence_fx.drop_in import transform
from cadence_fx.generators import generator_states, restore_generators
from cadence_fx.module import CadenceModule
from cadence_fx.program import Program
from cadence_fx.replay import ExactShapeReplay
from cadence_fx.staging import like
from cadence_fx.traffic import clone_tree
from tests.fake_backend import FakeBackend
from tests.streams import WIDTH, Pair, drawn

CUDA = pytest.param("cuda", marks=pytest.mark.gpu)
# For tests whose captures machines without a device should check too.
ON_ALL = pytest.mark.parametrize("on", ["plan", "fake", CUDA], indirect=True)


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """A copy at an address as a device's allocator gives it; the host's vary, and so do its kernels' bits."""
    copy = like(tensor, 0)
    return copy.copy_(tensor)


class HostCaptures(Captures):
    """Captures whose examples lie where the calls' inputs will."""

    def examples(self, program: Program) -> list[Any]:
        owned = {b.tensor.untyped_storage().data_ptr() for b in self.memory.buffers.values()}
        return [v if v.untyped_storage().data_ptr() in owned else aligned(v) for v in super().examples(program)]


@dataclass(frozen=True)
class Backend:
    """Where a case runs. ``name`` is "plan", "fake" (captures without a device) or "cuda"."""

    name: str
    device: torch.device

    @classmethod
    def of(cls, name: str) -> Backend:
        return cls(name, torch.device("cuda", torch.cuda.current_device()) if name == "cuda" else torch.device("cpu"))

    @property
    def captures(self) -> bool:
        return self.name != "plan"

    @property
    def is_cuda(self) -> bool:
        return self.name == "cuda"

    def transform(self, module: nn.Module, declared: Contract, **options: Any) -> CadenceModule:
        if self.name != "fake":
            return transform(module, declared, device=self.device, backend=self.name, **options)
        given = {name: options.pop(name) for name in ("granularity", "capture_after") if name in options}
        fast = transform(module, declared, backend="plan", **options)
        fast.__dict__["_captures"] = HostCaptures(
            declared, fast.compiler, fast.memory, fast._stock, streams=1, backend=FakeBackend(), **given
        )
        return fast

    def engine(self, **options: Any) -> ExactShapeReplay:
        backend = FakeBackend() if self.name == "fake" else None
        return ExactShapeReplay(self.device, backend=backend, **{"max_graphs": 64, **options})

    def chunks(self, lengths: Sequence[int], seed: int = 1, width: int = WIDTH, **kind: Any) -> list[torch.Tensor]:
        """One drawn input per length; the same values on every device."""
        generator = torch.Generator().manual_seed(seed)
        return [torch.randn(1, n, width, generator=generator).to(self.device, **kind) for n in lengths]


class Twins(Pair):
    """A module that nobody has touched and the transform of its equal: outputs, state, buffers and generators agree.

    Args:
        make: called twice; its weights are drawn from a seed.
        warm: what is compiled and captured before the first call; None for nothing.
    """

    def __init__(
        self, make: Callable[[], nn.Module], declared: Contract, on: Backend, warm: str | None = "all", **options: Any
    ) -> None:
        self.on = on
        stock, mine = (drawn(make()).to(on.device) for _ in range(2))
        fast = on.transform(mine, declared, **options)
        start = {k: v.to(on.device) for k, v in stock.start().items()}
        super().__init__(stock, declared, start, fast)
        self.mine = mine
        if warm is not None:
            fast.warmup(warm)

    def restart(self) -> None:
        """A new turn."""
        start = {k: v.to(self.on.device) for k, v in self.stock.start().items()}
        self.theirs, self.ours = clone_tree(start), clone_tree(start)

    def step(self, x: torch.Tensor, **kwargs: Any) -> Any:
        before, given = generator_states(self.on.device), (aligned(x), aligned(x))
        expected, self.theirs = self.stock(given[0], state=self.theirs, **kwargs)
        after = generator_states(self.on.device)
        restore_generators(self.on.device, before)
        found, self.ours = self.fast(given[1], state=self.ours, **kwargs)
        self.check(expected, found)
        differences = (
            first_difference("argument", *given),
            first_difference("generators", after, generator_states(self.on.device)),
            first_difference("buffers", dict(self.stock.named_buffers()), dict(self.fast.named_buffers())),
        )
        assert differences == (None, None, None), [str(d) for d in differences]
        return found

    @property
    def served(self) -> int:
        """Calls that ran as they should here: as replays, or from the plan where nothing can be captured."""
        return int(self.fast.stats()["replays" if self.on.captures else "plan"])

    @property
    def accounted(self) -> bool:
        """Every call is counted once, every stock call by its reason."""
        found = self.fast.stats()
        return bool(
            found["calls"] == found["plan"] + found["replays"] + found["stock"]
            and sum(found["eager"].values()) == found["stock"]
        )


def fixed(name: str, *shape: int, **declared: Any) -> Region:
    """State of a fixed shape."""
    return Region(name, shape, enters=Arg("state", name), leaves=Result(1, name), **declared)


def contract(
    lengths: Sequence[int], *regions: Region, width: int = WIDTH, dtype: str = "float32", **changes: Any
) -> Contract:
    """For ``forward(x [1, frames, width], state)``: calls of these lengths, the first of them steady."""
    given: dict[str, Any] = {
        "clocks": (Clock("frame", hz=50),),
        "inputs": (Input(Arg("x"), (1, None, width), dtype),),
        "calls": tuple(Call(f"chunk[{n}]", {"frame": n}, {"x": (n,)}, steady=i == 0) for i, n in enumerate(lengths)),
    }
    return Contract("case", regions=regions, **(given | changes))
