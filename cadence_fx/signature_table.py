"""From the arguments of a call to its signature in the catalog, by integer compares."""

from __future__ import annotations

from typing import Any

import torch

from cadence_fx.catalog import Signature, signatures
from cadence_fx.compiler import Compiler
from cadence_fx.contract import Arg, Contract
from cadence_fx.memory import dtype_of
from cadence_fx.places import get_path

__all__ = ["SignatureTable"]


class SignatureTable:
    """All signatures of a catalog, looked up by scalars, extents and sizes."""

    def __init__(self, contract: Contract, compiler: Compiler) -> None:
        self.contract = contract
        self.regions = [r for r in contract.states if isinstance(r.enters, Arg)]
        self.scalar_places = list(dict.fromkeys(p for s in signatures(contract) for p, _ in compiler.scalars(s)))
        self.entries: dict[tuple[Any, ...], Signature] = {}
        for signature in signatures(contract):
            scalars = dict(compiler.scalars(signature))
            extents = tuple(compiler.extent(signature, r) for r in self.regions)
            sizes = contract.call(signature.call).sizes
            key = (
                tuple((type(scalars.get(p)).__name__, scalars.get(p)) for p in self.scalar_places),
                extents,
                tuple(tuple(sizes.get(i.name, ())) for i in contract.inputs),
            )
            self.entries.setdefault(key, signature)
        self.inputs = [(i.place, i.shape, dtype_of(i.dtype), i.name) for i in contract.inputs]
        self.device = compiler.memory.device

    def lookup(self, bound: dict[str, Any], state: dict[str, torch.Tensor]) -> Signature | str:
        """The signature, or the reason why the call has none."""
        sizes = []
        for place, shape, dtype, name in self.inputs:
            tensor = get_path(bound, place)
            reason = _mismatch(tensor, shape, dtype, self.device)
            if reason:
                return f"input {name!r}: {reason}"
            sizes.append(tuple(n for n, s in zip(tensor.shape, shape, strict=True) if s is None))
        scalars = tuple((type(v).__name__, v) for v in (get_path(bound, p) for p in self.scalar_places))
        extents = tuple(0 if r.dim is None else state[r.name].shape[r.dim] for r in self.regions)
        found = self.entries.get((scalars, extents, tuple(sizes)))
        if found is not None:
            return found
        return "signature not in the catalog"


def _mismatch(tensor: Any, shape: tuple[int | None, ...], dtype: torch.dtype, device: torch.device) -> str | None:
    if not isinstance(tensor, torch.Tensor):
        return f"it is a {type(tensor).__name__}"
    if tensor.dtype != dtype:
        return f"dtype is {tensor.dtype}, declared {dtype}"
    if tensor.device != device:
        return f"device is {tensor.device}, declared {device}"
    if tensor.dim() != len(shape) or any(s is not None and s != n for s, n in zip(shape, tensor.shape, strict=True)):
        return f"shape is {list(tensor.shape)}, declared {list(shape)}"
    if tensor.requires_grad and torch.is_grad_enabled():
        return "it requires a gradient"
    return None
