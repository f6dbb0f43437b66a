"""Calls: what a module is given, how often, and what else runs or is drawn around its state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NoReturn

from cadence_fx.clocks import Arg, Result, Value
from cadence_fx.errors import ContractError, suggest
from cadence_fx.regions import DTYPE_BYTES, LIFETIMES, Lifetime

__all__ = ["Bound", "Boundary", "Call", "Entry", "Input", "RandomStream", "Scalar"]


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
