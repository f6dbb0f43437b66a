"""Which operators may be fused: each class, and what only looks like it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from cadence_fx.exact_ops import admission, is_function_of_one
from tests.flat_graphs import flat_of, operator_of

F = torch.randn(2, 3, 4)
B = torch.randn(2, 3, 4).bfloat16()
I = torch.arange(24).view(2, 3, 4)  # noqa: E741


def admitted(name: str, function: Callable[..., Any], *tensors: torch.Tensor, proven: bool = False) -> str | None:
    flat = flat_of(function, *tensors)
    return admission(operator_of(flat, name), lambda node: proven)


@pytest.mark.parametrize(
    ("name", "function", "tensors"),
    [
        ("add", lambda x, y: (x + y,), (F, F)),
        ("add", lambda x: (x + 0.3,), (F,)),
        ("sub", lambda x: (x - 1,), (I,)),
        ("rsub", lambda x: (1.0 - x,), (F,)),
        ("mul", lambda x, y: (x * y,), (F, F[:, :1])),
        ("where", lambda x, y: (torch.where(x > 0, x, y),), (F, F)),
        ("gt", lambda x: (x > 0,), (F,)),
        ("logical_not", lambda x: (torch.logical_not(x > 0),), (F,)),
        ("maximum", lambda x, y: (torch.maximum(x, y),), (I, I)),
        ("masked_fill", lambda x: (x.masked_fill(x > 0, -1.0),), (F,)),
        ("to", lambda x: (x.to(torch.float64),), (F,)),
        ("to", lambda x: (x.to(torch.float32),), (I,)),
    ],
)
def test_arithmetic_that_the_standard_fixes_is_admitted(
    name: str, function: Callable[..., Any], tensors: tuple[torch.Tensor, ...]
) -> None:
    assert admitted(name, function, *tensors) == "IEEE"


@pytest.mark.parametrize(
    ("name", "function", "tensors"),
    [
        ("cat", lambda x, y: (torch.cat([x, y], 1),), (F, F)),
        ("clone", lambda x: (x.transpose(0, 1).clone(),), (F,)),
        ("contiguous", lambda x: (x.transpose(0, 1).contiguous(),), (F,)),
        ("reshape", lambda x: (x.transpose(0, 1).reshape(-1),), (F,)),
        ("copy_", lambda x, y: (x[:1].copy_(y[:1]),), (F, F)),
    ],
)
def test_movement_is_admitted(name: str, function: Callable[..., Any], tensors: tuple[torch.Tensor, ...]) -> None:
    assert admitted(name, function, *tensors) == "movement"


@pytest.mark.parametrize(
    ("why", "name", "function", "tensors"),
    [
        ("eager may contract it", "add", lambda x, y: (torch.add(x, y, alpha=2.5),), (F, F)),
        ("eager multiplies by the reciprocal", "div", lambda x: (x / 3.0,), (F,)),
        ("division is no part of it", "div", lambda x, y: (x / y,), (F, F)),
        ("payloads of NaN", "maximum", lambda x, y: (torch.maximum(x, y),), (F, F)),
        ("out of range it is anything", "to", lambda x: (x.to(torch.int32),), (F,)),
        ("no copy at all", "to", lambda x: (x.to(torch.float32),), (F,)),
        ("nothing moves", "reshape", lambda x: (x.reshape(-1),), (F,)),
        ("it converts", "copy_", lambda x, y: (x.copy_(y),), (F, B)),
        ("a reduction", "sum", lambda x: (x.sum(-1),), (F,)),
        ("a normalisation", "layer_norm", lambda x: (torch.layer_norm(x, [4]),), (F,)),
        ("NaNs of 16 bits", "add", lambda x: (x + 0.3,), (B,)),
        ("NaNs of 16 bits", "clone", lambda x: (x.transpose(0, 1).clone(),), (B,)),
        ("NaNs of 16 bits", "to", lambda x: (x.to(torch.bfloat16),), (F,)),
        ("it draws", "rand_like", lambda x: (torch.rand_like(x),), (F,)),
        ("nobody has proven it", "sin", lambda x: (torch.sin(x),), (F,)),
    ],
)
def test_everything_else_is_left_alone(
    why: str, name: str, function: Callable[..., Any], tensors: tuple[torch.Tensor, ...]
) -> None:
    assert admitted(name, function, *tensors) is None, why


def test_a_proof_admits_functions_of_one_tensor_and_nothing_else() -> None:
    assert admitted("sin", lambda x: (torch.sin(x),), F, proven=True) == "proven"
    assert admitted("pow", lambda x: (x**2,), F, proven=True) == "proven"
    assert admitted("add", lambda x: (x + 0.3,), B, proven=True) == "proven"
    assert admitted("add", lambda x, y: (x + y,), B, B + 1, proven=True) is None
    assert admitted("softmax", lambda x: (torch.softmax(x, -1),), F, proven=True) is None
    assert admitted("atan2", lambda x, y: (torch.atan2(x, y),), F, F + 1, proven=True) is None
    assert admitted("atan2", lambda x: (torch.atan2(x, x),), F, proven=True) is None
    assert admitted("sin", lambda x: (torch.sin(x),), I, proven=True) is None
    flat = flat_of(lambda x: (torch.cumsum(x, 0),), F)
    assert not is_function_of_one(operator_of(flat, "cumsum"))
