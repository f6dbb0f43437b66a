"""Remove operators that return their input, and checks that tracing has already made.

Before / after::

    dropout: "f32[1, 28, 512]" = aten.dropout(layer_norm, 0.1, False)       # eval mode: the input itself
    contiguous: "f32[1, 512, 28]" = aten.contiguous(clone)                  # already contiguous
    slice_1: "f32[1, 28, 512]" = aten.slice(dropout, 0, 0, 9223372036854775807)
    _ = aten._assert_tensor_metadata(exp, dtype = torch.float32)
    mul: "f32[1, 28, 512]" = aten.mul(slice_1, 22.6)

    mul: "f32[1, 28, 512]" = aten.mul(layer_norm, 22.6)

Requires: an inference graph (no gradients), so that detach is the identity.
Leaves alone: copies (clone, repeat), casts that cast, and every operator that draws or writes.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from cadence_fx.changes import Change
from cadence_fx.effects import base_of
from cadence_fx.pipeline import PassContext, PassResult
from cadence_fx.specialise import FlatGraph, TensorMeta, meta_of

__all__ = ["Normalise"]

aten = torch.ops.aten
_SAME_IF_SAME_META = {
    aten.to.dtype_layout, aten.to.dtype, aten.to.device, aten.to.other, aten.slice.Tensor, aten.expand.default,
    aten.expand_as.default, aten.reshape.default, aten.view.default, aten.view_as.default, aten.type_as.default,
}  # fmt: skip
_IDENTITY = {aten.detach.default, aten.alias.default}
_CHECKS = {aten._assert_tensor_metadata.default, aten._assert_scalar.default, aten._assert_async.msg}


@dataclass(frozen=True)
class Normalise:
    """Replace identities by their input and drop metadata checks."""

    name: ClassVar[str] = "normalise"
    after: ClassVar[tuple[str, ...]] = ()

    def requires(self, flat: FlatGraph, context: PassContext) -> str | None:
        return None

    def call(self, flat: FlatGraph, context: PassContext) -> PassResult:
        removed: Counter[str] = Counter()
        for node in list(flat.graph.nodes):
            if node.op != "call_function":
                continue
            if node.target in _CHECKS:
                flat.graph.erase_node(node)
            elif _is_identity(node):
                node.replace_all_uses_with(node.args[0])
                flat.graph.erase_node(node)
            else:
                continue
            removed[str(node.target)] += 1
        changes = tuple(
            Change(self.name, "removed", target, "it returns its input, or checks what the trace has checked", count=n)
            for target, n in removed.most_common()
        )
        return PassResult(flat, changes)

    def ensures(self, flat: FlatGraph, context: PassContext) -> str | None:
        left = next((n for n in flat.graph.nodes if n.op == "call_function" and _is_identity(n)), None)
        return None if left is None else f"{left} is still an identity"


def _is_identity(node: fx.Node) -> bool:
    if not node.args or not isinstance(node.args[0], fx.Node):
        return False
    source, result = meta_of(node.args[0]), meta_of(node)
    if node.target in _IDENTITY:
        return True
    if node.target is aten.dropout.default:
        return node.args[2] is False
    if source is None or result is None:
        return False
    if node.target is aten.contiguous.default:
        # A state argument looks contiguous to the trace and will be a strided view of its region.
        if base_of(node.args[0]).op == "placeholder":
            return False
        return _is_contiguous(source) and len(node.args) == 1 and "memory_format" not in node.kwargs
    if node.target in _SAME_IF_SAME_META:
        same = source.shape == result.shape and source.dtype == result.dtype and source.device == result.device
        return same and _same_strides(source, result) and not _asks_for_copy(node)
    return False


def _asks_for_copy(node: fx.Node) -> bool:
    """True for ``to(..., copy=True)``, however the argument is passed."""
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    return bool(given.get("copy", False))


def _is_contiguous(meta: TensorMeta) -> bool:
    """As torch has it: strides of dimensions of size 1 do not matter."""
    expected = 1
    for size, stride in zip(reversed(meta.shape), reversed(meta.stride), strict=True):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def _same_strides(a: TensorMeta, b: TensorMeta) -> bool:
    return all(x == y for x, y, size in zip(a.stride, b.stride, a.shape, strict=True) if size != 1)
