"""Statistics of matched blocks: medians, and paired intervals of ratios."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Ratio", "paired_ratio", "quantile"]

# Student's t at 97.5 %, by degrees of freedom from 1: torch has no such function and scipy is no dependency.
_T975 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which ``share`` of the values lie, linear between neighbours; NaN if there are none."""
    if not values:
        return math.nan
    ordered = sorted(values)
    at = share * (len(ordered) - 1)
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (at - low) * (ordered[high] - ordered[low])


@dataclass(frozen=True)
class Ratio:
    """A ratio over matched blocks: the geometric mean of the blocks' ratios, and its 95 % interval.

    ``low`` and ``high`` are None with fewer than two blocks.
    """

    value: float
    low: float | None
    high: float | None
    blocks: int

    def to_dict(self) -> dict[str, float | int | None]:
        return {"ratio": self.value, "low": self.low, "high": self.high, "blocks": self.blocks}

    def __str__(self) -> str:
        interval = "" if self.low is None or self.high is None else f" [{self.low:.3f}, {self.high:.3f}]"
        return f"{self.value:.3f}{interval}"


def paired_ratio(above: Sequence[float], below: Sequence[float]) -> Ratio:
    """``above`` over ``below``, block by block: what both share in a block drops out.

    The interval is Student's, on logarithms: ratios are positive, and one and its inverse get the same interval.

    Raises:
        ValueError: the numbers of blocks differ, or there are none.
    """
    logs = [math.log(a / b) for a, b in zip(above, below, strict=True)]
    if not logs:
        raise ValueError("no blocks to compare")
    centre = statistics.fmean(logs)
    if len(logs) < 2:
        return Ratio(math.exp(centre), None, None, len(logs))
    t = _T975[min(len(logs) - 1, len(_T975)) - 1]
    half = t * statistics.stdev(logs) / math.sqrt(len(logs))
    return Ratio(math.exp(centre), math.exp(centre - half), math.exp(centre + half), len(logs))
