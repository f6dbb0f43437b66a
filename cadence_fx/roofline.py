"""A lower bound on an operator's time: the bytes that it must move and the sums that it must make (Williams, 2009)."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import fx

from cadence_fx.specialise import TensorMeta, meta_of

__all__ = ["Roofline", "flops", "moved_bytes"]

aten = torch.ops.aten


@dataclass(frozen=True)
class Roofline:
    """What a device does at most: bytes read and written, and floating-point operations, per second."""

    bytes_per_second: float
    flops_per_second: float

    @classmethod
    def of(cls, device: torch.device) -> Roofline:
        """Measured now: a copy of 512 MiB and a float32 product of 4096 rows under the flags in force."""
        size = 512 << 20 if device.type == "cuda" else 64 << 20
        side = 4096 if device.type == "cuda" else 512
        source = torch.empty(size, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        a = torch.randn(side, side, device=device)
        copy = _seconds(lambda: target.copy_(source), device)
        product = _seconds(lambda: a @ a, device)
        return cls(2 * size / copy, 2.0 * side**3 / product)

    def microseconds(self, node: fx.Node) -> float:
        """No kernel that computes this operator alone can take less."""
        return 1e6 * max(moved_bytes(node) / self.bytes_per_second, flops(node) / self.flops_per_second)


def _seconds(run: Callable[[], object], device: torch.device, runs: int = 5) -> float:
    """Of the fastest run."""
    found = []
    for _ in range(runs + 1):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        begin = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found.append(time.perf_counter() - begin)
    return min(found[1:])


def moved_bytes(node: fx.Node) -> int:
    """Bytes of an operator's distinct arguments and of its result."""
    metas = [meta_of(argument) for argument in node.all_input_nodes] + [meta_of(node)]
    return sum(_touched(meta) for meta in metas if meta is not None)


def _touched(meta: TensorMeta) -> int:
    """Bytes of the elements that exist: a broadcast dimension is one element."""
    return meta.dtype.itemsize * math.prod(
        n for n, stride in zip(meta.shape, meta.stride, strict=True) if stride != 0 or n == 0
    )


def flops(node: fx.Node) -> float:
    """Multiplications and additions of products, convolutions and attention; 0 for what is bound by its bytes."""
    metas = [meta_of(a) if isinstance(a, fx.Node) else None for a in node.args]
    result = meta_of(node)
    if result is None or not metas or metas[0] is None:
        return 0.0
    count = _PER_RESULT.get(node.target)
    return 0.0 if count is None else 2.0 * count(metas, result)


Metas = list[TensorMeta | None]


def _product(metas: Metas, result: TensorMeta) -> float:
    return float(result.numel * metas[0].shape[-1]) if metas[0] is not None else 0.0


def _convolution(metas: Metas, result: TensorMeta) -> float:
    weight = metas[1]
    return 0.0 if weight is None else float(result.numel * math.prod(weight.shape[1:]))


def _transposed(metas: Metas, result: TensorMeta) -> float:
    source, weight = metas[0], metas[1]
    return 0.0 if source is None or weight is None else float(source.numel * math.prod(weight.shape[1:]))


def _attention(metas: Metas, result: TensorMeta) -> float:
    query, key = metas[0], metas[1]
    return 0.0 if query is None or key is None else float(query.numel * key.shape[-2] * 2)


_PER_RESULT: dict[object, Callable[[Metas, TensorMeta], float]] = {
    aten.linear.default: _product,
    aten.matmul.default: _product,
    aten.mm.default: _product,
    aten.bmm.default: _product,
    aten.conv1d.default: _convolution,
    aten.conv2d.default: _convolution,
    aten.conv_transpose1d.default: _transposed,
    aten.scaled_dot_product_attention.default: _attention,
}
