"""Every cell of the benchmark on a real device: it captures what it says, and its bits are stock's."""

from __future__ import annotations

from typing import Any

import pytest

from cadence_fx.bench import bench
from tests.bench_target import TARGET

pytestmark = pytest.mark.gpu
CELLS = ["B0", "B0b", "S", "R", "Rc", "SR", "SRc", "ours_chain", "ours_host", "ours"]
CHUNKS = 12  # of two blocks of six


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return bench(TARGET, device="cuda", chunks=6, blocks=2, cells=CELLS, timeout=300).to_dict()


@pytest.mark.parametrize(
    ("name", "ran"),
    [
        ("B0", {}),
        ("B0b", {}),
        ("S", {"stock": CHUNKS}),
        ("R", {"replays": 2 * CHUNKS}),  # two solver steps
        ("Rc", {"replays": CHUNKS}),
        ("SR", {"replays": CHUNKS}),
        ("SRc", {"replays": CHUNKS}),
        ("ours_chain", {"replays": CHUNKS}),
        ("ours_host", {"replays": CHUNKS}),
        ("ours", {"replays": CHUNKS}),
    ],
)
def test_a_cell_runs_as_it_says_with_stocks_bits(found: dict[str, Any], name: str, ran: dict[str, int]) -> None:
    cell = found["cells"][name]
    assert cell["error"] is None
    assert {how: count for how, count in cell["ran"].items() if count} == ran, cell["stats"]
    assert cell["bits_equal"] is True, cell["differences"]
    assert cell["device_p50_ms"] > 0
    assert cell["peak_mib"] > 0


def test_the_environment_names_device_and_driver(found: dict[str, Any]) -> None:
    assert all(found["environment"][name] for name in ("device", "driver", "cuda", "cudnn"))
