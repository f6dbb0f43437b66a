"""What operators do beside computing, read from their schemas."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

from cadence_fx.effects import base_of, is_random, is_sync, mutated_bases, view_input, written

aten = torch.ops.aten


def call(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """A node over placeholders: each 'x' in the arguments becomes one."""
    graph = fx.Graph()

    def made(value: Any) -> Any:
        return graph.placeholder("x") if value == "x" else value

    return graph.call_function(target, tuple(map(made, args)), {k: made(v) for k, v in kwargs.items()})


@pytest.mark.parametrize(
    "target",
    [
        aten.view.default,
        aten.reshape.default,
        aten.slice.Tensor,
        aten.select.int,
        aten.transpose.int,
        aten.permute.default,
        aten.expand.default,
        aten.unsqueeze.default,
        aten.squeeze.dim,
        aten.split.Tensor,
        aten.chunk.default,
        aten.unbind.int,
        aten.detach.default,
        aten.alias.default,
        aten.contiguous.default,
        aten.to.dtype,
        aten.unfold.default,
        aten.as_strided.default,
        aten.view_as_real.default,
        aten.flatten.using_ints,
        aten.unflatten.int,
        aten.dropout.default,
        aten.narrow.default,
    ],
    ids=str,
)
def test_views_share_the_memory_of_their_input(target: Any) -> None:
    node = call(target, "x")
    assert view_input(node) is node.args[0]
    assert base_of(node) is node.args[0]


@pytest.mark.parametrize(
    "target",
    [
        aten.clone.default,
        aten.cat.default,
        aten.add.Tensor,
        aten.repeat.default,
        aten.linear.default,
        aten.index.Tensor,
    ],
    ids=str,
)
def test_new_memory_has_no_base(target: Any) -> None:
    node = call(target, "x")
    assert view_input(node) is None
    assert base_of(node) is node


@pytest.mark.parametrize(
    "target",
    [
        aten.copy_.default,
        aten.add_.Tensor,
        aten.fill_.Scalar,
        aten.index_copy_.default,
        aten.index_put_.default,
        aten.normal_.default,
        aten.zero_.default,
    ],
    ids=str,
)
def test_in_place_operators_write_and_return_their_first_argument(target: Any) -> None:
    node = call(target, "x")
    assert written(node) == (node.args[0],)
    assert base_of(node) is node.args[0]
    assert mutated_bases(node.graph.nodes) == {node.args[0]}


def test_an_out_argument_is_written() -> None:
    node = call(aten.add.out, "x", 1, out="x")
    assert written(node) == (node.kwargs["out"],)


def test_a_write_through_a_chain_of_views_reaches_the_owner() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    view = graph.call_function(aten.select.int, (graph.call_function(aten.slice.Tensor, (x, 0, 1, 3)), 0, 0))
    graph.call_function(aten.copy_.default, (view, x))
    assert mutated_bases(graph.nodes) == {x}


@pytest.mark.parametrize(
    "target",
    [
        aten.randn.default,
        aten.rand.default,
        aten.randn_like.default,
        aten.randint.default,
        aten.bernoulli.default,
        aten.multinomial.default,
        aten.normal_.default,
        aten.uniform_.default,
        aten.randperm.default,
    ],
    ids=str,
)
def test_draws_are_random(target: Any) -> None:
    assert is_random(call(target, "x"))


def test_dropout_is_random_in_training_only() -> None:
    assert is_random(call(aten.dropout.default, "x", 0.1, True))
    assert not is_random(call(aten.dropout.default, "x", 0.1, False))


@pytest.mark.parametrize("target", [aten.ones.default, aten.arange.default, aten.sin.default], ids=str)
def test_what_draws_nothing_is_not_random(target: Any) -> None:
    assert not is_random(call(target, "x"))


@pytest.mark.parametrize(
    "target",
    [
        aten.item.default,
        aten._local_scalar_dense.default,
        aten.nonzero.default,
        aten.masked_select.default,
        aten.istft.default,
        aten.is_nonzero.default,
        aten.equal.default,
        aten.unique_consecutive.default,
    ],
    ids=str,
)
def test_operators_that_look_at_values_wait(target: Any) -> None:
    assert is_sync(call(target, "x"))


@pytest.mark.parametrize(("dtype", "waits"), [(torch.bool, True), (torch.uint8, True), (torch.int64, False)], ids=str)
def test_an_index_waits_if_it_is_a_mask(dtype: torch.dtype, waits: bool) -> None:
    node = call(aten.index.Tensor, "x", [None])
    index = node.graph.placeholder("index")
    index.meta["val"] = torch.empty(3, dtype=dtype)
    node.args = (node.args[0], [None, index])
    assert is_sync(node) is waits


@pytest.mark.parametrize("target", [aten.stft.center, aten.add.Tensor, aten.where.self], ids=str)
def test_other_operators_do_not_wait(target: Any) -> None:
    assert not is_sync(call(target, "x"))


def test_placeholders_have_no_effects() -> None:
    node = fx.Graph().placeholder("x")
    assert (view_input(node), written(node), is_random(node), is_sync(node)) == (None, (), False, False)
