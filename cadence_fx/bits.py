"""Comparing raw bits: signed zeros and NaN payloads count, and a difference is located."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree

__all__ = [
    "CHUNK", "INTEGER", "Difference", "bit_sum", "digest", "first_difference", "integers", "pieces", "same_bits",
]  # fmt: skip

CHUNK = 1 << 24  # bytes of device memory that a copy to the host or a comparison may use

# Bytes of an element -> the integer type that shows its bits.
INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def integers(tensor: torch.Tensor) -> torch.Tensor:
    """The raw bits of a tensor's elements, dense, as integers of their size."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.detach().contiguous().view(INTEGER[tensor.element_size()])


def pieces(tensor: torch.Tensor, limit: int = CHUNK) -> Iterator[torch.Tensor]:
    """Views of a tensor, in the order of its elements, of about ``limit`` bytes each."""
    nbytes = tensor.numel() * tensor.element_size()
    dim = next((d for d, size in enumerate(tensor.shape) if size > 1), None)
    if dim is None or nbytes <= limit:
        yield tensor
        return
    rows = max(1, limit * tensor.shape[dim] // nbytes)
    for first in range(0, tensor.shape[dim], rows):
        yield from pieces(tensor.narrow(dim, first, min(rows, tensor.shape[dim] - first)), limit)


def bit_sum(tensor: torch.Tensor) -> torch.Tensor:
    """A position-dependent sum over a tensor's bits, on its device: a difference shows in it."""
    flat = integers(tensor).reshape(-1).to(torch.int64)
    weight = torch.arange(flat.numel(), device=flat.device, dtype=torch.int64) * 2654435761 + 97
    return (flat * weight).sum()


def digest(value: Any) -> str:
    """SHA-256, in hex, over the raw bytes of a structure's tensors and the text of its plain values."""
    found = hashlib.sha256()
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            # In pieces: what is not dense is made so on its device first.
            for piece in pieces(leaf.detach()):
                found.update(piece.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        elif leaf is not None:
            found.update(repr(leaf).encode())
    return found.hexdigest()


@dataclass(frozen=True)
class Difference:
    """Where two values differ first.

    Attributes:
        where: name of the value, with the path inside it.
        index: of the first differing element, or () if shapes or types differ.
        expected, found: the two values as text.
        count: number of differing elements.
    """

    where: str
    index: tuple[int, ...]
    expected: str
    found: str
    count: int

    def __str__(self) -> str:
        at = f" at {list(self.index)}" if self.index else ""
        return f"{self.where}{at}: stock has {self.expected}, found {self.found} ({self.count} elements differ)"

    def to_dict(self) -> dict[str, Any]:
        return {
            "where": self.where,
            "index": list(self.index),
            "expected": self.expected,
            "found": self.found,
            "count": self.count,
        }


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """True if shape, dtype and every bit agree."""
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(integers(a), integers(b.to(a.device)))


def first_difference(where: str, expected: Any, found: Any) -> Difference | None:
    """The first difference between two structures of tensors and plain values, or None if all bits agree."""
    a, spec_a = pytree.tree_flatten_with_path(expected)
    b, spec_b = pytree.tree_flatten_with_path(found)
    if [pytree.keystr(k) for k, _ in a] != [pytree.keystr(k) for k, _ in b]:
        return Difference(where, (), str(spec_a), str(spec_b), 1)
    for (path, x), (_, y) in zip(a, b, strict=True):
        name = where + pytree.keystr(path)
        if isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor):
            difference = _tensors(name, x, y)
            if difference is not None:
                return difference
        elif type(x) is not type(y) or x != y:
            return Difference(name, (), repr(x), repr(y), 1)
    return None


def _tensors(name: str, x: torch.Tensor, y: torch.Tensor) -> Difference | None:
    if x.shape != y.shape or x.dtype != y.dtype:
        return Difference(name, (), f"{x.dtype}{list(x.shape)}", f"{y.dtype}{list(y.shape)}", 1)
    if same_bits(x, y):
        return None
    differs = integers(x) != integers(y.to(x.device))
    if x.is_complex():
        differs = differs.any(-1)
    index = tuple(int(i) for i in differs.reshape(x.shape).nonzero()[0])
    return Difference(name, index, repr(x[index].item()), repr(y[index].item()), int(differs.sum()))
