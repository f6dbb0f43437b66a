"""G2-12 and G2-13: weight norm and einops, traced through on every backend and bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from cadence_fx.contract import Arg, Input, Region, Result
from tests.case_toys import Backend, Twins, contract, fixed
from tests.streams import WIDTH


class Normed(nn.Module):
    """Weight norm in both spellings."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        with pytest.warns(FutureWarning):
            self.conv = torch.nn.utils.weight_norm(nn.Conv1d(WIDTH, WIDTH, 3, dtype=dtype))
        self.out = torch.nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH, dtype=dtype))

    def start(self) -> dict[str, torch.Tensor]:
        return {"left": torch.zeros(1, WIDTH, 2, dtype=self.out.bias.dtype)}

    def forward(self, x: torch.Tensor, state: Any) -> Any:
        seen = torch.cat([state["left"], x.transpose(1, 2)], -1)
        return self.out(self.conv(seen).transpose(1, 2)), {"left": seen[..., -2:]}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_weight_norm_is_folded_with_the_bits_of_the_live_computation(on: Backend, dtype: str) -> None:
    """G2-12: no deepcopy is asked for; an edit of a magnitude is followed; the report counts the folds."""
    kind = getattr(torch, dtype)
    inputs = (Input(Arg("x"), (1, None, WIDTH), dtype),)
    twins = Twins(lambda: Normed(kind), contract((2,), fixed("left", 1, WIDTH, 2, dtype=dtype), inputs=inputs), on)
    assert sum(c.count for c in twins.fast.report.rewrites if c.what == "hoisted") == 2
    chunks = on.chunks([2] * 4, dtype=kind)
    twins.steps(chunks[:2])
    assert twins.served == 2
    twins.both(lambda m: m.conv.weight_g.mul_(1.5))
    twins.step(chunks[2])
    twins.both(lambda m: m.out.parametrizations.weight.original0.mul_(0.5))
    twins.step(chunks[3])
    twins.fast.warmup("all")
    twins.steps(chunks)
    stats = twins.fast.stats()
    assert (stats["weights edited"], stats["stock"]) == (2, 0)
    assert twins.served >= 6


class Einops(nn.Module):
    """Both forms of einops, by name and as a layer."""

    def __init__(self) -> None:
        super().__init__()
        layers = pytest.importorskip("einops.layers.torch")
        self.lin, self.fold = nn.Linear(WIDTH, WIDTH), layers.Rearrange("b (t p) d -> b t (p d)", p=2)

    def start(self) -> dict[str, torch.Tensor]:
        return {"last": torch.zeros(1, WIDTH)}

    def forward(self, x: torch.Tensor, state: Any) -> Any:
        import einops

        y = self.lin(x)
        wide = einops.rearrange(y, "b (t p) d -> b t (p d)", p=2) + self.fold(x)
        many = einops.repeat(state["last"], "b c -> b c t", t=x.shape[1])
        packed, shapes = einops.pack([x, y], "b * d")
        again = einops.unpack(packed, shapes, "b * d")[1]
        return (wide, many, einops.reduce(y, "b t d -> b d", "mean"), again), {"last": y[:, -1]}


@pytest.mark.parametrize("batch", [1, 2])
def test_einops_is_traced_through_and_keeps_nothing_of_the_trace(on: Backend, batch: int) -> None:
    """G2-13."""
    einops = pytest.importorskip("einops")
    region = Region("last", (batch, WIDTH), enters=Arg("state", "last"), leaves=Result(1, "last"))
    declared = contract((4, 6, 8), region, inputs=(Input(Arg("x"), (batch, None, WIDTH)),))
    twins = Twins(Einops, declared, on)
    twins.theirs, twins.ours = ({"last": torch.zeros(batch, WIDTH, device=on.device)} for _ in range(2))
    for x in on.chunks([4, 6, 8, 4, 6, 8]):
        twins.step(x.repeat(batch, 1, 1))
    assert twins.served == 6
    x = torch.randn(1, 6, WIDTH, device=on.device)
    assert torch.equal(einops.rearrange(x, "b (t p) d -> b t (p d)", p=2), x.reshape(1, 3, 2 * WIDTH))
