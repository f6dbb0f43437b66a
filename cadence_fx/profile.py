"""Where a chunk's device time goes: operators, kernels, concurrency, and the longest chain that nothing can shorten.

The program runs once as a chain, operator by operator, which gives each operator's kernels and their times when nothing
runs beside them. A replay of its captured graph gives the span, the time in which at least one kernel ran, and how much
ran at once. The critical path is the longest chain of dependent operators by these times: no assignment of operators
to streams can be faster with the same kernels. The slack gamma of a part is its time over its roofline bound.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._C._autograd import DeviceType
from torch.profiler import record_function

from cadence_fx.device_trace import MARK, Timeline, on_device, profiler, timeline_of
from cadence_fx.program import Program
from cadence_fx.roofline import Roofline
from cadence_fx.schedule import dependencies
from cadence_fx.specialise import FlatGraph, source_of

__all__ = ["OUTSIDE", "OperatorTime", "Profile", "critical_path", "operator_times", "part_of", "profile_of"]

OUTSIDE = "outside of boundaries"


@dataclass(frozen=True)
class OperatorTime:
    """An operator of the graph with the kernels that it launched, alone on the device.

    Attributes:
        part: the outermost boundary that it belongs to.
        bound: roofline bound in microseconds; 0 where none was asked for.
    """

    node: str
    target: str
    source: str
    part: str
    microseconds: float
    kernels: tuple[str, ...]
    bound: float = 0.0


@dataclass(frozen=True)
class Profile:
    """Device time of one signature.

    Attributes:
        operators: in the graph's order; those that launch nothing are left out.
        critical: names of the operators on the critical path.
        replay, stock: what the device did in a replay, and in a call of the stock module; None if not measured.
    """

    operators: tuple[OperatorTime, ...]
    critical: tuple[str, ...]
    replay: Timeline | None = None
    stock: Timeline | None = None

    @property
    def chain_ms(self) -> float:
        """Sum of all kernel times, run as a chain."""
        return sum(o.microseconds for o in self.operators) / 1e3

    @property
    def critical_ms(self) -> float:
        """Sum over the critical path."""
        chosen = set(self.critical)
        return sum(o.microseconds for o in self.operators if o.node in chosen) / 1e3

    def parts(self) -> list[dict[str, Any]]:
        """For each part: operators, kernels, milliseconds as a chain and on the critical path, bound and slack."""
        chosen, rows = set(self.critical), dict[str, dict[str, Any]]()
        for o in self.operators:
            row = rows.setdefault(
                o.part,
                {"part": o.part, "operators": 0, "kernels": 0, "chain_ms": 0.0, "critical_ms": 0.0, "bound_ms": 0.0},
            )
            row["operators"] += 1
            row["kernels"] += len(o.kernels)
            row["chain_ms"] += o.microseconds / 1e3
            row["critical_ms"] += o.microseconds / 1e3 if o.node in chosen else 0.0
            row["bound_ms"] += o.bound / 1e3
        for row in rows.values():
            row["gamma"] = row["chain_ms"] / row["bound_ms"] if row["bound_ms"] else None
        return sorted(rows.values(), key=lambda row: -row["chain_ms"])

    def by_kernel(self) -> list[tuple[str, int, float]]:
        """(kernel, launches, milliseconds), the most expensive first; an operator's time is split evenly."""
        return _grouped((name, o.microseconds / len(o.kernels)) for o in self.operators for name in o.kernels)

    def by_target(self) -> list[tuple[str, int, float]]:
        """(ATen operator, calls, milliseconds), the most expensive first."""
        return _grouped((o.target, o.microseconds) for o in self.operators)

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe values. ``times_critical`` is a replay's span as a multiple of the critical path."""
        span = None if self.replay is None else self.replay.span_ms
        return {
            "operators": len(self.operators),
            "chain_ms": self.chain_ms,
            "critical_ms": self.critical_ms,
            "critical_operators": len(self.critical),
            "times_critical": span / self.critical_ms if span is not None and self.critical_ms else None,
            "replay": None if self.replay is None else self.replay.to_dict(),
            "stock": None if self.stock is None else self.stock.to_dict(),
            "parts": self.parts(),
            "by_target": self.by_target(),
            "by_kernel": self.by_kernel(),
        }


def _grouped(rows: Any) -> list[tuple[str, int, float]]:
    count: dict[str, int] = defaultdict(int)
    time: dict[str, float] = defaultdict(float)
    for name, microseconds in rows:
        count[name] += 1
        time[name] += microseconds / 1e3
    return sorted(((name, count[name], time[name]) for name in count), key=lambda row: -row[2])


def part_of(node: fx.Node) -> str:
    """The outermost boundary that an operator was traced in."""
    where = node.meta.get("where", ())
    return str(where[0][0]) if where else OUTSIDE


def operator_times(
    flat: FlatGraph, module: torch.nn.Module, inputs: Sequence[Any], roofline: Roofline | None = None
) -> tuple[OperatorTime, ...]:
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
                with record_function(f"{MARK}{i}"):
                    env[node] = node.target(*args, **kwargs)

    with torch.no_grad():
        run()  # kernels load
        torch.cuda.synchronize()
        with profiler() as trace:
            run()
            torch.cuda.synchronize()
    return attributed(nodes, trace.profiler.kineto_results.events(), roofline)


def attributed(
    nodes: Sequence[fx.Node], events: Sequence[Any], roofline: Roofline | None = None
) -> tuple[OperatorTime, ...]:
    """Operators with the device events that were launched within their ranges."""
    cpu = DeviceType.CPU
    marks = sorted(
        (e.start_ns(), e.start_ns() + e.duration_ns(), int(e.name()[len(MARK) :]))
        for e in events
        if e.device_type() == cpu and e.name().startswith(MARK)
    )
    starts = [start for start, _, _ in marks]

    def owner(at: int) -> int | None:
        i = bisect.bisect_right(starts, at) - 1
        return marks[i][2] if i >= 0 and at <= marks[i][1] else None

    launched_by = {e.correlation_id(): e.start_ns() for e in events if e.device_type() == cpu}
    times: dict[int, float] = defaultdict(float)
    names: dict[int, list[str]] = defaultdict(list)
    for event in events:
        if not on_device(event):
            continue
        at = launched_by.get(event.linked_correlation_id(), launched_by.get(event.correlation_id()))
        index = None if at is None else owner(at)
        if index is not None:
            times[index] += event.duration_ns() / 1e3
            names[index].append(event.name())
    return tuple(
        OperatorTime(
            nodes[i].name, str(nodes[i].target), source_of(nodes[i]), part_of(nodes[i]), times[i], tuple(names[i]),
            0.0 if roofline is None else roofline.microseconds(nodes[i]),
        )
        for i in sorted(times)
    )  # fmt: skip


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


def profile_of(
    program: Program,
    inputs: Sequence[Any],
    replay: Callable[[], Any] | None = None,
    roofline: Roofline | None = None,
) -> Profile:
    """Profile a program on ``inputs``, and ``replay`` as the call of its captured graph if there is one.

    The program writes its regions: live state must have been saved.
    """
    operators = operator_times(program.flat, program.module, inputs, roofline)
    _, path = critical_path(program.flat, {o.node: o.microseconds for o in operators})
    if replay is None:
        return Profile(operators, path)
    replay()
    device = next(t.device for t in inputs if isinstance(t, torch.Tensor))
    return Profile(operators, path, timeline_of(replay, device))
