"""Statistics of matched blocks against scipy, and what an interval means."""

from __future__ import annotations

import math

import pytest
import torch

from cadence_fx.bench_stats import paired_ratio, quantile

stats = pytest.importorskip("scipy.stats")


@pytest.mark.parametrize("count", [2, 3, 4, 8, 31])
def test_the_interval_is_students_on_logarithms(count: int) -> None:
    generator = torch.Generator().manual_seed(count)
    above = (200 + 5 * torch.randn(count, generator=generator)).tolist()
    below = (60 + torch.randn(count, generator=generator)).tolist()
    logs = [math.log(a / b) for a, b in zip(above, below, strict=True)]
    low, high = stats.t.interval(0.95, count - 1, loc=sum(logs) / count, scale=stats.sem(logs))
    found = paired_ratio(above, below)
    assert found.value == pytest.approx(math.exp(sum(logs) / count))
    assert [found.low, found.high] == pytest.approx([math.exp(low), math.exp(high)], rel=1e-3)


def test_what_both_cells_share_in_a_block_drops_out() -> None:
    """A host that is twice as slow in one block slows both; the ratio is exact all the same."""
    found = paired_ratio([200, 400, 200, 210], [50, 100, 50, 52.5])
    assert [found.value, found.low, found.high] == pytest.approx([4, 4, 4])
    assert str(found) == "4.000 [4.000, 4.000]"


def test_one_block_has_no_interval_and_none_no_ratio() -> None:
    assert str(paired_ratio([4.0], [2.0])) == "2.000"
    with pytest.raises(ValueError, match="no blocks"):
        paired_ratio([], [])
    with pytest.raises(ValueError, match="zip"):
        paired_ratio([1.0, 2.0], [1.0])


@pytest.mark.parametrize("share", [0.0, 0.5, 0.95, 1.0])
def test_quantiles_are_torchs(share: float) -> None:
    values = [5.0, 1.0, 4.0, 2.0, 8.0, 3.0]
    assert quantile(values, share) == pytest.approx(torch.tensor(values).quantile(share).item())
    assert math.isnan(quantile([], share))
