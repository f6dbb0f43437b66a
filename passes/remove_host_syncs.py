"""Re-express operators that look at a device value on the host by the same device operators without the look.

``istft`` divides by the overlap-added square of its window and first checks on the host that no element of that
envelope is near zero. The envelope depends on the window and the number of frames only, so the check is made once,
here::

    istft: "f32[1, 27840]" = aten.istft(complex_1, 16, 4, 16, window)

    transpose: "c64[1, 6961, 9]" = aten.transpose(complex_1, 1, 2)
    frames: "f32[1, 6961, 16]" = aten._fft_c2r(transpose, [2], 2, 16)
    mul: "f32[1, 6961, 16]" = aten.mul(frames, aten.view(window, [1, 1, 16]))
    y: "f32[1, 27856]" = aten.unfold_backward(mul, [1, 27856], 1, 16, 4)
    envelope: "f32[1, 27856]" = aten.unfold_backward(aten.expand(aten.pow(window, 2), [1, 6961, 16]), [1, 27856], 1, 16,
        4)
    div: "f32[1, 27840]" = aten.div(aten.slice(y, 1, 8, 27848), aten.slice(envelope, 1, 8, 27848))

These are the operators, arguments and order of ATen's own istft (aten/src/ATen/native/SpectralOps.cpp).

Requires: the window is an attribute or computed from attributes.
Leaves alone (each with a rejection): a window that is not constant, one that fails the check, the arguments
``length``, ``return_complex`` and ``onesided=False``; every other operator that synchronises.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from cadence_fx.changes import Change, Rejection, register
from cadence_fx.constant_eval import ConstantEvaluator
from cadence_fx.effects import is_sync
from cadence_fx.pipeline import PassContext, PassResult
from cadence_fx.specialise import FlatGraph, TensorMeta, meta_of, source_of

__all__ = ["RemoveHostSyncs"]

aten = torch.ops.aten
CX301 = register("CX301", "operator waits for a value on the host")
CX302 = register("CX302", "istft with arguments that have no capture-safe form here")
CX303 = register("CX303", "istft whose window is not a constant")
CX304 = register("CX304", "istft whose window envelope fails its own check")
_LOWEST = 1e-11  # the bound of ATen's check


@dataclass(frozen=True)
class RemoveHostSyncs:
    """Expand istft into the operators that it is made of, its check made here."""

    name: ClassVar[str] = "remove_host_syncs"
    after: ClassVar[tuple[str, ...]] = ("normalise", "lower_autocast")

    def requires(self, flat: FlatGraph, context: PassContext) -> str | None:
        return None

    def call(self, flat: FlatGraph, context: PassContext) -> PassResult:
        changes: list[Change] = []
        rejections: list[Rejection] = []
        evaluator = ConstantEvaluator(flat, context)
        for node in list(flat.graph.nodes):
            if not is_sync(node):
                continue
            if node.target is not aten.istft.default:
                hint = "it stays, and a capture region ends there; move the decision out of the call if you can"
                rejections.append(
                    Rejection(CX301, self.name, node.name, f"{node.target} synchronises", (hint,), source_of(node))
                )
                continue
            refusal = _refusal(node, evaluator)
            if refusal is not None:
                code, explanation = refusal
                rejections.append(Rejection(code, self.name, node.name, explanation, (), source_of(node)))
                continue
            _expand(flat, node)
            changes.append(
                Change(
                    self.name,
                    "expanded",
                    node.name,
                    "same ATen operators; the window's envelope was checked here",
                    source_of(node),
                )
            )
        return PassResult(flat, tuple(changes), tuple(rejections))

    def ensures(self, flat: FlatGraph, context: PassContext) -> str | None:
        return None


def _arguments(node: fx.Node) -> dict[str, Any]:
    """All arguments of an istft node by name."""
    schema = aten.istft.default._schema.arguments
    found = {argument.name: argument.default_value if argument.has_default_value() else None for argument in schema}
    found.update({schema[i].name: value for i, value in enumerate(node.args)})
    found.update(node.kwargs)
    return found


def _refusal(node: fx.Node, evaluator: ConstantEvaluator) -> tuple[str, str] | None:
    a = _arguments(node)
    meta = meta_of(node.args[0]) if isinstance(node.args[0], fx.Node) else None
    if meta is None or len(meta.shape) != 3:
        return CX302, "the spectrum is not of shape [batch, bins, frames]"
    for name, allowed in (("length", (None,)), ("return_complex", (False,)), ("onesided", (None, True))):
        if a[name] not in allowed:
            return CX302, f"{name} is {a[name]}, expected one of {allowed}"
    hop, win = a["hop_length"], a["win_length"]
    if hop is None or (win is not None and win != a["n_fft"]):
        return (
            CX302,
            f"hop_length is {hop} and win_length {win}; expected a hop and win_length equal to n_fft {a['n_fft']}",
        )
    window = a["window"]
    if not isinstance(window, fx.Node) or not evaluator.is_constant(window):
        return CX303, f"the window {window} depends on the call"
    value = evaluator.value(window)
    n_fft, frames = int(a["n_fft"]), meta.shape[2]
    length = n_fft + hop * (frames - 1)
    with torch.no_grad():
        squares = value.pow(2).expand([1, frames, n_fft])
        envelope = aten.unfold_backward(squares, [1, length], 1, n_fft, hop)
        start, end = _bounds(a, length)
        lowest = float(envelope[:, start:end].abs().min())
    return (CX304, f"its smallest element is {lowest}, the bound is {_LOWEST}") if lowest < _LOWEST else None


def _bounds(a: dict[str, Any], length: int) -> tuple[int, int]:
    half = int(a["n_fft"]) // 2 if a["center"] else 0
    return half, length - half


def _expand(flat: FlatGraph, node: fx.Node) -> None:
    a = _arguments(node)
    spectrum, window = a["self"], a["window"]
    meta, result = meta_of(spectrum), meta_of(node)
    assert meta is not None
    assert result is not None
    batch, _, frames = meta.shape
    n_fft, hop = int(a["n_fft"]), int(a["hop_length"])
    length = n_fft + hop * (frames - 1)
    start, end = _bounds(a, length)
    norm = 1 if a["normalized"] else 2  # by sqrt(n), by n

    def add(
        target: Any, args: tuple[Any, ...], shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype
    ) -> fx.Node:
        made = flat.graph.call_function(target, args)
        made.meta.update(node.meta)
        made.meta["val"] = TensorMeta(shape, stride, dtype, result.device)
        return made

    real = result.dtype
    with flat.graph.inserting_before(node):
        spec = add(aten.transpose.int, (spectrum, 1, 2), (batch, frames, meta.shape[1]),
                   (meta.stride[0], meta.stride[2], meta.stride[1]), meta.dtype)  # fmt: skip
        full = (batch, frames, n_fft), (frames * n_fft, n_fft, 1), real
        signal = add(aten._fft_c2r.default, (spec, [2], norm, n_fft), *full)
        row = add(aten.view.default, (window, [1, 1, n_fft]), (1, 1, n_fft), (n_fft, n_fft, 1), real)
        windowed = add(aten.mul.Tensor, (signal, row), *full)
        y = add(
            aten.unfold_backward.default, (windowed, [batch, length], 1, n_fft, hop), (batch, length), (length, 1), real
        )
        square = add(aten.pow.Tensor_Scalar, (window, 2), (n_fft,), (1,), real)
        squares = add(aten.expand.default, (square, [1, frames, n_fft]), (1, frames, n_fft), (0, 0, 1), real)
        envelope = add(
            aten.unfold_backward.default, (squares, [1, length], 1, n_fft, hop), (1, length), (length, 1), real
        )
        inner = (batch, end - start), (length, 1), real
        kept = add(aten.slice.Tensor, (y, 1, start, end), *inner)
        weight = add(aten.slice.Tensor, (envelope, 1, start, end), (1, end - start), (length, 1), real)
        divided = add(aten.div.Tensor, (kept, weight), (batch, end - start), (end - start, 1), real)
    node.replace_all_uses_with(divided)
    flat.graph.erase_node(node)
