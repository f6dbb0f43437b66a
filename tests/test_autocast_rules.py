"""Rules of autocast, found on fake tensors: those of a GPU need none."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cadence_fx.autocast import AutocastState
from cadence_fx.autocast_rules import Rule, rule_of
from cadence_fx.specialise import TensorMeta

aten = torch.ops.aten
HALF, FULL = torch.float16, torch.float32


def tensor(*shape: int, dtype: torch.dtype = FULL, device: str = "cuda:0") -> TensorMeta:
    return TensorMeta(shape, torch.empty(shape, device="meta").stride(), dtype, torch.device(device))


def rule(target: Any, *args: Any, device: str = "cuda", **kwargs: Any) -> Rule:
    found = rule_of(target, args, kwargs, AutocastState(((device, HALF),)))
    assert isinstance(found, Rule), found
    return found


def cast_to(found: Rule) -> dict[int, Any]:
    return {cast.index: dict(cast.kwargs)["dtype"] for cast in found.casts}


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_a_product_takes_what_is_not_in_the_lower_precision_yet(device: str) -> None:
    x, weight = tensor(2, 3, 8, dtype=HALF, device=device), tensor(4, 8, device=device)
    found = rule(aten.linear.default, x, weight, device=device[:4].rstrip(":"))
    assert cast_to(found) == {1: HALF}
    assert found.results == (tensor(2, 3, 4, dtype=HALF, device=device),)


def test_a_norm_on_a_gpu_takes_full_precision() -> None:
    found = rule(aten.layer_norm.default, tensor(2, 8, dtype=HALF), [8], tensor(8), tensor(8))
    assert cast_to(found) == {0: FULL}


def test_a_softmax_on_a_gpu_gets_its_dtype_set() -> None:
    found = rule(aten.softmax.int, tensor(2, 8, dtype=HALF), -1)
    assert (found.casts, found.dtype, found.target) == ((), FULL, aten.softmax.int)
    given = rule(aten.softmax.int, tensor(2, 8, dtype=HALF), -1, HALF)
    assert given.dtype is None


def test_a_rule_that_calls_another_overload_is_found() -> None:
    found = rule(aten.norm.Scalar, tensor(2, 8, dtype=HALF), 2)
    assert (found.target, found.dtype) == (aten.norm.ScalarOpt_dtype, FULL)


def test_an_operators_own_casts_are_not_autocasts() -> None:
    assert rule(aten.to.dtype, tensor(2, 8), HALF).casts == ()
    attention = [tensor(1, 2, 16, 8, dtype=HALF, device="cpu")] * 3
    assert rule(aten.scaled_dot_product_attention.default, *attention, device="cpu").casts == ()
    attention[1] = tensor(1, 2, 16, 8, device="cpu")
    assert cast_to(rule(aten.scaled_dot_product_attention.default, *attention, device="cpu")) == {1: HALF}


def test_another_devices_tensors_and_integers_are_left_alone() -> None:
    assert rule(aten.linear.default, tensor(2, 8, device="cpu"), tensor(4, 8, device="cpu")).casts == ()
    assert rule(aten.embedding.default, tensor(4, 8), tensor(3, dtype=torch.int64)).casts == ()


def test_equal_arguments_of_different_types_have_rules_of_their_own() -> None:
    integers = tensor(2, dtype=torch.int64)
    assert rule(aten.mul.Scalar, integers, 1).results[0].dtype is torch.int64
    assert rule(aten.mul.Scalar, integers, 1.0).results[0].dtype is FULL


def test_an_operator_that_cannot_run_is_a_reason_and_not_an_error(caplog: pytest.LogCaptureFixture) -> None:
    state = AutocastState((("cpu", HALF),))
    found = rule_of(aten.mm.default, (tensor(2, 3, device="cpu"), tensor(4, 5, device="cpu")), {}, state)
    assert isinstance(found, str)
    assert found.startswith("it cannot be run on fake tensors: RuntimeError")
    layers = [tensor(16, 4, device="cpu")] * 2 + [tensor(16, device="cpu")] * 2
    start = [tensor(1, 3, 4, device="cpu")] * 2
    args = (tensor(2, 3, 4, device="cpu"), start, layers, True, 1, 0.0, False, False, False)
    assert "explicit casts" in str(rule_of(aten.lstm.input, args, {}, state))
    assert caplog.records == []
