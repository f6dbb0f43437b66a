"""The ambient modes that change bits: a program is admitted only under the modes that it was made under."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["AUTOCAST_CACHE", "MODE_NAMES", "ambient_modes", "changed_modes"]

MODE_NAMES: tuple[str, ...] = (
    "autocast", "autocast_dtype", "autocast_cache", "matmul_precision", "cuda_matmul_tf32", "fp16_reduction",
    "bf16_reduction", "cudnn_enabled", "cudnn_deterministic", "cudnn_benchmark", "cudnn_tf32", "deterministic",
    "sdp_flash", "sdp_mem_efficient", "sdp_math", "sdp_cudnn", "default_dtype",
)  # fmt: skip
AUTOCAST_CACHE = MODE_NAMES.index("autocast_cache")


def ambient_modes(device_type: str) -> tuple[Any, ...]:
    """The modes in force in this thread, in the order of `MODE_NAMES`. A few microseconds."""
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    autocast = torch.is_autocast_enabled(device_type)
    return (
        autocast,
        torch.get_autocast_dtype(device_type) if autocast else None,
        torch.is_autocast_cache_enabled() if autocast else None,
        torch.get_float32_matmul_precision(),
        cuda.matmul.allow_tf32,
        cuda.matmul.allow_fp16_reduced_precision_reduction,
        cuda.matmul.allow_bf16_reduced_precision_reduction,
        cudnn.enabled,
        cudnn.deterministic,
        cudnn.benchmark,
        cudnn.allow_tf32,
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
