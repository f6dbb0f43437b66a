"""The contract: what a streaming decoder's author knows about its clocks, written down.

A `Contract` is a value: frozen, validated when it is made, comparable, and convertible to JSON and back
(`cadence_fx.contract_json`). It names no tensor and needs no GPU, so extents, bytes and catalog widths
follow from it before anything runs (`cadence_fx.extents`).

Sizes are in elements of a dimension ("extent"), advances of a clock are in ticks. A call of the module
advances some clocks by some ticks; a region grows by ``growth`` elements per tick of its clock, and its
retention rule then bounds it.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, NoReturn, TypeAlias, TypeVar

from cadence_fx.errors import ContractError
from cadence_fx.retention import Pinned, Retention, Ring

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

Key: TypeAlias = str | int
Value: TypeAlias = bool | int | float | str | None
Lifetime = Literal["operator", "unit", "turn", "session", "process"]
Mutability = Literal["state", "scratch", "constant"]
Order = Literal["new_first", "old_first", "ring", "replace"]
LIFETIMES: tuple[str, ...] = ("operator", "unit", "turn", "session", "process")
MUTABILITIES: tuple[str, ...] = ("state", "scratch", "constant")
ORDERS: tuple[str, ...] = ("new_first", "old_first", "ring", "replace")
PINNED = Pinned()
DTYPE_BYTES: dict[str, int] = {
    "bool": 1, "uint8": 1, "int8": 1, "int16": 2, "int32": 4, "int64": 8,
    "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "complex64": 8, "complex128": 16,
}  # fmt: skip


# ---------------------------------------------------------------------------------------------- places
class _Path:
    """Where a value is found: a root and the dict keys or tuple indices below it."""

    keys: tuple[Key, ...]

    def __init__(self, *keys: Key) -> None:
        for key in keys:
            if not isinstance(key, (str, int)) or isinstance(key, bool):
                raise ContractError(f"{type(self).__name__}: key {key!r} is neither a str nor an int")
        object.__setattr__(self, "keys", tuple(keys))

    def __str__(self) -> str:
        return type(self).__name__.lower() + "".join(f"[{key!r}]" for key in self.keys)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(repr, self.keys))})"


@dataclass(frozen=True, init=False, repr=False)
class Arg(_Path):
    """An argument of ``forward`` by name, then keys into it: ``Arg("state", "att_cache")``."""

    keys: tuple[Key, ...]


@dataclass(frozen=True, init=False, repr=False)
class Result(_Path):
    """A part of the returned value: ``Result(1, "att_cache")``; ``Result()`` is the value itself."""

    keys: tuple[Key, ...]


@dataclass(frozen=True)
class Attr:
    """An attribute of the module or of a submodule, by dotted path: ``Attr("decoder.att_buffer")``."""

    path: str

    def __str__(self) -> str:
        return self.path


Place: TypeAlias = Arg | Result | Attr


# ---------------------------------------------------------------------------------------------- clocks
@dataclass(frozen=True)
class Clock:
    """A deterministic counter that configuration fixes.

    Give ``hz`` for a clock tied to stream time, ``of`` and ``ratio`` for one that ticks ``ratio`` times per tick
    of another, ``extent`` for one that restarts in each call (solver step, codebook step), or ``product`` for
    the product of several clocks.

    Args:
        name: unique in the contract.
        hz: ticks per second of stream.
        of: name of the parent clock.
        ratio: ticks per tick of the parent.
        extent: number of ticks of a clock that restarts in each call.
        product: names of the factors of a product clock.
    """

    name: str
    hz: float | None = None
    of: str | None = None
    ratio: Fraction | int = Fraction(1)
    extent: int | None = None
    product: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "ratio", Fraction(self.ratio))
        object.__setattr__(self, "product", tuple(self.product))
        where = f"Clock {self.name!r}"
        if not self.name:
            raise ContractError("Clock: name is empty; every clock needs a name that regions can refer to")
        if self.hz is not None and self.hz <= 0:
            raise ContractError(f"{where}: hz is {self.hz}; a rate is positive, leave it out if unknown")
        if self.ratio <= 0:
            raise ContractError(f"{where}: ratio is {self.ratio}; a clock only advances, give a positive ratio")
        if self.ratio != 1 and self.of is None:
            raise ContractError(f"{where}: ratio {self.ratio} without a parent; name it with of=")
        if self.extent is not None and self.extent < 1:
            raise ContractError(f"{where}: extent is {self.extent}; a bounded clock has at least one tick")
        if self.product and (self.of or self.extent or self.hz):
            raise ContractError(f"{where}: a product clock takes its rate and extent from {self.product}")


# ---------------------------------------------------------------------------------------------- regions
@dataclass(frozen=True)
class Region:
    """One persistent tensor, the paper's tuple (clock, growth, lifetime, mutability, retention, placement).

    Args:
        name: unique in the contract.
        shape: sizes as the contract demands them; ``None`` at ``dim``, the dimension that the clock drives.
        dtype: name of a torch dtype.
        dim: the growing dimension; ``None`` for a region of fixed shape.
        clock: the clock that drives ``dim``.
        fixed_clocks: other dimensions and the bounded clocks that index them, such as ``((0, "solver_step"),)``.
        growth: elements appended per tick of ``clock``.
        start: extent at the start of the lifetime, one per start variant (two voices with prompts of 302 and 250
            frames: ``(302, 250)``); a single int for all.
        strides: ticks that a steady call advances the clock by. Left out, they follow from ``Contract.calls``.
        flush: ticks of calls that are shorter or longer than a steady one: flushes and last chunks.
        order: where a call puts the new elements: before or after the old ones, at a ring's index, or in place of all.
        retain: the rule that bounds the extent.
        enters: where the module takes the region from.
        leaves: where the module hands it back.
        lifetime: what ends it.
        mutability: "state", or "scratch" that no call reads before writing, or "constant".
        placement: "device" or "host".
        reserved: the shape that stock allocates, for the over-reservation; the envelope if left out.
        shares: name of the state region whose memory a scratch region may use.
        value: "alias" if the module may return views of the contract's buffer, "copy" otherwise.
        anchor: which part of a constant table larger than ``shape`` is ever read: its start or its centre.
    """

    name: str
    shape: tuple[int | None, ...]
    dtype: str = "float32"
    dim: int | None = None
    clock: str | None = None
    fixed_clocks: tuple[tuple[int, str], ...] = ()
    growth: Fraction | int = Fraction(1)
    start: tuple[int, ...] | int = 0
    strides: tuple[int, ...] = ()
    flush: tuple[int, ...] = ()
    order: Order = "replace"
    retain: Retention = PINNED
    enters: Place | None = None
    leaves: Place | None = None
    lifetime: Lifetime = "turn"
    mutability: Mutability = "state"
    placement: Literal["device", "host"] = "device"
    reserved: tuple[int, ...] | None = None
    shares: str | None = None
    value: Literal["alias", "copy"] = "alias"
    anchor: Literal["start", "centre"] = "start"

    def __post_init__(self) -> None:
        for name in ("shape", "strides", "flush", "fixed_clocks"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        object.__setattr__(self, "growth", Fraction(self.growth))
        start = (self.start,) if isinstance(self.start, int) else tuple(self.start)
        object.__setattr__(self, "start", start)
        if self.reserved is not None:
            object.__setattr__(self, "reserved", tuple(self.reserved))
        self._check_choices()
        self._check_shape()
        self._check_extents()

    @property
    def starts(self) -> tuple[int, ...]:
        """Start extents, one per variant (one element if they are all the same)."""
        assert isinstance(self.start, tuple)
        return self.start

    @property
    def grows(self) -> bool:
        """True if the attended extent can change from call to call."""
        return self.dim is not None and not isinstance(self.retain, (Pinned, Ring))

    def _fail(self, field: str, found: object, way_out: str) -> None:
        raise ContractError(f"Region {self.name!r}: {field} is {found!r}; {way_out}")

    def _check_choices(self) -> None:
        if not self.name:
            raise ContractError("Region: name is empty; every region needs a name that reports can show")
        for field, choices in (("lifetime", LIFETIMES), ("mutability", MUTABILITIES), ("order", ORDERS),
                               ("placement", ("device", "host")), ("value", ("alias", "copy")), ("anchor", ("start", "centre"))):  # fmt: skip
            found = getattr(self, field)
            if found not in choices:
                self._fail(field, found, f"expected one of {', '.join(choices)}{suggest(str(found), choices)}")
        if self.dtype not in DTYPE_BYTES:
            self._fail("dtype", self.dtype, f"expected a torch dtype name{suggest(self.dtype, DTYPE_BYTES)}")

    def _check_shape(self) -> None:
        rank = len(self.shape)
        open_dims = [i for i, size in enumerate(self.shape) if size is None]
        if self.dim is not None and not 0 <= self.dim < rank:
            self._fail("dim", self.dim, f"the shape has dimensions 0..{rank - 1}")
        if open_dims != ([] if self.dim is None else [self.dim]):
            self._fail("shape", self.shape, "put None at the growing dimension, dim, and sizes everywhere else")
        if (self.dim is None) != (self.clock is None):
            self._fail("clock", self.clock, "dim and clock go together: name the clock that drives dim, or neither")
        if any(size is not None and size < 0 for size in self.shape):
            self._fail("shape", self.shape, "a size is not negative")
        if self.reserved is not None and len(self.reserved) != rank:
            self._fail("reserved", self.reserved, f"it needs {rank} sizes, as many as shape")
        if self.growth <= 0:
            self._fail("growth", self.growth, "a region grows by a positive number of elements per tick")
        for dim, clock in self.fixed_clocks:
            if not 0 <= dim < rank or dim == self.dim:
                self._fail("fixed_clocks", (dim, clock), f"name a dimension of 0..{rank - 1} other than dim")

    def _check_extents(self) -> None:
        if any(start < 0 for start in self.starts):
            self._fail("start", self.starts, "an extent is not negative")
        for field in ("strides", "flush"):
            ticks = getattr(self, field)
            if any(tick <= 0 for tick in ticks):
                self._fail(field, ticks, "a call advances its clock by at least one tick; leave idle calls out")
        for start in self.starts:
            reason = self.retain.contradiction(start)
            if reason:
                self._fail("retain", self.retain, f"{reason}, but start is {start}")


# ---------------------------------------------------------------------------------------------- calls
@dataclass(frozen=True)
class Input:
    """A tensor argument of ``forward`` that is not state. ``None`` in ``shape`` is a size that the call fixes."""

    place: Arg
    shape: tuple[int | None, ...]
    dtype: str = "float32"
    high: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.shape))
        if self.dtype not in DTYPE_BYTES:
            raise ContractError(f"Input {self.place}: dtype is {self.dtype!r}{suggest(self.dtype, DTYPE_BYTES)}")
        if self.high is not None and self.high < 1:
            raise ContractError(f"Input {self.place}: high is {self.high}; integers are drawn from 0..high-1")

    @property
    def name(self) -> str:
        """The name that ``Call.sizes`` uses: ``"token"`` for ``Arg("token")``, ``"x.mel"`` for ``Arg("x", "mel")``."""
        return ".".join(map(str, self.place.keys))


@dataclass(frozen=True)
class Scalar:
    """A Python value among the arguments that each start variant fixes, such as the prompt's length."""

    place: Arg
    per_start: tuple[Value, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "per_start", tuple(self.per_start))


@dataclass(frozen=True)
class Call:
    """One kind of call that traffic makes.

    Args:
        name: unique in the contract: "chunk", "flush[10]", "last[28]".
        ticks: clock name -> ticks by which the call advances it. Clocks related by ``ratio`` follow.
        sizes: input argument name -> sizes for the ``None``s of its shape, in order.
        scalars: places and values of Python arguments that the call fixes.
        steady: part of the regular cadence: counted in the catalog width and captured first.
        ends: lifetime that the call ends ("turn" for a last chunk): the next call starts anew.
    """

    name: str
    ticks: Mapping[str, int]
    sizes: Mapping[str, tuple[int, ...]]
    scalars: tuple[tuple[Arg, Value], ...] = ()
    steady: bool = False
    ends: Lifetime | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "ticks", _frozen_map(self.ticks))
        object.__setattr__(self, "sizes", _frozen_map({k: tuple(v) for k, v in self.sizes.items()}))
        object.__setattr__(self, "scalars", tuple((place, value) for place, value in self.scalars))
        for clock, ticks in self.ticks.items():
            if ticks <= 0:
                raise ContractError(
                    f"Call {self.name!r}: ticks[{clock!r}] is {ticks}; leave clocks out that stand still"
                )
        if self.ends is not None and self.ends not in LIFETIMES:
            raise ContractError(f"Call {self.name!r}: ends is {self.ends!r}; expected one of {', '.join(LIFETIMES)}")


@dataclass(frozen=True)
class Bound:
    """Part of the admission predicate: a call may advance ``clock`` by at most this many ticks."""

    clock: str
    at_most: int


@dataclass(frozen=True)
class Boundary:
    """A callable of the module, by dotted path, that is traced once per regime and where capture may cut.

    ``clock`` names the bounded clock that its calls tick (the solver step), if there is one. Its arguments and
    results are tensors, ints and None.
    """

    path: str
    clock: str | None = None


@dataclass(frozen=True)
class Entry:
    """Another method that makes or changes state, run as stock on the contract's buffers (``prime``).

    ``leaves`` says where the method's result holds each region.
    """

    method: str
    leaves: tuple[tuple[str, Result], ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "leaves", tuple((name, place) for name, place in self.leaves))


@dataclass(frozen=True)
class RandomStream:
    """Random numbers that a call draws: from which generator, and on which clock its position advances."""

    generator: Literal["device", "host"] = "device"
    clock: str = "chunk"


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


def suggest(found: str, known: Iterable[str]) -> str:
    """A 'did you mean' clause, or nothing."""
    close = difflib.get_close_matches(found, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


Named = TypeVar("Named", Clock, Region, Call)


def _named(items: tuple[Named, ...], name: str, kind: str) -> Named:
    for item in items:
        if item.name == name:
            return item
    known = [item.name for item in items]
    raise ContractError(
        f"no {kind} is called {name!r}; the contract has {', '.join(known) or 'none'}{suggest(name, known)}"
    )


class _FrozenMap(dict):  # type: ignore[type-arg]
    """A dict that hashes by content, so that frozen dataclasses that hold one stay hashable."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(sorted(self.items())))

    def __reduce__(self) -> tuple[type[_FrozenMap], tuple[dict[object, object]]]:
        # The default fills a copy item by item, which a frozen map refuses; modules that hold a contract are copied.
        return _FrozenMap, (dict(self),)

    def _refuse(self, *args: object, **kwargs: object) -> NoReturn:
        raise TypeError("a contract is frozen; make a new one with dataclasses.replace")

    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse


def _frozen_map(mapping: Mapping[str, object]) -> _FrozenMap:
    return _FrozenMap(mapping)
