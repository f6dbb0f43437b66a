"""What a device did while something ran, by torch's profiler: kernels with their times, and what follows from these."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity
from torch.profiler import profile as torch_profile

from cadence_fx.graph_dump import MEMCPY, MEMSET

__all__ = ["Kernel", "Timeline", "launch_counts", "on_device", "profiler", "timeline_of"]

MARK = "cadence:"  # of ranges that attribute kernels to operators


@dataclass(frozen=True)
class Kernel:
    """One kernel, copy or fill that ran on the device. Times in microseconds, ``start`` from an arbitrary zero."""

    name: str
    start: float
    duration: float
    stream: int

    @property
    def end(self) -> float:
        return self.start + self.duration


@dataclass(frozen=True)
class Timeline:
    """Kernels by start time. All sums in milliseconds."""

    kernels: tuple[Kernel, ...]

    @property
    def span_ms(self) -> float:
        """From the first start to the last end."""
        return (max(k.end for k in self.kernels) - self.kernels[0].start) / 1e3 if self.kernels else 0.0

    @property
    def busy_ms(self) -> float:
        """Time in which at least one kernel ran."""
        total, until = 0.0, float("-inf")
        for kernel in self.kernels:
            total += max(0.0, kernel.end - max(kernel.start, until))
            until = max(until, kernel.end)
        return total / 1e3

    @property
    def sum_ms(self) -> float:
        """Of all kernels' times: more than `busy_ms` where kernels ran side by side."""
        return sum(k.duration for k in self.kernels) / 1e3

    def to_dict(self) -> dict[str, Any]:
        return {
            "kernels": len(self.kernels),
            "span_ms": self.span_ms,
            "busy_ms": self.busy_ms,
            "idle_ms": self.span_ms - self.busy_ms,
            "sum_ms": self.sum_ms,
            "streams": len({k.stream for k in self.kernels}),
        }


def profiler() -> torch_profile:
    """A profiler of host and device for one cycle."""
    # acc_events: there is one cycle, and torch warns of events that get lost between cycles.
    return torch_profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True)


def on_device(event: Any) -> bool:
    """True for a profiler's event that is work of the device and no range around such work."""
    return event.device_type() == DeviceType.CUDA and not event.name().startswith(MARK)


def timeline_of(run: Callable[[], Any], device: torch.device) -> Timeline:
    """What ``run`` makes the device do."""
    torch.cuda.synchronize(device)
    with profiler() as trace:
        run()
        torch.cuda.synchronize(device)
    events = trace.profiler.kineto_results.events()
    found = [
        Kernel(e.name(), e.start_ns() / 1e3, e.duration_ns() / 1e3, e.device_resource_id())
        for e in events
        if on_device(e)
    ]
    return Timeline(tuple(sorted(found, key=lambda k: k.start)))


def launch_counts(run: Callable[[], Any], device: torch.device) -> Counter[str]:
    """How often ``run`` launches each kernel, by the names that `cadence_fx.graph_dump.launches` uses."""
    return counted(timeline_of(run, device).kernels)


def counted(kernels: Sequence[Kernel]) -> Counter[str]:
    """Kernels by name; fills and copies under one name each, as a graph's nodes are."""
    kinds = (("Memset", MEMSET), ("Memcpy", MEMCPY))
    return Counter(next((kind for prefix, kind in kinds if k.name.startswith(prefix)), k.name) for k in kernels)
