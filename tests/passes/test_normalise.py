"""Normalise: identities and checks go, everything that copies, casts, draws or writes stays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx

from cadence_fx.passes import Normalise
from cadence_fx.pipeline import PassContext
from cadence_fx.specialise import FlatGraph
from tests.toys import TOYS, bench, build, flat_of, same_bits, targets

aten = torch.ops.aten
A, B = torch.randn(2, 3, 4), torch.randn(2, 3, 4)


def run(flat: FlatGraph, *inputs: torch.Tensor) -> list[torch.Tensor]:
    result: list[torch.Tensor] = list(fx.GraphModule(torch.nn.Module(), flat.graph)(*[t.clone() for t in inputs]))
    return result


@pytest.fixture
def context() -> PassContext:
    return bench(build("causal_conv")).context


def normalised(f: Callable[..., Any], context: PassContext) -> list[str]:
    """Operators that are left; the graph still gives the same bits."""
    flat = flat_of(f, A, B)
    before = run(flat, A, B)
    Normalise().call(flat, context)
    assert Normalise().ensures(flat, context) is None
    assert all(same_bits(x, y) for x, y in zip(before, run(flat, A, B), strict=True))
    return targets(flat)


def test_what_returns_its_input_is_removed(context: PassContext) -> None:
    def f(a: torch.Tensor, b: torch.Tensor) -> Any:
        y = F.dropout(a * 2, 0.1, False)[:, :, :].contiguous().detach().reshape(2, 3, 4).view(2, 3, 4)
        y = y.expand(2, 3, 4).to(torch.float32).type_as(b).view_as(b)
        return (y + b,)

    assert normalised(f, context) == ["mul", "add"]


def test_the_docstrings_example() -> None:
    def f(a: torch.Tensor, b: torch.Tensor) -> Any:
        return (F.dropout(F.layer_norm(a, (4,)), 0.1, False)[0:] * 22.6,)

    flat = flat_of(f, A, B)
    assert targets(flat)[-1] == "mul"
    result = Normalise().call(flat, bench(build("causal_conv")).context)
    assert targets(flat) == ["layer_norm", "mul"]
    assert {c.what for c in result.changes} == {"removed"}
    assert "normalise: removed aten.dropout.default: it returns its input" in " ".join(map(str, result.changes))


@pytest.mark.parametrize(("f", "kept"), [
    (lambda a, b: (a.clone() + 1,), "clone"),
    (lambda a, b: (a.to(torch.float64) + 1,), "to"),
    (lambda a, b: (a.to(torch.float32, copy=True) + 1,), "to"),
    (lambda a, b: (a[:, 1:] + 1,), "slice"),
    (lambda a, b: (a.transpose(0, 1).contiguous() + 1,), "contiguous"),
    (lambda a, b: ((a * 2).reshape(6, 4) + 1,), "reshape"),
    (lambda a, b: ((a * 2)[:, :1].expand(2, 3, 4) + 1,), "expand"),
], ids=["clone", "cast", "copy", "slice", "transposed", "reshape", "expand"])  # fmt: skip
def test_what_copies_casts_or_selects_stays(f: Callable[..., Any], kept: str, context: PassContext) -> None:
    assert kept in normalised(f, context)


def test_contiguous_on_an_argument_stays_for_it_will_be_a_strided_view(context: PassContext) -> None:
    flat = flat_of(lambda a, b: (a + b,), A, B)
    add = next(n for n in flat.graph.nodes if n.op == "call_function")
    with flat.graph.inserting_before(add):
        made = flat.graph.call_function(aten.contiguous.default, (add.args[0],))
    made.meta["val"] = add.meta["val"]
    add.replace_input_with(add.args[0], made)
    assert not Normalise().call(flat, context).modified


def test_draws_and_writes_stay(context: PassContext) -> None:
    def f(a: torch.Tensor, b: torch.Tensor) -> Any:
        y = F.dropout(a * 2, 0.5, True)
        y.add_(1)
        return (y * 0 + b,)

    assert [t for t in normalised(f, context) if t in ("dropout", "add_")] == ["dropout", "add_"]


def test_checks_of_what_the_trace_has_fixed_are_removed(context: PassContext) -> None:
    flat = flat_of(lambda a, b: (a + b,), A, B)
    node = next(n for n in flat.graph.nodes if n.op == "call_function")
    with flat.graph.inserting_before(node):
        flat.graph.call_function(aten._assert_tensor_metadata.default, (node.args[0],))
    result = Normalise().call(flat, context)
    assert targets(flat) == ["add"]
    assert [str(c.where) for c in result.changes] == ["aten._assert_tensor_metadata.default"]


def test_the_promise_names_an_identity_that_is_left(context: PassContext) -> None:
    flat = flat_of(lambda a, b: ((a * 2).detach() + b,), A, B)
    assert Normalise().ensures(flat, context) == "detach is still an identity"


@pytest.mark.parametrize("name", list(TOYS))
def test_a_second_run_changes_nothing_and_the_first_no_bit(name: str) -> None:
    at = bench(build(name))
    inputs = [torch.randn(n.meta["val"].shape) for n in at.flat.graph.nodes if n.op == "placeholder"]
    before = at.execute(at.flat, *[t.clone() for t in inputs])
    at.run_pass(Normalise())
    after = at.execute(at.flat, *[t.clone() for t in inputs])
    assert all(same_bits(x, y) for x, y in zip(before, after, strict=True))
    text = str(at.flat.graph)
    assert not at.run_pass(Normalise()).modified
    assert str(at.flat.graph) == text
