"""Does the traced module move rows as the contract says? Compared row by row before anything runs."""

from __future__ import annotations

from math import prod
from typing import Any

from torch import fx

from cadence_fx.contract import Region
from cadence_fx.segments import Layout, Piece

__all__ = ["order_mismatch"]


def order_mismatch(region: Region, layout: Layout, state: fx.Node, old: int, grown: int, start: int) -> str | None:
    """Why the declared order and retention cannot be the module's, or None.

    Declared and traced are compared for every row of the new state. A region whose slices follow several rules (packed
    halves, a cache that freezes) agrees in part, which is fine: rewriting follows the trace. Where nothing agrees, the
    declaration describes another module.

    Args:
        layout: the new state as pieces; pieces of ``state`` are old rows, all others are new.
        old, grown, start: extent before the call, growth, start extent.
    """
    if region.order not in ("new_first", "old_first") or region.dim is None or not old or not grown:
        return None
    rows = _declared_rows(region, old, grown, start)
    agreed = 0
    first: tuple[int, Any, Any] | None = None
    for piece in layout.pieces:
        same, difference = _compare(piece, region.dim, rows, state)
        agreed += same
        if difference is not None and (first is None or difference[0] < first[0]):
            first = difference
    if agreed or first is None:
        return None
    row, expected, found = first
    other = "old_first" if region.order == "new_first" else "new_first"
    return (
        f"row {row} of the new state is {_name(found)} in the traced module, but order={region.order!r} with "
        f"{region.retain} says {_name(expected)}, and no row agrees; "
        f"if new elements are on the other side, declare order={other!r}"
    )


def _declared_rows(region: Region, old: int, grown: int, start: int) -> list[int | None]:
    """Per row of the new state, the old row that it holds, or None for a new one."""
    old_rows: list[int | None] = list(range(old))
    new_rows: list[int | None] = [None] * grown
    full = new_rows + old_rows if region.order == "new_first" else old_rows + new_rows
    return [row for lo, hi in region.retain.keep(len(full), start) for row in full[lo:hi]]


def _compare(
    piece: Piece, dim: int, rows: list[int | None], state: fx.Node
) -> tuple[int, tuple[int, int | None, int | None] | None]:
    """Volume on which a piece agrees, and its first row that does not."""
    is_old = piece.source is state
    first, length = piece.start[dim], piece.size[dim]
    other = prod(piece.size) // length
    agreed, difference = 0, None
    for i in range(length):
        row = first + i
        found: int | None = None
        if is_old:
            axis = piece.axes[dim]
            found = piece.origin[dim] + (i if axis == dim else 0)
        expected = rows[row] if row < len(rows) else -1
        if found == expected:
            agreed += other
        elif difference is None:
            difference = (row, expected, found)
    return agreed, difference


def _name(row: int | None) -> str:
    return "a new element" if row is None else f"old row {row}"
