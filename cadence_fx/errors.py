"""Every error that cadence_fx raises, under one base."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["AdmissionError", "CadenceError", "ContractError", "TraceError", "VerificationError", "suggest"]


class CadenceError(RuntimeError):
    """Base of all errors of this library."""


class ContractError(CadenceError, ValueError):
    """A declaration contradicts itself or the module that it describes.

    The text names the field, the value found and a way out. Nothing has run when it is raised.
    """


class TraceError(CadenceError):
    """A module could not be traced, or a trace does not cover an extent that traffic can reach.

    The module that was passed in is unchanged when it is raised.
    """


class AdmissionError(CadenceError):
    """A call cannot be served exactly.

    Raised for a state tensor whose content a later call has overwritten, and, in strict mode, for every call that
    would otherwise run as stock. State is unchanged when it is raised.
    """


class VerificationError(CadenceError):
    """Bits differ from stock's: the text names region or output, chunk, first differing index and both values."""


def suggest(found: str, known: Iterable[str]) -> str:
    """A 'did you mean' clause, or nothing."""
    close = difflib.get_close_matches(found, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
