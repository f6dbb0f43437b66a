"""Contracts that are wrong about their module: what is caught, when, and what the text says.

python examples/wrong_contract.py
"""

from __future__ import annotations

import dataclasses
import textwrap
from typing import Any

import torch
from torch import nn

import cadence_fx
from cadence_fx import Arg, Call, Clock, Contract, ContractError, Input, Region, Result, Window
from cadence_fx.bits import same_bits

WIDTH, WINDOW, CHUNK = 16, 8, 2


class Decoder(nn.Module):
    """Attention over a sliding window: old rows first, the newest eight are kept."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: torch.Tensor, kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        kv = torch.cat([kv, torch.cat([k, v], dim=-1)], dim=1)
        keys, values = kv.chunk(2, dim=-1)
        return torch.softmax(q @ keys.transpose(1, 2), -1) @ values, kv[:, -WINDOW:]


def contract(**changes: Any) -> Contract:
    """The right declaration, or one with a field changed."""
    kv = Region(
        "kv",
        (1, None, 2 * WIDTH),
        dim=1,
        clock="frame",
        order="old_first",
        retain=Window(WINDOW),
        enters=Arg("kv"),
        leaves=Result(1),
    )
    return Contract(
        "window",
        clocks=(Clock("frame", hz=25),),
        regions=(dataclasses.replace(kv, **changes),),
        inputs=(Input(Arg("x"), (1, None, WIDTH)),),
        calls=(Call("chunk", ticks={"frame": CHUNK}, sizes={"x": (CHUNK,)}, steady=True),),
    )


def refused(title: str, decoder: nn.Module, **changes: Any) -> None:
    """Declare, transform and warm up; print what is raised. Nothing has been served by then."""
    print(f"\n{title}")
    try:
        cadence_fx.transform(decoder, contract(**changes)).warmup("all")
    except ContractError as error:
        print(textwrap.indent(textwrap.fill(f"ContractError: {error}", 110), "  "))
    else:
        raise SystemExit(f"{title}: nothing was raised")


def main() -> None:
    torch.manual_seed(0)
    decoder = Decoder().eval()
    refused("a field that contradicts another: caught when the contract is written", decoder, clock=None)
    refused("a wrong order: caught by the trace, before anything is served", decoder, order="new_first")
    refused("a wrong retention: caught by the trace too", decoder, retain=Window(WINDOW - 2))
    refused("the wrong end kept: the same shapes, other rows", decoder, retain=Window(WINDOW, side="head"))

    print("\na call that nobody declared: runs as stock, with stock's bits, and is counted")
    fast = cadence_fx.transform(decoder, contract()).warmup("all")
    theirs = ours = torch.zeros(1, 0, 2 * WIDTH)
    for length in (CHUNK, CHUNK, 5, CHUNK):
        x = torch.randn(1, length, WIDTH)
        expected, theirs = decoder(x, theirs)
        found, ours = fast(x, ours)
        if not (same_bits(expected, found) and same_bits(theirs, ours)):
            raise SystemExit("bits differ")
    print(f"  {fast.stats()['plan']} from the plan, as stock: {fast.stats()['eager']}")


if __name__ == "__main__":
    with torch.no_grad():
        main()
