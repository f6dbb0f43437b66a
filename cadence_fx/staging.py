"""Memory that stands in for a caller's tensor: the same shape, strides and alignment, at an address that stays."""

from __future__ import annotations

from typing import Any

import torch
import torch.utils._pytree as pytree

__all__ = [
    "SAFE_ALIGNMENT",
    "CapturedInput",
    "alignment",
    "copies_of",
    "copy_of",
    "like",
    "nbytes_of",
    "twin_of",
    "writable",
]

_ALIGNED = 256  # bytes; no kernel choice looks further
SAFE_ALIGNMENT = 16  # bytes, the widest load; kernels may take addresses below for granted not to occur


def nbytes_of(tensor: torch.Tensor) -> int:
    """Bytes of the elements."""
    return tensor.numel() * tensor.element_size()


def writable(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor without its broadcast dimensions: each element once, so that it can be written."""
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def copy_of(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in its own memory with the same strides, which ``clone`` keeps only where they are dense."""
    copy = tensor.clone()
    if copy.stride() != tensor.stride():
        copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
        writable(copy).copy_(writable(tensor))
    return copy


def alignment(tensor: torch.Tensor) -> int:
    """The largest power of two, up to 256, that divides the address."""
    return min(tensor.data_ptr() & -tensor.data_ptr(), _ALIGNED)


def like(tensor: torch.Tensor, shift: int | None = None) -> torch.Tensor:
    """Unwritten memory for the same shape, strides and alignment, or ``shift`` bytes after an aligned address."""
    size, span = tensor.element_size(), 0
    if tensor.numel():
        span = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    memory = torch.empty(span + _ALIGNED // size, dtype=tensor.dtype, device=tensor.device)
    wanted = tensor.data_ptr() if shift is None else shift
    return memory.as_strided(tensor.shape, tensor.stride(), (wanted - memory.data_ptr()) % _ALIGNED // size)


def twin_of(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides and alignment."""
    twin = like(tensor)
    writable(twin).copy_(writable(tensor))
    return twin


def copies_of(outputs: Any) -> Any:
    """The caller's own tensors; one that is returned twice stays one."""
    memo: dict[int, torch.Tensor] = {}

    def copy(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) not in memo:
            memo[id(value)] = copy_of(value)
        return memo[id(value)]

    return pytree.tree_map(copy, outputs)


class CapturedInput:
    """One argument of a captured call: staged into its own buffer, resident at a fixed address, or a plain value."""

    def __init__(self, name: str, example: Any, resident: set[int]) -> None:
        self.name, self.example = name, example
        self.static: Any = example
        self.staged = self.pointer = 0
        self.written = False  # the run writes it in place, so a replay must write the caller's
        if not isinstance(example, torch.Tensor):
            return
        self.pointer = example.data_ptr()
        if example.untyped_storage().data_ptr() not in resident:
            self.staged = nbytes_of(example)
            self.static = like(example)
            self.stage(example)
        self.form = (example.shape, example.stride(), example.dtype, example.device)
        self.alignment = alignment(example) if example.is_floating_point() or example.is_complex() else 0

    def forget_example(self) -> None:
        """Let go of the caller's tensor, which may be as large as a state; what stands in for it stays."""
        self.example = self.static

    def stage(self, value: Any) -> None:
        """Copy a value to where the run reads it."""
        if self.staged:
            writable(self.static).copy_(writable(value))

    def unstage(self, value: Any) -> None:
        """Copy what the run wrote back into the caller's tensor."""
        if self.written:
            writable(value).copy_(writable(self.static))

    def mismatch(self, value: Any, any_alignment: bool) -> str | None:
        """Why a value cannot take this argument's place, or None."""
        if not isinstance(self.example, torch.Tensor):
            same = type(value) is type(self.example) and bool(value == self.example)
            return None if same else f"{self.name} is {value!r}, captured with {self.example!r}"
        if not isinstance(value, torch.Tensor):
            return f"{self.name} is {type(value).__name__}, captured with a tensor"
        if (value.shape, value.stride(), value.dtype, value.device) != self.form:
            found = f"{value.dtype} {list(value.shape)} strides {list(value.stride())} on {value.device}"
            return f"{self.name} has another form: {found}"
        if not self.staged and value.data_ptr() != self.pointer and value.numel():
            return f"{self.name} moved"
        return self._misplaced(value, any_alignment)

    def _misplaced(self, value: torch.Tensor, any_alignment: bool) -> str | None:
        """Stock may take another kernel at another alignment; only a certificate says that this has no effect."""
        if not self.alignment or (found := alignment(value)) == self.alignment:
            return None
        if any_alignment and min(found, self.alignment) >= SAFE_ALIGNMENT:
            return None
        return f"{self.name} has another alignment"
