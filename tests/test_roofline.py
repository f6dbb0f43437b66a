"""Bounds on the time of operators: what they move and compute, counted by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

from cadence_fx.roofline import Roofline, flops, moved_bytes
from cadence_fx.specialise import TensorMeta

aten = torch.ops.aten


def operator(target: Any, result: tuple[int, ...], *arguments: tuple[int, ...], stride: Any = None) -> fx.Node:
    graph, nodes = fx.Graph(), []
    for i, shape in enumerate(arguments):
        node = graph.placeholder(f"a{i}")
        steps = stride if stride is not None and i == 0 else torch.empty(shape, device="meta").stride()
        node.meta["val"] = TensorMeta(shape, tuple(steps), torch.float32, torch.device("cpu"))
        nodes.append(node)
    made = graph.call_function(target, tuple(nodes))
    made.meta["val"] = TensorMeta(
        result, torch.empty(result, device="meta").stride(), torch.float32, torch.device("cpu")
    )
    return made


@pytest.mark.parametrize(
    ("node", "expected"),
    [
        (operator(aten.linear.default, (2, 50, 7), (2, 50, 5), (7, 5)), 2 * 100 * 7 * 5),
        (operator(aten.bmm.default, (3, 4, 6), (3, 4, 5), (3, 5, 6)), 2 * 3 * 4 * 6 * 5),
        (operator(aten.conv1d.default, (1, 8, 50), (1, 4, 52), (8, 4, 3)), 2 * 8 * 50 * 4 * 3),
        (operator(aten.conv_transpose1d.default, (1, 4, 100), (1, 8, 50), (8, 4, 4)), 2 * 8 * 50 * 4 * 4),
        (
            operator(
                aten.scaled_dot_product_attention.default, (2, 8, 50, 64), *[(2, 8, n, 64) for n in (50, 452, 452)]
            ),
            2 * 2 * (2 * 8 * 50 * 64) * 452,
        ),
        (operator(aten.add.Tensor, (2, 3), (2, 3), (2, 3)), 0),
    ],
)
def test_operations_are_counted(node: fx.Node, expected: int) -> None:
    assert flops(node) == expected


def test_bytes_of_arguments_and_result_are_counted_once_each() -> None:
    assert moved_bytes(operator(aten.add.Tensor, (2, 3), (2, 3), (2, 3))) == 3 * 2 * 3 * 4


def test_a_broadcast_dimension_is_one_element() -> None:
    assert moved_bytes(operator(aten.add.Tensor, (2, 3), (2, 3), (2, 3), stride=(0, 1))) == (3 + 6 + 6) * 4


def test_the_bound_is_the_slower_of_moving_and_computing() -> None:
    node = operator(aten.linear.default, (100, 7), (100, 5), (7, 5))
    moved, computed = moved_bytes(node), flops(node)
    assert Roofline(moved, 1e30).microseconds(node) == pytest.approx(1e6)
    assert Roofline(1e30, computed / 3).microseconds(node) == pytest.approx(3e6)


def test_a_device_has_both_limits() -> None:
    found = Roofline.of(torch.device("cpu"))
    assert found.bytes_per_second > 0
    assert found.flops_per_second > 0
