"""What may be captured, decided before the first capture: the regular cadence first, and the axis that is too wide."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cadence_fx.catalog import Signature
from cadence_fx.contract import Contract
from cadence_fx.refusal import BYTE_LIMIT, GRAPH_LIMIT, Refusal

__all__ = ["Axis", "axes", "within_budget"]

_SHOWN = 4  # values of an axis that a message spells out


@dataclass(frozen=True)
class Axis:
    """One thing in which signatures differ.

    Attributes:
        name: "call", "start" or "extents", with the regions that move.
        values: what it takes, as text, in catalog order.
        remedy: what makes it narrower.
    """

    name: str
    values: tuple[str, ...]
    remedy: str

    def __str__(self) -> str:
        shown = ", ".join(self.values[:_SHOWN]) + (", ..." if len(self.values) > _SHOWN else "")
        return f"{len(self.values)} of {self.name} ({shown})"


def axes(wanted: Sequence[Signature]) -> tuple[Axis, ...]:
    """The axes of a set of signatures, the widest first."""
    moving = _moving(wanted)
    found = (
        Axis("call", _distinct(s.call for s in wanted), "declare fewer flush and last lengths"),
        Axis("start", _distinct(str(s.state.variant) for s in wanted), "declare fewer prompt lengths"),
        Axis(
            f"extents of {', '.join(moving)}" if moving else "extents",
            _distinct("/".join(str(s.state.extent(name)) for name in moving) for s in wanted),
            "calls of fewer lengths reach fewer extents",
        ),
    )
    return tuple(sorted(found, key=lambda axis: -len(axis.values)))


def _moving(wanted: Sequence[Signature]) -> tuple[str, ...]:
    """Regions of which signatures have more than one extent."""
    extents: dict[str, set[int]] = {}
    for signature in wanted:
        for name, extent in signature.state.extents:
            extents.setdefault(name, set()).add(extent)
    return tuple(name for name, found in extents.items() if len(found) > 1)


def _distinct(values: object) -> tuple[str, ...]:
    return tuple(dict.fromkeys(values))  # type: ignore[call-overload]


def within_budget(
    contract: Contract, wanted: Sequence[Signature], nbytes: Mapping[Signature, int]
) -> dict[Signature, Refusal]:
    """The signatures that the contract's ``max_graphs`` and ``max_bytes`` have no room for, with the reason of each.

    Args:
        wanted: to be captured, in the order in which they will be; of equal rank the earlier one gets the room.
        nbytes: predicted for each; one that is missing counts nothing.
    """
    steady = {call.name for call in contract.calls if call.steady}
    refused: dict[Signature, Refusal] = {}
    graphs = held = 0
    for signature in sorted(wanted, key=lambda s: s.call not in steady):
        size = nbytes.get(signature, 0)
        if graphs >= contract.max_graphs:
            text = f"max_graphs = {contract.max_graphs}, the catalog has {len(wanted)} signatures"
            refused[signature] = Refusal(GRAPH_LIMIT, "graph limit", _explained(text, wanted, "max_graphs"))
        elif contract.max_bytes is not None and held + size > contract.max_bytes:
            text = f"max_bytes = {contract.max_bytes:,}, {held:,} are taken and this class needs {size:,}"
            refused[signature] = Refusal(BYTE_LIMIT, "byte limit", _explained(text, wanted, "max_bytes"))
        else:
            graphs, held = graphs + 1, held + size
    return refused


def _explained(text: str, wanted: Sequence[Signature], limit: str) -> str:
    found = axes(wanted)
    widest = found[0]
    others = "; ".join(str(axis) for axis in found[1:] if len(axis.values) > 1)
    also = f", with {others}" if others else ""
    return f"{text}; the widest axis is {widest}{also}: {widest.remedy}, warm up 'steady' only, or raise {limit}"
