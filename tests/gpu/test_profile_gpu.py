"""A profile on a real device: every kernel has its operator, and the timeline is that of a replay."""

from __future__ import annotations

import pytest

from cadence_fx.profile_run import profile_family
from tests.bench_target import TARGET

pytestmark = pytest.mark.gpu


def test_a_steady_chunk_is_profiled_operator_by_operator_and_as_a_replay() -> None:
    profile, found = profile_family(TARGET, device="cuda")
    assert profile.replay is not None
    assert profile.stock is not None
    launched = sum(len(o.kernels) for o in profile.operators)
    assert launched == pytest.approx(len(profile.replay.kernels), rel=0.2)
    assert 0 < profile.critical_ms <= profile.chain_ms
    assert all(part["gamma"] is None or part["gamma"] > 0 for part in found["parts"])
    assert found["stock"]["kernels"] > 0
