"""Schedules on streams and slots for results: the same values, every wait that the data asks for, no slot twice."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from cadence_fx.output_slots import OutputSlots, plan_slots
from cadence_fx.profile import critical_path
from cadence_fx.program import Program
from cadence_fx.schedule import dependencies, is_view, readers, schedule
from cadence_fx.scheduled_run import Launched, run_scheduled
from tests.flat_graphs import flat_of
from tests.streams import chunks, contract, drawn, stream
from tests.toys import same_bits


def program() -> tuple[Program, list[Any], dict[str, torch.Tensor]]:
    """The compiled steady call of a small stream, inputs for it, and the buffers that it works on."""
    from cadence_fx.drop_in import transform

    fast = transform(drawn(stream()), contract((2,)))
    fast.warmup("steady")
    found = fast.programs[fast.steady_signature()]
    return found, [chunks([2])[0]], {name: b.tensor for name, b in fast.memory.buffers.items()}


class Streams:
    """Notes what runs where and what waits for what."""

    def __init__(self) -> None:
        self.now, self.log, self.recorded = 0, list[tuple[Any, ...]](), 0

    def use(self, stream: int) -> None:
        self.now = stream

    def record(self, stream: int) -> tuple[int, int]:
        return stream, len(self.log)

    def wait(self, stream: int, event: tuple[int, int]) -> None:
        self.log.append(("wait", stream, *event))

    def count(self) -> int:
        return self.recorded


@pytest.mark.parametrize("streams", [1, 2, 6])
def test_a_schedule_gives_the_values_of_the_chain_whatever_the_number_of_streams(streams: int) -> None:
    found, inputs, buffers = program()
    start = {name: torch.randn_like(b) for name, b in buffers.items()}

    def run(action: Any) -> tuple[Any, dict[str, torch.Tensor]]:
        for name, buffer in buffers.items():
            buffer.copy_(start[name])
        with torch.no_grad():
            return action(), {name: b.clone() for name, b in buffers.items()}

    expected, left = run(lambda: found.run(*inputs))
    planned = schedule(found.flat, streams)
    assert planned.streams <= streams
    outputs, state = run(lambda: run_scheduled(found.flat, found.module, planned, Streams(), inputs))
    assert all(map(same_bits, expected, outputs))
    assert all(same_bits(left[name], state[name]) for name in left)


def test_every_dependency_is_kept_by_stream_order_or_by_a_wait() -> None:
    found, _, _ = program()
    planned = schedule(found.flat, 3)
    order = list(planned.stream)
    done: dict[Any, set[Any]] = {}
    last: dict[int, Any] = {}
    for node in order:
        sources = [*planned.waits.get(node, ())]
        sources += [last[planned.stream[node]]] if planned.stream[node] in last else []
        done[node] = {p for s in sources for p in done[s] | {s}}
        last[planned.stream[node]] = node
    assert all(needs <= done[node] for node, needs in dependencies(found.flat).items())


def test_a_graph_has_one_schedule() -> None:
    """Two traces of the same module, whose nodes are other objects with other hashes."""
    plans = []
    for _ in range(2):
        found, _, _ = program()
        planned = schedule(found.flat, 4)
        plans.append([(node.name, stream) for node, stream in planned.stream.items()])
    assert plans[0] == plans[1]


def test_what_each_operator_recorded_is_noted_in_order() -> None:
    found, inputs, _ = program()
    backend, launched = Streams(), list[Launched]()

    def launch(node: Any, args: Any, kwargs: Any) -> Any:
        backend.recorded += 0 if is_view(node) else 2
        return node.target(*args, **kwargs)

    with torch.no_grad():
        run_scheduled(found.flat, found.module, schedule(found.flat, 2), backend, inputs, launch, launched)
    assert [(op.first, op.last) for op in launched] == [(2 * i, 2 * i + 2) for i in range(len(launched))]
    assert [op.node for op in launched] == list(schedule(found.flat, 2).stream)
    assert backend.now == 0


def test_a_run_that_fails_leaves_the_thread_on_the_stream_where_it_began() -> None:
    found, inputs, _ = program()
    backend, planned = Streams(), schedule(found.flat, 3)
    last = [node for node, stream in planned.stream.items() if stream != 0][-1]

    def launch(node: Any, args: Any, kwargs: Any) -> Any:
        if node is last:
            raise RuntimeError("out of memory")
        return node.target(*args, **kwargs)

    with pytest.raises(RuntimeError, match="out of memory"), torch.no_grad():
        run_scheduled(found.flat, found.module, planned, backend, inputs, launch)
    assert backend.now == 0


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = x
        for layer in self.layers:
            x = torch.tanh(layer(x)) + kept
        return self.layers[0](x)


def layers() -> Any:
    import torch.utils._pytree as pytree

    from cadence_fx.specialise import FlatGraph, TensorMeta

    x = torch.randn(3, 8)
    graph = torch.export.export(Layers().eval(), (x,)).graph
    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            node.meta["val"] = TensorMeta.of(value)
    return FlatGraph(graph, pytree.tree_structure((x,)))


@pytest.mark.parametrize("count", [1, 2, 3, 16])
def test_a_slot_has_one_tenant_at_a_time_and_the_next_waits_for_all_readers(count: int) -> None:
    flat = layers()
    order = [n for n in flat.graph.nodes if n.op == "call_function" and not is_view(n)]
    position = {node: i for i, node in enumerate(order)}
    used, planned = readers(flat, order, position), plan_slots(flat, order, count)
    assert len(planned) == 6  # the last product leaves the graph
    last: dict[int, Any] = {}
    for node, tenancy in planned.items():
        before = last.get(tenancy.slot)
        expected = () if before is None else tuple(order[i] for i in sorted(used[before]))
        assert tenancy.after == expected
        assert before is None or max(used[before]) < position[node]
        last[tenancy.slot] = node
    memory = OutputSlots(planned, torch.device("cpu"))
    assert memory.nbytes == min(count, 6) * 3 * 8 * 4


def test_outside_of_a_capture_no_slot_is_used() -> None:
    flat = layers()
    order = [n for n in flat.graph.nodes if n.op == "call_function"]
    slots = OutputSlots(plan_slots(flat, order), torch.device("cpu"))
    node = next(iter(slots.planned))
    rows, weight, bias = torch.randn(3, 8), torch.randn(8, 8), torch.randn(8)
    result = slots.launch(node, (rows, weight, bias), {})
    assert same_bits(result, torch.nn.functional.linear(rows, weight, bias))
    assert all(result.data_ptr() != memory.data_ptr() for memory in slots.memory.values())


def test_the_critical_path_is_the_longest_chain_of_dependent_operators() -> None:
    flat = layers()
    times = {n.name: 1.0 for n in flat.graph.nodes if n.op == "call_function"}
    total, path = critical_path(flat, times)
    assert total == len(path) == 6 * 3 + 1  # product, tanh, add; and the last product
    slow = path[3]
    assert critical_path(flat, {**times, slow: 10.0})[0] == total + 9


@pytest.mark.parametrize(("branches", "worthwhile"), [(1, False), (3, True)])
def test_streams_are_worthwhile_only_where_operators_need_not_wait_for_each_other(
    branches: int, worthwhile: bool
) -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found = []
        for _ in range(branches):
            y = x
            for _ in range(12):
                y = torch.sin(y)
            found.append(y)
        return tuple(found)

    planned = schedule(flat_of(function, torch.randn(3)), 6)
    assert planned.longest == 12
    assert planned.worthwhile is worthwhile
