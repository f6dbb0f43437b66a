"""Constant tables of a vendor, cut to what is ever read."""

from __future__ import annotations

import torch

from cadence_fx.contract import Attr, Contract
from cadence_fx.places import get_attr, set_attr

__all__ = ["shrink_tables"]


def shrink_tables(module: torch.nn.Module, contract: Contract, device: torch.device) -> None:
    """Cut constant tables of a twin to the part that is ever read, and bring them where they are used.

    Vendors keep tables as plain attributes that ``.to()`` misses and move them in their first call.
    """
    for region in contract.regions:
        if region.mutability != "constant" or not isinstance(region.enters, Attr):
            continue
        table = get_attr(module, region.enters)
        for dim, size in enumerate(region.shape):
            found = table.shape[dim]
            if size is not None and size < found:
                first = (found - size) // 2 if region.anchor == "centre" else 0
                table = table.narrow(dim, first, size)
        where = torch.device("cpu") if region.placement == "host" else device
        table = table.to(where)
        set_attr(module, region.enters, table.clone() if table._is_view() else table)
