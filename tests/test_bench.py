"""The benchmark on a decoder of milliseconds: real processes, equality of bits, and cells that go wrong."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Any

import pytest
import torch

from cadence_fx.bench import BenchResult, Event, bench, cell_names
from cadence_fx.bench_cells import CELLS, all_cells, find_cell
from cadence_fx.bench_process import WorkerFailed, WorkerProcess
from cadence_fx.bench_protocol import Block, Measured, Spec
from cadence_fx.bench_result import CellResult
from cadence_fx.bench_worker import play_block
from cadence_fx.catalog import settling
from cadence_fx.errors import CadenceError
from cadence_fx.families import load
from cadence_fx.machine import command_line
from tests.bench_target import TARGET

SPEC = Spec(TARGET, "B0", "cpu", chunks=6, blocks=2, seed=0)
WRONG = "tests.bench_target:WRONG"
SAVED: list[BenchResult] = []  # what an interruption of that run would have left, after each cell


# ---------------------------------------------------------------------------------------------- real processes
@pytest.fixture(scope="module")
def run() -> tuple[BenchResult, list[Event]]:
    """Stock, the cells that a CPU can run, one wrong bit, and three ways to fail."""
    events: list[Event] = []
    failing = ["SRc", "tests.bench_target:DIES", "tests.bench_target:RAISES"]
    cells = ["S", "ours", WRONG, *failing]
    found = bench(
        TARGET, device="cpu", chunks=6, blocks=2, cells=cells, jobs=2, progress=events.append, save=SAVED.append
    )
    return found, events


def test_the_cells_of_the_library_have_stocks_bits(run: tuple[BenchResult, list[Event]]) -> None:
    found = run[0].to_dict()["cells"]
    assert list(found)[:3] == ["B0", "S", "ours"]
    for name in ("B0", "S", "ours"):
        assert found[name]["bits_equal"] is True
        assert found[name]["sha256"] == found["B0"]["sha256"]
        assert found[name]["p50_ms"] > 0
    assert found["S"]["ran"] == {"replays": 0, "plan": 0, "stock": 12}
    assert found["ours"]["ran"] == {"replays": 0, "plan": 12, "stock": 0}


def test_one_wrong_bit_in_one_chunk_is_found_and_named(run: tuple[BenchResult, list[Event]]) -> None:
    cell = run[0].to_dict()["cells"][WRONG]
    assert cell["bits_equal"] is False
    assert cell["differences"] == ["block 0: outputs from chunk 3 on"]


def test_a_cell_that_fails_is_a_row_with_its_reason(run: tuple[BenchResult, list[Event]]) -> None:
    result, events = run
    assert result.ok
    found = result.to_dict()["cells"]
    assert found["SRc"]["error"] == "captures need a CUDA device"
    assert found["tests.bench_target:DIES"]["error"].startswith("ended with 3 while preparing\nlast words")
    raised = found["tests.bench_target:RAISES"]["error"]
    assert raised.startswith("ValueError: this cell cannot be built\n")
    assert "in _raises" in raised
    assert found["SRc"]["p50_ms"] is found["SRc"]["bits_equal"] is None
    assert {event.cell for event in events if event.what == "failed"} == {
        name for name in found if found[name]["error"]
    }


def test_the_product_is_prepared_alone_and_stock_is_measured_first(run: tuple[BenchResult, list[Event]]) -> None:
    told = [(event.cell, event.what) for event in run[1]]
    assert told[:2] == [("ours", "preparing"), ("ours", "ready")]
    measured = [cell for cell, what in told if what == "measuring"]
    assert measured == ["B0", "S", "ours", WRONG]
    assert told.count(("B0", "block")) == 2
    assert told.index(("B0", "measuring")) > max(i for i, (_, what) in enumerate(told) if what == "ready")


def test_the_result_is_one_json_object_with_all_that_a_reader_needs(run: tuple[BenchResult, list[Event]]) -> None:
    result = run[0]
    found = json.loads(json.dumps(result.to_dict()))
    assert (found["target"], found["seed"], found["blocks"], found["chunks"]) == (TARGET, 0, 2, 6)
    assert found["growing"] == 2
    environment = found["environment"]
    assert environment["torch"] == torch.__version__
    assert environment["flags"]["cudnn_deterministic"] is True
    assert environment["flags"]["cuda_conv_fp32"] == "tf32"
    stock = found["cells"]["B0"]
    assert [block["seed"] for block in stock["blocks"]] == [1, 2]
    assert [len(block["wall_ms"]) for block in stock["blocks"]] == [6, 6]
    ratio = found["ratios"]["p50 B0/ours"]
    assert ratio["low"] <= ratio["ratio"] <= ratio["high"]
    assert ratio["blocks"] == 2


def test_a_cell_that_takes_too_long_is_ended() -> None:
    spec = dataclasses.replace(SPEC, cell="tests.bench_target:SLEEPS")
    with (
        WorkerProcess(spec, timeout=0.5) as worker,
        pytest.raises(WorkerFailed, match=r"preparing took more than 0\.5 s"),
    ):
        worker.prepare()
    assert worker._process.returncode is not None
    worker.close()  # a second time


def test_what_is_measured_is_saved_cell_by_cell(run: tuple[BenchResult, list[Event]]) -> None:
    names = [cell.name for cell in run[0].cells]
    assert len(SAVED) == len(names)
    measured = [sum(cell.measured is not None for cell in result.cells) for result in SAVED]
    assert measured[:3] == [1, 2, 3]
    assert json.loads(json.dumps(SAVED[0].to_dict()))["cells"]["B0"]["p50_ms"] > 0


def test_cells_that_are_not_ready_in_the_time_for_all_are_left_out() -> None:
    cells = ["tests.bench_target:SLEEPS"]
    found = bench(TARGET, device="cpu", chunks=6, blocks=1, cells=cells, jobs=2, prepare_within=0.0)
    assert not found.ok
    assert all(cell.error.startswith("preparing took more than 0.") for cell in found.cells)


# ---------------------------------------------------------------------------------------------- in this process
def block(seed: int, times: list[float], **changes: Any) -> Block:
    names = [f"{i}" for i in range(len(times))]
    return dataclasses.replace(Block(seed, times, [], names, "out", "state", "generator"), **changes)


def cell(name: str, *blocks: Block, peak: int = 0, growing: int = 0) -> CellResult:
    return CellResult(
        name, name, Measured(growing=growing, prepare_peak_bytes=peak, serving_peak_bytes=peak, blocks=list(blocks))
    )


def test_chunks_whose_state_still_grows_are_in_no_quantile() -> None:
    times = [900.0, 800.0, 10.0, 12.0, 11.0]
    assert cell("B0", block(1, times), growing=2).milliseconds(0.5) == 11.0
    assert cell("B0", block(1, times), growing=9).milliseconds(0.5) == 11.0  # the last chunk is left
    assert cell("B0", block(1, times), block(2, [5.0] * 5), growing=2).milliseconds(0.5) == 8.0
    assert CellResult("B0", "failed", None, "why").milliseconds(0.5) is None


def test_what_differs_is_named_by_block_chunk_and_kind() -> None:
    stock = cell("B0", block(1, [1.0, 1.0]), block(2, [1.0, 1.0]))
    other = cell(
        "x", block(1, [1.0, 1.0], state_sha256="other", generator_sha256="other"),
        block(2, [1.0, 1.0], output_sha256="other", chunk_sha256=["0", "x"]),
    )  # fmt: skip
    assert other.differences(stock) == ["block 0: state, generators", "block 1: outputs from chunk 1 on"]


def test_ratios_are_there_for_what_was_measured() -> None:
    cells = (
        cell("B0", block(1, [40.0]), peak=400),
        cell("SRc", block(1, [20.0]), peak=300),
        cell("ours", block(1, [10.0])),
    )
    ratios = BenchResult(SPEC, (*cells, CellResult("R", "failed", None, "why"))).ratios()
    assert {name: round(ratio["ratio"], 3) for name, ratio in ratios.items()} == {
        "p50 B0/SRc": 2.0, "p50 B0/ours": 4.0, "p50 SRc/ours": 2.0, "peak SRc/B0": 0.75, "peak ours/B0": 0.0,
        "serving peak SRc/B0": 0.75, "serving peak ours/B0": 0.0,
    }  # fmt: skip


def test_a_run_whose_stock_failed_is_no_result() -> None:
    result = BenchResult(SPEC, (CellResult("B0", "stock", None, "why"), cell("ours", block(1, [1.0]))))
    assert not result.ok
    assert result.to_dict()["cells"]["ours"]["bits_equal"] is None


def test_a_block_is_the_same_twice_and_another_seed_draws_elsewhere() -> None:
    family = load(TARGET)
    contract, cpu = family.contract(), torch.device("cpu")

    def play(seed: int) -> Block:
        module = family.build_random("cpu", 0)
        with torch.no_grad():
            return play_block(module, family.stream(module, contract, seed, 3), contract, cpu, seed)

    one, two, other = play(1), play(1), play(2)
    assert one.bits == two.bits
    assert one.bits != other.bits
    assert (len(one.wall_ms), one.device_ms, one.ran) == (3, [], {})


def test_settling_counts_the_steady_calls_that_change_extents() -> None:
    assert settling(load(TARGET).contract()) == 2


def test_names_of_cells() -> None:
    assert list(CELLS)[:6] == ["B0", "B0b", "S", "R", "Rc", "SR"]
    assert cell_names(["ours", "B0", "ours"]) == ["B0", "ours"]
    assert cell_names(None) == list(all_cells())
    with pytest.raises(CadenceError, match=r"no cell is called 'our' \(did you mean 'ours'\?\)"):
        find_cell("our")
    with pytest.raises(CadenceError, match="is no Cell"):
        find_cell("tests.bench_target:TARGET")


def test_controls_are_cells_where_this_version_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        sys.modules, "cadence_fx.bench_controls", type("Controls", (), {"CONTROLS": {"mine": CELLS["S"]}})
    )
    assert list(all_cells()) == [*CELLS, "mine"]


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"autocast": "no_such"}, "autocast is 'no_such'; expected the name of a dtype"),
        ({"cells": ["no_such"]}, "no cell is called 'no_such'"),
        ({"options": {"width": 3}}, "has no option 'width'"),
    ],
)
def test_mistakes_are_found_before_any_process_starts(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(CadenceError, match=text):
        bench(TARGET, device="cpu", **settings)


def test_a_spec_and_a_result_survive_json() -> None:
    spec = dataclasses.replace(SPEC, options={"steps": 5}, autocast="float16")
    assert Spec.from_json(spec.to_json()) == spec
    found = Measured(growing=2, blocks=[block(1, [1.0])], stats={"calls": 3})
    assert Measured.from_dict(json.loads(json.dumps(found.to_dict()))) == found


def test_the_command_of_a_result_tells_nothing_of_the_machine() -> None:
    found = command_line(
        ["bench", "token2wav", "--json", "/somewhere/out/x.json", "--cells", "B0,ours", "--plot", "p.png"]
    )
    assert found == "cadence-fx bench token2wav --json x.json --cells B0,ours --plot p.png"
