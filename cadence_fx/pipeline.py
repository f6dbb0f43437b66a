"""What a pass is, and the driver that runs passes in order.

A pass is a frozen dataclass: its fields are its options, ``name`` is its public identity. It gets a valid graph and
leaves a valid graph; it changes nothing but the graph that it is given. Every rewrite is returned as a `Change`, every
near miss as a `Rejection`, so that a report can say what was done and why anything was not.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import networkx
import torch

from cadence_fx.changes import Change, Rejection
from cadence_fx.constants import ConstantPool
from cadence_fx.contract import Contract
from cadence_fx.errors import CadenceError
from cadence_fx.specialise import FlatGraph

__all__ = ["GraphPass", "PassContext", "PassError", "PassResult", "RegionLink", "order_passes", "run_passes"]


class PassError(CadenceError):
    """A pass broke one of its own promises: a fault of the library, not of the contract."""


@dataclass(frozen=True)
class RegionLink:
    """How one state region touches one graph.

    Attributes:
        name: the region's.
        input: placeholder that brings the state in.
        output: index among the graph's outputs of the new state; None if the call does not return it.
        buffer: name under which the graph may read the region's buffer as an attribute.
        shape: of the buffer.
        dim: growing dimension, or None.
        old, new: extent before and after the call (0 where ``dim`` is None).
        old_offset, new_offset: first live row before and after.
        grown: elements that the call adds before retention.
        variant: start variant of the call.
    """

    name: str
    input: str
    output: int | None
    buffer: str
    shape: tuple[int, ...]
    dim: int | None
    old: int
    new: int
    old_offset: int
    new_offset: int
    grown: int = 0
    variant: int = 0


@dataclass(frozen=True)
class PassContext:
    """What a pass may know beside the graph: the contract and values, never a model."""

    contract: Contract
    regions: tuple[RegionLink, ...]
    scratch: frozenset[str]  # dotted paths of buffers that no call reads before writing
    fetch: Callable[[FlatGraph, str], torch.Tensor]  # value of an attribute of the graph
    constants: ConstantPool = field(default_factory=ConstantPool)


@dataclass(frozen=True)
class PassResult:
    """A pass's graph and everything it did or declined. ``modified`` follows from the changes."""

    flat: FlatGraph
    changes: tuple[Change, ...] = ()
    rejections: tuple[Rejection, ...] = ()

    @property
    def modified(self) -> bool:
        return bool(self.changes)


class GraphPass(Protocol):
    """A pass. ``after`` names the passes that must have run before it, where they run at all."""

    name: ClassVar[str]
    after: ClassVar[tuple[str, ...]]

    def requires(self, flat: FlatGraph, context: PassContext) -> str | None:
        """Why the pass cannot run on this graph, or None."""
        ...

    def call(self, flat: FlatGraph, context: PassContext) -> PassResult:
        """Rewrite ``flat`` in place and say what changed."""
        ...

    def ensures(self, flat: FlatGraph, context: PassContext) -> str | None:
        """What is wrong with the pass's result, or None."""
        ...


Observer = Callable[[str, FlatGraph, PassResult], None]


def order_passes(passes: Sequence[GraphPass]) -> tuple[GraphPass, ...]:
    """The passes in an order that respects ``after``, otherwise as given.

    Raises:
        PassError: two passes share a name, or the constraints form a cycle, which is named.
    """
    by_name = {p.name: p for p in passes}
    if len(by_name) != len(passes):
        raise PassError(f"two passes share a name: {[p.name for p in passes]}")
    graph = networkx.DiGraph()
    graph.add_nodes_from(by_name)
    graph.add_edges_from((before, p.name) for p in passes for before in p.after if before in by_name)
    try:
        rank = {p.name: i for i, p in enumerate(passes)}
        return tuple(by_name[name] for name in networkx.lexicographical_topological_sort(graph, key=rank.__getitem__))
    except networkx.NetworkXUnfeasible:
        cycle = networkx.find_cycle(graph)
        raise PassError(
            f"passes wait for each other: {' -> '.join(edge[0] for edge in cycle)} -> {cycle[0][0]}"
        ) from None


def run_passes(
    flat: FlatGraph,
    context: PassContext,
    passes: Sequence[GraphPass],
    observer: Observer | None = None,
    seconds: dict[str, float] | None = None,
) -> PassResult:
    """Run passes in order on ``flat`` and collect all changes and rejections.

    Args:
        observer: called after each pass with its name, the graph before it (a copy) and its result. Dumps and bit
            checks hang here; without an observer no copies are made.
        seconds: accumulates time per pass.

    Raises:
        PassError: a pass's requirement or promise does not hold, or it raised; names the passes already run.
    """
    changes: list[Change] = []
    rejections: list[Rejection] = []
    done: list[str] = []
    for step in order_passes(passes):
        before = flat.copy() if observer is not None else flat
        start = time.perf_counter()
        try:
            reason = step.requires(flat, context)
            if reason is not None:
                raise PassError(f"pass {step.name!r} cannot run: {reason}")
            result = step.call(flat, context)
            result.flat.graph.lint()
            reason = step.ensures(result.flat, context)
            if reason is not None:
                raise PassError(f"pass {step.name!r} left a wrong graph: {reason}")
        except CadenceError:
            raise
        except Exception as error:
            raise PassError(
                f"pass {step.name!r} failed after {done or 'none'}: {type(error).__name__}: {error}"
            ) from error
        if seconds is not None:
            seconds[step.name] = seconds.get(step.name, 0.0) + time.perf_counter() - start
        flat = result.flat
        changes += result.changes
        rejections += result.rejections
        done.append(step.name)
        if observer is not None:
            observer(step.name, before, result)
    return PassResult(flat, tuple(changes), tuple(rejections))
