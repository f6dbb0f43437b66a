"""Small streaming modules with contracts, and a way to play the same calls to a module and to its transform."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from cadence_fx.bits import first_difference
from cadence_fx.contract import Arg, Attr, Call, Clock, Contract, Input, Region, Result
from cadence_fx.drop_in import transform
from cadence_fx.module import CadenceModule
from cadence_fx.retention import Window
from cadence_fx.traffic import clone_tree

WIDTH = 8
State = dict[str, torch.Tensor]


class Stream(nn.Module):
    """Attention over a sliding window of rows behind a causal convolution with a context of six samples."""

    conv: Any
    rows: Any
    out: Any
    shift: torch.Tensor

    def __init__(self, window: int = 12, kernel: int = 7) -> None:
        super().__init__()
        self.window, self.context = window, kernel - 1
        self.conv = nn.Conv1d(WIDTH, WIDTH, kernel)
        self.rows, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("shift", torch.linspace(-1, 1, WIDTH))

    def start(self, batch: int = 1) -> State:
        return {"rows": torch.zeros(batch, 0, WIDTH), "context": torch.zeros(batch, WIDTH, self.context)}

    def forward(self, x: torch.Tensor, state: State) -> tuple[torch.Tensor, State]:
        seen = torch.cat([state["context"], x.transpose(1, 2)], -1)
        y = self.conv(seen).transpose(1, 2) + self.scale()
        rows = torch.cat([state["rows"], self.rows(y)], 1)
        attended = torch.softmax(y @ rows.transpose(1, 2), -1) @ rows
        new = {"rows": rows[:, -self.window :], "context": seen[..., -self.context :]}
        return self.out(torch.tanh(attended)), new

    def scale(self) -> torch.Tensor:
        return torch.exp(self.shift * 0.1)  # no clock touches it: hoisted


class Workspace(nn.Module):
    """A window kept in a buffer that is far larger than the window, as vendors do it."""

    big: torch.Tensor

    def __init__(self, window: int = 12, reserved: int = 4096) -> None:
        super().__init__()
        self.window = window
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("big", torch.zeros(1, reserved, WIDTH), persistent=False)

    def forward(self, x: torch.Tensor, state: State) -> tuple[torch.Tensor, State]:
        rows = torch.cat([state["rows"], self.mix(x)], 1)
        self.big[:, : rows.shape[1]] = rows
        seen = self.big[:, : rows.shape[1]]
        return torch.tanh(x @ seen.transpose(1, 2)) @ seen, {"rows": rows[:, -self.window :].clone()}


def call(length: int, steady: bool = False) -> Call:
    return Call(f"chunk[{length}]", {"frame": length}, {"x": (length,)}, steady=steady)


def window_region(window: int, **changes: Any) -> Region:
    """Rows that grow with the frames up to a window."""
    given: dict[str, Any] = {
        "shape": (1, None, WIDTH),
        "dim": 1,
        "clock": "frame",
        "order": "old_first",
        "retain": Window(window),
        "enters": Arg("state", "rows"),
        "leaves": Result(1, "rows"),
    }
    return Region("rows", **(given | changes))


def context_region(context: int = 6, name: str = "context") -> Region:
    """The fixed left context of a convolution."""
    return Region(name, (1, WIDTH, context), enters=Arg("state", name), leaves=Result(1, name))


def contract(lengths: Sequence[int] = (2,), window: int = 12, context: int | None = 6, **changes: Any) -> Contract:
    """For `Stream` and its relatives: calls of these lengths, the first of them steady."""
    regions = [window_region(window)] + ([] if context is None else [context_region(context)])
    given: dict[str, Any] = {
        "clocks": (Clock("frame", hz=50),),
        "regions": tuple(regions),
        "inputs": (Input(Arg("x"), (1, None, WIDTH)),),
        "calls": tuple(call(n, steady=i == 0) for i, n in enumerate(lengths)),
    }
    return Contract("stream", **(given | changes))


def workspace_contract(window: int = 12, reserved: int = 4096, lengths: Sequence[int] = (2,)) -> Contract:
    """For `Workspace`."""
    scratch = Region(
        "workspace",
        (1, None, WIDTH),
        dim=1,
        clock="frame",
        retain=Window(window),
        enters=Attr("big"),
        mutability="scratch",
        lifetime="unit",
        reserved=(1, reserved, WIDTH),
    )
    return contract(lengths, window, None, regions=(window_region(window), scratch))


def drawn(module: nn.Module, seed: int = 0) -> Any:
    """The module in eval mode with weights that keep its output away from zero and from its limits."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.4)
        parameter.requires_grad_(False)
    return module.eval()


def stream(**sizes: int) -> Stream:
    """A `Stream` with drawn weights."""
    return drawn(Stream(**sizes))


def chunks(lengths: Sequence[int], seed: int = 1) -> list[torch.Tensor]:
    """One input per length."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(1, n, WIDTH, generator=generator) for n in lengths]


class Pair:
    """A module and its transform, called with the same inputs; outputs and state must agree in every bit."""

    def __init__(self, stock: nn.Module, declared: Contract, state: Any, fast: CadenceModule | None = None) -> None:
        self.stock: Any = stock
        self.fast = transform(stock, declared) if fast is None else fast
        self.theirs, self.ours = clone_tree(state), clone_tree(state)

    def step(self, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """One call of both."""
        expected, self.theirs = self.stock(x, state=self.theirs, **kwargs)
        found, self.ours = self.fast(x, state=self.ours, **kwargs)
        self.check(expected, found)
        return found

    def steps(self, inputs: Sequence[torch.Tensor], **kwargs: Any) -> None:
        for x in inputs:
            self.step(x, **kwargs)

    def both(self, change: Callable[[Any], object]) -> None:
        """The same change made to both modules."""
        change(self.stock)
        change(self.fast)

    def check(self, expected: Any, found: Any) -> None:
        difference = first_difference("output", expected, found) or first_difference("state", self.theirs, self.ours)
        assert difference is None, str(difference)

    def counted(self, reason: str) -> int:
        """How often the transform ran as stock for a reason that starts so."""
        return sum(n for text, n in self.fast.stats()["eager"].items() if text.startswith(reason))
