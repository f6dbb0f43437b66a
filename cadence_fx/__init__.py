"""Exact replay of streaming speech decoders from a declaration of their clocks."""

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
from cadence_fx.module import CadenceModule, eager, transform
from cadence_fx.report import Report
from cadence_fx.retention import START, KeepAll, KeepEnds, Pinned, Ring, Window

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
