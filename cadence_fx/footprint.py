"""What a capture will take from the device, predicted before it: the caching allocator, played on the graph's sizes.

A graph's memory pool ends at its high-water mark. That follows from the sizes of values, from when they are freed, and
from how torch's caching allocator cuts segments: requests up to 1 MiB share segments of 2 MiB, larger ones segments of
20 MiB or, from 10 MiB on, their own; a stream reuses only what it freed itself. What operators allocate inside is known
for convolutions alone: their operands in the kernel's layout. The capturing stream's workspace of the matrix library
lies in the pool too; side streams got theirs, outside of it, when the program was warmed up.
"""

from __future__ import annotations

import bisect
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import fx

from cadence_fx.schedule import Schedule, leaving, memory_owners, operators
from cadence_fx.specialise import FlatGraph, TensorMeta, meta_of

__all__ = ["CONVOLUTIONS", "Pool", "pool_bytes", "workspace_bytes"]

aten = torch.ops.aten
MIB = 1 << 20
ROUND, SMALL, SMALL_SEGMENT, LARGE_SEGMENT, OWN_FROM, OWN_ROUND = 512, MIB, 2 * MIB, 20 * MIB, 10 * MIB, 2 * MIB
CONVOLUTIONS = {aten.conv1d.default, aten.conv_transpose1d.default, aten.conv2d.default}


@dataclass
class _Free:
    """Free blocks of one stream and size class: (bytes, segment, start), by size."""

    blocks: list[tuple[int, int, int]] = field(default_factory=list)

    def take(self, size: int) -> tuple[int, int, int] | None:
        at = bisect.bisect_left(self.blocks, (size, -1, -1))
        return self.blocks.pop(at) if at < len(self.blocks) else None

    def give(self, size: int, segment: int, start: int) -> None:
        """Back, merged with free neighbours."""
        for i, (other, other_segment, other_start) in enumerate(self.blocks):
            if other_segment == segment and other_start + other == start:
                del self.blocks[i]
                self.give(other + size, segment, other_start)
                return
            if other_segment == segment and start + size == other_start:
                del self.blocks[i]
                self.give(size + other, segment, start)
                return
        bisect.insort(self.blocks, (size, segment, start))


@dataclass
class Pool:
    """One memory pool. Blocks are (stream, bytes, segment, start)."""

    reserved: int = 0
    segments: int = 0
    has_workspace: bool = False
    small: set[int] = field(default_factory=set)  # segments of small blocks
    free: dict[tuple[int, bool], _Free] = field(default_factory=dict)

    def allocate(self, nbytes: int, stream: int) -> tuple[int, int, int, int]:
        """A block for that many bytes, from what the stream has freed or from a new segment."""
        size = max(ROUND, -(-nbytes // ROUND) * ROUND)
        small = size <= SMALL
        blocks = self.free.setdefault((stream, small), _Free())
        found = blocks.take(size)
        if found is None:
            total = SMALL_SEGMENT if small else LARGE_SEGMENT if size < OWN_FROM else -(-size // OWN_ROUND) * OWN_ROUND
            found = (total, self.segments, 0)
            self.small |= {self.segments} if small else set()
            self.segments += 1
            self.reserved += total
        total, segment, start = found
        left = total - size
        if left >= ROUND if small else left > SMALL:
            blocks.give(left, segment, start + size)
            total = size
        return stream, total, segment, start

    def release(self, block: tuple[int, int, int, int]) -> None:
        """Give a block back to its stream."""
        stream, size, segment, start = block
        self.free[(stream, segment in self.small)].give(size, segment, start)


def workspace_bytes(device: torch.device) -> int:
    """Of the matrix library on one stream, as torch sets it up: 32 MiB on Hopper and later, else about 8 MiB."""
    asked = os.environ.get("CUBLAS_WORKSPACE_CONFIG", "")
    sizes = [part for part in asked.split(":") if part]
    if sizes and len(sizes) % 2 == 0 and all(part.isdigit() for part in sizes):
        return sum(1024 * int(size) * int(count) for size, count in zip(sizes[::2], sizes[1::2], strict=True))
    major = torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 0
    return 32 * MIB if major >= 9 else 2 * 4 * MIB + 8 * 16 * 1024


def pool_bytes(flat: FlatGraph, planned: Schedule | None = None, pool: Pool | None = None, workspace: int = 0) -> int:
    """Bytes by which the pool grows when the graph is captured; ``pool`` is left as the capture leaves it.

    Args:
        planned: where operators run and when values are freed; a chain on one stream if None.
        pool: as earlier captures left it; a new one if None.
        workspace: bytes of the matrix library's on the capturing stream; it is made by the first capture of a pool.
    """
    pool = Pool() if pool is None else pool
    before = pool.reserved
    if workspace and not pool.has_workspace:
        pool.allocate(workspace, 0)
        pool.has_workspace = True
    order = operators(flat)
    release = _last_uses(flat, order) if planned is None else planned.release
    held: dict[fx.Node, list[tuple[int, int, int, int]]] = {}
    for node in order:
        stream = 0 if planned is None else planned.stream[node]
        inside = [pool.allocate(n, stream) for n in _inside(node)]
        held[node] = [pool.allocate(meta.nbytes, stream) for meta in _results(node)]
        for block in inside:
            pool.release(block)
        for value in release.get(node, ()):
            for block in held.pop(value, ()):
                pool.release(block)
    kept = leaving(flat)
    for block in [block for value, blocks in held.items() if value not in kept for block in blocks]:
        pool.release(block)
    return pool.reserved - before


def _results(node: fx.Node) -> tuple[TensorMeta, ...]:
    """What an operator allocates for its results."""
    if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable:
        return ()
    value = node.meta.get("val")
    values = value if isinstance(value, tuple) else (value,)
    return tuple(v for v in values if isinstance(v, TensorMeta))


def _inside(node: fx.Node) -> Iterator[int]:
    """Bytes that an operator allocates for itself."""
    if node.target in CONVOLUTIONS:
        metas = [meta_of(a) for a in node.args[:2] if isinstance(a, fx.Node)]
        yield sum(-(-_padded(m.shape) * m.dtype.itemsize // ROUND) * ROUND for m in metas if m is not None)


def _padded(shape: tuple[int, ...]) -> int:
    return math.prod(-(-n // 8) * 8 if d == 1 else n for d, n in enumerate(shape))


def _last_uses(flat: FlatGraph, order: list[fx.Node]) -> dict[fx.Node, tuple[fx.Node, ...]]:
    """After which operator each value is freed where a graph runs as a chain."""
    last: dict[fx.Node, fx.Node] = {}
    for node in order:
        last.setdefault(node, node)
        for argument in node.all_input_nodes:
            for owner in memory_owners(argument):
                last[owner] = node
    kept = leaving(flat)
    found: dict[fx.Node, list[fx.Node]] = {}
    for value, node in last.items():
        if value not in kept:
            found.setdefault(node, []).append(value)
    return {node: tuple(values) for node, values in found.items()}
