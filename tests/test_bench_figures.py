"""The picture and the README's block, from the JSON of a run that never was."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from cadence_fx import bench_figures
from cadence_fx.bench_plot import draw

ROOT = Path(__file__).parents[1]


def row(title: str, p50: float | None, peak: float | None, **changes: Any) -> dict[str, Any]:
    p95 = None if p50 is None else p50 + 2
    found = {"title": title, "error": None, "p50_ms": p50, "p95_ms": p95, "peak_mib": peak, "bits_equal": True}
    found["serving_peak_mib"] = None if peak is None else peak - 500
    return {**found, **changes}


@pytest.fixture
def found() -> dict[str, Any]:
    cells = {
        "B0": row("stock", 210.0, 3765.0),
        "B0b": row("stock again", 211.0, 3765.0),
        "SRc": row("capture", None, None, bits_equal=None, error="no such device\nmore"),
        "padded": row("vendor's graphs", 90.0, 4000.0, bits_equal=False),
        "ours": row("cadence_fx", 50.0, 2000.0),
    }
    ratio = {"ratio": 4.2, "low": 4.1, "high": 4.3, "blocks": 4}
    return {
        "command": "cadence-fx bench token2wav", "target": "token2wav", "chunks": 40, "blocks": 4, "options": {},
        "autocast": None, "tf32": False, "cells": cells,
        "environment": {"device": "NVIDIA H200", "driver": "570", "torch": "2.11", "cudnn": 91002},
        "ratios": {"p50 B0/ours": ratio, "peak ours/B0": {"ratio": 0.53}},
    }  # fmt: skip


def test_the_table_has_every_cell_but_the_checks_of_the_benchmark_itself(found: dict[str, Any]) -> None:
    text = bench_figures.block([found])
    assert "| `B0` | stock | 210.0 | 212.0 | 1 | 3,765 | - | 3,265 | equal |" in text
    assert "| `ours` | cadence_fx | 50.0 | 52.0 | 4.20 [4.10, 4.30] | 2,000 | 53 % | 1,500 | equal |" in text
    assert "| `padded` | vendor's graphs | 90.0 | 92.0 | - | 4,000 | - | 3,500 | differ |" in text
    assert "| `SRc` | capture | - | - | - | - | - | - | fails: no such device |" in text
    assert "B0b" not in text
    assert "NVIDIA H200, driver 570, torch 2.11" in text


def test_each_other_result_is_a_row_of_a_second_table(found: dict[str, Any]) -> None:
    fewer = {**copy.deepcopy(found), "options": {"n_timesteps": 5}, "autocast": "float16"}
    text = bench_figures.block([found, fewer])
    assert "| as above | 210.0 | 50.0 | 4.20 [4.10, 4.30] | 53 % | equal |" in text
    assert "| n_timesteps=5, autocast float16 | 210.0 | 50.0 |" in text


def test_the_command_rewrites_the_block_and_nothing_else(found: dict[str, Any], tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("before\n<!-- bench:begin -->\nold\n<!-- bench:end -->\nafter \\1\n")
    (tmp_path / "one.json").write_text(json.dumps(found))
    with pytest.raises(SystemExit):  # no file is named yet
        bench_figures.main([str(readme)])
    assert bench_figures.main([str(readme), "one.json", "--check"]) == 1
    assert "old" in readme.read_text()
    assert bench_figures.main([str(readme), "one.json"]) == 0
    text = readme.read_text()
    assert text.startswith("before\n<!-- bench:begin one.json -->\n")
    assert text.endswith("\n<!-- bench:end -->\nafter \\1\n")
    assert bench_figures.named_files(text) == ["one.json"]
    assert bench_figures.main([str(readme), "--check"]) == 0  # the files are those of the block
    with pytest.raises(ValueError, match="no <!-- bench:begin"):
        bench_figures.rewritten("nothing here", ["one.json"], [found])


def test_the_readme_shows_what_the_committed_results_say() -> None:
    readme = ROOT / "README.md"
    if not bench_figures.named_files(readme.read_text(encoding="utf-8")):
        pytest.skip("the README has no measured figures yet")
    assert bench_figures.main([str(readme), "--check"]) == 0, "run python -m cadence_fx.bench_figures README.md"


@pytest.mark.parametrize("suffix", ["png", "svg"])
@pytest.mark.parametrize("with_memory", [True, False])
def test_the_picture_names_every_cell(found: dict[str, Any], tmp_path: Path, suffix: str, with_memory: bool) -> None:
    pytest.importorskip("matplotlib")
    if not with_memory:
        for cell in found["cells"].values():
            cell["peak_mib"] = None
    path = tmp_path / f"cells.{suffix}"
    draw(found, path)
    assert path.stat().st_size > 5000
    if suffix == "svg":
        text = path.read_text()
        labels = [
            "ours: cadence_fx",
            "not measured",
            "90.0  (2.33x)  bits differ",
            "token2wav on NVIDIA H200, torch 2.11",
        ]
        assert all(label in text for label in labels)  # matplotlib writes each text as a comment beside its outlines
        assert ("2,000  (53%)" in text) is with_memory
