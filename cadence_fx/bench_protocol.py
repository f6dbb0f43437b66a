"""What the benchmark's parent process and the process of one cell say to each other: values that are JSON lines."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = ["GO", "Block", "Measured", "Spec"]

GO = "go"  # the parent's only word: measure now


@dataclass(frozen=True)
class Spec:
    """What a cell's process is to do.

    Attributes:
        target: of `cadence_fx.families.load`.
        cell: name of a cell, or ``package.module:attribute``.
        seed: of the weights; block i plays a stream of seed ``seed + 1 + i``.
        autocast: name of the dtype under which every call runs, or None.
        tf32: leave torch's defaults for TF32 (in convolutions, not in products), or turn it off.
    """

    target: str
    cell: str
    device: str
    chunks: int
    blocks: int
    seed: int
    options: Mapping[str, Any] = field(default_factory=dict)
    autocast: str | None = None
    tf32: bool = True

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Spec:
        return cls(**json.loads(text))


@dataclass(frozen=True)
class Block:
    """One stream, from its start through all its chunks.

    Attributes:
        wall_ms: of each chunk call, the device idle before and after.
        device_ms: of each, between two events of the device; empty on a CPU.
        chunk_sha256: 16 hex digits for each chunk's outputs.
        output_sha256: over all chunks' outputs.
        state_sha256: of the state after the last chunk, without slots that nothing reads.
        generator_sha256: of the generators' positions after it.
        ran: calls by how they ran, where the module counts that: replays, plan, stock.
    """

    seed: int
    wall_ms: list[float]
    device_ms: list[float]
    chunk_sha256: list[str]
    output_sha256: str
    state_sha256: str
    generator_sha256: str
    ran: dict[str, int] = field(default_factory=dict)

    @property
    def bits(self) -> tuple[str, str, str]:
        """What must be equal for a block to be bit for bit another's."""
        return self.output_sha256, self.state_sha256, self.generator_sha256


@dataclass
class Measured:
    """What a cell's process found.

    Attributes:
        growing: chunks at the start of each stream whose state still grows.
        build_seconds: that building the decoder and drawing its weights took.
        prepare_seconds: from then until the cell was ready: transform, compile, capture, certify.
        prepare_peak_bytes, serving_peak_bytes: the allocator's peaks until ready and from then on; 0 on a CPU.
        reserved_bytes: the most that the allocator held from the device, pools of captured graphs included.
        stats: the module's own counters at the end.
        environment: device, driver, versions, flags.
    """

    growing: int = 0
    build_seconds: float = 0.0
    prepare_seconds: float = 0.0
    prepare_peak_bytes: int = 0
    serving_peak_bytes: int = 0
    reserved_bytes: int = 0
    blocks: list[Block] = field(default_factory=list)
    stats: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)

    @property
    def peak_bytes(self) -> int:
        """The allocator's peak of the whole process."""
        return max(self.prepare_peak_bytes, self.serving_peak_bytes)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> Measured:
        return cls(**{**found, "blocks": [Block(**block) for block in found["blocks"]]})
