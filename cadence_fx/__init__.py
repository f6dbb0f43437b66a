"""Exact replay of streaming speech decoders from a declaration of their clocks."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from cadence_fx.contract import (
    Arg,
    Attr,
    Bound,
    Boundary,
    Call,
    Clock,
    Contract,
    Entry,
    Input,
    RandomStream,
    Region,
    Result,
    Scalar,
)
from cadence_fx.errors import AdmissionError, CadenceError, ContractError, TraceError, VerificationError
from cadence_fx.explain import explain
from cadence_fx.report import Report
from cadence_fx.retention import START, KeepAll, KeepEnds, Pinned, Ring, Window

if TYPE_CHECKING:
    from cadence_fx.drop_in import transform
    from cadence_fx.module import CadenceModule, eager

__version__ = "0.1.0"

__all__ = [
    "START",
    "AdmissionError",
    "Arg",
    "Attr",
    "Bound",
    "Boundary",
    "CadenceError",
    "CadenceModule",
    "Call",
    "Clock",
    "Contract",
    "ContractError",
    "Entry",
    "Input",
    "KeepAll",
    "KeepEnds",
    "Pinned",
    "RandomStream",
    "Region",
    "Report",
    "Result",
    "Ring",
    "Scalar",
    "TraceError",
    "VerificationError",
    "Window",
    "eager",
    "explain",
    "transform",
]

# What needs torch is imported on first use: a contract and its report need none.
_LAZY = {"CadenceModule": "module", "eager": "module", "transform": "drop_in"}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(f"cadence_fx.{_LAZY[name]}"), name)
    raise AttributeError(f"module 'cadence_fx' has no attribute {name!r}")
