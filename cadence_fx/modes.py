"""The ambient modes that change bits: a program is admitted only under the modes that it was made under."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["AUTOCAST_CACHE", "MODE_NAMES", "ambient_modes", "changed_modes", "pinned_kernels"]

MODE_NAMES: tuple[str, ...] = (
    "autocast", "autocast_dtype", "autocast_cache", "autocast_host", "cuda_matmul_fp32", "cuda_conv_fp32",
    "cuda_rnn_fp32", "mkldnn_matmul_fp32", "mkldnn_conv_fp32", "fp16_reduction", "bf16_reduction", "cudnn_enabled",
    "cudnn_deterministic", "cudnn_benchmark", "deterministic", "sdp_flash", "sdp_mem_efficient", "sdp_math",
    "sdp_cudnn", "default_dtype",
)  # fmt: skip
AUTOCAST_CACHE = MODE_NAMES.index("autocast_cache")

_fp32_precision = torch._C._get_fp32_precision_getter
# What torch.backends.*.fp32_precision, allow_tf32 and set_float32_matmul_precision amount to; the older switches cannot
# be read any more once the newer ones were set to what they do not express.
_FP32 = (("cuda", "matmul"), ("cuda", "conv"), ("cuda", "rnn"), ("mkldnn", "matmul"), ("mkldnn", "conv"))


def _precision(backend: str, operation: str) -> str:
    found = _fp32_precision(backend, operation)
    return "ieee" if found == "none" else found  # nothing set, and full precision asked for


def ambient_modes(device_type: str) -> tuple[Any, ...]:
    """The modes in force in this thread, in the order of `MODE_NAMES`. A few microseconds."""
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    autocast = torch.is_autocast_enabled(device_type)
    return (
        autocast,
        torch.get_autocast_dtype(device_type) if autocast else None,
        torch.is_autocast_cache_enabled() if autocast else None,
        torch.get_autocast_dtype("cpu") if device_type != "cpu" and torch.is_autocast_enabled("cpu") else None,
        *(_precision(backend, operation) for backend, operation in _FP32),
        cuda.matmul.allow_fp16_reduced_precision_reduction,
        cuda.matmul.allow_bf16_reduced_precision_reduction,
        cudnn.enabled,
        cudnn.deterministic,
        cudnn.benchmark,
        torch.are_deterministic_algorithms_enabled(),
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.math_sdp_enabled(),
        cuda.cudnn_sdp_enabled(),
        torch.get_default_dtype(),
    )


def changed_modes(expected: tuple[Any, ...], found: tuple[Any, ...]) -> str:
    """Names and values of the modes that differ, for a reason text."""
    return ", ".join(
        f"{name} {before} -> {now}"
        for name, before, now in zip(MODE_NAMES, expected, found, strict=True)
        if before != now
    )


@contextmanager
def pinned_kernels() -> Iterator[None]:
    """Within this context cuDNN takes kernels that give the same bits in every run; the flags are put back."""
    deterministic, benchmark = torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    try:
        yield
    finally:
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = deterministic, benchmark
