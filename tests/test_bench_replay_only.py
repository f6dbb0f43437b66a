"""Replay without the state rule, and the plain passes of SR and SRc, on a backend that needs no device."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

from cadence_fx.bench_cell import CellUnavailable
from cadence_fx.bench_cells import PLAIN_PASSES, find_cell
from cadence_fx.bench_protocol import Block
from cadence_fx.bench_replay_only import ReplayOnly
from cadence_fx.bench_worker import play_block
from cadence_fx.drop_in import transform
from cadence_fx.families import Family, load
from cadence_fx.partition import Granularity
from cadence_fx.verify import compare
from tests.bench_target import TARGET
from tests.fake_backend import FakeBackend

CPU = torch.device("cpu")
SMALL: dict[str, Any] = {"depth": 1, "n_timesteps": 2, "encoder_blocks": 1, "up_blocks": 1}


class Backend(FakeBackend):
    """Draws come from the generator that the modules draw from."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.default_generator


@pytest.fixture
def family() -> Family:
    return load(TARGET)


def played(family: Family, module: torch.nn.Module, chunks: int = 5) -> Block:
    contract = family.contract()
    with torch.no_grad():
        return play_block(module, family.stream(module, contract, 3, chunks), contract, CPU, 7)


def learnt(family: Family, granularity: Granularity, backend: FakeBackend) -> tuple[torch.nn.Module, ReplayOnly]:
    module = family.build_random("cpu", 0)
    replays = ReplayOnly(module, family.contract(), granularity, backend)
    with torch.no_grad():
        replays.learn(family, 0)
    return module, replays


@pytest.mark.parametrize(("granularity", "replays"), [("step", 10), ("chunk", 5)])
def test_every_call_of_the_cadence_replays_with_stocks_bits(
    family: Family, granularity: Granularity, replays: int
) -> None:
    expected = played(family, family.build_random("cpu", 0))
    module, _ = learnt(family, granularity, Backend())
    found = played(family, module)
    assert found.bits == expected.bits
    assert found.ran == {"replays": replays, "stock": 0}


def test_a_refused_capture_runs_as_stock_and_is_counted(family: Family) -> None:
    backend = Backend()
    backend.capture_error = RuntimeError("operation not permitted")
    module, replays = learnt(family, "chunk", backend)
    found = played(family, module)
    assert found.bits == played(family, family.build_random("cpu", 0)).bits
    assert found.ran == {"replays": 0, "stock": 5}
    assert "operation not permitted" in next(iter(replays.stats()["refused"]))


def test_a_shape_that_the_cadence_does_not_have_runs_as_stock(family: Family) -> None:
    module, replays = learnt(family, "chunk", Backend())
    captured = len(replays.captured)
    x, state = torch.randn(1, 2, 8), {"kv": torch.randn(2, 1, 2, 6, 8)}
    with torch.no_grad():
        module(x=x, state=state)
    assert (replays.stats()["stock"], len(replays.captured)) == (1, captured)


def test_nothing_of_the_stock_module_is_replaced_but_its_callables(family: Family) -> None:
    module = family.build_random("cpu", 0)
    before = {id(t) for t in (*module.parameters(), *module.buffers())}
    ReplayOnly(module, family.contract(), "step", Backend())
    assert {id(t) for t in (*module.parameters(), *module.buffers())} == before
    assert set(module.__dict__["_modules"]["block"].__dict__) - set(torch.nn.Module().__dict__) == {"forward"}


@pytest.mark.parametrize("name", ["R", "Rc", "SR", "SRc"])
def test_cells_that_capture_say_what_they_lack_on_a_cpu(family: Family, name: str) -> None:
    with pytest.raises(CellUnavailable, match="captures need a CUDA device"):
        find_cell(name).make(family, "cpu", 0)


def test_plain_passes_keep_the_modules_own_concatenations_and_its_bits(family: Family) -> None:
    stock, contract = family.build_random("cpu", 0), family.contract()
    fast = transform(stock, contract, backend="plan")
    plain = fast.compiler
    plain.passes = PLAIN_PASSES
    with torch.no_grad():
        fast.warmup()
        result = compare(stock, fast, contract, family.stream(stock, contract, 0, 5))
    assert result.first_mismatch is None
    assert result.stats["eager"] == {}
    concatenations = [
        str(n.target)
        for program in fast.programs.values()
        for n in program.flat.graph.nodes
        if "aten.cat" in str(n.target)
    ]
    assert len(concatenations) >= 4 * len(fast.programs)  # keys and values of two steps


@pytest.mark.vendor
@pytest.mark.slow
def test_the_plain_program_of_token2wav_has_stocks_bits() -> None:
    """What SR and SRc capture, at small sizes; two chunks of growth and two of the settled state."""
    if importlib.util.find_spec("stepaudio2") is None:
        pytest.skip("stepaudio2-minicpmo is not installed (pip install --no-deps)")
    family = load("token2wav", vocoder_channels=32, last_tokens=(11,), **SMALL)
    stock, contract = family.build_random("cpu", 0), family.contract()
    fast = transform(stock, contract, backend="plan")
    fast.compiler.passes = PLAIN_PASSES
    result = compare(stock, fast, contract, family.stream(stock, contract, 0, 4))
    assert result.ok, result.first_mismatch or result.output
    assert (result.stats["plan"], result.stats["eager"]) == (4, {})
