"""A decoder of your own: a contract read off its configuration, then proof on traffic of your own.

python examples/own_decoder.py
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import cadence_fx
from cadence_fx import Arg, Call, Clock, Contract, Input, Region, Result, Window
from cadence_fx.traffic import SessionMemory, Step
from cadence_fx.verify import VerifyStep, compare


@dataclass(frozen=True)
class Config:
    """What a model's configuration file says."""

    frame_hz: float = 12.5
    hidden: int = 32
    heads: int = 4
    context_frames: int = 8
    kernel: int = 5
    chunk_frames: tuple[int, ...] = (4, 1)  # steady calls first, then the shorter last one


class Decoder(nn.Module):
    """Causal convolution, then attention over a sliding window. State is a dict, passed in and returned."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.conv = nn.Conv1d(config.hidden, config.hidden, config.kernel)
        self.qkv = nn.Linear(config.hidden, 3 * config.hidden)

    def start(self) -> dict[str, torch.Tensor]:
        c = self.config
        return {
            "left": torch.zeros(1, c.hidden, c.kernel - 1),
            "kv": torch.zeros(2, c.heads, 0, c.hidden // c.heads),
        }

    def forward(
        self, mel: torch.Tensor, state: dict[str, torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        seen = torch.cat([state["left"], mel], dim=2)
        q, k, v = self.qkv(self.conv(seen).transpose(1, 2)).unflatten(-1, (3, self.config.heads, -1)).unbind(2)
        kv = torch.cat([state["kv"], torch.cat([k, v]).transpose(1, 2)], dim=2)
        attended = nn.functional.scaled_dot_product_attention(q.transpose(1, 2), kv[:1], kv[1:])
        new = {"left": seen[..., -state["left"].shape[2] :], "kv": kv[:, :, -self.config.context_frames :]}
        return torch.tanh(attended.transpose(1, 2).flatten(2)), new


def contract(c: Config) -> Contract:
    """Every line is one that the configuration or the decoder's forward answers."""
    return Contract(
        "own decoder",
        clocks=(Clock("frame", hz=c.frame_hz),),
        regions=(
            # A fixed shape: the convolution's left context.
            Region("left", (1, c.hidden, c.kernel - 1), enters=Arg("state", "left"), leaves=Result(1, "left")),
            # Grows along dimension 2 by one row a frame, old rows first, and keeps the newest context_frames.
            Region(
                "kv",
                (2, c.heads, None, c.hidden // c.heads),
                dim=2,
                clock="frame",
                order="old_first",
                retain=Window(c.context_frames),
                enters=Arg("state", "kv"),
                leaves=Result(1, "kv"),
            ),
        ),
        inputs=(Input(Arg("mel"), (1, c.hidden, None)),),
        calls=tuple(
            Call(f"frames[{n}]", ticks={"frame": n}, sizes={"mel": (n,)}, steady=n == c.chunk_frames[0])
            for n in c.chunk_frames
        ),
    )


def traffic(c: Config) -> list[Step]:
    """Two turns: each starts anew, plays steady chunks and ends with a short one."""

    def start(decoder: Any, memory: SessionMemory) -> None:
        memory.start(decoder.start())

    def chunk(mel: torch.Tensor) -> Step:
        return Step(f"{mel.shape[2]} frames", lambda decoder, memory: memory.call(decoder, mel=mel), is_chunk=True)

    steady, last = c.chunk_frames
    turn = [Step("start", start), *(chunk(torch.randn(1, c.hidden, n)) for n in [steady] * 4 + [last])]
    return turn + turn


def main() -> None:
    torch.manual_seed(0)
    config = Config()
    decoder = Decoder(config).eval()
    declared = contract(config)
    fast = cadence_fx.transform(decoder, declared)
    fast.warmup("all")

    def progress(step: VerifyStep) -> None:
        print(f"  {step.name:<9} {step.how:<6} output {step.equal_pcm}, state {step.equal_state}")

    result = compare(decoder, fast, declared, traffic(config), progress=progress)
    print(
        f"equal in every bit: {result.ok}; {result.catalog} signatures; run as stock: {result.stats['eager'] or 'none'}"
    )
    raise SystemExit(not result.ok)


if __name__ == "__main__":
    main()
