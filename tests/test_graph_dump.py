"""Kernel lists: names as the profiler prints them, and a difference between graph and run is told."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from cadence_fx import captures as captures_module
from cadence_fx.graph_dump import demangled
from tests.test_captures import captured, play


@pytest.mark.parametrize(
    ("symbol", "text"),
    [("_Z3addPfS_i", "add(float*, float*, int)"), ("plain_name", "plain_name"), ("_Zbroken", "_Zbroken")],
)
def test_symbols_are_printed_as_the_profiler_prints_them(symbol: str, text: str) -> None:
    assert demangled(symbol) == text


def test_equal_lists_have_no_difference_and_others_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    _, fast, backend = captured()
    fast.warmup("steady")
    launched = Counter({"gemm": 3, "memset": 1})
    monkeypatch.setattr(captures_module, "launch_counts", lambda run, device: run() and launched)
    assert fast.kernel_difference() is None  # this backend cannot read its graphs
    backend.listed = Counter(launched)
    assert fast.kernel_difference() == {}
    backend.listed = Counter({"gemm": 2, "split_k": 1, "memset": 1})
    assert fast.kernel_difference() == {"gemm": (2, 3), "split_k": (1, 0)}


def test_looking_at_kernels_leaves_live_state_and_generators_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    module, fast, backend = captured()
    fast.warmup("steady")
    assert play(module, fast, [2, 2, 2])
    before = {name: buffer.tensor.clone() for name, buffer in fast.memory.buffers.items()}
    position = backend.position()
    backend.listed = Counter()
    monkeypatch.setattr(captures_module, "launch_counts", lambda run, device: run() and Counter())
    assert fast.kernel_difference() == {}
    assert all(torch.equal(before[name], buffer.tensor) for name, buffer in fast.memory.buffers.items())
    assert torch.equal(position, backend.position())
