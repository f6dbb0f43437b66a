"""Extents, catalog widths and bytes of each region, from the contract alone.

Two extents are kept apart. The attended extent is what a consumer reads: it specialises the signature and sets
the number of shapes. The envelope extent is what storage must hold before truncation: it sets the bytes.

The closed form K = 1 + ceil(W/s) says from configuration how many attended extents a steady cadence reaches; the
enumeration iterates the retention rule and is what the catalog uses. Where the two differ, the reason says so.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from math import prod
from typing import Any, Literal, cast

import sympy

from cadence_fx.contract import Call, Contract, Region
from cadence_fx.regions import DTYPE_BYTES, LIFETIMES
from cadence_fx.retention import KeepAll, Pinned, Retention, Ring, Window

__all__ = [
    "PROMPT",
    "STRIDE",
    "Move",
    "RegionExtents",
    "all_extents",
    "catalog_width",
    "moves",
    "reachable_extents",
    "region_bytes",
    "region_extents",
    "resets",
    "retained",
    "travel",
]

PROMPT = sympy.Symbol("start", integer=True, nonnegative=True)
STRIDE = sympy.Symbol("s", integer=True, positive=True)


@dataclass(frozen=True)
class Move:
    """What one kind of call does to a region: growth in elements, and whether the call ends the lifetime."""

    growth: int
    steady: bool
    resets: bool = False


@dataclass(frozen=True)
class RegionExtents:
    """What follows from one region's declaration. Extents in elements, sizes in bytes.

    Args:
        family: name of the contract.
        region, clock, lifetime, mutability: as declared.
        window: travel W of the attended extent, the largest over start variants; None if unbounded.
        stride: the smallest steady growth s; None if the region does not grow or no steady call grows it.
        width: closed-form catalog width K, the largest over start variants; None if there is none.
        verdict: "capture" or "exclude".
        reason: why, with the number that decided.
        attended: extents that a steady cadence reaches, over all start variants, ascending.
        attended_all: the same with flushes and last chunks.
        by_variant: ``attended`` for each start variant.
        envelope: the largest extent before truncation, over all calls; None without a growing dimension or bound.
        bytes: what the envelope takes; 0 for a scratch region that shares another's memory; None if unbounded.
        reserved_bytes: what stock reserves; the envelope's bytes if the contract does not say.
        rho: over-reservation, reserved_bytes / bytes; None where bytes is 0 or unknown.
        shares: the state region whose memory a scratch region uses.
    """

    family: str
    region: str
    clock: str | None
    lifetime: str
    mutability: str
    window: int | None
    stride: int | None
    width: int | None
    verdict: Literal["capture", "exclude"]
    reason: str
    attended: tuple[int, ...]
    attended_all: tuple[int, ...]
    by_variant: tuple[tuple[int, ...], ...]
    envelope: int | None
    bytes: int | None
    reserved_bytes: int | None
    rho: float | None
    shares: str | None = None

    def to_dict(self) -> dict[str, object]:
        """The fields as JSON-safe values, tuples as lists."""
        plain = {field.name: getattr(self, field.name) for field in fields(self)}
        plain["by_variant"] = [list(extents) for extents in self.by_variant]
        return {name: list(value) if isinstance(value, tuple) else value for name, value in plain.items()}


# ---------------------------------------------------------------------------------------------- closed forms
def travel(rule: Retention) -> sympy.Expr:
    """W, by how much the attended extent can move, in terms of `PROMPT`, the start extent (oo if unbounded)."""
    if isinstance(rule, (Pinned, Ring)):
        return sympy.Integer(0)
    if isinstance(rule, KeepAll):
        return sympy.oo
    # A window with a high mark falls back to its length and walks up again, from below the start if that is lower.
    low = sympy.Min(PROMPT, rule.length) if isinstance(rule, Window) and rule.high is not None else PROMPT
    return cast(sympy.Expr, rule.limit(cast(Any, PROMPT)) - low)


def catalog_width(window: sympy.Expr | int, stride: sympy.Expr | int = STRIDE) -> sympy.Expr:
    """K = 1 + ceil(W/s), the paper's equation 7."""
    return cast(sympy.Expr, 1 + sympy.ceiling(sympy.sympify(window) / stride))


# ---------------------------------------------------------------------------------------------- enumeration
def retained(rule: Retention, extent: int, start: int) -> int:
    """The attended extent that is left of ``extent`` elements after truncation."""
    return sum(stop - begin for begin, stop in rule.keep(extent, start))


def resets(region: Region, call: Call) -> bool:
    """True if ``call`` ends the region's lifetime: a last chunk ends a turn, but no session."""
    return call.ends is not None and LIFETIMES.index(region.lifetime) <= LIFETIMES.index(call.ends)


def moves(contract: Contract, region: Region) -> tuple[Move, ...]:
    """How calls move the region: from ``Contract.calls``, or from its own strides and flushes without any."""
    if not region.grows:
        return ()
    if contract.calls:
        found = [Move(contract.advance(region, c.ticks), c.steady, resets(region, c)) for c in contract.calls]
    else:
        found = [Move(int(region.growth * ticks), True) for ticks in region.strides]
        found += [Move(int(region.growth * ticks), False) for ticks in region.flush]
    return tuple(dict.fromkeys(move for move in found if move.growth))


def reachable_extents(rule: Retention, start: int, taken: Iterable[Move]) -> tuple[int, ...]:
    """Attended extents that the moves ``taken``, in any order, reach from ``start``, ascending.

    ``rule`` must bound the extent, otherwise this does not end.
    """
    if isinstance(rule, (Pinned, Ring)):
        return (retained(rule, start, start),)
    growths = sorted({move.growth for move in taken if not move.resets})
    seen, open_ends = {start}, [start]
    while open_ends:
        extent = open_ends.pop()
        for growth in growths:
            after = retained(rule, extent + growth, start)
            if after not in seen:
                seen.add(after)
                open_ends.append(after)
    return tuple(sorted(seen))


# ---------------------------------------------------------------------------------------------- one region
def region_bytes(region: Region, extent: int | None) -> int:
    """Bytes of the region with ``extent`` elements in its growing dimension (ignored if it has none)."""
    return DTYPE_BYTES[region.dtype] * prod((extent or 0) if size is None else size for size in region.shape)


def region_extents(contract: Contract, region: Region) -> RegionExtents:
    """Everything that follows from the declaration of one region."""
    taken = moves(contract, region)
    steady = tuple(move for move in taken if move.steady)
    stride = min((move.growth for move in steady), default=None)
    bounded = not isinstance(region.retain, KeepAll)
    by_variant: tuple[tuple[int, ...], ...] = ()
    everything: tuple[int, ...] = ()
    if region.dim is not None and bounded:
        by_variant = tuple(reachable_extents(region.retain, start, steady) for start in region.starts)
        everything = _union(reachable_extents(region.retain, start, taken) for start in region.starts)
    window, width = _closed_form(region, stride)
    known = bounded and (bool(taken) or window == 0)  # what no call grows, although it may move, has no known envelope
    envelope = max(everything) + max((m.growth for m in taken), default=0) if everything and known else None
    held = region_bytes(region, envelope) if known else None
    reserved = held if region.reserved is None else DTYPE_BYTES[region.dtype] * prod(region.reserved)
    if region.shares is not None:
        held = 0
    count = max(map(len, by_variant), default=1)
    refusal = _refusal(contract, region, held, window, count, stride)
    return RegionExtents(
        family=contract.name,
        region=region.name,
        clock=region.clock,
        lifetime=region.lifetime,
        mutability=region.mutability,
        window=window,
        stride=stride,
        width=width,
        verdict="exclude" if refusal else "capture",
        reason=refusal or _account(region, steady, count, window, width),
        attended=_union(by_variant),
        attended_all=everything,
        by_variant=by_variant,
        envelope=envelope,
        bytes=held,
        reserved_bytes=reserved,
        rho=reserved / held if held and reserved is not None else None,
        shares=region.shares,
    )


def all_extents(contract: Contract) -> tuple[RegionExtents, ...]:
    """`region_extents` of every region, in the contract's order."""
    return tuple(region_extents(contract, region) for region in contract.regions)


def _union(extents: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(sorted({extent for some in extents for extent in some}))


def _closed_form(region: Region, stride: int | None) -> tuple[int | None, int | None]:
    """W and K, the largest over the start variants."""
    windows = [travel(region.retain).subs(PROMPT, start) for start in region.starts]
    if any(window == sympy.oo for window in windows):
        return None, None
    window = max(int(window) for window in windows)
    if window == 0:
        return 0, 1
    return window, None if stride is None else int(catalog_width(window, stride))


def _refusal(
    contract: Contract, region: Region, held: int | None, window: int | None, count: int, stride: int | None
) -> str | None:
    """Why the region must stay outside captures, or None."""
    if window is None:
        return "KeepAll never truncates: the extent is unbounded, and so is the number of shapes"
    if window > 0 and stride is None:
        return f"travel W = {window}, but no steady call grows it: mark the regular call steady, or give strides"
    if count > contract.max_graphs:
        return f"{count} attended extents (W = {window}, s = {stride}) are more than max_graphs = {contract.max_graphs}"
    if contract.max_bytes is not None and held is not None and held > contract.max_bytes:
        return f"the envelope takes {held:,} B, more than max_bytes = {contract.max_bytes:,}"
    return None


def _account(region: Region, steady: tuple[Move, ...], count: int, window: int | None, width: int | None) -> str:
    """What a captured region's numbers rest on."""
    if region.shares is not None:
        return f"scratch without bytes of its own: uses the memory of {region.shares!r} during a call"
    if region.mutability == "scratch" and not region.grows:
        return "scratch of fixed shape: exists only during a call, as in stock"
    if region.mutability == "constant":
        return "constant: one shape"
    if not region.grows:
        return "the extent is pinned: one shape"
    if window == 0:
        return "one attended extent: it starts at its limit and stays there"
    strides = sorted({move.growth for move in steady})
    text = f"{count} attended extents, K = 1 + ceil({window}/{strides[0]})"
    if width != count:
        text = (
            f"{count} attended extents by enumeration, which counts; 1 + ceil({window}/{strides[0]}) gives K = {width}"
        )
    if len(strides) > 1:
        text += f"; the closed form takes the smallest of the strides {', '.join(map(str, strides))}"
    return text
