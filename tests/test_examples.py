"""The examples run as a reader runs them, and print what they claim."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXPECTED = {
    "walkthrough.py": (
        "kv: reads [6, 8, 10] rows, never holds more than 12, so 3 shapes",
        "ring_writeback: read in place concatenation (2x): its rows are adjacent in the region",
        "left alone: nothing",
        "output and state are equal in every bit",
        "the state was at 1 address\n",
        "10 calls: 10 from the plan, 0 as stock",
    ),
    "own_decoder.py": ("1 frames  plan   output True, state True", "equal in every bit: True; 18 signatures"),
    "wrong_contract.py": (
        "clock is None; dim and clock go together",
        "row 0 of the new state is old row 2 in the traced module, but order='new_first'",
        "the module leaves shape [1, 8, 32], the contract says",
        "with Window(length=8, high=None, side='head') says old row 0",
        "3 from the plan, as stock: {'signature not in the catalog': 1}",
    ),
}


def test_every_example_is_tested() -> None:
    assert {path.name for path in (ROOT / "examples").glob("*.py")} == set(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_an_example_runs_alone_and_prints_what_it_claims(name: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-W", "error", str(ROOT / "examples" / name)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    printed = " ".join(ran.stdout.split()) + "\n"
    for text in EXPECTED[name]:
        assert " ".join(text.split()) in printed


@pytest.mark.parametrize("name", EXPECTED)
def test_an_example_is_short_enough_to_read(name: str) -> None:
    assert len((ROOT / "examples" / name).read_text().splitlines()) <= 120
