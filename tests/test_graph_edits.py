"""Edits of recorded graphs: what may move, what must not, and that tenants of a slot wait for its last readers."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch
from torch import fx

from cadence_fx.errors import CadenceError
from cadence_fx.graph_edits import Constant, Converted, EditCounts, prepare_early, run_once
from cadence_fx.output_slots import Tenancy
from cadence_fx.scheduled_run import Launched

CPU = torch.device("cpu")
WORKSPACE, SLOT = 0x20000000000, 0x30000000000
GEMM, BIAS, ADD = "sgemm_largek<true>", "cublasLt::epilogue::globalKernel<8>", "at::native::add_kernel<float>"
CLEAR = "scal_kernel<float, 1>"


def word(value: int) -> bytes:
    return struct.pack("<Q", value)


@dataclass
class Recorded:
    """A graph of kernels by name, memsets by the address that they write; a chain unless said otherwise."""

    names: list[str] = field(default_factory=list)
    given: list[list[bytes]] = field(default_factory=list)
    before: list[set[int]] = field(default_factory=list)
    after: list[set[int]] = field(default_factory=list)
    ran: list[int] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)
    writes_too_much: torch.Tensor | None = None

    def add(self, name: str, parameters: Sequence[bytes] = (), after: Sequence[int] | None = None) -> int:
        node = len(self.names)
        sources = ([node - 1] if node else []) if after is None else list(after)
        self.names.append(name)
        self.given.append(list(parameters))
        self.before.append(set(sources))
        self.after.append(set())
        for source in sources:
            self.after[source].add(node)
        return node

    def kind(self, node: int) -> str:
        return "memset" if self.names[node] == "memset" else "kernel"

    def name(self, node: int) -> str:
        return self.names[node]

    def parameters(self, node: int) -> list[bytes]:
        return self.given[node]

    def memset_range(self, node: int) -> tuple[int, int]:
        return struct.unpack("<Q", self.given[node][0])[0], 512

    def set_parameters(self, node: int, parameters: Sequence[bytes]) -> None:
        self.given[node] = list(parameters)

    def drop(self, node: int) -> None:
        self.dropped.append(node)

    def run_once(self, nodes: Sequence[int]) -> None:
        self.ran += nodes
        if self.writes_too_much is not None:
            self.writes_too_much[-1] = 0

    def waits_for(self, node: int, other: int) -> bool:
        """Whether a node runs after another, along whatever path."""
        todo, seen = [node], set[int]()
        while todo:
            for source in self.before[todo.pop()] - seen:
                seen.add(source)
                todo.append(source)
        return other in seen


class Products:
    """Two products with pointwise work between them, on one stream, their results in one slot each (or in the same)."""

    def __init__(self, between: str = ADD, counters: int = WORKSPACE, cleared: int = SLOT + 4096) -> None:
        g = fx.Graph()
        linear = torch.ops.aten.linear.default
        self.nodes = [g.placeholder("x")]
        self.nodes.append(g.call_function(linear, (self.nodes[0],)))
        self.nodes.append(g.call_function(torch.ops.aten.add.Tensor, (self.nodes[1],)))
        self.nodes.append(g.call_function(linear, (self.nodes[2],)))
        self.graph = Recorded()
        for name, parameters in (
            ("memset", [word(WORKSPACE)]), (CLEAR, [b"", word(SLOT), word(SLOT), b"0"]), (GEMM, []), (BIAS, []),
            (between, []),
            ("memset", [word(counters)]), (CLEAR, [b"", word(cleared), word(cleared), b"0"]), (GEMM, []), (BIAS, []),
        ):  # fmt: skip
            self.graph.add(name, parameters)
        self.launched = [
            Launched(self.nodes[1], 0, 0, 4), Launched(self.nodes[2], 0, 4, 5), Launched(self.nodes[3], 0, 5, 9),
        ]  # fmt: skip
        self.tenancies = {self.nodes[1]: Tenancy(0, ()), self.nodes[3]: Tenancy(1, ())}
        self.counts = EditCounts()

    def edit(self, slots: tuple[int, int] = (SLOT, SLOT + 4096)) -> Recorded:
        def is_workspace(address: int, nbytes: int) -> bool:
            return address >= WORKSPACE and address + nbytes <= WORKSPACE + (1 << 20)

        addresses = dict(enumerate(slots))
        prepare_early(self.graph, self.launched, self.tenancies, addresses, is_workspace, self.counts)
        return self.graph


def test_counters_and_result_are_cleared_beside_the_work_that_makes_the_inputs() -> None:
    products = Products()
    graph = products.edit()
    assert (products.counts.counters, products.counts.results) == (1, 1)
    assert graph.before[5] == {3}  # counters: after the last user of the workspace
    assert graph.before[6] == set()  # the result: nobody used its slot before
    assert graph.before[7] == {4, 5, 6}  # the product: inputs, counters and the cleared result
    assert not graph.waits_for(5, 4)


def test_a_workspace_that_work_between_may_use_is_waited_for() -> None:
    """A kernel that is not torch's own may keep its partial sums where the counters lie."""
    graph = Products(between="cutlass::splitKreduce_kernel<32>").edit()
    assert graph.before[5] == {4}


def test_a_workspace_belongs_to_a_stream() -> None:
    products = Products(between="cutlass::splitKreduce_kernel<32>")
    products.launched[1] = Launched(products.nodes[2], 1, 4, 5)
    assert products.edit().before[5] == {3}


def test_the_first_product_of_a_stream_stays_as_it_was_recorded() -> None:
    graph = Products().edit()
    assert [graph.before[n] for n in range(5)] == [set(), {0}, {1}, {2}, {3}]


@pytest.mark.parametrize(
    "products", [Products(counters=SLOT + 4096), Products(counters=0x50000000000)], ids=["in a slot", "anywhere"]
)
def test_a_memset_of_anything_but_a_workspace_stays(products: Products) -> None:
    graph = products.edit()
    assert products.counts.counters == 0
    assert graph.before[5] == {4}


def test_clearing_something_else_than_the_result_stays_behind_the_counters() -> None:
    products = Products(cleared=SLOT + 8192)
    graph = products.edit()
    assert (products.counts.counters, products.counts.results) == (1, 0)
    assert graph.before[6] == {4, 5}


def test_a_product_without_a_slot_stays() -> None:
    products = Products()
    del products.tenancies[products.nodes[3]]
    products.edit()
    assert products.counts.counters == 0


def test_the_next_tenant_of_a_slot_clears_it_after_the_last_readers() -> None:
    products = Products(cleared=SLOT)
    products.tenancies[products.nodes[3]] = Tenancy(0, (products.nodes[2],))
    graph = products.edit((SLOT, SLOT))
    assert products.counts.results == 1
    assert graph.before[6] == {4}  # the reader of the last tenant
    assert graph.before[5] == {3}


def test_a_tenant_that_is_not_recognised_waits_for_the_last_readers_all_the_same() -> None:
    """Two products on streams that know nothing of each other, in one slot."""
    products = Products()
    graph = Recorded()
    for after in ([], [0], []):
        graph.add("sm80_xmma_gemm", [], after)
    products.graph = graph
    products.launched = [
        Launched(products.nodes[1], 0, 0, 1),
        Launched(products.nodes[2], 0, 1, 2),
        Launched(products.nodes[3], 1, 2, 3),
    ]
    products.tenancies = {products.nodes[1]: Tenancy(0, ()), products.nodes[3]: Tenancy(0, (products.nodes[2],))}
    assert products.edit().before[2] == {1}


# ---------------------------------------------------------------------------------------------- constants
WEIGHT = torch.arange(6 * 5 * 3, dtype=torch.float32).view(6, 5, 3)
TO_NHWC, CONV = "cudnn::nchwToNhwcKernel<float>", "sm80_xmma_fprop_implicit_gemm"
INPUT, OUTPUT, SCRATCH = 0x40000000000, 0x40000010000, 0x40000020000


def convolutions(*used: int) -> tuple[Recorded, list[Launched]]:
    """Convolutions that convert their input and then a weight into scratch, each given by the weight's address."""
    graph, launched = Recorded(), []
    node = fx.Graph().placeholder("x")
    for address in used:
        first = len(graph.names)
        graph.add(TO_NHWC, [b"shape", word(INPUT), word(SCRATCH)])
        graph.add(TO_NHWC, [b"shape", word(address), word(SCRATCH + 0x8000)])
        graph.add(CONV, [word(SCRATCH) + word(SCRATCH + 0x8000) + word(OUTPUT)])
        launched.append(Launched(node, 0, first, first + 3))
    return graph, launched


def constant(address: int = 0x10000000000) -> Constant:
    return Constant(address, Constant.of(WEIGHT).converted_bytes)


def test_another_layout_takes_no_more_than_padded_channels() -> None:
    assert Constant.of(WEIGHT).converted_bytes == 8 * 8 * 3 * 4


def test_a_constant_is_converted_once_and_all_its_readers_read_it_there() -> None:
    weight, counts, converted = constant(), EditCounts(), Converted()
    graph, launched = convolutions(weight.address, weight.address)
    run_once(graph, launched, {weight.address: weight}, converted, CPU, counts)
    (memory,) = converted.memory.values()
    assert graph.ran == [1]
    assert graph.dropped == [1, 4]
    assert graph.given[1][2] == word(memory.data_ptr())
    assert graph.given[2] == graph.given[5] == [word(SCRATCH) + word(memory.data_ptr()) + word(OUTPUT)]
    assert (counts.conversions, counts.removed) == (2, {TO_NHWC: 2})
    again, launched = convolutions(weight.address)
    run_once(again, launched, {weight.address: weight}, converted, CPU, EditCounts())
    assert again.ran == []  # another graph finds it converted
    assert again.dropped == [1]


def test_what_is_no_constant_is_converted_in_every_call() -> None:
    weight = constant()
    graph, launched = convolutions(weight.address + 64)
    run_once(graph, launched, {weight.address: weight}, Converted(), CPU, EditCounts())
    assert graph.dropped == graph.ran == []


@pytest.mark.parametrize("reader", [b"no address here", word(SCRATCH + 0x8000 + 16)], ids=["unread", "read inside"])
def test_a_conversion_whose_readers_are_not_known_stays(reader: bytes) -> None:
    weight = constant()
    graph, launched = convolutions(weight.address)
    graph.given[2] = [reader]
    run_once(graph, launched, {weight.address: weight}, Converted(), CPU, EditCounts())
    assert graph.dropped == []


def test_what_saves_most_launches_for_its_bytes_comes_first() -> None:
    often, seldom = constant(), constant(0x10000900000)
    graph, launched = convolutions(seldom.address, often.address, often.address)
    converted = Converted(limit=often.converted_bytes + 300)
    run_once(graph, launched, {c.address: c for c in (often, seldom)}, converted, CPU, EditCounts())
    assert graph.dropped == [4, 7]


def test_a_conversion_that_writes_beyond_its_memory_is_an_error_and_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weight, converted = constant(), Converted()
    graph, launched = convolutions(weight.address)
    original = graph.run_once

    def overrun(nodes: Sequence[int]) -> None:
        graph.writes_too_much = next(iter(converted.memory.values()))
        original(nodes)

    monkeypatch.setattr(graph, "run_once", overrun)
    with pytest.raises(CadenceError, match="larger than any layout"):
        run_once(graph, launched, {weight.address: weight}, converted, CPU, EditCounts())
    assert converted.memory == {}
