"""Which nodes are unary operators, under which name, and what a name gives back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

from cadence_fx.bits import same_bits
from cadence_fx.known_operators import KNOWN, known_operators
from cadence_fx.specialise import TensorMeta
from cadence_fx.unary import UnaryOperator

aten = torch.ops.aten
CPU = torch.device("cpu")


def node_of(
    target: Any,
    *args: Any,
    dtype: torch.dtype = torch.float32,
    gives: torch.dtype | None = None,
    shape: tuple[int, ...] = (3,),
    **kwargs: Any,
) -> fx.Node:
    """A call on placeholders: ``"x"`` among the arguments is a tensor of shape [3], ``"y"`` another."""
    graph = fx.Graph()
    inputs = {name: graph.placeholder(name) for name in "xy"}
    for node in inputs.values():
        node.meta["val"] = TensorMeta((3,), (1,), dtype, CPU)
    found = [inputs.get(a, a) if isinstance(a, str) else a for a in args]
    node = graph.call_function(target, tuple(found), kwargs)
    node.meta["val"] = TensorMeta(shape, (1,) * len(shape), gives or dtype, CPU)
    return node


@pytest.mark.parametrize(
    ("node", "text", "arguments"),
    [
        (node_of(aten.exp.default, "x"), "aten.exp.default", "{}"),
        (node_of(aten.pow.Tensor_Scalar, "x", 2), "aten.pow.Tensor_Scalar(exponent=2)", '{"exponent": 2}'),
        (node_of(aten.leaky_relu.default, "x"), "aten.leaky_relu.default(negative_slope=0.01)", None),
        (node_of(aten.clamp.default, "x", max=0.99), "aten.clamp.default(min=None, max=0.99)", None),
        (node_of(aten.gelu.default, "x", approximate="tanh"), "aten.gelu.default(approximate='tanh')", None),
        (node_of(aten.mul.Tensor, "x", 2.0), "aten.mul.Tensor(other=2.0)", None),
    ],
)
def test_a_node_has_one_name_for_all_its_arguments(node: fx.Node, text: str, arguments: str | None) -> None:
    operator = UnaryOperator.of(node)
    assert operator is not None
    assert (str(operator), operator.dtype) == (text, "float32")
    if arguments is not None:
        assert operator.arguments == arguments


def test_the_tensor_need_not_be_the_first_argument() -> None:
    operator = UnaryOperator.of(node_of(aten.pow.Scalar, 2, "x"))
    assert operator is not None
    assert (operator.tensor, str(operator)) == ("exponent", "aten.pow.Scalar(self=2)")
    assert operator.alone()(torch.tensor([3.0]))[0].item() == 8.0


@pytest.mark.parametrize(
    "node",
    [
        node_of(aten.mul.Tensor, "x", "y"),  # of two tensors
        node_of(aten.mul.Tensor, "x", "x"),
        node_of(aten.softmax.int, "x", 0),  # not pointwise
        node_of(aten.cumsum.default, "x", 0),
        node_of(aten.relu_.default, "x"),  # writes
        node_of(aten.rrelu.default, "x"),  # may draw
        node_of(aten.isnan.default, "x", gives=torch.bool),
        node_of(aten.exp.default, "x", dtype=torch.float64),
        node_of(aten.exp.default, "x", dtype=torch.int32, gives=torch.float32),
        node_of(aten.exp.default, "x", shape=(1, 3)),
        node_of(aten.mul.Tensor, "x", 2j),
        node_of(torch.exp, "x"),  # no overload
        fx.Graph().placeholder("x"),
    ],
)
def test_what_is_no_function_of_one_floating_tensor_has_no_name(node: fx.Node) -> None:
    assert UnaryOperator.of(node) is None


def test_defaults_and_keywords_do_not_make_another_operator_but_types_do() -> None:
    make = UnaryOperator.make
    same = {
        make("aten.leaky_relu.default", "float32", *args, **named)
        for args, named in (((), {}), ((0.01,), {}), ((), {"negative_slope": 0.01}))
    }
    assert len(same) == 1
    assert make("aten.pow.Tensor_Scalar", "float32", 2) != make("aten.pow.Tensor_Scalar", "float32", 2.0)
    assert make("aten.logit.default", "float32", 1) == make("aten.logit.default", "float32", 1.0)  # declared a float
    assert make("aten.exp.default", "float32") != make("aten.exp.default", "float16")


@pytest.mark.parametrize("name", KNOWN)
def test_a_name_gives_back_the_call(name: str) -> None:
    (operator,) = known_operators([name], ["bfloat16"])
    target, args, kwargs = KNOWN[name]
    x = torch.linspace(-3, 3, 101).to(torch.bfloat16)
    packet, overload = target.removeprefix("aten.").split(".")
    expected = getattr(getattr(aten, packet), overload)(x, *args, **kwargs)
    assert same_bits(operator.alone()(x)[0], expected)
    (node,) = (n for n in operator.alone().graph.nodes if n.op == "call_function")
    node.args[0].meta["val"] = node.meta["val"] = TensorMeta((3,), (1,), torch.bfloat16, CPU)
    assert UnaryOperator.of(node) == operator


@pytest.mark.parametrize(
    ("target", "dtype", "text"),
    [
        ("aten.nope.default", "float32", "has no operator 'aten.nope.default'"),
        ("aten.exp", "float32", "has no operator 'aten.exp'"),
        ("aten.mul.Tensor", "float32", "is no pointwise operator of one tensor and plain values"),
        ("aten.exp.default", "float64", "'float64' is none of float32, bfloat16, float16"),
    ],
)
def test_a_name_that_is_none_is_refused(target: str, dtype: str, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        UnaryOperator.make(target, dtype)


def test_an_unknown_short_name_is_told_what_is_near() -> None:
    with pytest.raises(ValueError, match=r"no operator is called 'silo' \(did you mean 'silu'\?\)"):
        known_operators(["silo"], ["float32"])
    with pytest.raises(ValueError, match="no dtype is called 'float'"):
        known_operators(None, ["float"])


def test_no_result_of_the_chain_has_a_second_use() -> None:
    names, module = UnaryOperator.make("aten.exp.default", "float32").embedded()
    calls = [n for n in module.graph.nodes if n.op == "call_function"]
    assert all(len(n.users) == 1 for n in calls)
    assert len(module(torch.ones(3))) == len(names) == 3
