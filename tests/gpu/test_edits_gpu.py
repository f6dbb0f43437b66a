"""Edited graphs on a real device: other waits, fewer kernels, the same bits, and what was edited is told."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from cadence_fx.bits import same_bits
from cadence_fx.captures import Captures
from cadence_fx.contract import Arg, Call, Clock, Contract, Input, Region, Result
from cadence_fx.drop_in import transform
from cadence_fx.graph_dump import driver
from cadence_fx.module import CadenceModule

pytestmark = pytest.mark.gpu
WIDTH, FRAMES, CONTEXT = 512, 50, 2


@pytest.fixture(autouse=True)
def pinned() -> Iterator[None]:
    before = torch.backends.cudnn.deterministic
    torch.backends.cudnn.deterministic = True
    if driver() is None:
        pytest.skip("cuda.bindings is not installed: graphs cannot be edited")
    yield
    torch.backends.cudnn.deterministic = before


class Blocks(nn.Module):
    """Blocks of a causal convolution and three products with few rows, which the library splits over K."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.convs: Any = nn.ModuleList(nn.Conv1d(WIDTH, WIDTH, CONTEXT + 1) for _ in range(depth))
        self.ins: Any = nn.ModuleList(nn.Linear(WIDTH, 4 * WIDTH) for _ in range(depth))
        self.outs: Any = nn.ModuleList(nn.Linear(4 * WIDTH, WIDTH) for _ in range(depth))
        self.gates: Any = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(depth))
        self.norm = nn.LayerNorm(WIDTH, elementwise_affine=False)

    def start(self) -> torch.Tensor:
        return torch.zeros(len(self.convs), 2, WIDTH, CONTEXT, device=self.convs[0].weight.device)

    def forward(self, x: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        contexts = []
        for i in range(len(self.convs)):
            seen = torch.cat([state[i], x.transpose(1, 2)], -1)
            contexts.append(seen[..., -CONTEXT:])
            y = self.norm(self.convs[i](seen).transpose(1, 2))
            y = self.outs[i](torch.nn.functional.gelu(self.ins[i](y)))
            x = x + y * torch.sigmoid(self.gates[i](self.norm(x)))
        return x, torch.stack(contexts)


def contract(depth: int = 4) -> Contract:
    context = Region("context", (depth, 2, WIDTH, CONTEXT), enters=Arg("state"), leaves=Result(1))
    return Contract(
        "blocks",
        clocks=(Clock("frame", hz=50),),
        regions=(context,),
        inputs=(Input(Arg("x"), (2, None, WIDTH)),),
        calls=(Call("chunk", {"frame": FRAMES}, {"x": (FRAMES,)}, steady=True),),
    )


def pair(**options: Any) -> tuple[Any, CadenceModule, Captures]:
    torch.manual_seed(0)
    module = Blocks().eval().requires_grad_(False).to("cuda")
    fast = transform(module, contract(), **options)
    fast.warmup().seal()
    assert fast._captures is not None
    return module, fast, fast._captures


def play(module: Any, fast: CadenceModule, calls: int = 12) -> None:
    theirs, ours = module.start(), module.start()
    for i in range(calls):
        x = torch.randn(2, FRAMES, WIDTH, device="cuda", generator=torch.Generator("cuda").manual_seed(i))
        with torch.no_grad():
            expected, theirs = module(x, theirs)
        found, ours = fast(x, ours)
        assert same_bits(expected, found), i
        assert same_bits(theirs, ours), i
    assert fast.stats()["replays"] == calls


def test_an_edited_graph_gives_stocks_bits_and_the_kernels_of_a_plain_run() -> None:
    module, fast, captures = pair()
    (row,) = captures.rows.values()
    assert row.refusals == ()
    assert row.edits is not None
    assert row.edits.conversions >= 4
    assert row.edits.counters >= 4
    assert row.edits.results >= 4
    play(module, fast)
    assert fast.kernel_difference() == {}


def test_edits_can_be_switched_off() -> None:
    module, fast, captures = pair(edits=False)
    (row,) = captures.rows.values()
    assert row.edits is None
    play(module, fast)


def test_a_weight_that_changes_takes_its_converted_form_with_it() -> None:
    """G1-24: an edit in place and a replaced parameter, both after the conversion has run."""
    module, fast, captures = pair()
    play(module, fast, 2)
    with torch.no_grad():
        module.convs[1].weight.mul_(1.5)
    theirs, ours = module.start(), module.start()
    for i in range(4):
        x = torch.randn(2, FRAMES, WIDTH, device="cuda", generator=torch.Generator("cuda").manual_seed(i))
        with torch.no_grad():
            expected, theirs = module(x, theirs)
        found, ours = fast(x, ours)
        assert same_bits(expected, found), i
    assert captures.converted.memory == {}


def test_an_edit_that_is_wrong_is_refused_by_the_certificate_and_the_plain_capture_serves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A conversion that is thrown away without having run leaves garbage where the convolution reads."""
    from cadence_fx.launch_graph import RawGraph

    monkeypatch.setattr(RawGraph, "run_once", lambda self, nodes: None)
    module, fast, captures = pair()
    (row,) = captures.rows.values()
    assert [r.reason for r in row.refusals] == ["other bits"]
    assert row.edits is None
    play(module, fast)


def test_edits_from_another_thread_and_stream() -> None:
    module, fast, _ = pair()
    with torch.cuda.stream(torch.cuda.Stream()):
        play(module, fast, 4)


def test_a_module_on_the_host_is_served_on_the_device_with_the_bits_of_one_that_was_moved() -> None:
    torch.manual_seed(0)
    module = Blocks().eval().requires_grad_(False)
    fast = transform(module, contract(), device="cuda")
    fast.warmup().seal()
    assert {p.device.type for p in module.parameters()} == {"cpu"}
    play(module.to("cuda"), fast, 4)
