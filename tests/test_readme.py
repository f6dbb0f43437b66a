"""The README is true: its code runs, and its numbers are those of the command that it names."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import cadence_fx
from cadence_fx.adapters import token2wav
from cadence_fx.cli_show import extents, size

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
SMALL = "depth=2, n_timesteps=2, encoder_blocks=1, up_blocks=1"


def printed(code: str) -> str:
    """Standard output of a script that may not warn."""
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    return ran.stdout


def test_the_contract_of_the_readme_is_consistent() -> None:
    assert printed(BLOCKS[1]).startswith("cadence_fx report: my decoder")


@pytest.mark.vendor
@pytest.mark.slow
def test_the_usage_of_the_readme_runs_at_small_sizes() -> None:
    code = BLOCKS[0].replace('("cpu", seed=0)', f'("cpu", seed=0, vocoder_channels=64, {SMALL})')
    code = code.replace("contract()", f"contract({SMALL})")
    found = printed(code + "print(list(pcm.shape))\n")
    assert "'plan': 3, 'stock': 0" in found
    assert "[1, 24000]" in found


def test_the_memory_table_is_what_explain_prints() -> None:
    report = cadence_fx.explain(None, token2wav.contract())
    for row in re.findall(r"^\| `([a-z_.]+)` \| [\d, ]+ \| \d+ \|.*$", README, re.MULTILINE):
        found = next(r for r in report.regions if r.region == row)
        rho = "-" if found.rho is None else f"{found.rho:.2f}"
        assert (
            f"| `{row}` | {extents(found.attended)} | {found.envelope} | {size(found.bytes or 0)} "
            f"| {size(found.reserved_bytes or 0)} | {rho} |" in README
        )
    assert f"| {report.state_bytes:,} | {report.reserved_bytes:,} | {report.rho:.2f} |" in README
    assert README.count("| 302, 352, 402 | 458 |") == 4


def test_every_file_that_the_readme_names_is_there() -> None:
    layout = README.split("## Layout")[1].split("```")[1]
    core = [line for line in layout.splitlines() if line.startswith("  ")]
    for line in core:
        for name in re.split(r",? +", line.strip().split("  ")[0]):
            assert (ROOT / "cadence_fx" / f"{name}.py").is_file(), name
    assert all((ROOT / name).is_file() for name in re.findall(r"examples/\w+\.py", README))
    assert len(README.splitlines()) <= 230
