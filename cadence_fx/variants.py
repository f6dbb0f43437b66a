"""Ways to run a program under capture, the fastest first: they launch the same kernels with fewer waits."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from cadence_fx.effects import mutated_bases
from cadence_fx.footprint import CONVOLUTIONS, Pool, pool_bytes, workspace_bytes
from cadence_fx.fusion import Fused, Fuser
from cadence_fx.graph_dump import driver
from cadence_fx.graph_edits import Constant, Converted, EditCounts, prepare_early, run_once
from cadence_fx.launch_graph import RawGraph
from cadence_fx.output_slots import OutputSlots, plan_slots
from cadence_fx.program import Program
from cadence_fx.schedule import Schedule, operators, schedule
from cadence_fx.scheduled_run import CudaStreams, Launched, OneStream, StreamBackend, run_scheduled
from cadence_fx.specialise import FlatGraph

__all__ = ["Variant", "variants"]


@dataclass(frozen=True)
class Variant:
    """One way.

    Attributes:
        edit: changes the recorded graph and returns the bytes that this took.
        counts: what it did.
        predicted: bytes that the capture will take from the device beside its static inputs; ``pool`` is the model of
            the memory pool as the capture leaves it.
        fused: what was fused, if anything.
    """

    label: str
    run: Callable[..., Any]
    edit: Callable[[int], int] | None = None
    counts: EditCounts | None = None
    predicted: int = 0
    pool: Pool = field(default_factory=Pool)
    fused: Fused | None = None


@dataclass(frozen=True)
class _Graph:
    """What a variant runs: a program's graph, as it is or fused, spread over streams or not."""

    program: Program
    flat: FlatGraph
    planned: Schedule | None
    streams: StreamBackend
    device: torch.device
    fused: Fused | None = None

    def run(self, *inputs: Any) -> tuple[Any, ...]:
        assert self.planned is not None
        return run_scheduled(self.flat, self.program.module, self.planned, self.streams, inputs)

    def label(self, text: str) -> str:
        return text if self.fused is None else f"{text}, {self.fused.summary()}"

    def variant(self, variant: Variant, pool: Pool) -> Variant:
        """The variant with what it will take predicted."""
        after = copy.deepcopy(pool)
        grown = pool_bytes(self.flat, self.planned, after, workspace_bytes(self.device))
        return replace(variant, predicted=variant.predicted + grown, pool=after, fused=self.fused)


def variants(
    program: Program,
    streams: CudaStreams,
    count: int,
    edits: bool,
    converted: Converted,
    pool: Pool,
    fuser: Fuser | None = None,
) -> Iterator[Variant]:
    """The variants of a program, each made when the one before it was not certified.

    Args:
        streams: side streams, shared by all captures.
        count: of streams, where `Schedule.worthwhile` says that they can gain something; 1 leaves the chain alone.
        edits: whether recorded graphs are edited; needs ``cuda.bindings``.
        converted: constants in other layouts, shared by all captures.
        pool: the model of the memory pool as earlier captures left it; it is not changed.
        fuser: fuses pointwise operators; None leaves them as they are.
    """
    spread = count > 1 and streams.device.type == "cuda"
    fused = None if fuser is None else fuser.fuse(program)
    for flat, what in ((None if fused is None else fused.flat, fused), (program.flat, None)):
        if flat is None:
            continue
        if spread:
            planned = schedule(flat, count)
            planned = planned if planned.worthwhile else schedule(flat, 1)
            graph = _Graph(program, flat, planned, streams, streams.device, what)
            if edits and driver() is not None:
                yield graph.variant(_edited(graph, streams, converted), pool)
            yield graph.variant(Variant(graph.label(planned.summary()), graph.run), pool)
        elif what is not None:
            chain = _Graph(program, flat, schedule(flat, 1), OneStream(), streams.device, what)
            yield chain.variant(Variant(chain.label("chain"), chain.run), pool)
    chain = _Graph(program, program.flat, None, OneStream(), streams.device)
    yield chain.variant(Variant("chain", program.run), pool)


def _edited(graph: _Graph, streams: CudaStreams, converted: Converted) -> Variant:
    flat, planned, launched, counts = graph.flat, graph.planned, list[Launched](), EditCounts()
    assert planned is not None
    constants = _constants(graph)
    slots = OutputSlots(plan_slots(flat, operators(flat)), streams.device)

    def run(*inputs: Any) -> tuple[Any, ...]:
        launched.clear()
        return run_scheduled(flat, graph.program.module, planned, streams, inputs, slots.launch, launched)

    def edit(raw: int) -> int:
        recorded = RawGraph(raw)
        addresses = {slot: memory.data_ptr() for slot, memory in slots.memory.items()}
        prepare_early(recorded, launched, slots.planned, addresses, _lasting(slots), counts)
        run_once(recorded, launched, constants, converted, streams.device, counts)
        recorded.apply()
        counts.nbytes += slots.nbytes
        return counts.nbytes

    predicted = slots.nbytes + converted.expected(_convolved(graph, constants))
    return Variant(graph.label(planned.summary()), run, edit, counts, predicted)


def _convolved(graph: _Graph, constants: Mapping[int, Constant]) -> Counter[Constant]:
    """Constants that convolutions read as weights, and how often: what conversions will be found for."""
    found = Counter[Constant]()
    for node in graph.flat.graph.nodes:
        if node.target in CONVOLUTIONS and isinstance(node.args[1], fx.Node) and node.args[1].op == "get_attr":
            constant = constants.get(getattr(graph.program.module, str(node.args[1].target)).data_ptr())
            found.update(() if constant is None else (constant,))
    return found


def _lasting(slots: OutputSlots) -> Callable[[int, int], bool]:
    """Whether a range lies in memory that is still allocated now, after the capture, and is no slot."""
    blocks = [
        (block["address"], block["address"] + block["size"])
        for segment in torch.cuda.memory_snapshot()
        for block in segment["blocks"]
        if block["state"] == "active_allocated"
    ]
    taken = {(memory.data_ptr(), memory.data_ptr() + memory.numel()) for memory in slots.memory.values()}

    def lasting(address: int, nbytes: int) -> bool:
        end = address + nbytes
        if any(address < last and first < end for first, last in taken):
            return False
        return any(first <= address and end <= last for first, last in blocks)

    return lasting


def _constants(graph: _Graph) -> dict[int, Constant]:
    """Dense attributes that the program does not write, by address."""
    flat = graph.flat
    written = {n.target for n in mutated_bases(flat.graph.nodes) if n.op == "get_attr"}
    found: dict[int, Constant] = {}
    for node in flat.graph.nodes:
        if node.op == "get_attr" and node.target not in written and "region" not in node.meta:
            tensor = getattr(graph.program.module, str(node.target))
            if isinstance(tensor, torch.Tensor) and tensor.is_cuda and tensor.is_contiguous():
                found[tensor.data_ptr()] = Constant.of(tensor)
    return found
