"""What the benchmark found: per cell medians, peaks and equality of bits; ratios with paired intervals."""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cadence_fx.bench_protocol import Block, Measured, Spec
from cadence_fx.bench_stats import Ratio, paired_ratio, quantile

__all__ = ["STOCK", "BenchResult", "CellResult"]

STOCK = "B0"
_MIB = 1 << 20


@dataclass(frozen=True)
class CellResult:
    """One cell, measured, or the reason why it is not."""

    name: str
    title: str
    measured: Measured | None = None
    error: str = ""

    @property
    def blocks(self) -> list[Block]:
        return [] if self.measured is None else self.measured.blocks

    def steady(self, times: Sequence[float]) -> Sequence[float]:
        """A block's times without the chunks at its start whose state still grows; at least the last one."""
        growing = 0 if self.measured is None else self.measured.growing
        return times[min(growing, max(len(times) - 1, 0)) :]

    def block_quantiles(self, share: float, on_device: bool = False) -> list[float]:
        """Of the steady chunks of each block, in ms; empty where nothing was measured."""
        times = [block.device_ms if on_device else block.wall_ms for block in self.blocks]
        return [quantile(self.steady(values), share) for values in times if values]

    def milliseconds(self, share: float, on_device: bool = False) -> float | None:
        """The median over blocks of that quantile."""
        found = self.block_quantiles(share, on_device)
        return statistics.median(found) if found else None

    def differences(self, stock: CellResult) -> list[str]:
        """Where the bits are not stock's, one text a block; empty if all are equal."""
        pairs = enumerate(zip(stock.blocks, self.blocks, strict=True))
        return [f"block {i}: {_difference(a, b)}" for i, (a, b) in pairs if a.bits != b.bits]

    def to_dict(self, stock: CellResult) -> dict[str, Any]:
        m, comparable = self.measured, bool(self.blocks and stock.blocks)
        differences = self.differences(stock) if comparable else []
        row: dict[str, Any] = {
            "title": self.title,
            "error": self.error or None,
            "p50_ms": self.milliseconds(0.5),
            "p95_ms": self.milliseconds(0.95),
            "device_p50_ms": self.milliseconds(0.5, on_device=True),
            "peak_mib": _mib(m.peak_bytes) if m else None,
            "serving_peak_mib": _mib(m.serving_peak_bytes) if m else None,
            "reserved_mib": _mib(m.reserved_bytes) if m else None,
            "build_seconds": round(m.build_seconds, 2) if m else None,
            "prepare_seconds": round(m.prepare_seconds, 2) if m else None,
            "bits_equal": not differences if comparable else None,
            "differences": differences,
            "sha256": _sha256(self.blocks) if m else None,
            "ran": _total(block.ran for block in self.blocks),
            "stats": m.stats if m else {},
        }
        p50, p95 = self.block_quantiles(0.5), self.block_quantiles(0.95)
        row["blocks"] = [
            {"p50_ms": p50[i], "p95_ms": p95[i], **vars(block)} for i, block in enumerate(self.blocks)
        ]  # fmt: skip
        return row


@dataclass(frozen=True)
class BenchResult:
    """All cells of one run; `to_dict` is the JSON of ``cadence-fx bench``.

    Args:
        spec: of stock's process; those of the other cells differ in the cell.
        cells: in the order in which they were measured, stock first.
        command: the command line of the run.
    """

    spec: Spec
    cells: tuple[CellResult, ...]
    command: str = ""

    def __getitem__(self, name: str) -> CellResult:
        return next(cell for cell in self.cells if cell.name == name)

    @property
    def ok(self) -> bool:
        """Stock was measured."""
        return bool(self[STOCK].blocks)

    def ratio(self, above: str, below: str) -> Ratio | None:
        """Of the blocks' medians; None where one of the two was not measured."""
        found = {cell.name: cell.block_quantiles(0.5) for cell in self.cells}
        if not found.get(above) or not found.get(below):
            return None
        return paired_ratio(found[above], found[below])

    def ratios(self) -> dict[str, dict[str, Any]]:
        """Stock's time over each cell's, each cell's peak over stock's, and plain capture against the product."""
        found: dict[str, dict[str, Any]] = {}
        names = [cell.name for cell in self.cells if cell.name != STOCK]
        for above, below in [*((STOCK, name) for name in names), ("SRc", "ours"), ("SRc", "ours_chain")]:
            if (ratio := self.ratio(above, below)) is not None:
                found[f"p50 {above}/{below}"] = ratio.to_dict()
        stock = self[STOCK].measured
        for name in names:
            m = self[name].measured
            if m is not None and stock is not None and stock.peak_bytes and stock.serving_peak_bytes:
                found[f"peak {name}/{STOCK}"] = {"ratio": m.peak_bytes / stock.peak_bytes}
                found[f"serving peak {name}/{STOCK}"] = {"ratio": m.serving_peak_bytes / stock.serving_peak_bytes}
        return found

    def to_dict(self) -> dict[str, Any]:
        stock = self[STOCK]
        measured = [cell.measured for cell in self.cells if cell.measured is not None]
        spec = vars(self.spec) | {"options": dict(self.spec.options)}
        return {
            "command": self.command,
            **{name: value for name, value in spec.items() if name != "cell"},
            "growing": measured[0].growing if measured else None,
            "environment": measured[0].environment if measured else {},
            "cells": {cell.name: cell.to_dict(stock) for cell in self.cells},
            "ratios": self.ratios(),
        }


def _difference(stock: Block, found: Block) -> str:
    """What differs in a block and, of the outputs, from which chunk on."""
    parts = []
    if stock.output_sha256 != found.output_sha256:
        pairs = zip(stock.chunk_sha256, found.chunk_sha256, strict=True)
        first = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        parts.append("outputs" if first is None else f"outputs from chunk {first} on")
    if stock.state_sha256 != found.state_sha256:
        parts.append("state")
    if stock.generator_sha256 != found.generator_sha256:
        parts.append("generators")
    return ", ".join(parts)


def _total(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Counts by name, those that are 0 included."""
    found: dict[str, int] = {}
    for count in counts:
        for name, number in count.items():
            found[name] = found.get(name, 0) + number
    return found


def _sha256(blocks: Sequence[Block]) -> str:
    """One digest over all blocks' outputs and states."""
    joined = "".join(block.output_sha256 + block.state_sha256 for block in blocks)
    return hashlib.sha256(joined.encode()).hexdigest()


def _mib(count: int) -> float | None:
    return round(count / _MIB, 1) if count else None  # nothing counts on a CPU
