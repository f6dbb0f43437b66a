"""What a cell of the benchmark is: one way to run a decoder, named and ready to be driven."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from cadence_fx.errors import CadenceError
from cadence_fx.families import Family

__all__ = ["Cell", "CellUnavailable"]


class CellUnavailable(CadenceError):
    """A cell cannot be made here: no such device, or software that is not installed. The text says what is missing."""


@dataclass(frozen=True)
class Cell:
    """One way to run a decoder.

    Attributes:
        name: short, as tables print it.
        title: what it is, in a few words.
        make: (family, device, seed) -> a module that is driven exactly as the stock decoder is, by the same methods
            and arguments, with all that it compiles or captures already made. Raises `CellUnavailable` where it cannot
            be made.
    """

    name: str
    title: str
    make: Callable[[Family, str, int], nn.Module]
