"""The benchmark: cells measured one after another, each in a process of its own, over matched blocks.

A block is one stream with a seed: every cell plays the same streams, and what a block's seed shares between two cells
drops out of their ratio. Cells are prepared side by side, since compiling takes minutes, and measured alone, also
where several benchmarks run on one machine.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal

import torch

from cadence_fx.bench_cells import all_cells, find_cell
from cadence_fx.bench_process import WorkerFailed, WorkerProcess
from cadence_fx.bench_protocol import Measured, Spec
from cadence_fx.bench_result import STOCK, BenchResult, CellResult
from cadence_fx.bench_turns import measuring, preparing
from cadence_fx.errors import CadenceError
from cadence_fx.families import load
from cadence_fx.machine import command_line

__all__ = ["BenchResult", "CellResult", "Event", "Progress", "bench", "cell_names"]

PREPARED_ALONE = "ours"  # so that its seconds of preparation are those of a machine that does nothing else


@dataclass(frozen=True)
class Event:
    """Something that happened to a cell; ``text`` is the error of one that failed."""

    cell: str
    what: Literal["preparing", "ready", "measuring", "block", "done", "failed"]
    text: str = ""


Progress = Callable[[Event], None]


def bench(
    target: str,
    *,
    device: str,
    chunks: int = 40,
    blocks: int = 4,
    seed: int = 0,
    cells: Sequence[str] | None = None,
    options: Mapping[str, Any] | None = None,
    autocast: str | None = None,
    tf32: bool = True,
    jobs: int | None = None,
    timeout: float = 1800.0,
    prepare_within: float | None = None,
    save: Callable[[BenchResult], None] | None = None,
    progress: Progress | None = None,
) -> BenchResult:
    """Measure cells of a target.

    Args:
        target: a family or ``package.module:factory``.
        device: of the decoder.
        chunks: of each block.
        blocks: matched blocks; four or more for an interval that means something.
        seed: of the weights; block i plays a stream of seed ``seed + 1 + i``.
        cells: names; all that this version has by default. Stock is always among them, and first.
        options: of the target.
        autocast: name of a dtype: every call of every cell runs under ``torch.autocast`` of it.
        tf32: leave torch's defaults for TF32 (in convolutions, not in products), or turn it off.
        jobs: cells that are prepared at the same time. With 1 no process waits beside the one that is measured.
        timeout: seconds for each cell to prepare, and again to measure.
        prepare_within: seconds for all cells together to prepare; what is ready by then is measured.
        save: called with the result so far after each cell, so that an interruption loses little.
        progress: called with what happens.

    Raises:
        CadenceError: the target, an option, a cell or the dtype does not exist. A cell that fails is no error: its
            result says why.
    """
    _checked(target, options or {}, autocast)
    names = cell_names(cells)
    found = {name: find_cell(name) for name in names}
    spec = Spec(target, STOCK, device, chunks, blocks, seed, dict(options or {}), autocast, tf32)
    say = progress if progress is not None else lambda event: None
    together = jobs or _jobs(device)
    run = _Run({name: dataclasses.replace(spec, cell=name) for name in names}, timeout, say, together)
    command = command_line(sys.argv[1:])

    def result() -> BenchResult:
        rows = (
            CellResult(name, cell.title, run.measured.get(name), run.errors.get(name, ""))
            for name, cell in found.items()
        )
        return BenchResult(spec, tuple(rows), command)

    def measure(name: str) -> None:
        run.measure(name)
        if save is not None:
            save(result())

    with ExitStack() as stack:
        stack.callback(run.close)
        if together < 2:
            for name in names:
                with preparing():
                    run.start(name)
                    run.prepare(name)
                with measuring():
                    measure(name)
        else:
            with preparing():
                run.prepare_all(prepare_within)
            with measuring():
                for name in names:
                    measure(name)
    return result()


def cell_names(cells: Sequence[str] | None) -> list[str]:
    """The names asked for, all by default; stock is always among them, and first."""
    return list(dict.fromkeys([STOCK, *(all_cells() if cells is None else cells)]))


def _checked(target: str, options: Mapping[str, Any], autocast: str | None) -> None:
    """Mistakes in the arguments are found here and not once in every process."""
    load(target, **options)
    if autocast is not None and not isinstance(getattr(torch, autocast, None), torch.dtype):
        raise CadenceError(f"autocast is {autocast!r}; expected the name of a dtype, as float16 or bfloat16")


def _jobs(device: str) -> int:
    """Half of the cores, eight at most; on a CPU the cells would take each other's cores."""
    return 1 if torch.device(device).type == "cpu" else max(1, min(8, (os.cpu_count() or 1) // 2))


class _Run:
    """The processes of one run, by cell."""

    def __init__(self, specs: Mapping[str, Spec], timeout: float, say: Progress, jobs: int) -> None:
        self.specs, self.timeout, self.say, self.jobs = specs, timeout, say, jobs
        # Each process would start a thread for every core, and they would take each other's.
        self.threads = None if jobs < 2 else max(1, (os.cpu_count() or 1) // jobs)
        self.workers: dict[str, WorkerProcess] = {}
        self.measured: dict[str, Measured] = {}
        self.errors: dict[str, str] = {}

    def start(self, name: str) -> None:
        self.say(Event(name, "preparing"))
        self.workers[name] = WorkerProcess(self.specs[name], self.timeout, self.threads)

    def prepare(self, name: str, end: float | None = None) -> None:
        """Wait until a started cell is ready or has failed, until ``end`` of the monotonic clock at most."""
        try:
            self.workers[name].prepare(end)
            self.say(Event(name, "ready"))
        except WorkerFailed as error:
            self._failed(name, error)

    def prepare_all(self, within: float | None) -> None:
        """Prepare every cell, some of them at a time; those that are not ready within the seconds given fail.

        Without a limit the product goes first, alone.
        """
        end = None if within is None else time.monotonic() + within
        names = deque(self.specs)
        if PREPARED_ALONE in names and end is None:
            names.remove(PREPARED_ALONE)
            self.start(PREPARED_ALONE)
            self.prepare(PREPARED_ALONE, end)
        started = deque[str]()
        while names or started:
            while names and len(started) < self.jobs:
                started.append(names.popleft())
                self.start(started[-1])
            self.prepare(started.popleft(), end)

    def measure(self, name: str) -> None:
        """Measure a cell that is ready, and end its process."""
        if name in self.errors:
            return
        self.say(Event(name, "measuring"))
        try:
            self.measured[name] = self.workers[name].measure(lambda: self.say(Event(name, "block")))
        except WorkerFailed as error:
            self._failed(name, error)
        else:
            self.workers[name].close()
            self.say(Event(name, "done"))

    def _failed(self, name: str, error: WorkerFailed) -> None:
        self.errors[name] = str(error)
        self.workers[name].close()
        self.say(Event(name, "failed", str(error)))

    def close(self) -> None:
        for worker in self.workers.values():
            worker.close()
