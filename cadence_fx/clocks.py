"""Clocks and paths: what a contract counts by, and where it finds values."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import TypeAlias

from cadence_fx.errors import ContractError

__all__ = ["Arg", "Attr", "Clock", "Key", "Place", "Result", "Value"]

Key: TypeAlias = str | int
Value: TypeAlias = bool | int | float | str | None


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
