"""Proofs that a compiled unary operator gives eager's bits: made by `prove`, kept in `Proofs`.

A compiler may fuse a unary operator only where all 2^16 or 2^32 inputs were compared on this very device, with these
versions and settings. Shipped proofs lie in the package, those that ``cadence-fx prove`` makes in the user's cache.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import fx

from cadence_fx.proving import prove
from cadence_fx.unary import UnaryOperator
from cadence_fx.verdicts import Check, Mismatch, ProofKey, Verdict

__all__ = ["Check", "Mismatch", "ProofKey", "Proofs", "UnaryOperator", "Verdict", "cache_folder", "prove"]

FORMAT = "cadence_fx proofs 1"
SHIPPED = Path(__file__).parent / "data" / "proofs"

_log = logging.getLogger(__name__)


def cache_folder() -> Path:
    """Where a user's proofs are kept: under ``XDG_CACHE_HOME``, or ``~/.cache``."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The convention asks to ignore a relative path, which would mean another folder for each working directory.
    root = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    return root / "cadence_fx" / "proofs"


class Proofs:
    """The complete verdicts that hold under one key.

    Files are read once, when the object is made. A file that was made under another key is passed over; one that cannot
    be read is, too, with a warning in the log of ``cadence_fx.proofs``. Where two files disagree, the one that found a
    difference counts.

    Args:
        key: the circumstances of this process; nothing that was found under others is looked at.
        cache: the user's folder, `cache_folder` by default; it need not exist.
        shipped: the folder of the proofs that come with the package.
    """

    def __init__(self, key: ProofKey, cache: Path | None = None, shipped: Path = SHIPPED) -> None:
        self.key = key
        self.cache = cache_folder() if cache is None else cache
        self._found: dict[UnaryOperator, Verdict] = {}
        for path in (*_files(shipped), *_files(self.cache)):
            for verdict in _read(path, key):
                old = self._found.get(verdict.operator)
                if old is None or old.exact:
                    self._found[verdict.operator] = verdict

    @classmethod
    def on(cls, device: torch.device | str, cache: Path | None = None) -> Proofs:
        """Those that hold on a device in this process."""
        return cls(ProofKey.current(device), cache)

    @property
    def path(self) -> Path:
        """The file in the cache that this key's verdicts are written to."""
        return self.cache / f"{self.key.slug}-{self.key.digest}.json"

    def __iter__(self) -> Iterator[Verdict]:
        return iter(self._found.values())

    def __len__(self) -> int:
        return len(self._found)

    def lookup(self, operator: UnaryOperator) -> Verdict | None:
        """The complete verdict on an operator, which need not be ``exact``, or None if there is none."""
        return self._found.get(operator)

    def proven(self, node: fx.Node) -> bool:
        """True for a node of a flat graph whose operator is exact on every input, whatever its memory's layout."""
        operator = UnaryOperator.of(node)
        verdict = None if operator is None else self._found.get(operator)
        return verdict is not None and verdict.exact

    def add(self, *verdicts: Verdict) -> None:
        """Keep verdicts here and in the cache's file; a later one replaces an earlier one.

        Raises:
            ValueError: a verdict is partial or failed, or was found under another key; nothing is kept then.
            OSError: the file cannot be written; the verdicts are kept in this object.
        """
        for verdict in verdicts:
            if verdict.key != self.key:
                raise ValueError(f"{verdict.operator}: found under another key: {_changed(self.key, verdict.key)}")
            if not verdict.complete:
                raise ValueError(f"{verdict.operator}: {verdict}; only complete verdicts are kept")
        added = {verdict.operator: verdict for verdict in verdicts}
        self._found |= added
        # What another process has written meanwhile stays.
        there = {verdict.operator: verdict for verdict in _read(self.path, self.key)} if self.path.is_file() else {}
        write_proofs(self.path, self.key, (there | added).values())


def write_proofs(path: Path, key: ProofKey, verdicts: Iterable[Verdict]) -> None:
    """Write one file of complete verdicts, whole or not at all.

    Raises:
        OSError: it cannot be written; a file that was there is unchanged.
    """
    rows = [verdict.to_dict() for verdict in sorted(verdicts, key=lambda v: v.operator)]
    text = json.dumps({"format": FORMAT, "key": key.to_dict(), "verdicts": rows}, indent=1) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    # Beside it, since a file can only replace another of its file system in one step.
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".part")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.json")) if folder.is_dir() else []


def _read(path: Path, key: ProofKey) -> list[Verdict]:
    """The complete verdicts of a file; none, with a warning, if it is not one of ours."""
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            raise ValueError(f"its format is {content['format']!r}, not {FORMAT!r}")
        if content["key"] != key.to_dict():
            return []
        verdicts = [Verdict.from_dict(row, key) for row in content["verdicts"]]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        _log.warning("%s is ignored: %s: %s", path, type(error).__name__, error)
        return []
    return [verdict for verdict in verdicts if verdict.complete]


def _changed(expected: ProofKey, found: ProofKey) -> str:
    """Names and values of the fields that differ."""
    mine, theirs = expected.to_dict(), found.to_dict()
    return ", ".join(f"{name} {theirs[name]!r} for {mine[name]!r}" for name in mine if mine[name] != theirs[name])
