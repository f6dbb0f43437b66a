"""A target for the benchmark's tests that runs in milliseconds, and cells that go wrong in known ways."""

from __future__ import annotations

import os
import time
from typing import Any

import torch

from cadence_fx.bench_cell import Cell, CellUnavailable
from tests.toys import WIDTH, build

TARGET = "tests.bench_target:make"


def make() -> Any:
    """Two solver steps whose state rests in a scratch buffer; three chunks until it has all its rows."""
    toy = build("new_first")
    generator = torch.Generator().manual_seed(3)
    state = {"kv": torch.randn(2, 1, 2, 6, 8, generator=generator)}
    return toy.module, toy.contract, [{"x": torch.randn(1, 3, WIDTH, generator=generator), "state": state}]


class _Wrong(torch.nn.Module):
    """Stock whose fourth chunk has one wrong bit."""

    def __init__(self, stock: torch.nn.Module) -> None:
        super().__init__()
        self.stock, self.calls = stock, 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        y, state = self.stock(*args, **kwargs)
        self.calls += 1
        if self.calls == 4 + 5:  # after the five chunks that warm up
            y.view(-1).view(torch.int32)[0] ^= 1
        return y, state


def _raises(*given: Any) -> Any:
    raise ValueError("this cell cannot be built")


def _unavailable(*given: Any) -> Any:
    raise CellUnavailable("needs a thing that is not here")


def _dies(*given: Any) -> Any:
    print("last words", flush=True)  # not a line of the protocol
    os._exit(3)


def _sleeps(*given: Any) -> Any:
    time.sleep(60)


WRONG = Cell("wrong", "one wrong bit", lambda family, device, seed: _Wrong(family.build_random(device, seed)))
RAISES = Cell("raises", "cannot be built", _raises)
UNAVAILABLE = Cell("unavailable", "lacks something", _unavailable)
DIES = Cell("dies", "ends its process", _dies)
SLEEPS = Cell("sleeps", "takes too long", _sleeps)
