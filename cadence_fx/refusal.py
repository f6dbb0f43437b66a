"""Why a call is not replayed: the reasons that the engine gives, as values with stable codes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cadence_fx.bits import Difference
from cadence_fx.changes import CODES, register

__all__ = [
    "ALREADY_CAPTURING",
    "BYTE_LIMIT",
    "CAPTURE_FAILED",
    "DIFFERENT_BITS",
    "DIFFERENT_POSITION",
    "GRAPH_LIMIT",
    "HOST_RANDOMNESS",
    "HOST_VALUE",
    "NOT_REPEATABLE",
    "OUT_OF_MEMORY",
    "PLAN_CACHE_FULL",
    "RUN_FAILED",
    "SEALED",
    "Refusal",
    "refusal_of",
]

ALREADY_CAPTURING = register("CX501", "another capture is active")
GRAPH_LIMIT = register("CX502", "graph limit reached")
BYTE_LIMIT = register("CX503", "byte limit reached")
HOST_RANDOMNESS = register("CX504", "draws from a generator of the host")
CAPTURE_FAILED = register("CX505", "capture failed")
OUT_OF_MEMORY = register("CX506", "out of memory while capturing")
NOT_REPEATABLE = register("CX507", "stock does not agree with itself")
DIFFERENT_BITS = register("CX508", "replay differs from stock")
DIFFERENT_POSITION = register("CX509", "replay leaves the generator elsewhere than stock")
SEALED = register("CX510", "sealed: nothing is captured any more")
HOST_VALUE = register("CX511", "a tensor that enters or leaves is not on the device")
RUN_FAILED = register("CX512", "a run outside the capture failed")
PLAN_CACHE_FULL = register("CX513", "no room in torch.backends.cuda.cufft_plan_cache for a plan to stay")


@dataclass(frozen=True)
class Refusal:
    """One call that is not captured.

    Attributes:
        code: stable code, see `cadence_fx.changes.CODES`.
        reason: a few words, fit for counting.
        detail: what was expected and what was found; the error's own text where one was raised.
        difference: the first differing element where bits differ.
    """

    code: str
    reason: str
    detail: str = ""
    difference: Difference | None = None

    def __str__(self) -> str:
        return f"{self.code} {CODES.get(self.code, '')}: {self.detail or self.reason}"

    def to_dict(self) -> dict[str, object]:
        """JSON-safe values."""
        located = None if self.difference is None else self.difference.to_dict()
        return {"code": self.code, "reason": self.reason, "detail": self.detail, "difference": located}


def refusal_of(error: Exception, code: str, reason: str) -> Refusal:
    """The refusal for something that raised; memory that ran out has its own code."""
    if isinstance(error, torch.OutOfMemoryError):
        code, reason = OUT_OF_MEMORY, "out of memory"
    return Refusal(code, reason, f"{type(error).__name__}: {error}")
