"""Turns of benchmarks on one machine: many prepare at the same time, one measures, and nobody prepares meanwhile."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["measuring", "preparing"]


def _place() -> Path:
    return Path(tempfile.gettempdir()) / f"cadence_fx-bench-{os.getuid()}.lock"


@contextmanager
def _held(kind: int, place: Path | None) -> Iterator[None]:
    with open(place or _place(), "w") as file:
        fcntl.flock(file, kind)  # let go when the file is closed, also by a process that dies
        yield


@contextmanager
def preparing(place: Path | None = None) -> Iterator[None]:
    """Waits while another benchmark measures, and holds up those that want to."""
    with _held(fcntl.LOCK_SH, place):
        yield


@contextmanager
def measuring(place: Path | None = None) -> Iterator[None]:
    """Waits until no other benchmark prepares or measures."""
    with _held(fcntl.LOCK_EX, place):
        yield
