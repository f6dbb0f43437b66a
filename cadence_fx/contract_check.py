"""Checks that a contract does not contradict itself.

Every check raises at the first contradiction: the text names the field, the value found and a way out. A
contract that passes can still be wrong about its module; tracing and certification find that out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable
from fractions import Fraction
from math import prod
from typing import TYPE_CHECKING, NoReturn

from cadence_fx.errors import ContractError, suggest

if TYPE_CHECKING:
    from cadence_fx.contract import Call, Clock, Contract, Region

__all__ = ["check"]

BUILT_IN_CLOCKS = ("chunk",)  # one tick per call of the module: random streams may use it undeclared


def check(contract: Contract) -> None:
    """Return if ``contract`` is consistent.

    Raises:
        ContractError: the first contradiction found, in the order of the checks below.
    """
    _check_names(contract)
    _check_clocks(contract)
    _check_limits(contract)
    for region in contract.regions:
        _check_region(contract, region)
    _check_places(contract)
    _check_variants(contract)
    for call in contract.calls:
        _check_call(contract, call)
    _check_references(contract)
    for region in contract.regions:
        _check_against_calls(contract, region)


def _fail(where: str, field: str, found: object, way_out: str) -> NoReturn:
    raise ContractError(f"{where}: {field} is {found!r}; {way_out}")


def _known(where: str, field: str, found: str, known: Iterable[str], kind: str) -> None:
    names = list(known)
    if found not in names:
        _fail(
            where,
            field,
            found,
            f"no {kind} has that name, known are {', '.join(names) or 'none'}{suggest(found, names)}",
        )


def _first_twice(items: Iterable[Hashable]) -> Hashable | None:
    return next((item for item, count in Counter(items).items() if count > 1), None)


# ------------------------------------------------------------------------------------------ names and limits
def _check_names(contract: Contract) -> None:
    where = f"Contract {contract.name!r}"
    for kind in ("clocks", "regions", "calls"):
        twice = _first_twice(item.name for item in getattr(contract, kind))
        if twice is not None:
            _fail(where, kind, twice, "it occurs twice, names are unique: rename one or drop it")


def _check_limits(contract: Contract) -> None:
    where = f"Contract {contract.name!r}"
    for field in ("max_graphs", "max_bytes", "max_constant_bytes"):
        found = getattr(contract, field)
        if found is not None and found < 1:
            none = ", or None for no limit" if field == "max_bytes" else ""
            _fail(where, field, found, f"a limit is at least 1{none}")
    clocks = [clock.name for clock in contract.clocks]
    for bound in contract.admit:
        _known("Bound", "clock", bound.clock, clocks, "clock")
        if bound.at_most < 1:
            _fail(f"Bound on {bound.clock!r}", "at_most", bound.at_most, "it would admit no call; give at least 1 tick")


# ------------------------------------------------------------------------------------------ clocks
def _check_clocks(contract: Contract) -> None:
    clocks = {clock.name: clock for clock in contract.clocks}
    for clock in contract.clocks:
        where = f"Clock {clock.name!r}"
        if clock.of is not None:
            _known(where, "of", clock.of, clocks, "clock")
        for factor in clock.product:
            _known(where, "product", factor, clocks, "clock")
    for clock in contract.clocks:
        _check_cycle(clock, clocks)
    for clock in contract.clocks:
        parent = clocks[clock.of] if clock.of is not None else None
        if parent is None or clock.hz is None or parent.hz is None:
            continue
        follows = float(clock.ratio) * parent.hz
        if abs(clock.hz - follows) > 1e-6 * follows:
            way_out = f"ratio {clock.ratio} of {parent.name!r} at {parent.hz} Hz makes {follows:g} Hz; leave hz out"
            _fail(f"Clock {clock.name!r}", "hz", clock.hz, way_out)


def _check_cycle(clock: Clock, clocks: dict[str, Clock]) -> None:
    path: list[str] = []
    open_ends = [(clock.name, [clock.name])]
    while open_ends:
        name, path = open_ends.pop()
        sources = [s for s in (clocks[name].of, *clocks[name].product) if s is not None]
        if clock.name in sources:
            field = "product" if clock.product else "of"
            loop = " -> ".join([*path, clock.name])
            _fail(
                f"Clock {clock.name!r}",
                field,
                getattr(clock, field),
                f"it depends on itself ({loop}); one must stand alone",
            )
        open_ends += [(source, [*path, source]) for source in sources if source not in path]


def _bounded_extent(contract: Contract, name: str) -> int | None:
    clock = contract.clock(name)
    factors = [_bounded_extent(contract, factor) for factor in clock.product]
    if not factors:
        return clock.extent
    return prod(f for f in factors if f is not None) if None not in factors else None


# ------------------------------------------------------------------------------------------ regions
def _check_region(contract: Contract, region: Region) -> None:
    where, clocks = f"Region {region.name!r}", [clock.name for clock in contract.clocks]
    if region.clock is not None:
        _known(where, "clock", region.clock, clocks, "clock")
        if contract.clock(region.clock).product:
            _fail(where, "clock", region.clock, "a product drives no single dimension; name the factor that drives dim "
                  "here and the bounded factors in fixed_clocks")  # fmt: skip
    for dim, name in region.fixed_clocks:
        _known(where, f"fixed_clocks[{dim}]", name, clocks, "clock")
        extent, size = _bounded_extent(contract, name), region.shape[dim]
        if extent is None:
            _fail(where, f"fixed_clocks[{dim}]", name, "that clock is unbounded; give the clock an extent")
        if extent != size:
            _fail(where, f"shape[{dim}]", size, f"clock {name!r} has {extent} tick(s); make the two equal (what stock "
                  "allocates beyond that belongs in reserved)")  # fmt: skip
    if region.shares is not None:
        if region.mutability != "scratch":
            _fail(where, "shares", region.shares, f"only a scratch region can share memory, not {region.mutability!r}")
        _known(where, "shares", region.shares, [r.name for r in contract.regions], "region")
        other = contract.region(region.shares)
        if other.mutability != "state":
            _fail(where, "shares", region.shares, f"that region is {other.mutability!r}; name a state region")


def _check_places(contract: Contract) -> None:
    for field in ("enters", "leaves"):
        used: dict[object, str] = {}
        for region in contract.states:
            place = getattr(region, field)
            if place is not None and place in used:
                _fail(f"Region {region.name!r}", field, str(place),
                      f"region {used[place]!r} has the same; two states cannot share a place")  # fmt: skip
            used[place] = region.name
    taken: dict[object, str] = {r.enters: f"region {r.name!r}" for r in contract.states if r.enters is not None}
    for kind, items in (("Input", contract.inputs), ("Scalar", contract.scalars)):
        for item in items:
            if item.place in taken:
                _fail(kind, "place", str(item.place), f"{taken[item.place]} has the same; declare each argument once")
            taken[item.place] = kind.lower() if kind == "Scalar" else "another input"


def _check_variants(contract: Contract) -> None:
    found = [(f"Region {r.name!r}", "start", r.starts) for r in contract.regions]
    found += [(f"Scalar {s.place}", "per_start", s.per_start) for s in contract.scalars]  # type: ignore[misc]
    for where, field, values in found:
        if len(values) not in (1, contract.variants):
            _fail(
                where,
                field,
                values,
                f"the contract has {contract.variants} start variant(s); give 1 value or one for each",
            )


# ------------------------------------------------------------------------------------------ calls
def _check_call(contract: Contract, call: Call) -> None:
    where, clocks = f"Call {call.name!r}", [clock.name for clock in contract.clocks]
    for name, ticks in call.ticks.items():
        _known(where, "ticks", name, clocks, "clock")
        if contract.clock(name).product:
            _fail(where, "ticks", name, "a product clock advances through its factors; name the factors")
        expected = contract.elapsed(name, call.ticks)
        if expected != ticks:
            _fail(
                where,
                f"ticks[{name!r}]",
                ticks,
                f"the other clocks of this call advance it by {expected}; give one of them",
            )
    inputs = {item.name: item for item in contract.inputs}
    for name in call.sizes:
        _known(where, "sizes", name, inputs, "input")
    fixed = {place for place, _ in call.scalars}
    for name, item in inputs.items():
        sizes, wanted = call.sizes.get(name, ()), item.shape.count(None)
        if len(sizes) != wanted and item.place not in fixed:
            _fail(
                where,
                f"sizes[{name!r}]",
                sizes,
                f"the input's shape {item.shape} leaves {wanted} size(s) open; give as many",
            )
        if any(size < 0 for size in sizes):
            _fail(where, f"sizes[{name!r}]", sizes, "a size is not negative")
    for bound in contract.admit:
        elapsed = contract.elapsed(bound.clock, call.ticks)
        if call.steady and elapsed > bound.at_most:
            way_out = f"it advances {bound.clock!r} by {elapsed}, admit allows {bound.at_most}; raise the bound"
            _fail(where, "steady", True, f"every steady call would run as stock: {way_out}")


def _check_references(contract: Contract) -> None:
    clocks = [clock.name for clock in contract.clocks]
    for entry in contract.entries:
        for name, _ in entry.leaves:
            _known(f"Entry {entry.method!r}", "leaves", name, [r.name for r in contract.regions], "region")
    for boundary in contract.boundaries:
        if boundary.clock is not None:
            _known(f"Boundary {boundary.path!r}", "clock", boundary.clock, clocks, "clock")
    for stream in contract.random:
        _known("RandomStream", "clock", stream.clock, [*clocks, *BUILT_IN_CLOCKS], "clock")


def _check_against_calls(contract: Contract, region: Region) -> None:
    """Strides and flushes of the region, if given, say what the calls say."""
    for field in ("strides", "flush"):
        for ticks in getattr(region, field):
            if (region.growth * ticks).denominator != 1:
                _fail(
                    f"Region {region.name!r}",
                    field,
                    ticks,
                    f"with growth {region.growth} it is no whole number of elements",
                )
    grown = {call.name: (call.steady, contract.advance(region, call.ticks)) for call in contract.calls}
    if not contract.calls or region.clock is None:
        return
    steady = {Fraction(n) for is_steady, n in grown.values() if is_steady and n}
    short = {Fraction(n) for is_steady, n in grown.values() if not is_steady and n} - steady
    strides = {region.growth * ticks for ticks in region.strides}
    flush = {region.growth * ticks for ticks in region.flush} - strides
    for field, given, called in (("strides", strides, steady), ("flush", flush, short)):
        if getattr(region, field) and given != called:
            kind = "steady" if field == "strides" else "other"
            elements = ", ".join(map(str, sorted(called))) or "nothing"
            way_out = f"the {kind} calls grow it by {elements} (elements); leave {field} out or mend the calls"
            _fail(f"Region {region.name!r}", field, getattr(region, field), way_out)
