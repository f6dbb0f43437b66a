"""Where a chunk's device time goes: operators, kernels, concurrency, and the longest chain that nothing can shorten.

Two measurements, both by torch's profiler. The program runs once as a chain, operator by operator, which gives each
operator's kernels and their times when nothing runs beside them. A replay of its captured graph gives the span, the
time in which at least one kernel ran, and how much ran at once. The critical path is the longest chain of dependent
operators by these times: no assignment of operators to streams can be faster with the same kernels.
"""

from __future__ import annotations

import bisect
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import fx
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, record_function
from torch.profiler import profile as torch_profile

from cadence_fx.graph_dump import MEMCPY, MEMSET
from cadence_fx.program import Program
from cadence_fx.schedule import dependencies
from cadence_fx.specialise import FlatGraph, source_of

__all__ = [
    "Kernel",
    "OperatorTime",
    "Profile",
    "critical_path",
    "kernels_of",
    "launch_counts",
    "operator_times",
    "profile_of",
]

_MARK = "cadence:"


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
class OperatorTime:
    """An operator of the graph with the kernels that it launched, alone on the device."""

    node: str
    target: str
    source: str
    microseconds: float
    kernels: tuple[str, ...]


@dataclass(frozen=True)
class Profile:
    """Device time of one signature. All times in milliseconds.

    Attributes:
        operators: in the graph's order; those that launch nothing are left out.
        chain_ms: sum of all kernel times, run as a chain.
        critical_ms: of the critical path, and ``critical`` the operators on it.
        span_ms, busy_ms, sum_ms, kernels, streams: of a replay: first start to last end, time with at least one kernel
            running, sum of kernel times, and how many there are; None if it is not captured.
    """

    operators: tuple[OperatorTime, ...]
    chain_ms: float
    critical_ms: float
    critical: tuple[str, ...]
    span_ms: float | None = None
    busy_ms: float | None = None
    sum_ms: float | None = None
    kernels: int | None = None
    streams: int | None = None

    def by_kernel(self) -> list[tuple[str, int, float]]:
        """(kernel, launches, milliseconds), the most expensive first."""
        count: dict[str, int] = defaultdict(int)
        time: dict[str, float] = defaultdict(float)
        for operator in self.operators:
            for name in operator.kernels:
                count[name] += 1
                time[name] += operator.microseconds / len(operator.kernels) / 1e3
        return sorted(((n, count[n], time[n]) for n in count), key=lambda row: -row[2])

    def by_target(self) -> list[tuple[str, int, float]]:
        """(ATen operator, calls, milliseconds), the most expensive first."""
        count: dict[str, int] = defaultdict(int)
        time: dict[str, float] = defaultdict(float)
        for operator in self.operators:
            count[operator.target] += 1
            time[operator.target] += operator.microseconds / 1e3
        return sorted(((n, count[n], time[n]) for n in count), key=lambda row: -row[2])

    def to_dict(self) -> dict[str, Any]:
        found = asdict(self)
        found["operators"] = len(self.operators)
        found["by_target"] = self.by_target()
        found["by_kernel"] = self.by_kernel()
        return found


def _profiler() -> torch_profile:
    # acc_events: there is one cycle, and torch warns of events that get lost between cycles.
    return torch_profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True)


def kernels_of(run: Callable[[], Any], device: torch.device) -> list[Kernel]:
    """What ``run`` makes the device do, by start time."""
    torch.cuda.synchronize(device)
    with _profiler() as trace:
        run()
        torch.cuda.synchronize(device)
    events = trace.profiler.kineto_results.events()
    found = [
        Kernel(e.name(), e.start_ns() / 1e3, e.duration_ns() / 1e3, e.device_resource_id())
        for e in events
        if _on_device(e)
    ]
    return sorted(found, key=lambda k: k.start)


def launch_counts(run: Callable[[], Any], device: torch.device) -> Counter[str]:
    """How often ``run`` launches each kernel, by the names that `cadence_fx.graph_dump.launches` uses."""
    kinds = (("Memset", MEMSET), ("Memcpy", MEMCPY))
    found: Counter[str] = Counter()
    for kernel in kernels_of(run, device):
        found[next((kind for prefix, kind in kinds if kernel.name.startswith(prefix)), kernel.name)] += 1
    return found


def _on_device(event: Any) -> bool:
    return event.device_type() == DeviceType.CUDA and not event.name().startswith(_MARK)


def operator_times(flat: FlatGraph, module: torch.nn.Module, inputs: Sequence[Any]) -> tuple[OperatorTime, ...]:
    """Run a graph as a chain and attribute each kernel to the operator that launched it."""
    nodes = list(flat.graph.nodes)

    def run() -> None:
        env: dict[fx.Node, Any] = {}
        given = iter(inputs)
        for i, node in enumerate(nodes):
            if node.op == "placeholder":
                env[node] = next(given)
            elif node.op == "get_attr":
                env[node] = getattr(module, str(node.target))
            elif node.op == "call_function":
                args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: env[n])
                with record_function(f"{_MARK}{i}"):
                    env[node] = node.target(*args, **kwargs)

    with torch.no_grad():
        run()
        torch.cuda.synchronize()
        with _profiler() as trace:
            run()
            torch.cuda.synchronize()
    return _attributed(nodes, trace.profiler.kineto_results.events())


def _attributed(nodes: Sequence[fx.Node], events: Sequence[Any]) -> tuple[OperatorTime, ...]:
    cpu = DeviceType.CPU
    marks = sorted(
        (e.start_ns(), e.start_ns() + e.duration_ns(), int(e.name()[len(_MARK) :]))
        for e in events
        if e.device_type() == cpu and e.name().startswith(_MARK)
    )
    starts = [start for start, _, _ in marks]

    def owner(at: int) -> int | None:
        i = bisect.bisect_right(starts, at) - 1
        return marks[i][2] if i >= 0 and at <= marks[i][1] else None

    launched_by = {e.correlation_id(): e.start_ns() for e in events if e.device_type() == cpu}
    times: dict[int, float] = defaultdict(float)
    names: dict[int, list[str]] = defaultdict(list)
    for event in events:
        if not _on_device(event):
            continue
        at = launched_by.get(event.linked_correlation_id(), launched_by.get(event.correlation_id()))
        index = None if at is None else owner(at)
        if index is not None:
            times[index] += event.duration_ns() / 1e3
            names[index].append(event.name())
    return tuple(
        OperatorTime(nodes[i].name, str(nodes[i].target), source_of(nodes[i]), times[i], tuple(names[i]))
        for i in sorted(times)
    )


def critical_path(flat: FlatGraph, microseconds: dict[str, float]) -> tuple[float, tuple[str, ...]]:
    """The longest chain of dependent operators: its time in microseconds, and their names in order.

    Args:
        microseconds: time of each operator by name; those that are missing take none.
    """
    needs = dependencies(flat)
    reach: dict[fx.Node, float] = {}
    via: dict[fx.Node, fx.Node | None] = {}
    for node in flat.graph.nodes:
        if node not in needs:
            continue
        last = max(needs[node], key=lambda p: reach[p], default=None)
        reach[node] = microseconds.get(node.name, 0.0) + (reach[last] if last is not None else 0.0)
        via[node] = last
    if not reach:
        return 0.0, ()
    end: fx.Node | None = max(reach, key=lambda n: reach[n])
    assert end is not None
    total, path = reach[end], []
    while end is not None:
        path.append(end.name)
        end = via[end]
    return total, tuple(reversed(path))


def profile_of(program: Program, inputs: Sequence[Any], replay: Callable[[], Any] | None = None) -> Profile:
    """Profile a program on ``inputs``, and ``replay`` as the call of its captured graph if there is one.

    The program writes its regions: live state must have been saved.
    """
    operators = operator_times(program.flat, program.module, inputs)
    chain = sum(o.microseconds for o in operators)
    critical, path = critical_path(program.flat, {o.node: o.microseconds for o in operators})
    if replay is None:
        return Profile(operators, chain / 1e3, critical / 1e3, path)
    replay()
    device = next(t.device for t in inputs if isinstance(t, torch.Tensor))
    ran = kernels_of(replay, device)
    return Profile(
        operators, chain / 1e3, critical / 1e3, path,
        (max(k.end for k in ran) - ran[0].start) / 1e3, union(ran) / 1e3, sum(k.duration for k in ran) / 1e3,
        len(ran), len({k.stream for k in ran}),
    )  # fmt: skip


def union(kernels: Sequence[Kernel]) -> float:
    """Microseconds in which at least one kernel ran; ``kernels`` by start time."""
    total, until = 0.0, float("-inf")
    for kernel in kernels:
        total += max(0.0, kernel.end - max(kernel.start, until))
        until = max(until, kernel.end)
    return total
