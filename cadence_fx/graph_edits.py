"""Edits of a captured graph before it is instantiated: the same kernels, fewer of them in a row.

A capture chains what one operator launches behind the operator's inputs, also where the data does not ask for it.

`prepare_early`: a matrix product that is split over K clears its counters, then its result, then multiplies. Neither
needs the product's inputs. The counters lie in the library's workspace of the stream: they may be cleared when the
stream's last user of the workspace is done. The result lies in a slot (`cadence_fx.output_slots`): it may be cleared
when the slot's last readers are done::

    inputs -> clear counters -> clear result -> multiply -> add bias
    inputs ----------------------------------> multiply -> add bias       beside it: clear counters, clear result

`run_once`: a convolution converts its weight to the layout that its kernel wants, in every call. The conversion of a
constant runs once, into memory of its own, which the convolution then reads.

What an edit does not recognise it leaves as it was recorded. Every edit is certified like the capture itself; that no
certificate can miss a race follows from the rules above, which name all memory that a moved node touches.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import fx

from cadence_fx.errors import CadenceError
from cadence_fx.fused_operator import FusedOperator
from cadence_fx.graph_dump import MEMSET
from cadence_fx.launch_graph import LaunchGraph, pointers
from cadence_fx.output_slots import Tenancy
from cadence_fx.scheduled_run import Launched

__all__ = ["Constant", "Converted", "EditCounts", "prepare_early", "run_once"]

aten = torch.ops.aten
K = TypeVar("K")
PRODUCTS = frozenset({aten.linear.default, aten.addmm.default, aten.mm.default, aten.bmm.default, aten.matmul.default})
# Kernels of torch itself: they touch their operator's tensors and no workspace of a library.
_TORCH = ("at::native::", "at_cuda_detail::", "PyTorchMemEffAttention::", "pytorch_flash::")
_CLEARS_RESULT = "scal_kernel<"
_CONVERSIONS = ("nchwToNhwcKernel<", "nhwcToNchwKernel<")
_GUARD, _PATTERN = 256, 0xA5  # bytes behind a converted constant that must stay as they are


@dataclass
class EditCounts:
    """What the edits did: counters and results that are cleared early, conversions that run once and their bytes."""

    counters: int = 0
    results: int = 0
    conversions: int = 0
    nbytes: int = 0
    removed: Counter[str] = field(default_factory=Counter)  # kernels that the graph holds no more, by name

    def summary(self) -> str:
        return (
            f"{self.counters} counters and {self.results} results cleared early, {self.conversions} conversions of "
            f"constants run once ({self.nbytes / 2**20:.0f} MiB)"
        )


@dataclass(frozen=True)
class Constant:
    """A tensor that no call writes: its address and the most bytes that another layout of it takes."""

    address: int
    converted_bytes: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Constant:
        padded = [-(-n // 8) * 8 if i < 2 else n for i, n in enumerate(tensor.shape)]
        size = tensor.element_size()
        for n in padded:
            size *= n
        return cls(tensor.data_ptr(), size)


@dataclass
class Converted:
    """Constants in other layouts, by address and kernel; shared by all graphs of a module.

    Args:
        limit: bytes that they may take. What saves most launches for its bytes comes first.
    """

    limit: int = 128 << 20
    memory: dict[tuple[int, str], torch.Tensor] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(t.numel() for t in self.memory.values())

    def choose(self, found: Sequence[_Conversion]) -> list[tuple[int, str]]:
        """The conversions, by key, that a graph adds within the limit."""
        uses = Counter(c.key for c in found if c.key not in self.memory)
        return self._within(uses, {c.key: c.constant.converted_bytes + _GUARD for c in found})

    def expected(self, uses: Counter[Constant]) -> int:
        """Bytes that a graph will add if each of these constants is converted by one kernel."""
        known = {address for address, _ in self.memory}
        new = Counter({constant: n for constant, n in uses.items() if constant.address not in known})
        sizes = {constant: constant.converted_bytes + _GUARD for constant in new}
        return sum(sizes[constant] for constant in self._within(new, sizes))

    def _within(self, uses: Counter[K], sizes: Mapping[K, int]) -> list[K]:
        room, chosen = self.limit - self.nbytes, []
        for key in sorted(uses, key=lambda k: uses[k] / sizes[k], reverse=True):
            if sizes[key] <= room:
                room -= sizes[key]
                chosen.append(key)
        return chosen


def _link(graph: LaunchGraph, sources: set[int], node: int) -> None:
    for source in sources - {node}:
        graph.before[node].add(source)
        graph.after[source].add(node)


def _unlink(graph: LaunchGraph, node: int) -> set[int]:
    """Free a node of what it waits for, and say what that was."""
    sources, graph.before[node] = graph.before[node], set()
    for source in sources:
        graph.after[source].discard(node)
    return sources


def _ends(graph: LaunchGraph, operator: Launched) -> set[int]:
    """The last nodes of an operator: who comes after them comes after all of it."""
    nodes = set(range(operator.first, operator.last))
    return {n for n in nodes if not graph.after[n] & nodes}


# ---------------------------------------------------------------------------------------------- split products
def prepare_early(
    graph: LaunchGraph,
    launched: Sequence[Launched],
    tenancies: Mapping[fx.Node, Tenancy],
    slot_address: Mapping[int, int],
    is_workspace: Callable[[int, int], bool],
    counts: EditCounts,
) -> None:
    """Let products clear counters and results before their inputs are there; order every slot's tenants.

    Args:
        launched: what each operator recorded, in order.
        tenancies: slots of products; ``slot_address`` says where they lie.
        is_workspace: true for an address range that lies in memory that outlives the capture and is no slot: of a
            product whose result lies in a slot, that is the workspace of the library.
    """
    by_node = {operator.node: operator for operator in launched}
    last_user: dict[int, Launched] = {}  # stream -> the last operator that may have used its workspace
    for operator in launched:
        if operator.first == operator.last:
            continue
        tenancy = tenancies.get(operator.node)
        before_slot: set[int] = set()
        if tenancy is not None:
            before_slot = {end for node in tenancy.after for end in _ends(graph, by_node[node])}
            _link_roots(graph, operator, before_slot)
        if not _uses_library(graph, operator):
            continue
        previous = last_user.get(operator.stream)
        last_user[operator.stream] = operator
        if previous is not None and tenancy is not None:
            free = _ends(graph, previous)
            _clear_early(graph, operator, free, before_slot, slot_address[tenancy.slot], is_workspace, counts)


def _link_roots(graph: LaunchGraph, operator: Launched, sources: set[int]) -> None:
    nodes = set(range(operator.first, operator.last))
    for node in nodes:
        if not graph.before[node] & nodes:
            _link(graph, sources, node)


def _uses_library(graph: LaunchGraph, operator: Launched) -> bool:
    if operator.node.target in PRODUCTS:
        return True
    if isinstance(operator.node.target, FusedOperator):
        return False
    names = [graph.name(n) for n in range(operator.first, operator.last) if graph.kind(n) == "kernel"]
    return not all(any(part in name for part in _TORCH) for name in names)


def _clear_early(
    graph: LaunchGraph,
    operator: Launched,
    workspace_free: set[int],
    before_slot: set[int],
    result: int,
    is_workspace: Callable[[int, int], bool],
    counts: EditCounts,
) -> None:
    counters = operator.first
    if graph.kind(counters) != MEMSET or not is_workspace(*graph.memset_range(counters)):
        return
    chain = _chain(graph, operator)
    if len(chain) < 3:
        return
    clears = _clears(graph, chain[1], result)
    multiply = chain[2] if clears else chain[1]
    inputs = _unlink(graph, counters) - before_slot
    _link(graph, workspace_free, counters)
    counts.counters += 1
    if clears:
        _unlink(graph, chain[1])
        _link(graph, before_slot, chain[1])
        _link(graph, {counters, chain[1]}, multiply)
        counts.results += 1
    else:
        _link(graph, before_slot, multiply)
    _link(graph, inputs, multiply)


def _chain(graph: LaunchGraph, operator: Launched) -> list[int]:
    """The operator's nodes from the first as long as each has one follower and that one waits for nothing else."""
    found = [operator.first]
    for node in range(operator.first + 1, operator.last):
        if graph.before[node] != {node - 1} or graph.after[node - 1] != {node}:
            break
        found.append(node)
    return found


def _clears(graph: LaunchGraph, node: int, result: int) -> bool:
    """True for the kernel that scales a result in place, which before a split product sets it to zero."""
    if graph.kind(node) != "kernel" or _CLEARS_RESULT not in graph.name(node):
        return False
    parameters = graph.parameters(node)
    return len(parameters) == 4 and parameters[1] == parameters[2] == struct.pack("<Q", result)


# ---------------------------------------------------------------------------------------------- constants
@dataclass(frozen=True)
class _Conversion:
    """A kernel that brings a constant into another layout, where it writes it, and who reads it there."""

    node: int
    constant: Constant
    kernel: str
    target: int
    readers: tuple[int, ...]

    @property
    def key(self) -> tuple[int, str]:
        return self.constant.address, self.kernel


def run_once(
    graph: LaunchGraph,
    launched: Sequence[Launched],
    constants: Mapping[int, Constant],
    converted: Converted,
    device: torch.device,
    counts: EditCounts,
) -> None:
    """Run conversions of constants now, and take them out of the graph.

    Args:
        constants: by address.
        converted: those that other graphs have converted already; new ones are added as far as its limit allows.

    Raises:
        CadenceError: a conversion wrote beyond the memory that its result should take.
    """
    found = [c for operator in launched for c in _conversions(graph, operator, constants)]
    first = {c.key: c for c in reversed(found)}
    new = converted.choose(found)
    for key in new:
        size = first[key].constant.converted_bytes + _GUARD
        converted.memory[key] = torch.full((size,), _PATTERN, dtype=torch.uint8, device=device)
    found = [c for c in found if c.key in converted.memory]
    for conversion in found:
        address = converted.memory[conversion.key].data_ptr()
        for node in (conversion.node, *conversion.readers):
            _readdress(graph, node, conversion.target, address)
    try:
        _convert(graph, [first[key].node for key in new], [converted.memory[key] for key in new], device)
    except BaseException:
        for key in new:
            del converted.memory[key]
        raise
    for conversion in found:
        counts.removed[conversion.kernel] += 1
        graph.drop(conversion.node)
    counts.conversions += len(found)
    counts.nbytes += sum(converted.memory[key].numel() for key in new)


def _convert(graph: LaunchGraph, nodes: Sequence[int], results: Sequence[torch.Tensor], device: torch.device) -> None:
    if not nodes:
        return
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()  # the results hold their pattern
    graph.run_once(nodes)
    if any(bool((memory[-_GUARD:] != _PATTERN).any()) for memory in results):
        raise CadenceError("a converted constant is larger than any layout of it that is known")


def _conversions(graph: LaunchGraph, operator: Launched, constants: Mapping[int, Constant]) -> Iterator[_Conversion]:
    for node in range(operator.first, operator.last):
        found = _conversion(graph, node, constants)
        if found is not None:
            constant, target = found
            readers = _readers_of(graph, operator, node, target, constant.converted_bytes)
            if readers:
                yield _Conversion(node, constant, graph.name(node), target, tuple(readers))


def _conversion(graph: LaunchGraph, node: int, constants: Mapping[int, Constant]) -> tuple[Constant, int] | None:
    """The constant that a conversion kernel reads and the address that it writes, or None."""
    if graph.kind(node) != "kernel" or not any(name in graph.name(node) for name in _CONVERSIONS):
        return None
    parameters = graph.parameters(node)
    if [len(p) for p in parameters[1:]] != [8, 8]:
        return None
    source, target = (struct.unpack("<Q", p)[0] for p in parameters[1:])
    constant = constants.get(source)
    return None if constant is None else (constant, target)


def _readers_of(graph: LaunchGraph, operator: Launched, node: int, target: int, nbytes: int) -> list[int]:
    """The operator's later kernels that are given the address; none if one is given an address inside of it."""
    found = []
    for other in range(operator.first, operator.last):
        if other == node or graph.kind(other) != "kernel":
            continue
        given = [value for parameter in graph.parameters(other) for _, value in pointers(parameter)]
        if any(target < value < target + nbytes for value in given):
            return []
        if target in given:
            if other < node:
                return []
            found.append(other)
    return found


def _readdress(graph: LaunchGraph, node: int, old: int, new: int) -> None:
    changed = []
    for parameter in graph.parameters(node):
        words = bytearray(parameter)
        for at, value in pointers(parameter):
            if value == old:
                struct.pack_into("<Q", words, at, new)
        changed.append(bytes(words))
    graph.set_parameters(node, changed)
