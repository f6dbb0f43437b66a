"""G2-08 and G2-09, other kernels and other bits: what tracing may neither decompose nor choose."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from cadence_fx.bits import first_difference, same_bits
from cadence_fx.contract import Arg, Input
from tests.case_toys import Backend, Twins, aligned, contract, fixed
from tests.streams import window_region

DTYPES = ["float32", "bfloat16", "float16"]


class Block(nn.Module):
    """Operators that a decomposition would round elsewhere."""

    def __init__(self, dtype: torch.dtype, width: int = 512) -> None:
        super().__init__()
        self.norm, self.groups = nn.LayerNorm(width, dtype=dtype), nn.GroupNorm(8, width, dtype=dtype)
        self.bias, self.key = (nn.Parameter(torch.empty(1, width, dtype=dtype)) for _ in range(2))
        self.mix, self.conv = nn.Linear(width, width, dtype=dtype), nn.Conv1d(width, width // 8, 3, dtype=dtype)

    def start(self) -> dict[str, torch.Tensor]:
        return {"left": torch.zeros(1, self.key.shape[1], 2, dtype=self.key.dtype)}

    def forward(self, x: torch.Tensor, state: Any) -> Any:
        h = self.norm(x)
        scores = torch.baddbmm(x[:, :, :1], h, (h * self.key).transpose(1, 2))
        h = F.gelu(torch.softmax(scores, -1) @ h, approximate="tanh")
        h = self.groups(h.transpose(1, 2)).transpose(1, 2)[0]
        h = torch.addmm(self.bias, h, self.mix.weight)
        h = F.silu(h) * self.mix(h)
        seen = torch.cat([state["left"], h.t()[None]], -1)
        return (self.conv(seen), scores), {"left": seen[..., -2:]}


def block(on: Backend, dtype: str) -> Twins:
    kind = getattr(torch, dtype)
    declared = contract((3,), fixed("left", 1, 512, 2, dtype=dtype), width=512, dtype=dtype)
    return Twins(lambda: Block(kind), declared, on)


class Dispatched(TorchDispatchMode):
    """The operators that reach a kernel, with copies of their results."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not _computes_nothing(func):
            self.seen.append((str(func), result.clone() if isinstance(result, torch.Tensor) else None))
        return result


def _computes_nothing(func: Any) -> bool:
    aten = torch.ops.aten
    return bool(func.is_view) or func in (aten.detach.default, aten.clone.default, aten.empty.memory_format)


def dispatched(run: Callable[[], object]) -> list[tuple[str, Any]]:
    with Dispatched() as mode:
        run()
    return mode.seen


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_traced_graph_dispatches_the_operators_of_stock_and_no_others(on: Backend, dtype: str) -> None:
    """G2-08: operator by operator and bit by bit, before any pass has touched the graph."""
    twins = block(on, dtype)
    (x,) = on.chunks([3], width=512, dtype=getattr(torch, dtype))
    graph = twins.fast.graphs["before"]
    stock = dispatched(lambda: twins.stock(aligned(x), {"left": aligned(twins.theirs["left"])}))
    traced = dispatched(lambda: graph(aligned(x), aligned(twins.theirs["left"])))
    assert [name for name, _ in stock] == [name for name, _ in traced]
    for (name, expected), (_, found) in zip(stock, traced, strict=True):
        assert first_difference(name, expected, found) is None
    called = {name for name, _ in traced}
    assert not called & {"aten.var_mean.correction", "aten.rsqrt.default", "aten.sigmoid.default", "aten.erf.default"}


def _adversarial(on: Backend, kind: torch.dtype) -> list[torch.Tensor]:
    """A large mean, denormals, infinities in a row, zeros of both signs."""
    (x,) = on.chunks([3], seed=99, width=512)
    infinite = x.clone()
    infinite[0, 1, :3] = float("inf")
    found = [x + 300, x * torch.finfo(kind).tiny, infinite, x * -0.0]
    return [v.to(kind) for v in found]


@pytest.mark.parametrize("dtype", DTYPES)
def test_fused_operators_keep_their_bits_for_many_inputs(on: Backend, dtype: str) -> None:
    """G2-08."""
    twins, kind = block(on, dtype), getattr(torch, dtype)
    seeds = range(200) if on.is_cuda else range(8)
    inputs = [*(x for seed in seeds for x in on.chunks([3], seed=seed, width=512, dtype=kind)), *_adversarial(on, kind)]
    twins.steps(inputs[:-4])
    for x in inputs[-4:]:
        twins.restart()
        twins.step(x)
    assert twins.served == len(inputs)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_decomposition_would_have_been_seen(on: Backend, dtype: str) -> None:
    """G2-08: the control. The textbook form of a layer norm has other bits."""
    kind = getattr(torch, dtype)
    seen = []
    for x in on.chunks([3] * 4, width=512, dtype=kind):
        centred = x - x.mean(-1, keepdim=True)
        by_hand = centred * torch.rsqrt((centred * centred).mean(-1, keepdim=True) + 1e-5)
        seen.append(same_bits(F.layer_norm(x, (512,)), by_hand))
    assert not all(seen)


# ------------------------------------------------------------------------------------------- attention
HEADS = (64, 72, 256)
TOTAL = sum(HEADS)


class Attention(nn.Module):
    """Every kind of mask with every head size; keys and values are a window of rows."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(TOTAL, dtype=dtype))

    def start(self) -> dict[str, torch.Tensor]:
        return {"rows": torch.zeros(1, 0, TOTAL, dtype=self.scale.dtype)}

    def forward(self, x: torch.Tensor, state: Any) -> Any:
        rows = torch.cat([state["rows"], x * self.scale], 1)
        allowed = torch.ones(x.shape[1], rows.shape[1], dtype=torch.bool, device=x.device).tril(rows.shape[1] - 2)
        added = torch.zeros_like(allowed, dtype=x.dtype).masked_fill(~allowed, -1.5)
        found = []
        for q, k in zip(x[:, None].split(HEADS, -1), rows[:, None].split(HEADS, -1), strict=True):
            found += [
                F.scaled_dot_product_attention(q, k, k),
                F.scaled_dot_product_attention(q, k, k, attn_mask=allowed),
                F.scaled_dot_product_attention(q, k, k, attn_mask=added),
                F.scaled_dot_product_attention(q, k, k, is_causal=True),
            ]
        return found, {"rows": rows[:, -2:]}


def attention(on: Backend, dtype: str, lengths: tuple[int, ...] = (5, 1)) -> Twins:
    region = window_region(2, shape=(1, None, TOTAL), dtype=dtype)
    inputs = (Input(Arg("x"), (1, None, TOTAL), dtype),)
    return Twins(lambda: Attention(getattr(torch, dtype)), contract(lengths, region, inputs=inputs), on)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_attention_kernel_is_chosen_as_stock_chooses_it(on: Backend, dtype: str) -> None:
    """G2-09: by mask, head size and number of queries, on this device and under the switches of the moment."""
    twins, kind = attention(on, dtype), getattr(torch, dtype)
    twins.steps(on.chunks([5, 1, 1, 5, 1], width=TOTAL, dtype=kind))
    assert twins.served == 5
    (x,) = on.chunks([5], width=TOTAL, dtype=kind)
    before = twins.theirs
    with sdpa_kernel([SDPBackend.MATH]):
        twins.step(x)
    flash = torch.backends.cuda.flash_sdp_enabled()
    torch.backends.cuda.enable_flash_sdp(not flash)
    try:
        twins.theirs, twins.ours = before, {k: v.clone() for k, v in before.items()}
        twins.step(x)
    finally:
        torch.backends.cuda.enable_flash_sdp(flash)
    assert twins.counted("mode changed: sdp_flash") == 2
    twins.step(x)
    assert twins.served == 6
    assert twins.accounted


@pytest.mark.parametrize("only", [SDPBackend.MATH, SDPBackend.EFFICIENT_ATTENTION])
def test_what_is_captured_under_a_switch_is_served_under_it_alone(on: Backend, only: SDPBackend) -> None:
    """G2-09."""
    with sdpa_kernel([only, SDPBackend.MATH]):
        twins = attention(on, "bfloat16", (5,))
        chunks = on.chunks([5, 5, 5], width=TOTAL, dtype=torch.bfloat16)
        twins.steps(chunks)
        assert twins.served == 3
    twins.steps(chunks)
    assert twins.counted("mode changed: sdp_flash") == 3
