"""Starts the process of one cell, waits for what it says, and ends it whatever happens."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Self

from cadence_fx.bench_protocol import GO, Measured, Spec

__all__ = ["WorkerFailed", "WorkerProcess"]

_LINES_OF_ERRORS = 15  # of a process's standard error, in the text of its failure


class WorkerFailed(Exception):
    """A cell's process said that it cannot, ended early or took too long. The text is the cell's error."""


class WorkerProcess:
    """One cell's process. A context manager: the process, and all that it has started, end with the context.

    Args:
        timeout: seconds from the start until ready, and again for measuring.
        threads: that torch may use for one operator on the host; as many as there are cores by default.
    """

    def __init__(self, spec: Spec, timeout: float, threads: int | None = None) -> None:
        self.spec, self.timeout, self._started = spec, timeout, time.monotonic()
        self._errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - lives until close()
        self._said: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        limit = {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "cadence_fx.bench_worker", spec.to_json()],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True,
            start_new_session=True,  # compilers start processes of their own, which must end with it
            env={**os.environ, **limit, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},  # modules as here
        )  # fmt: skip
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._said.put(line)
        self._said.put(None)

    def prepare(self, end: float | None = None) -> float:
        """Wait until the cell is ready, until ``end`` of the monotonic clock at most; seconds that it took.

        Raises:
            WorkerFailed: it cannot be made, or not in time.
        """
        latest = self._started + self.timeout
        return float(self._until("ready", "preparing", latest if end is None else min(latest, end))["seconds"])

    def measure(self, on_block: Callable[[], None]) -> Measured:
        """Let a ready cell measure; ``on_block`` is called after each block.

        Raises:
            WorkerFailed: it failed meanwhile.
        """
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended; what it said last is read below
            self._process.stdin.write(GO + "\n")
            self._process.stdin.flush()
        end = time.monotonic() + self.timeout
        return Measured.from_dict(self._until("result", "measuring", end, on_block)["result"])

    def _until(self, event: str, doing: str, end: float, on_block: Callable[[], None] | None = None) -> dict[str, Any]:
        begin = self._started if event == "ready" else time.monotonic()
        while True:
            try:
                line = self._said.get(timeout=max(0.0, end - time.monotonic()))
            except queue.Empty:
                raise WorkerFailed(f"{doing} took more than {time.monotonic() - begin:.1f} s") from None
            if line is None:
                self._process.wait()
                raise WorkerFailed(f"ended with {self._process.returncode} while {doing}{self._last_errors()}")
            message: dict[str, Any] = json.loads(line)
            if message["event"] == event:
                return message
            if message["event"] == "unavailable":
                raise WorkerFailed(message["text"])
            if message["event"] == "error":
                raise WorkerFailed(f"{message['text']}{self._last_errors()}")
            if on_block is not None:
                on_block()

    def _last_errors(self) -> str:
        self._errors.seek(0)
        lines = self._errors.read().strip().splitlines()[-_LINES_OF_ERRORS:]
        return "".join(f"\n{line}" for line in lines)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process and whatever it has started; a second call does nothing."""
        if self._errors.closed:
            return
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # it is the leader of its own group
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            with suppress(BrokenPipeError):
                stream.close()  # type: ignore[union-attr]
