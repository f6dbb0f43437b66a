"""What a contract implies, before anything runs."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from cadence_fx.catalog import CaptureBytes, predicted_bytes
from cadence_fx.changes import Change, Rejection
from cadence_fx.contract import Contract
from cadence_fx.errors import ContractError
from cadence_fx.extents import all_extents
from cadence_fx.report import Report

if TYPE_CHECKING:
    from cadence_fx.inspection import Inspection

__all__ = ["explain", "report_of"]


def explain(module: object | None, contract: Contract) -> Report:
    """Extents, widths, verdicts, catalog and bytes of ``contract``.

    Needs no tensors and no GPU, and calls nothing: all numbers follow from the declaration. Predicted bytes assume
    that the contract owns every state region, so that only other inputs are staged.

    Args:
        module: the module that the contract describes; the declaration's part of the report does not need it.
        contract: the declaration.
    """
    regions = all_extents(contract)
    owned = [r for r in regions if r.mutability != "constant"]
    notes = [
        f"{r.region}: the bytes are unknown and in no total"
        for r in owned
        if r.bytes is None or r.reserved_bytes is None
    ]
    captures = CaptureBytes((), ())
    try:
        captures = predicted_bytes(contract, frozenset(region.name for region in contract.states))
    except ContractError as error:  # too many states to list; everything else still holds
        notes.append(str(error))
    if len(captures.classes) > contract.max_graphs:
        notes.append(
            f"the catalog has {len(captures.classes)} signatures, more than max_graphs = {contract.max_graphs}: "
            "the steady cadence is captured first, and what does not fit runs as stock"
        )
    if not contract.calls:
        notes.append("no calls are declared, so the catalog is empty: extents come from the regions' own strides")
    return Report(
        family=contract.name,
        regions=regions,
        catalog=captures.classes,
        clocks=contract.clocks,
        state_bytes=sum(r.bytes or 0 for r in owned),
        reserved_bytes=sum(r.reserved_bytes or 0 for r in owned if r.bytes is not None),
        predicted_bytes=captures,
        notes=tuple(notes),
    )


def report_of(fast: Inspection) -> Report:
    """The contract's report, and what was done to the module: rewrites, rejections, programs, seconds."""
    changes: dict[tuple[str, str, str, str, str], int] = {}
    rejections: dict[Rejection, None] = {}
    classes = []
    captures = fast._captures
    for signature, program in fast._programs.items():
        row = captures.rows.get(signature) if captures is not None else None
        fused = None if row is None else row.fused
        for change in (*program.changes, *(() if fused is None else fused.changes)):
            key = (change.pass_name, change.what, change.where, change.why, change.source)
            changes[key] = max(changes.get(key, 0), change.count)
        rejections.update(dict.fromkeys((*program.rejections, *(() if fused is None else fused.rejections))))
        classes.append(
            {
                "call": signature.call,
                "variant": signature.state.variant,
                "extents": dict(signature.state.extents),
                "operators_before": program.nodes_before,
                "operators_after": program.nodes_after,
                "seconds": round(program.seconds, 3),
                "capture": row.to_dict() if row is not None else None,
            }
        )
    declared = explain(None, fast.contract)
    notes = declared.notes if fast.disagreement is None else (*declared.notes, f"stock: {fast.disagreement}")
    return replace(
        declared,
        notes=notes,
        rewrites=tuple(Change(*key, count=count) for key, count in changes.items()),
        rejections=tuple(rejections),
        classes=tuple(classes),
    )
