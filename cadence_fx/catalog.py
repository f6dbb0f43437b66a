"""The catalog: every signature that the declared traffic can reach, enumerated before any traffic.

A state is the start variant and the attended extent of each growing state region. Calls move all regions at once,
so the states and the moves between them form a small directed graph; what the start states reach is the catalog.
Regions whose verdict is "exclude" are no part of it: what reads them runs as stock.
"""

from __future__ import annotations

from collections import deque
from dataclasses import asdict, dataclass
from functools import lru_cache
from math import prod

import networkx as nx

from cadence_fx.contract import Attr, Call, Contract, Input, Region
from cadence_fx.errors import ContractError, suggest
from cadence_fx.extents import region_bytes, region_extents, resets, retained
from cadence_fx.regions import DTYPE_BYTES

__all__ = [
    "MAX_STATES",
    "CaptureBytes",
    "ClassBytes",
    "Signature",
    "State",
    "admitted",
    "after",
    "catalog_regions",
    "predicted_bytes",
    "reachable",
    "settling",
    "signatures",
    "starts",
]

MAX_STATES = 20_000  # far above what captures could hold; the enumeration must end in any case


@dataclass(frozen=True, order=True)
class State:
    """Attended extents between two calls: a start variant, and (region, elements) in the contract's order."""

    variant: int
    extents: tuple[tuple[str, int], ...]

    def extent(self, region: str) -> int | None:
        """The extent of ``region`` in elements; None if it is not part of the catalog."""
        return dict(self.extents).get(region)


@dataclass(frozen=True, order=True)
class Signature:
    """One class of the catalog: a call by name, made in a state."""

    state: State
    call: str


@dataclass(frozen=True)
class _Table:
    """The catalog's regions, and what each call does to each of them: (elements grown, resets)."""

    regions: tuple[Region, ...]
    effects: dict[str, tuple[tuple[int, bool], ...]]

    def after(self, state: State, call: str) -> State:
        extents = []
        for region, (name, extent), (grown, back) in zip(self.regions, state.extents, self.effects[call], strict=True):
            start = _start(region, state.variant)
            left = retained(region.retain, extent + grown, start) if grown else extent
            extents.append((name, start if back else left))
        return State(state.variant, tuple(extents))


@lru_cache(maxsize=64)
def _table(contract: Contract) -> _Table:
    regions = tuple(r for r in contract.states if r.grows and region_extents(contract, r).verdict == "capture")
    effects = {c.name: tuple((contract.advance(r, c.ticks), resets(r, c)) for r in regions) for c in contract.calls}
    return _Table(regions, effects)


def catalog_regions(contract: Contract) -> tuple[Region, ...]:
    """The growing state regions that captures may read, in the contract's order."""
    return _table(contract).regions


def _start(region: Region, variant: int) -> int:
    return region.starts[variant if len(region.starts) > 1 else 0]


def starts(contract: Contract) -> tuple[State, ...]:
    """The state before the first call, one for each start variant."""
    regions = catalog_regions(contract)
    return tuple(State(v, tuple((r.name, _start(r, v)) for r in regions)) for v in range(contract.variants))


def after(contract: Contract, state: State, call: str) -> State:
    """The state that ``call`` leaves behind.

    A call that ends a lifetime takes the regions of that lifetime, and of shorter ones, back to their start.

    Raises:
        ContractError: no call has that name.
    """
    return _table(contract).after(state, contract.call(call).name)


def admitted(contract: Contract, call: Call) -> bool:
    """True if ``call`` stays within every bound of ``Contract.admit``."""
    return all(contract.elapsed(bound.clock, call.ticks) <= bound.at_most for bound in contract.admit)


def reachable(contract: Contract, steady_only: bool = False) -> nx.DiGraph:
    """The states that traffic reaches, in breadth-first order, and the moves between them.

    Nodes are `State`; each edge carries ``calls``, the names of the calls that take it. Calls beyond the admission
    bounds run as stock and still move state, so their edges are here, while their signatures are not in the catalog.

    Args:
        contract: the declaration.
        steady_only: follow steady calls only.

    Raises:
        ContractError: there are more than `MAX_STATES` states.
    """
    graph = nx.DiGraph()
    graph.add_nodes_from(starts(contract))
    calls = [call for call in contract.calls if call.steady or not steady_only]
    table, queue = _table(contract), deque(graph.nodes)
    while queue:
        state = queue.popleft()
        for call in calls:
            target = table.after(state, call.name)
            if target not in graph:
                if len(graph) >= MAX_STATES:
                    raise ContractError(
                        f"Contract {contract.name!r}: calls reach more than {MAX_STATES} states; "
                        "declare fewer calls, or lower max_graphs so that the widest regions are excluded"
                    )
                graph.add_node(target)
                queue.append(target)
            taken = graph.get_edge_data(state, target, {}).get("calls", ())
            graph.add_edge(state, target, calls=(*taken, call.name))
    return graph


def signatures(contract: Contract, steady_only: bool = False) -> tuple[Signature, ...]:
    """The catalog, states breadth first from the starts and calls in the contract's order.

    Equal extents under two start variants are two signatures, since scalars and retention may differ.

    Args:
        contract: the declaration.
        steady_only: the regular cadence alone: steady calls, in the states that these reach.

    Raises:
        ContractError: there are more than `MAX_STATES` states.
    """
    calls = [c.name for c in contract.calls if admitted(contract, c) and (c.steady or not steady_only)]
    return tuple(Signature(state, call) for state in reachable(contract, steady_only).nodes for call in calls)


def settling(contract: Contract) -> int:
    """Steady calls from the first start until no extent grows any more; 0 if the contract calls nothing steady."""
    steady = next((call.name for call in contract.calls if call.steady), None)
    state, seen = starts(contract)[0], dict[State, None]()
    while steady is not None and state not in seen:
        seen[state] = None
        state = after(contract, state, steady)
    return max(0, len(seen) - 1)


# ---------------------------------------------------------------------------------------------- equation 6
@dataclass(frozen=True)
class ClassBytes:
    """One signature and the bytes of its static inputs, the arguments that are copied in before each replay."""

    call: str
    variant: int
    extents: tuple[tuple[str, int], ...]
    staged_bytes: int

    def to_dict(self) -> dict[str, object]:
        """JSON-safe values; extents as an object."""
        return {**asdict(self), "extents": dict(self.extents)}


@dataclass(frozen=True)
class CaptureBytes:
    """What captures hold beside their workspaces, in bytes.

    Args:
        classes: static inputs of each signature.
        frozen: envelopes at fixed addresses, (region, bytes), each held once for all signatures.
        excluded: state regions outside the catalog; their bytes are in no total.
    """

    classes: tuple[ClassBytes, ...]
    frozen: tuple[tuple[str, int], ...]
    excluded: tuple[str, ...] = ()

    @property
    def staged_total(self) -> int:
        """Bytes of static inputs over all signatures."""
        return sum(row.staged_bytes for row in self.classes)

    @property
    def frozen_total(self) -> int:
        """Bytes of the frozen envelopes."""
        return sum(size for _, size in self.frozen)

    @property
    def total(self) -> int:
        """Both."""
        return self.staged_total + self.frozen_total

    def to_dict(self) -> dict[str, object]:
        """JSON-safe values, totals included."""
        return {
            "classes": [row.to_dict() for row in self.classes],
            "frozen": dict(self.frozen),
            "excluded": list(self.excluded),
            "staged_total": self.staged_total,
            "frozen_total": self.frozen_total,
            "total": self.total,
        }


def predicted_bytes(contract: Contract, aliased: frozenset[str]) -> CaptureBytes:
    """What the catalog's captures will hold: the paper's equation 6.

    Every argument that is not aliased needs storage of its own in every class; every aliased region needs its
    envelope once. A region that the module finds at an attribute is at a fixed address whether it is named or not.

    Args:
        contract: the declaration.
        aliased: names of regions and inputs that replays read where the caller has them.

    Raises:
        ContractError: a name in ``aliased`` is unknown, or there are more than `MAX_STATES` states.
    """
    known = [*(r.name for r in contract.regions), *(i.name for i in contract.inputs)]
    for name in sorted(aliased - set(known)):
        raise ContractError(f"aliased is {name!r}; no region or input has that name{suggest(name, known)}")
    derived = {r.name: region_extents(contract, r) for r in contract.regions}
    excluded = tuple(r.name for r in contract.states if derived[r.name].verdict == "exclude")
    usable = [r for r in contract.regions if r.name not in excluded and r.mutability != "constant"]
    fixed = [r for r in usable if r.name in aliased or isinstance(r.enters, Attr)]
    passed = [r for r in usable if r.mutability == "state" and r not in fixed]
    rows = []
    for signature in signatures(contract):
        state, call = signature.state, contract.call(signature.call)
        staged = sum(region_bytes(r, _extent(r, state)) for r in passed)
        staged += sum(_input_bytes(item, call) for item in contract.inputs if item.name not in aliased)
        rows.append(ClassBytes(call.name, state.variant, state.extents, staged))
    envelopes = ((r.name, derived[r.name].bytes) for r in fixed)
    return CaptureBytes(tuple(rows), tuple((name, size) for name, size in envelopes if size), excluded)


def _extent(region: Region, state: State) -> int:
    found = state.extent(region.name)
    start = _start(region, state.variant)
    # A pinned region or a ring with a declared dimension is always read whole.
    return retained(region.retain, start, start) if found is None else found


def _input_bytes(item: Input, call: Call) -> int:
    if any(place == item.place for place, _ in call.scalars):
        return 0  # this call passes a Python value there
    sizes = iter(call.sizes.get(item.name, ()))
    return DTYPE_BYTES[item.dtype] * prod(next(sizes) if size is None else size for size in item.shape)
