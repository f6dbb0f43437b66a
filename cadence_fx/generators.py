"""Generator positions: saved, restored, and left as they were around work that must not be seen."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["generator_states", "restore_generators", "rewound"]


def generator_states(device: torch.device) -> list[torch.Tensor]:
    """States of the host's generator and, for a GPU, of the device's default generator."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


def restore_generators(device: torch.device, states: list[torch.Tensor]) -> None:
    """Put back what `generator_states` gave."""
    torch.set_rng_state(states[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states[1], device)


@contextmanager
def rewound(device: torch.device) -> Iterator[None]:
    """Whatever draws inside, the generators are where they were afterwards."""
    states = generator_states(device)
    try:
        yield
    finally:
        restore_generators(device, states)
