"""Regions: the persistent tensors of a streaming module, and how their sizes change."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from cadence_fx.clocks import Place
from cadence_fx.errors import ContractError, suggest
from cadence_fx.retention import Pinned, Retention, Ring

__all__ = ["DTYPE_BYTES", "LIFETIMES", "MUTABILITIES", "ORDERS", "Lifetime", "Mutability", "Order", "Region"]

Lifetime = Literal["operator", "unit", "turn", "session", "process"]
Mutability = Literal["state", "scratch", "constant"]
Order = Literal["new_first", "old_first", "ring", "replace"]
LIFETIMES: tuple[str, ...] = ("operator", "unit", "turn", "session", "process")
MUTABILITIES: tuple[str, ...] = ("state", "scratch", "constant")
ORDERS: tuple[str, ...] = ("new_first", "old_first", "ring", "replace")
PINNED = Pinned()
CHOICES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("lifetime", LIFETIMES),
    ("mutability", MUTABILITIES),
    ("order", ORDERS),
    ("placement", ("device", "host")),
    ("value", ("alias", "copy")),
    ("anchor", ("start", "centre")),
)
DTYPE_BYTES: dict[str, int] = {
    "bool": 1, "uint8": 1, "int8": 1, "int16": 2, "int32": 4, "int64": 8,
    "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "complex64": 8, "complex128": 16,
}  # fmt: skip


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
        for field, choices in CHOICES:
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
