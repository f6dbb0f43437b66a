"""Memory of their own for the results of matrix products, so that it is known what used it before.

A library that splits a product over K first clears the result. In memory from the allocator nobody can tell when that
is safe any earlier than the product's own inputs; in a slot it is: when the readers of the slot's last tenant are done.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from cadence_fx.schedule import leaving, readers
from cadence_fx.specialise import FlatGraph, meta_of

__all__ = ["OutputSlots", "Tenancy", "plan_slots"]

aten = torch.ops.aten
LARGEST = 8 << 20  # bytes of a slot; larger products are limited by their own time


@dataclass(frozen=True)
class Tenancy:
    """One operator's use of a slot. ``after``: the operators that used the slot last, which must be done before."""

    slot: int
    after: tuple[fx.Node, ...]


def plan_slots(flat: FlatGraph, order: Sequence[fx.Node], count: int = 24) -> dict[fx.Node, Tenancy]:
    """Slots for products whose result dies within the graph: each takes the one that has been free for longest.

    Args:
        flat: the graph.
        order: its operators in the order of launches.
        count: of slots.
    """
    position = {node: i for i, node in enumerate(order)}
    used = readers(flat, list(order), position)
    kept = leaving(flat)
    free_after = [-1] * count
    tenants: list[tuple[fx.Node, ...]] = [()] * count
    planned: dict[fx.Node, Tenancy] = {}
    for node in order:
        if not _eligible(node) or node in kept or not used.get(node):
            continue
        slot = min(range(count), key=free_after.__getitem__)
        if free_after[slot] >= position[node]:
            continue
        planned[node] = Tenancy(slot, tenants[slot])
        free_after[slot] = max(used[node])
        tenants[slot] = tuple(order[i] for i in sorted(used[node]))
    return planned


def _eligible(node: fx.Node) -> bool:
    """A linear layer with a bias on dense rows, which torch computes as one ``addmm`` into a dense result."""
    if node.target is not aten.linear.default or len(node.args) < 3 or node.kwargs:
        return False
    metas = [meta_of(a) if isinstance(a, fx.Node) else None for a in node.args]
    result = meta_of(node)
    if result is None or any(m is None for m in metas):
        return False
    rows, weight, bias = metas
    assert rows is not None
    assert weight is not None
    assert bias is not None
    same = rows.dtype == weight.dtype == bias.dtype == result.dtype
    dense = torch.empty(rows.shape, device="meta").as_strided(rows.shape, rows.stride).is_contiguous()
    fits = 0 < result.nbytes <= LARGEST
    return same and dense and fits and len(rows.shape) in (2, 3) and len(weight.shape) == 2 and len(bias.shape) == 1


class OutputSlots:
    """The memory of a plan, and the launcher that computes products into it."""

    def __init__(self, planned: Mapping[fx.Node, Tenancy], device: torch.device) -> None:
        self.planned = planned
        sizes: dict[int, int] = {}
        for node, tenancy in planned.items():
            meta = meta_of(node)
            assert meta is not None
            sizes[tenancy.slot] = max(sizes.get(tenancy.slot, 0), meta.nbytes)
        self.memory = {slot: torch.empty(n, dtype=torch.uint8, device=device) for slot, n in sizes.items()}

    @property
    def nbytes(self) -> int:
        return sum(t.numel() for t in self.memory.values())

    def result(self, node: fx.Node) -> torch.Tensor | None:
        """Where a product goes, as a matrix of rows; None if it has no slot."""
        tenancy, meta = self.planned.get(node), meta_of(node)
        if tenancy is None or meta is None:
            return None
        return self.memory[tenancy.slot][: meta.nbytes].view(meta.dtype).view(-1, meta.shape[-1])

    def launch(self, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator; under capture a product that has a slot as the ``addmm`` that ``linear`` is, into its slot.

        Outside of a capture nothing orders the tenants of a slot, so none is used.
        """
        capturing = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
        target = self.result(node) if capturing else None
        if target is None:
            return node.target(*args, **kwargs)  # type: ignore[operator]
        rows, weight, bias = args
        aten.addmm.out(bias, rows.view(-1, rows.shape[-1]), weight.t(), out=target)
        return target.view(*rows.shape[:-1], target.shape[-1])
