"""Graphs as files: numbered by pass, readable, and Python that runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from cadence_fx.drop_in import transform
from cadence_fx.dump import record, write
from cadence_fx.module import CadenceModule
from tests.streams import contract, stream


@pytest.fixture(scope="module")
def fast() -> CadenceModule:
    return transform(stream(), contract())


def test_files_are_numbered_in_the_order_of_the_passes(fast: CadenceModule, tmp_path: Path) -> None:
    files = write(fast, tmp_path / "new folder")
    names = [path.name for path in files]
    assert names == sorted(names)
    assert names[0] == "00_before.py"
    assert [name[3:-3] for name in names] == list(record(fast.compiler, fast.steady_signature()))


def test_each_file_runs_and_says_where_its_operators_come_from(fast: CadenceModule, tmp_path: Path) -> None:
    files = write(fast, tmp_path)
    for path in (files[0], files[-1]):
        ran = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, check=False)
        assert ran.returncode == 0, ran.stderr
        assert "(1, 2, 8)" in ran.stdout
    text = files[-1].read_text()
    assert text.startswith('"""stream, call ')
    assert "# tests/streams.py:" in text
    assert "# float32[1, 2, 8]" in text


def test_recording_leaves_the_compiler_as_it_was(fast: CadenceModule) -> None:
    observer = fast.compiler.observer
    record(fast.compiler, fast.steady_signature())
    assert fast.compiler.observer is observer
