"""Fused captures on a real device: fewer kernels, the same bits, and contraction is caught."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import fx, nn

from cadence_fx.captures import Captures
from cadence_fx.contract import Arg, Call, Clock, Contract, Input, Region, Result
from cadence_fx.drop_in import transform
from cadence_fx.exact_compile import EXACT, compile_exact, exact_settings
from cadence_fx.fusion import Fuser
from cadence_fx.module import CadenceModule
from tests.streams import drawn
from tests.toys import same_bits

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]
WIDTH, FRAMES = 512, 50


@pytest.fixture(autouse=True)
def pinned() -> Iterator[None]:
    before = torch.backends.cudnn.deterministic
    torch.backends.cudnn.deterministic = True
    yield
    torch.backends.cudnn.deterministic = before


class Modulated(nn.Module):
    """Causal convolutions between modulations and gates, as blocks of a diffusion transformer have them."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.rows = nn.Conv1d(WIDTH, WIDTH, 3), nn.Linear(WIDTH, 3 * WIDTH)
        self.norm = nn.LayerNorm(WIDTH, elementwise_affine=False)

    def start(self) -> torch.Tensor:
        return torch.zeros(2, WIDTH, 2, device=self.conv.weight.device)

    def forward(self, x: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        shift, scale, gate = self.rows(x.mean(1, keepdim=True)).chunk(3, -1)
        h = self.norm(x) * (1 + scale) + shift
        seen = torch.cat([state, h.transpose(1, 2)], -1)
        y = self.conv(seen).transpose(1, 2)
        return x + gate * y * 0.7, seen[..., -2:]


def contract() -> Contract:
    return Contract(
        "modulated",
        clocks=(Clock("frame", hz=50),),
        regions=(Region("context", (2, WIDTH, 2), enters=Arg("state"), leaves=Result(1)),),
        inputs=(Input(Arg("x"), (2, None, WIDTH)),),
        calls=(Call("chunk", ticks={"frame": FRAMES}, sizes={"x": (FRAMES,)}, steady=True),),
    )


def captured(**options: Any) -> tuple[nn.Module, CadenceModule, Captures]:
    module = drawn(Modulated()).to("cuda")
    fast = transform(module, contract(), **options)
    captures = fast._captures
    assert captures is not None
    return module, fast, captures


def equal(module: Any, fast: CadenceModule) -> bool:
    a, b = module.start(), module.start()
    same = True
    for i in range(6):
        x = torch.randn(2, FRAMES, WIDTH, generator=torch.Generator("cuda").manual_seed(i), device="cuda")
        with torch.no_grad():
            expected, a = module(x, a)
        found, b = fast(x, b)
        same &= same_bits(expected.cpu(), found.cpu()) and same_bits(a.cpu(), b.cpu())
    return same


def test_groups_are_kernels_with_stocks_bits() -> None:
    module, fast, captures = captured()
    fast.warmup()
    (row,) = captures.rows.values()
    assert row.captured, row.refusals
    assert row.fused is not None
    assert row.fused.groups < row.fused.operators
    assert not row.refusals
    assert equal(module, fast)
    assert fast.stats()["replays"] == 6
    (program,) = fast.programs.values()
    assert captures.kernel_difference(program) in ({}, None)
    fused, plain = captures.engine.launches(row.binding), None  # type: ignore[arg-type]
    _, other, unfused = captured(skip=("fuse_pointwise",))
    other.warmup()
    (row,) = unfused.rows.values()
    assert row.fused is None
    plain = unfused.engine.launches(row.binding)  # type: ignore[arg-type]
    if fused is not None and plain is not None:
        assert fused.total() < plain.total()


def test_contraction_is_refused_by_the_certificate() -> None:
    """The mutation: the settings that exactness rests on, turned off."""
    module, fast, captures = captured()
    loose = {**exact_settings(), **{n: False for n in exact_settings() if EXACT[n] is True and "emulate" in n}}
    captures.fuser = Fuser.of(torch.device("cuda", torch.cuda.current_device()))
    assert captures.fuser is not None
    captures.fuser.kernels.compile = partial(_compiled, settings=loose)
    fast.warmup()
    (row,) = captures.rows.values()
    assert row.captured
    assert row.fused is None
    assert row.refusals[0].code == "CX508"
    assert equal(module, fast)


def _compiled(module: fx.GraphModule, arguments: Any, settings: dict[str, Any]) -> Any:
    return compile_exact(module, arguments, settings)
