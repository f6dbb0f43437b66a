"""The command line against stand-ins for the parts that do the work."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

import cadence_fx
from cadence_fx import cli
from cadence_fx.catalog import ClassBytes
from cadence_fx.changes import Change, Rejection
from cadence_fx.cli_notes import MAX_WIDTH, class_lines, rejection_lines, rewrite_lines
from cadence_fx.cli_show import Show, cell, extents, size
from cadence_fx.errors import ContractError, VerificationError

RunCli = Callable[..., int]


# ------------------------------------------------------------------------------------------ stand-ins
@dataclass
class Row:
    family: str = "token2wav"
    region: str = "solver_kv"
    clock: str = "mel_frame"
    window: int | None = 100
    stride: int | None = 50
    width: int | None = 3
    verdict: str = "capture"
    reason: str = ""
    attended: tuple[int, ...] = (302, 352, 402)
    envelope: int = 452
    bytes: int = 1 << 20
    reserved_bytes: int = 7 << 19
    rho: float = 3.5


def compiled(capture: dict[str, Any] | None = None) -> dict[str, Any]:
    return {
        "call": "chunk", "variant": 0, "extents": {"kv": 402, "mel": 8}, "operators_before": 90, "operators_after": 60,
        "seconds": 1.5, "capture": capture,
    }  # fmt: skip


@dataclass
class FakeReport:
    regions: list[Row] = field(default_factory=lambda: [Row(), Row(region="text_kv", verdict="exclude", reason="wide")])
    rewrites: list[Change] = field(default_factory=lambda: [Change("ring_writeback", "writeback", "solver_kv", "all")])
    rejections: list[Rejection] = field(
        default_factory=lambda: [Rejection("CX901", "fuse_pointwise", "tanh", "it has no exhaustive proof")]
    )

    catalog: list[ClassBytes] = field(
        default_factory=lambda: [ClassBytes(f"flush[{n}]", 0, (("solver_kv", 302),), 2048) for n in range(14)]
    )
    classes: list[dict[str, Any]] = field(default_factory=lambda: [compiled()])
    state_bytes: int = 2 << 20
    reserved_bytes: int = 7 << 20

    def to_dict(self) -> dict[str, Any]:
        return {"regions": [asdict(row) for row in self.regions]}


@dataclass
class FakeResult:
    ok: bool = True
    module: Any = None
    vacuous: bool = False
    flags: dict[str, Any] = field(default_factory=dict)

    @property
    def first_mismatch(self) -> dict[str, Any] | None:
        if self.ok or self.vacuous:
            return None
        return {"step": 1, "name": "chunk", "kind": "pcm", "where": "output", "index": [0, 17], "expected": "0.25",
                "found": "0.5", "count": 3}  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        return {
            "family": "token2wav", "device": "cpu", "torch": "2.13.0", "chunks": 2,
            "bitwise_equal": self.first_mismatch is None,
            "state_equal": True, "rng_equal": True, "self_agreement": True, "first_mismatch": self.first_mismatch,
            "replays": 1, "plan": 1, "eager": {"outside the catalog": 1}, "catalog": 3,
            "bytes": {"stock_buffers": 2, "ours_regions": 1},
            "output": {"distinct": 1 if self.vacuous else 960, "clipped": 0.0},
            "sha256": "ab" * 32, "ledger": [], "flags": self.flags, "seconds": {"stock": 4.0, "ours": 2.0},
        }  # fmt: skip


def bench_found() -> dict[str, Any]:
    """What a run of the benchmark gives: stock, a cell whose bits differ, and one that failed."""
    stock: dict[str, Any] = {
        "title": "stock", "error": None, "p50_ms": 200.0, "p95_ms": 210.0, "device_p50_ms": 199.0, "peak_mib": 3765.0,
        "serving_peak_mib": 3700.0, "prepare_seconds": 4.0, "bits_equal": True, "differences": [], "sha256": "ab" * 32,
        "ran": {"replays": 120, "plan": 0},
    }  # fmt: skip
    ours = {**stock, "p50_ms": 50.0, "bits_equal": False, "differences": ["block 1: outputs from chunk 3 on"]}
    failed: dict[str, Any] = {**dict.fromkeys(stock), "title": "capture", "differences": [], "ran": {}}
    failed["error"] = "no such device\nmore"
    ratio = {"ratio": 4.0, "low": 3.9, "high": 4.1, "blocks": 4}
    return {
        "cells": {"B0": stock, "ours": ours, "SRc": failed},
        "ratios": {"p50 B0/ours": ratio, "peak ours/B0": {"ratio": 1.0}},
    }


class Fakes:
    """Stand-in modules; ``calls`` records what the command line passed on."""

    def __init__(self) -> None:
        self.calls: dict[str, Any] = {}
        self.result = FakeResult(module=SimpleNamespace(report=FakeReport()))
        self.error: Exception | None = None

    def verify(
        self, target: str, *, device: str, chunks: int, seed: int, options: dict[str, Any], progress: Any
    ) -> Any:
        self.calls["verify"] = (target, device, chunks, seed, options)
        if self.error:
            raise self.error
        for index in range(2):
            equal = self.result.ok or index == 0
            progress(SimpleNamespace(index=index, name="chunk", equal_pcm=equal, equal_state=True, equal_rng=True,
                                     seconds_stock=2.0, seconds_ours=1.0, how=("stock", "plan")[index]))  # fmt: skip
        return self.result

    def explain(self, module: nn.Module | None, contract: object) -> FakeReport:
        self.calls["explain"] = (module, contract)
        if self.error:
            raise self.error
        return FakeReport()

    def bench(self, target: str, **settings: Any) -> Any:
        self.calls["bench"] = (target, settings)
        settings["progress"](SimpleNamespace(cell="SRc", what="failed", text="no such device"))
        return SimpleNamespace(to_dict=lambda: bench_found(), ok=True)

    def cell_names(self, cells: list[str] | None) -> list[str]:
        return ["B0", "ours", "SRc"] if cells is None else cells

    def transform(self, module: nn.Module, contract: object, backend: str = "auto") -> Any:
        self.calls["transform"] = (module, contract, backend)
        warm = SimpleNamespace(report=FakeReport())
        return SimpleNamespace(report=None, warmup=lambda: warm)

    def write(self, fast: object, out: Path) -> list[Path]:
        self.calls["write"] = out
        return [out / "00_traced.py", out / "01_ring_writeback.py"]

    def build_random(self, device: str, seed: int, depth: int = 16) -> nn.Module:
        self.calls["build_random"] = (device, seed, depth)
        return nn.Identity()

    def contract(self, steps: int = 10) -> str:
        return f"contract with {steps} steps"


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> Fakes:
    fakes = Fakes()
    modules = {
        "cadence_fx.verify": ("verify",),
        "cadence_fx.explain": ("explain",),
        "cadence_fx.bench": ("bench", "cell_names"),
        "cadence_fx.dump": ("write",),
        "cadence_fx.adapters.token2wav": ("build_random", "contract"),
    }
    for name, functions in modules.items():
        module = ModuleType(name)
        for function in functions:
            setattr(module, function, getattr(fakes, function))
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(cadence_fx, "transform", fakes.transform, raising=False)
    return fakes


@pytest.fixture
def run() -> RunCli:
    """Runs the command line in this process and gives its exit code."""

    def run(*arguments: str) -> int:
        with pytest.raises(SystemExit) as exit:
            cli.main(list(arguments))
        assert isinstance(exit.value.code, int)
        return exit.value.code

    return run


Capture = pytest.CaptureFixture[str]


# ------------------------------------------------------------------------------------------ verify
def test_verify_prints_one_line_a_chunk_and_exits_with_0(fakes: Fakes, run: RunCli, capsys: Capture) -> None:
    assert run("verify", "token2wav", "--device", "cpu", "--chunks", "2", "--seed", "7", "-o", "steps=5") == 0
    assert fakes.calls["verify"] == ("token2wav", "cpu", 2, 7, {"steps": 5})
    printed = capsys.readouterr().out.splitlines()
    assert " ".join(printed[1].split()) == (
        "1 chunk plan pcm equal state equal generator equal (stock 2.000 s, ours 1.000 s)"
    )
    assert printed[-4:] == [
        "equal to stock in every bit: 2 chunks of token2wav on cpu, torch 2.13.0",
        "replayed 1, run from the plan 1, run as stock 1",
        "  1 x outside the catalog",
        "one SHA-256 over all chunks: " + "ab" * 32,
    ]


def test_a_difference_exits_with_1_and_names_the_first_mismatch(fakes: Fakes, run: RunCli, capsys: Capture) -> None:
    fakes.result = FakeResult(ok=False)
    assert run("verify", "token2wav", "--device", "cpu") == 1
    printed = capsys.readouterr().out
    assert "pcm DIFFERENT" in printed
    assert "first mismatch: step 1 (chunk), output at [0, 17]: stock has 0.25, found 0.5 (3 elements differ)" in printed


def test_equal_bits_of_a_constant_output_prove_nothing_and_exit_with_1(
    fakes: Fakes, run: RunCli, capsys: Capture
) -> None:
    fakes.result = FakeResult(ok=False, vacuous=True)
    assert run("verify", "token2wav", "--device", "cpu") == 1
    printed = capsys.readouterr().out
    assert "proves nothing: 2 chunks of token2wav" in printed
    assert "the output is constant or saturated: 1 distinct values, 0.0 % at the limits" in printed


def test_an_operator_of_stock_that_does_not_agree_with_itself_is_named(
    fakes: Fakes, run: RunCli, capsys: Capture
) -> None:
    fakes.result.flags = {
        "disagreement": {"operator": "aten.cumsum", "source": "/a/b/c/d.py:1 in f", "under": "default flags"}
    }
    assert run("verify", "token2wav", "--device", "cpu") == 0
    assert "does not agree with itself under default flags: aten.cumsum [b/c/d.py:1 in f];" in capsys.readouterr().out


def test_json_on_standard_output_is_the_only_thing_there(fakes: Fakes, run: RunCli, capsys: Capture) -> None:
    assert run("verify", "token2wav", "--device", "cpu", "--json", "-") == 0
    captured = capsys.readouterr()
    assert list(json.loads(captured.out)) == [
        "command", "seed", "environment", "family", "device", "torch", "chunks", "bitwise_equal", "state_equal",
        "rng_equal", "self_agreement", "first_mismatch", "replays", "plan", "eager", "catalog", "bytes", "output",
        "sha256", "ledger", "flags", "seconds",
    ]  # fmt: skip
    assert "generator equal" in captured.err


def test_a_difference_still_writes_its_json(fakes: Fakes, run: RunCli, tmp_path: Path) -> None:
    fakes.result = FakeResult(ok=False)
    file = tmp_path / "verify.json"
    assert run("verify", "token2wav", "--device", "cpu", "--json", str(file)) == 1
    assert json.loads(file.read_text())["bitwise_equal"] is False


@pytest.mark.parametrize("error", [ContractError("Region 'kv': dim is 9"), VerificationError("pcm differs")])
def test_an_error_of_the_library_is_one_line_and_exits_with_1(
    error: Exception, fakes: Fakes, run: RunCli, capsys: Capture
) -> None:
    fakes.error = error
    assert run("verify", "token2wav", "--device", "cpu") == 1
    assert capsys.readouterr().err == f"cadence-fx: {error}\n"


# ------------------------------------------------------------------------------------------ explain, demo, bench, graph
def test_explain_needs_no_module_and_prints_aligned_columns(fakes: Fakes, run: RunCli, capsys: Capture) -> None:
    assert run("explain", "token2wav", "-o", "steps=5") == 0
    assert fakes.calls["explain"] == (None, "contract with 5 steps")
    lines = capsys.readouterr().out.splitlines()
    assert " ".join(lines[0].split()) == "region clock W s K verdict attended envelope bytes stock bytes rho reason"
    assert lines[1].split("  ")[-2:] == ["3.5 MiB", "3.50"]
    assert lines[2].endswith("3.50  wide")
    assert (
        "state and scratch: 2,097,152 bytes in the contract's buffers; stock reserves 7,340,032, 3.50 times as much"
        in lines
    )
    assert not any(line.startswith("rewrites") for line in lines)  # nothing was traced


def test_explain_lists_the_catalog_with_predicted_bytes(fakes: Fakes, run: RunCli, capsys: Capture) -> None:
    assert run("explain", "token2wav") == 0
    lines = capsys.readouterr().out.splitlines()
    first = lines.index("catalog, signatures that the declared traffic reaches: 14") + 1
    assert " ".join(lines[first].split()) == "flush[0] start 0 2.0 KiB of static inputs at solver_kv=302"
    assert lines[first + 12].strip() == "... and 2 more; explain --json lists all"


def test_explain_with_trace_builds_the_module_and_lists_rewrites(fakes: Fakes, run: RunCli, capsys: Capture) -> None:
    assert run("explain", "token2wav", "--trace", "--device", "cpu", "--seed", "3", "-o", "depth=2") == 0
    assert fakes.calls["build_random"] == ("cpu", 3, 2)
    assert isinstance(fakes.calls["transform"][0], nn.Identity)
    assert fakes.calls["transform"][2] == "plan"  # no GPU work for a listing
    assert "explain" not in fakes.calls
    lines = capsys.readouterr().out.splitlines()
    assert "  ring_writeback: writeback 1: all" in lines
    assert lines[-2:] == ["  CX901 (fuse_pointwise)", "    tanh: it has no exhaustive proof"]


def test_explain_prints_its_json(fakes: Fakes, run: RunCli, capsys: Capture) -> None:
    assert run("explain", "token2wav", "--json") == 0
    row = json.loads(capsys.readouterr().out)["regions"][0]
    assert {"family", "region", "window", "stride", "width", "verdict", "reason", "attended", "envelope", "bytes",
            "reserved_bytes", "rho"} <= set(row)  # fmt: skip


def test_demo_verifies_token2wav_and_shows_regions_rewrites_and_graphs(
    fakes: Fakes, run: RunCli, capsys: Capture, tmp_path: Path
) -> None:
    assert run("demo", "--device", "cpu", "--out", str(tmp_path), "--json", str(tmp_path / "demo.json")) == 0
    assert fakes.calls["verify"][0] == "token2wav"
    printed = capsys.readouterr().out
    for text in (
        "generator equal",
        "solver_kv",
        "shapes compiled, by extents of kv/mel: 1",
        "rewrites made: 1",
        "rewrites declined: 1",
        "00_traced.py",
    ):
        assert text in printed
    assert list(json.loads((tmp_path / "demo.json").read_text())) == ["verify", "explain", "graphs"]


def test_demo_with_a_difference_shows_everything_and_exits_with_1(fakes: Fakes, run: RunCli, tmp_path: Path) -> None:
    fakes.result = FakeResult(ok=False, module=fakes.result.module)
    assert run("demo", "--device", "cpu", "--out", str(tmp_path)) == 1
    assert fakes.calls["write"] == tmp_path


def test_bench_prints_cells_and_ratios_and_hands_on_its_options(
    fakes: Fakes, run: RunCli, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    asked = ("--cells", "B0, ours", "--blocks", "5", "--autocast", "float16", "--tf32", "--jobs", "2", "-o", "steps=5")
    assert run("bench", "token2wav", "--device", "cuda", "--json", "-", *asked) == 0
    target, settings = fakes.calls["bench"]
    assert (target, settings["cells"], settings["blocks"]) == ("token2wav", ["B0", "ours"], 5)
    assert (settings["autocast"], settings["tf32"], settings["jobs"]) == ("float16", True, 2)
    assert settings["options"] == {"steps": 5}
    captured = capsys.readouterr()
    assert list(json.loads(captured.out)) == ["cells", "ratios"]
    for text in (
        "p50 B0/ours: 4.000 [3.900, 4.100]",
        "ours differs from B0 in block 1: outputs from chunk 3 on",
        "SRc: no such device",
        "4.00 [3.90, 4.10]",
        "DIFFERENT",
        "120 replays",
    ):
        assert text in captured.err


def test_graph_writes_into_the_folder_asked_for(fakes: Fakes, run: RunCli, capsys: Capture, tmp_path: Path) -> None:
    assert run("graph", "token2wav", "--device", "cpu", "--out", str(tmp_path), "--json") == 0
    assert json.loads(capsys.readouterr().out)["files"][0] == str(tmp_path / "00_traced.py")
    assert fakes.calls["write"] == tmp_path


# ------------------------------------------------------------------------------------------ usage
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("verify", "token2wave"), "no family is called 'token2wave' (did you mean 'token2wav'?); expected one of"),
        (("verify", "token2wav", "-o", "step=5"), "token2wav has no option 'step' (did you mean 'steps'?)"),
        (("verify", "token2wav", "-o", "5"), "--option '5': write NAME=VALUE"),
        (("verify", "token2wav", "--device", "gpu"), "--device 'gpu': expected cpu, cuda or cuda:N"),
        (("verify", "token2wav", "--device", "cuda:99"), "--device cuda:99: torch"),
        (("bench", "token2wav", "--device", "cpu", "--profile"), "--profile needs a CUDA device: a CPU has no kernels"),
        (("verify", "token2wav", "--json", "no/such/folder/x.json"), "there is no folder no/such/folder"),
        (("verify", "json:no_such"), "json has no 'no_such'"),
        (("verify", "no_such_module:make"), "needs the module 'no_such_module'"),
        (("verify",), "Missing argument"),
        (("verify", "token2wav", "--chunks", "0"), "--chunks"),
        (("proof", "token2wav"), "No such command"),
        (("prove", "token2wav", "--operators", "exp"), "give a TARGET or --operators, not both"),
        (("prove", "--operators", "exp,silo"), "no operator is called 'silo' (did you mean 'silu'?)"),
        (("prove", "--dtype", "float"), "no dtype is called 'float'"),
    ],
)
def test_wrong_usage_exits_with_2(
    arguments: tuple[str, ...], text: str, fakes: Fakes, run: RunCli, capsys: Capture
) -> None:
    assert run(*arguments) == 2
    assert text in capsys.readouterr().err
    assert not fakes.calls


def test_version(run: RunCli, capsys: Capture) -> None:
    assert run("--version") == 0
    assert capsys.readouterr().out == f"cadence-fx {cadence_fx.__version__}\n"


@pytest.mark.parametrize(
    ("given", "completed"),
    [
        (["--json"], ["--json", "-"]),
        (["--json", "--seed", "1"], ["--json", "-", "--seed", "1"]),
        (["--json", "-"], ["--json", "-"]),
        (["--json", "out.json", "x"], ["--json", "out.json", "x"]),
        ([], []),
    ],
)
def test_json_without_a_file_means_standard_output(given: list[str], completed: list[str]) -> None:
    assert cli.complete_json(given) == completed


# ------------------------------------------------------------------------------------------ cells
def test_cells_read_as_people_write_them() -> None:
    assert [size(n) for n in (0, 1023, 1024, 3 << 19, 5 << 30)] == ["0 B", "1023 B", "1.0 KiB", "1.5 MiB", "5.0 GiB"]
    assert extents((302, 352, 402)) == "302, 352, 402"
    assert extents(range(2, 57, 2)) == "2..56 (28)"
    assert [cell("rho", 3.5), cell("W", None), cell("stock bytes", 2048), cell("K", 3)] == ["3.50", "-", "2.0 KiB", "3"]


# ------------------------------------------------------------------------------------------ notes
def test_rewrites_that_are_alike_are_told_once_with_their_places_below() -> None:
    line = "/somewhere/site-packages/vendor/flow/decoder.py:82 in forward"
    assert list(
        rewrite_lines(
            [
                Change("eliminate_dead", "removed", "aten.add.Tensor", "nothing reads it", count=2),
                Change("hoist_constants", "hoisted", "constant", "it never changes", line, 72),
                Change("eliminate_dead", "removed", "aten.mul.Tensor", "nothing reads it"),
                Change("ring_writeback", "writeback", "kv", "all in place"),
                Change("ring_writeback", "writeback", "mel", "1 copy"),
            ]
        )
    ) == [
        "eliminate_dead: removed 3: nothing reads it",
        "  2 x aten.add.Tensor, 1 x aten.mul.Tensor",
        "hoist_constants: hoisted 72: it never changes",
        "  72 x constant [vendor/flow/decoder.py:82 in forward]",
        "ring_writeback: writeback 2",
        "  1 x kv: all in place",
        "  1 x mel: 1 copy",
    ]


def test_a_hint_is_told_once_for_all_places_that_share_it() -> None:
    left = [Rejection("CX901", "pass", f"cat_{i}", "a reader", ("move it",), "/a/b/c/d.py:1 in f") for i in range(2)]
    assert list(rejection_lines(left)) == [
        "CX901 (pass)",
        "  cat_0: a reader [b/c/d.py:1 in f]",
        "  cat_1: a reader [b/c/d.py:1 in f]",
        "  hint: move it",
    ]


def test_a_compiled_shape_says_what_became_of_its_capture() -> None:
    refusal = {"code": "CX601", "reason": "bits differ", "detail": "at 0", "difference": None}
    whole = {"captured": True, "segments": [], "measured_bytes": 2048, "refusals": []}
    cut = {**whole, "segments": [{"captured": True}, {"captured": False}], "refusals": [refusal]}
    assert list(class_lines([compiled(), compiled(whole), compiled(cut), compiled({**whole, "captured": False})])) == [
        "  chunk at 402/8: 90 -> 60 operators",
        "  chunk at 402/8: 90 -> 60 operators, captured with 2,048 bytes",
        "  chunk at 402/8: 90 -> 60 operators, captured in 1 of 2 segments with 2,048 bytes; bits differ: at 0",
        "  chunk at 402/8: 90 -> 60 operators, not captured",
    ]


def test_no_line_of_notes_or_regions_is_too_long_to_read(capsys: Capture) -> None:
    changes = [Change("eliminate_dead", "removed", f"aten.operator_{i}.default", "dead") for i in range(60)]
    assert max(map(len, rewrite_lines(changes))) <= MAX_WIDTH
    Show(None).regions(FakeReport([Row(reason="a" * 120), Row(region="other", reason="a" * 120)]))
    printed = capsys.readouterr().out
    assert "\n  solver_kv, other: " + "a" * 120 in printed
    assert max(map(len, printed.splitlines())) <= MAX_WIDTH


# ------------------------------------------------------------------------------------------ tables
@pytest.mark.parametrize(
    ("columns", "ruled", "reason_below"), [(70, False, True), (110, True, True), (130, True, False)]
)
def test_no_cell_is_broken_whatever_the_terminal_is_wide(
    columns: int, ruled: bool, reason_below: bool, capsys: Capture
) -> None:
    show = Show(None)
    show.console = Console(force_terminal=True, width=columns, soft_wrap=True, color_system=None, highlight=False)
    show.regions(FakeReport([Row(), Row(region="text_kv", verdict="exclude", reason="wider than 8")]))
    printed = capsys.readouterr().out
    assert ("━" in printed) == ruled
    assert ("\n  text_kv: wider than 8\n" in printed) == reason_below
    assert "302, 352, 402" in printed
    assert "…" not in printed
