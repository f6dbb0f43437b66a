"""The ambient modes: every switch of precision is seen, whichever of torch's two families of switches set it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from cadence_fx.modes import MODE_NAMES, ambient_modes, changed_modes

CUDNN: Any = torch.backends.cudnn
BACKENDS: tuple[Any, ...] = (torch.backends.cuda.matmul, CUDNN.conv, CUDNN.rnn)


@pytest.fixture(autouse=True)
def precision_put_back() -> Iterator[None]:
    flags = [(b, b.fp32_precision) for b in BACKENDS]
    yield
    for backend, value in flags:
        backend.fp32_precision = value
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = True


def test_there_is_a_name_for_every_mode() -> None:
    assert len(ambient_modes("cpu")) == len(MODE_NAMES)


def _older(value: str) -> Callable[[], None]:
    return lambda: torch.set_float32_matmul_precision(value)


def _newer(backend: object, value: str) -> Callable[[], None]:
    return lambda: setattr(backend, "fp32_precision", value)


@pytest.mark.parametrize(
    ("change", "seen"),
    [
        (_older("high"), "cuda_matmul_fp32"),
        (_older("medium"), "mkldnn_matmul_fp32"),
        (_newer(torch.backends.cuda.matmul, "tf32"), "cuda_matmul_fp32"),
        (_newer(CUDNN.conv, "ieee"), "cuda_conv_fp32"),
        (_newer(CUDNN.rnn, "ieee"), "cuda_rnn_fp32"),
        (lambda: setattr(torch.backends.cudnn, "allow_tf32", False), "cuda_conv_fp32"),
    ],
)
def test_either_family_of_precision_switches_is_seen(change: Callable[[], None], seen: str) -> None:
    """G4-03. Torch refuses to read the older switches after some uses of the newer ones: that must not stop a call."""
    before = ambient_modes("cuda")
    change()
    assert seen in changed_modes(before, ambient_modes("cuda"))


def test_autocast_of_the_host_is_a_mode_of_a_gpu() -> None:
    before = ambient_modes("cuda")
    with torch.autocast("cpu", torch.float16):
        assert changed_modes(before, ambient_modes("cuda")) == "autocast_host None -> torch.float16"


def test_full_precision_by_default_and_full_precision_by_request_are_one_mode() -> None:
    before = ambient_modes("cuda")
    torch.set_float32_matmul_precision("medium")
    torch.set_float32_matmul_precision("highest")
    assert ambient_modes("cuda") == before
