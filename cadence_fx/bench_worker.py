"""The process of one cell: ``python -m cadence_fx.bench_worker SPEC``. Started by `cadence_fx.bench`.

It builds the family, makes its cell, says ``ready`` and waits for the word to measure, so that cells can be prepared
side by side and still be measured alone. Standard output carries one JSON object a line, and nothing else: whatever
libraries print goes to standard error.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch

from cadence_fx.bench_cell import CellUnavailable
from cadence_fx.bench_cells import find_cell
from cadence_fx.bench_protocol import GO, Block, Measured, Spec
from cadence_fx.bits import digest
from cadence_fx.catalog import settling
from cadence_fx.contract import Arg, Contract, Region
from cadence_fx.families import Family, load
from cadence_fx.generators import generator_states
from cadence_fx.machine import environment
from cadence_fx.places import get_path
from cadence_fx.traffic import SessionMemory, Step

__all__ = ["main", "play_block"]

Say = Callable[[dict[str, Any]], None]
Ambient = Callable[[], AbstractContextManager[Any]]


def _demanded(region: Region, tensor: torch.Tensor) -> torch.Tensor:
    """A state tensor without slots that nothing reads, which stock carries along in dimensions of fixed size."""
    for dim, size in enumerate(region.shape):
        if size is not None and dim < tensor.dim() and tensor.shape[dim] > size:
            tensor = tensor.narrow(dim, 0, size)
    return tensor


def _state(contract: Contract, state: Any) -> list[torch.Tensor]:
    regions = [(region, region.enters) for region in contract.states if isinstance(region.enters, Arg)]
    return [_demanded(region, get_path(state, Arg(*place.keys[1:]))) for region, place in regions]


class _Timer:
    """Runs something alone on the device; wall time and the time between two events of the device, in ms."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.events = device, device.type == "cuda"

    def __call__(self, action: Callable[[], Any]) -> tuple[Any, float, float | None]:
        if not self.events:
            begin = time.perf_counter()
            value = action()
            return value, 1e3 * (time.perf_counter() - begin), None
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize(self.device)
        begin = time.perf_counter()
        first.record()
        value = action()
        last.record()
        torch.cuda.synchronize(self.device)
        return value, 1e3 * (time.perf_counter() - begin), first.elapsed_time(last)


def play_block(
    module: torch.nn.Module,
    steps: Iterable[Step],
    contract: Contract,
    device: torch.device,
    seed: int,
    ambient: Ambient = contextlib.nullcontext,
) -> Block:
    """Play one stream to a module, generators seeded with ``seed``, each call under the context that ``ambient`` makes.

    Times are those of the chunk calls alone; outputs are read back and hashed between them.
    """
    memory, timer = SessionMemory.of(contract), _Timer(device)
    torch.manual_seed(seed)
    before = _ran(module)
    wall_ms, device_ms, outputs = list[float](), list[float](), list[str]()

    def act(step: Step) -> Any:
        with ambient():
            return step.action(module, memory)

    for step in steps:
        value, wall, on_device = timer(lambda step=step: act(step))  # type: ignore[misc]
        if not step.is_chunk:
            continue
        outputs.append(digest(value))
        wall_ms.append(round(wall, 4))
        if on_device is not None:
            device_ms.append(round(on_device, 4))
    return Block(
        seed,
        wall_ms,
        device_ms,
        chunk_sha256=[sha256[:16] for sha256 in outputs],
        output_sha256=digest(outputs),
        state_sha256=digest(_state(contract, memory.state)),
        generator_sha256=digest(generator_states(device)),
        ran={name: count - before[name] for name, count in _ran(module).items()},
    )


def _stats(module: torch.nn.Module) -> dict[str, Any]:
    counted = getattr(module, "stats", None)
    return dict(counted()) if callable(counted) else {}


def _ran(module: torch.nn.Module) -> dict[str, int]:
    found = _stats(module)
    return {name: int(found[name]) for name in ("replays", "plan", "stock") if name in found}


class _Built:
    """A family that keeps the seconds that its builds took: drawing weights is no part of preparing a cell."""

    def __init__(self, family: Family) -> None:
        self.family, self.name, self.seconds = family, family.name, 0.0
        self.contract, self.script, self.stream = family.contract, family.script, family.stream

    def build_random(self, device: str, seed: int, **sizes: Any) -> torch.nn.Module:
        begin = time.perf_counter()
        try:
            return self.family.build_random(device, seed, **sizes)
        finally:
            self.seconds += time.perf_counter() - begin


# ---------------------------------------------------------------------------------------------- surroundings
def _pin(tf32: bool) -> None:
    """The flags that every cell runs under: kernels that are the same in every run, and TF32 only where asked for."""
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    if not tf32:
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False


def _ambient(spec: Spec, device: torch.device) -> Ambient:
    if spec.autocast is None:
        return contextlib.nullcontext
    dtype = getattr(torch, spec.autocast)
    return lambda: torch.autocast(device.type, dtype=dtype)


def _peaks(device: torch.device) -> tuple[int, int]:
    """Bytes allocated and reserved at most since the last reset."""
    if device.type != "cuda":
        return 0, 0
    return torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)


# ---------------------------------------------------------------------------------------------- the process
def run(spec: Spec, say: Say, wait: Callable[[], str]) -> None:
    """Prepare, say ``ready``, wait for the word, measure and say the result."""
    device = torch.device(spec.device)
    _pin(spec.tf32)
    ambient = _ambient(spec, device)
    family = _Built(load(spec.target, **spec.options))
    contract = family.contract()
    found = Measured(growing=settling(contract))
    begin = time.perf_counter()
    with torch.no_grad(), ambient():
        module = find_cell(spec.cell).make(family, spec.device, spec.seed)
    gc.collect()  # what making the cell left in cycles, the stock module perhaps among it
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    found.build_seconds = family.seconds
    found.prepare_seconds = time.perf_counter() - begin - family.seconds
    found.prepare_peak_bytes, found.reserved_bytes = _peaks(device)
    say({"event": "ready", "seconds": found.prepare_seconds})
    if wait().strip() != GO:
        return
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)

    def block(seed: int, chunks: int) -> Block:
        steps = family.stream(module, contract, seed, chunks)
        return play_block(module, steps, contract, device, seed, ambient)

    with torch.no_grad():
        block(spec.seed, min(spec.chunks, found.growing + 3))  # kernels load, clocks rise
        for i in range(spec.blocks):
            found.blocks.append(block(spec.seed + 1 + i, spec.chunks))
            say({"event": "block", "index": i})
    found.serving_peak_bytes, reserved = _peaks(device)
    found.reserved_bytes = max(found.reserved_bytes, reserved)
    with ambient():
        found.stats, found.environment = _stats(module), environment(device)
    say({"event": "result", "result": found.to_dict()})


def main() -> None:
    """Run the spec that is the only argument; every outcome is said, none is raised."""
    with os.fdopen(os.dup(1), "w", buffering=1) as out:
        os.dup2(2, 1)  # whatever else prints to standard output

        def say(message: dict[str, Any]) -> None:
            out.write(json.dumps(message, default=str) + "\n")

        try:
            run(Spec.from_json(sys.argv[1]), say, sys.stdin.readline)
        except CellUnavailable as error:
            say({"event": "unavailable", "text": str(error)})
        except Exception as error:  # noqa: BLE001 - the parent makes a cell with this text of it
            traceback.print_exc()
            say({"event": "error", "text": f"{type(error).__name__}: {error}"})


if __name__ == "__main__":
    main()
