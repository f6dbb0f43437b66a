"""Settings of all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.case_toys import CUDA, Backend


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture
def repeatable() -> Iterator[None]:
    """Kernels that stock repeats, no gradients, and no random state that leaks from test to test."""
    deterministic, benchmark = torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    torch.manual_seed(0)
    with torch.no_grad():
        yield
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = deterministic, benchmark


@pytest.fixture(params=["plan", CUDA])
def on(request: pytest.FixtureRequest, repeatable: None) -> Backend:
    """What users have: a transform on the host and on a device."""
    return Backend.of(request.param)


@pytest.fixture(params=["fake", CUDA])
def captures(request: pytest.FixtureRequest, repeatable: None) -> Backend:
    """Captures, so that machines without a device check them too."""
    return Backend.of(request.param)
