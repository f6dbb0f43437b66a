"""Which operators may be computed inside one fused kernel with eager's bits, and why.

Three classes are admitted, everything else never:

- movement: an element of the result is an element of an argument;
- IEEE: addition, subtraction and multiplication round to nearest, comparisons, selections and sign operations are
  exact, integer and boolean arithmetic wraps. A compiler that contracts nothing (`cadence_fx.exact_compile`) has no
  freedom in these;
- proven: a function of one tensor whose bits were compared with eager's on every input (`cadence_fx.proofs`).

A sum with a factor (``alpha``) is left out since eager may contract it, a quotient by a number since eager multiplies
by its reciprocal, and the minimum and maximum of floats since the payload of a NaN depends on the instruction. Of
16-bit floats only what is proven is admitted: compilers hold them in 32 bits, and the way back changes NaNs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import fx

from cadence_fx.specialise import TensorMeta, meta_of

__all__ = ["Admission", "Proven", "admission", "is_function_of_one", "nothing_proven"]

aten = torch.ops.aten

Admission = Literal["movement", "IEEE", "proven"]
Proven = Callable[[fx.Node], bool]

MOVEMENT = frozenset({
    aten.cat.default, aten.clone.default, aten.contiguous.default, aten.copy_.default, aten.repeat.default,
    aten.reshape.default, aten.stack.default, aten.constant_pad_nd.default,
})  # fmt: skip
SUMS = frozenset({
    aten.add.Tensor, aten.add.Scalar, aten.sub.Tensor, aten.sub.Scalar, aten.rsub.Tensor, aten.rsub.Scalar,
})  # fmt: skip
IEEE = frozenset({
    aten.mul.Tensor, aten.mul.Scalar, aten.multiply.Tensor, aten.multiply.Scalar, aten.neg.default, aten.abs.default,
    aten.where.self, aten.masked_fill.Scalar, aten.masked_fill.Tensor,
    aten.eq.Tensor, aten.eq.Scalar, aten.ne.Tensor, aten.ne.Scalar, aten.lt.Tensor, aten.lt.Scalar, aten.le.Tensor,
    aten.le.Scalar, aten.gt.Tensor, aten.gt.Scalar, aten.ge.Tensor, aten.ge.Scalar,
    aten.logical_and.default, aten.logical_or.default, aten.logical_not.default, aten.logical_xor.default,
})  # fmt: skip
INTEGER = frozenset({
    aten.bitwise_and.Tensor, aten.bitwise_or.Tensor, aten.bitwise_xor.Tensor, aten.bitwise_not.default,
    aten.minimum.default, aten.maximum.default,
})  # fmt: skip
CASTS = frozenset({aten.to.dtype, aten._to_copy.default})
_FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
_PLAIN = _FLOATS | {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}


def nothing_proven(node: fx.Node) -> bool:
    """For a device without proofs: no function of one tensor is admitted."""
    return False


def admission(node: fx.Node, proven: Proven = nothing_proven) -> Admission | None:
    """Why an operator may be part of a fused kernel; None if it may not."""
    if node.op != "call_function" or not _plain(node):
        return None
    target = node.target
    if _short_floats(node):
        return "proven" if is_function_of_one(node) and proven(node) else None
    if target in MOVEMENT:
        return "movement" if _moves_only(node) else None
    if target in SUMS:
        return "IEEE" if _factor(node) == 1 else None
    if target in IEEE or (target in INTEGER and not _float(node)):
        return "IEEE"
    if target in CASTS:
        return "IEEE" if _is_exact_cast(node) else None
    return "proven" if is_function_of_one(node) and proven(node) else None


def is_function_of_one(node: fx.Node) -> bool:
    """True for a pointwise function of one floating-point tensor: its bits can be compared on every input."""
    result, given = meta_of(node), list[fx.Node]()
    fx.map_arg((node.args, node.kwargs), given.append)
    if result is None or len(given) != 1 or torch.Tag.pointwise not in getattr(node.target, "tags", ()):
        return False
    argument = meta_of(given[0])
    return argument is not None and argument.dtype == result.dtype in _FLOATS and argument.shape == result.shape


def _metas(node: fx.Node) -> Iterable[TensorMeta | None]:
    return (meta_of(a) for a in node.all_input_nodes)


def _plain(node: fx.Node) -> bool:
    """One tensor out, tensors of one device in: a value on the host is read when the kernel is launched."""
    result = meta_of(node)
    given = list(_metas(node))
    return (
        result is not None
        and bool(given)
        and all(m is not None and m.dtype in _PLAIN and m.device == result.device for m in (result, *given))
    )


def _short_floats(node: fx.Node) -> bool:
    """True if a 16-bit float enters or leaves."""
    return any(m is not None and m.dtype in (torch.float16, torch.bfloat16) for m in (meta_of(node), *_metas(node)))


def _float(node: fx.Node) -> bool:
    result = meta_of(node)
    return result is not None and result.dtype in _FLOATS


def _moves_only(node: fx.Node) -> bool:
    """False where a copy converts, and where a reshape moves nothing: its result is no new memory."""
    result = meta_of(node)
    assert result is not None
    if any(m is None or m.dtype != result.dtype for m in _metas(node)):
        return False
    if node.target not in (aten.reshape.default, aten.contiguous.default):
        return True
    given = meta_of(node.all_input_nodes[0])
    assert given is not None
    source = given.empty("meta")
    moved = node.target(source, *node.args[1:], **node.kwargs)
    return moved is not source and not moved._is_view()


def _factor(node: fx.Node) -> Any:
    given = (*node.args[2:3], node.kwargs.get("alpha", 1))
    return given[0]


def _is_exact_cast(node: fx.Node) -> bool:
    """A float to an integer out of its range is whatever the device makes of it; other casts round to nearest."""
    result, given = meta_of(node), meta_of(node.all_input_nodes[0])
    assert result is not None
    assert given is not None
    extra = set(node.kwargs) - {"dtype"} if node.target is aten._to_copy.default else set(node.kwargs)
    out_of_range = given.dtype in _FLOATS and result.dtype not in (*_FLOATS, torch.bool)
    return not extra and given.dtype != result.dtype and not out_of_range  # of the same type it is no copy at all
