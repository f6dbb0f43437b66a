"""The contract: what a streaming decoder's author knows about its clocks, written down.

A `Contract` is a value: frozen, validated when it is made, comparable, and convertible to JSON and back
(`cadence_fx.contract_json`). It names no tensor and needs no GPU, so extents, bytes and catalog widths
follow from it before anything runs (`cadence_fx.extents`).

Sizes are in elements of a dimension ("extent"), advances of a clock are in ticks. A call of the module
advances some clocks by some ticks; a region grows by ``growth`` elements per tick of its clock, and its
retention rule then bounds it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import TypeVar

from cadence_fx.calls import Bound, Boundary, Call, Entry, Input, RandomStream, Scalar
from cadence_fx.clocks import Arg, Attr, Clock, Key, Place, Result, Value
from cadence_fx.errors import ContractError, suggest
from cadence_fx.regions import Region

__all__ = [
    "Arg",
    "Attr",
    "Bound",
    "Boundary",
    "Call",
    "Clock",
    "Contract",
    "Entry",
    "Input",
    "Key",
    "Place",
    "RandomStream",
    "Region",
    "Result",
    "Scalar",
    "Value",
]


@dataclass(frozen=True)
class Contract:
    """Everything that a runtime must know about a streaming module, as one frozen value.

    Args:
        name: shown in reports.
        clocks, regions, inputs, calls, scalars: the declaration.
        entries: methods beside ``forward`` that make state.
        boundaries: callables at which traces are shared and captures may cut, outermost first.
        admit: bounds on what a single call may advance.
        random: the random streams that ``forward`` draws from.
        constants: attributes that are constant although a call could write them; all parameters and all buffers
            that no traced call writes are constants without being named.
        max_graphs: most signatures to capture; wider regions are excluded.
        max_bytes: most bytes that captures may hold; ``None`` for no limit.
        max_constant_bytes: most bytes that hoisted constants may hold.

    Raises:
        ContractError: a name is unknown or used twice, two regions share a place, or sizes contradict each other.
    """

    name: str
    clocks: tuple[Clock, ...]
    regions: tuple[Region, ...]
    inputs: tuple[Input, ...] = ()
    calls: tuple[Call, ...] = ()
    scalars: tuple[Scalar, ...] = ()
    entries: tuple[Entry, ...] = ()
    boundaries: tuple[Boundary, ...] = ()
    admit: tuple[Bound, ...] = ()
    random: tuple[RandomStream, ...] = ()
    constants: tuple[str, ...] = ()
    max_graphs: int = 128
    max_bytes: int | None = None
    max_constant_bytes: int = 256 << 20

    def __post_init__(self) -> None:
        for name in ("clocks", "regions", "inputs", "calls", "scalars", "entries", "boundaries", "admit",
                     "random", "constants"):  # fmt: skip
            object.__setattr__(self, name, tuple(getattr(self, name)))
        from cadence_fx.contract_check import check

        check(self)

    @property
    def variants(self) -> int:
        """Number of start variants (prompt lengths)."""
        return max([1, *(len(r.starts) for r in self.regions), *(len(s.per_start) for s in self.scalars)])

    def clock(self, name: str) -> Clock:
        """The clock of that name; ContractError with a suggestion if there is none."""
        return _named(self.clocks, name, "clock")

    def region(self, name: str) -> Region:
        """The region of that name; ContractError with a suggestion if there is none."""
        return _named(self.regions, name, "region")

    def call(self, name: str) -> Call:
        """The call of that name; ContractError with a suggestion if there is none."""
        return _named(self.calls, name, "call")

    @property
    def states(self) -> tuple[Region, ...]:
        """The regions that hold state."""
        return tuple(r for r in self.regions if r.mutability == "state")

    @property
    def scratch(self) -> tuple[tuple[Attr, Region], ...]:
        """Attributes of the module that no call reads before writing, and their declarations."""
        return tuple((r.enters, r) for r in self.regions if r.mutability == "scratch" and isinstance(r.enters, Attr))

    def _rate(self, clock: str) -> tuple[str, Fraction]:
        """The clock without a parent that ``clock`` descends from, and ticks of ``clock`` per tick of it."""
        ratio, current = Fraction(1), self.clock(clock)
        while current.of is not None:
            ratio, current = ratio * current.ratio, self.clock(current.of)
        return current.name, ratio

    def ratio(self, clock: str, to: str) -> Fraction | None:
        """Ticks of ``clock`` per tick of ``to``, through the parents that they share; None if they are unrelated."""
        (root, rate), (to_root, to_rate) = self._rate(clock), self._rate(to)
        return rate / to_rate if root == to_root else None

    def elapsed(self, clock: str, ticks: Mapping[str, int]) -> Fraction:
        """Ticks of ``clock`` in a call that advances the clocks by ``ticks``; 0 if the call does not touch it."""
        for other, n in ticks.items():
            ratio = self.ratio(clock, other)
            if ratio is not None:
                return ratio * n
        return Fraction(0)

    def advance(self, region: Region, ticks: Mapping[str, int]) -> int:
        """Elements by which ``region`` grows when a call advances the clocks by ``ticks``.

        Raises:
            ContractError: the growth is no whole number of elements.
        """
        if region.clock is None:
            return 0
        grown = region.growth * self.elapsed(region.clock, ticks)
        if grown.denominator != 1:
            given = ", ".join(f"{n} ticks of {clock!r}" for clock, n in ticks.items())
            raise ContractError(
                f"Region {region.name!r}: {given} grow it by {grown}, no whole number; mend growth or ratio"
            )
        return int(grown)


Named = TypeVar("Named", Clock, Region, Call)


def _named(items: tuple[Named, ...], name: str, kind: str) -> Named:
    for item in items:
        if item.name == name:
            return item
    known = [item.name for item in items]
    raise ContractError(
        f"no {kind} is called {name!r}; the contract has {', '.join(known) or 'none'}{suggest(name, known)}"
    )
