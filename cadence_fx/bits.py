"""Comparing raw bits: signed zeros and NaN payloads count, and a difference is located."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree

__all__ = ["Difference", "bit_sum", "digest", "first_difference", "same_bits"]

_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _integers(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.detach().contiguous().view(_INTEGER[tensor.element_size()])


def bit_sum(tensor: torch.Tensor) -> torch.Tensor:
    """A position-dependent sum over a tensor's bits, on its device: a difference shows in it."""
    flat = _integers(tensor).reshape(-1).to(torch.int64)
    weight = torch.arange(flat.numel(), device=flat.device, dtype=torch.int64) * 2654435761 + 97
    return (flat * weight).sum()


def digest(value: Any) -> str:
    """SHA-256, in hex, over the raw bytes of a structure's tensors and the text of its plain values."""
    found = hashlib.sha256()
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            found.update(leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
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
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(_integers(a), _integers(b.to(a.device)))


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
    differs = _integers(x) != _integers(y.to(x.device))
    if x.is_complex():
        differs = differs.any(-1)
    index = tuple(int(i) for i in differs.reshape(x.shape).nonzero()[0])
    return Difference(name, index, repr(x[index].item()), repr(y[index].item()), int(differs.sum()))
