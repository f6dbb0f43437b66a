"""Profiles: kernels are attributed to operators, sums follow from the timeline, and tables and pictures show them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx
from torch._C._autograd import DeviceType

from cadence_fx.cli_bench import show_profile
from cadence_fx.cli_show import Show
from cadence_fx.device_trace import MARK, Kernel, Timeline, counted
from cadence_fx.errors import CadenceError
from cadence_fx.profile import OUTSIDE, OperatorTime, Profile, attributed
from cadence_fx.profile_run import draw_timelines


@dataclass
class Event:
    """One event of torch's profiler; times in nanoseconds."""

    label: str
    start: int
    duration: int
    device: Any = DeviceType.CPU
    correlation: int = 0
    linked: int = 0

    def name(self) -> str:
        return self.label

    def start_ns(self) -> int:
        return self.start

    def duration_ns(self) -> int:
        return self.duration

    def device_type(self) -> Any:
        return self.device

    def correlation_id(self) -> int:
        return self.correlation

    def linked_correlation_id(self) -> int:
        return self.linked


def nodes() -> list[fx.Node]:
    graph = fx.Graph()
    x = graph.placeholder("x")
    y = graph.call_function(torch.ops.aten.linear.default, (x, x))
    y.meta["where"], y.meta["source"] = (("solver.step", 3), ("block", 0)), "dit.py:12"
    z = graph.call_function(torch.ops.aten.relu.default, (y,))
    return [x, y, z]


def test_kernels_belong_to_the_operator_that_launched_them_whenever_they_ran() -> None:
    gpu = DeviceType.CUDA
    events = [
        Event(f"{MARK}1", 0, 100), Event("aten::addmm", 10, 80, correlation=7),
        Event(f"{MARK}2", 200, 50), Event("aten::relu", 210, 30, correlation=8),
        Event("gemm", 150, 5000, gpu, 101, 7), Event("bias", 5200, 1000, gpu, 102, 7),
        Event("relu", 6300, 2000, gpu, 103, 8), Event("before any operator", 1, 9, gpu, 104, 99),
        Event(f"{MARK}1", 150, 6000, gpu),  # the range as the device saw it
    ]  # fmt: skip
    found = attributed(nodes(), events)
    assert [(o.target, o.part, o.microseconds, o.kernels) for o in found] == [
        ("aten.linear.default", "solver.step", 6.0, ("gemm", "bias")),
        ("aten.relu.default", OUTSIDE, 2.0, ("relu",)),
    ]
    assert found[0].source == "dit.py:12"


def test_a_timeline_knows_span_busy_time_and_what_ran_side_by_side() -> None:
    found = Timeline((Kernel("a", 0, 1000, 1), Kernel("b", 500, 1000, 2), Kernel("c", 3000, 500, 1)))
    assert (found.span_ms, found.busy_ms, found.sum_ms) == (3.5, 2.0, 2.5)
    assert found.to_dict() == {
        "kernels": 3, "span_ms": 3.5, "busy_ms": 2.0, "idle_ms": 1.5, "sum_ms": 2.5, "streams": 2,
    }  # fmt: skip
    assert Timeline(()).span_ms == 0.0


def test_fills_and_copies_are_counted_as_a_graph_counts_its_nodes() -> None:
    kernels = [Kernel(n, 0, 1, 0) for n in ("Memset (Device)", "Memcpy DtoD (Device -> Device)", "gemm", "gemm")]
    assert counted(kernels) == {"memset": 1, "memcpy": 1, "gemm": 2}


def profile() -> Profile:
    operators = (
        OperatorTime("a", "aten.linear.default", "", "encoder", 3000.0, ("gemm", "bias"), 1000.0),
        OperatorTime("b", "aten.linear.default", "", "solver", 5000.0, ("gemm",), 2000.0),
        OperatorTime("c", "aten.add.Tensor", "", "solver", 1000.0, ("add",), 0.0),
    )
    replay = Timeline((Kernel("gemm", 10, 4000, 1), Kernel("add", 4110, 4000, 2)))
    stock = Timeline(tuple(Kernel("gemm", 9000.0 * i, 3000, 1) for i in range(4)))
    return Profile(operators, ("a", "b"), replay, stock)


def test_parts_have_their_slack_over_the_roofline_and_their_share_of_the_critical_path() -> None:
    found = profile().to_dict()
    assert [p["part"] for p in found["parts"]] == ["solver", "encoder"]
    assert found["parts"][0] == {
        "part": "solver", "operators": 2, "kernels": 2, "chain_ms": 6.0, "critical_ms": 5.0, "bound_ms": 2.0,
        "gamma": 3.0,
    }  # fmt: skip
    assert (found["chain_ms"], found["critical_ms"]) == (9.0, 8.0)
    assert found["times_critical"] == pytest.approx(8.1 / 8.0)
    assert found["by_target"][0] == ("aten.linear.default", 2, 8.0)
    assert found["by_kernel"][0] == ("gemm", 2, 6.5)
    json.dumps(found)


def test_the_table_shows_both_runs_and_what_takes_most(capsys: pytest.CaptureFixture[str]) -> None:
    show_profile(Show(None), profile().to_dict())
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "stock 4 30.00 12.00 18.00 12.00" in lines
    assert "ours 2 8.10 8.00 0.10 8.00" in lines
    assert "solver 2 2 6.00 5.00 2.00 3.0" in lines
    assert "critical path: 8.00 ms in 2 operators; a replay takes 1.01 times as long" in lines
    assert "operator aten.linear.default 2 8.00" in lines


def test_the_picture_shows_both_timelines_on_one_scale(tmp_path: Path) -> None:
    file = tmp_path / "timeline.png"
    draw_timelines(profile(), file)
    assert file.read_bytes()[:4] == b"\x89PNG"
    with pytest.raises(CadenceError, match="nothing ran on a device"):
        draw_timelines(Profile((), ()), file)
