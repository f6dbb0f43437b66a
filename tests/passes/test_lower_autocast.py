"""LowerAutocast: casts written out give stock's bits under real autocast, and what they cannot express is refused."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from cadence_fx.autocast import AutocastState, autocast_of, under
from cadence_fx.autocast_rules import Rule, rule_of
from cadence_fx.contract import Boundary
from cadence_fx.effects import base_of
from cadence_fx.errors import TraceError
from cadence_fx.passes import EliminateDead, HoistConstants, LowerAutocast, Normalise
from cadence_fx.specialise import TensorMeta
from tests.toys import WIDTH, Bench, Player, Rows, Toy, bench, differences, function, targets

aten = torch.ops.aten
LOWER = [torch.bfloat16, torch.float16]
Body = Callable[[Any, torch.Tensor], torch.Tensor]


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, gain: float = 1.0) -> torch.Tensor:
        return torch.as_tensor(self.lin(x) * gain)


def attention(m: Any, x: torch.Tensor) -> torch.Tensor:
    q, k, v = (m.qkv(x).float() if i else m.qkv(x) for i in range(3))  # of mixed dtypes: autocast casts two of them
    return F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None])


def full_inside(m: Any, x: torch.Tensor) -> torch.Tensor:
    h = m.lin(x)
    with torch.autocast("cpu", enabled=False):
        h = torch.softmax(m.lin(h.float()) @ m.table, -1)
    return torch.as_tensor(m.lin(h))


BODIES: dict[str, Body] = {
    "linear": lambda m, x: m.lin(x),
    "matmul": lambda m, x: x @ m.table,
    "layer norm": lambda m, x: m.norm(m.lin(x)),
    "softmax": lambda m, x: torch.softmax(m.lin(x), -1),
    "softmax with a dtype": lambda m, x: torch.softmax(m.lin(x), -1, dtype=torch.float32),
    "cat of two dtypes": lambda m, x: torch.cat([m.lin(x), x], 1),
    "attention": attention,
    "conv1d": lambda m, x: m.conv(x.transpose(1, 2)),
    "a rule that casts up": lambda m, x: F.mse_loss(m.lin(x), x),
    "its own casts": lambda m, x: m.lin(x.half().float()).double(),
    "a block in full precision": full_inside,
    "in-place": lambda m, x: m.lin(x).clone().mul_(x).add_(1),
}


def toy(body: Body, dtype: torch.dtype = torch.bfloat16, **options: Any) -> Toy:
    """A module that runs the body in a block and takes its result outside again."""

    def f(m: Any, x: torch.Tensor, state: Rows) -> Any:
        with torch.autocast("cpu", dtype=dtype):
            y = body(m, x)
        return y * 0.5, {"a": state["a"]}

    with torch.random.fork_rng():
        torch.manual_seed(3)
        parts = {
            "lin": nn.Linear(WIDTH, WIDTH), "qkv": nn.Linear(WIDTH, WIDTH), "norm": nn.LayerNorm(WIDTH),
            "conv": nn.Conv1d(WIDTH, WIDTH, 2), "table": torch.randn(WIDTH, WIDTH), "inner": Scale(),
        }  # fmt: skip
    return function(f, {"a": 2}, parts=parts, **options)


def lowered(body: Body, *more: Any) -> Bench:
    at = bench(toy(body))
    at.run_pass(Normalise(), LowerAutocast(), *more)
    return at


def casts(at: Bench) -> list[fx.Node]:
    return [n for n in at.flat.graph.nodes if n.target is aten._to_copy.default]


@pytest.mark.parametrize("dtype", LOWER, ids=str)
@pytest.mark.parametrize("name", list(BODIES))
def test_a_block_gives_the_bits_of_stock_under_autocast(name: str, dtype: torch.dtype) -> None:
    found = toy(BODIES[name], dtype)
    assert list(differences(found, ["chunk[3]"] * 3)) == []


@pytest.mark.parametrize("name", list(BODIES))
def test_the_metadata_of_a_lowered_graph_is_what_its_operators_give(name: str) -> None:
    class Check(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            value, meta = super().run_node(n), n.meta.get("val")
            if n.op == "call_function" and isinstance(meta, TensorMeta):
                seen.append((n.name, value.dtype, tuple(value.shape)))
                expected.append((n.name, meta.dtype, meta.shape))
            return value

    at = lowered(BODIES[name])
    seen, expected = list[Any](), list[Any]()
    shapes = [n.meta["val"].shape for n in at.flat.graph.nodes if n.op == "placeholder"]
    with torch.no_grad():
        Check(at.compiler.build(at.flat)).run(*[torch.randn(shape) for shape in shapes])
    assert seen
    assert seen == expected


def test_casts_of_weights_are_computed_once_and_that_of_an_input_is_shared() -> None:
    at = lowered(lambda m, x: m.lin(x) + m.qkv(x))
    assert len(casts(at)) == 5  # x once, two weights and two biases
    assert all("test_lower_autocast.py" in n.meta["source"] for n in casts(at))
    at.run_pass(HoistConstants(), EliminateDead())
    (left,) = casts(at)
    assert isinstance(left.args[0], fx.Node)
    assert left.args[0].op == "placeholder"
    program = Player(toy(lambda m, x: m.lin(x) + m.qkv(x))).program("chunk[3]")
    assert sum(v.dtype is torch.bfloat16 for v in program.flat.constants.values()) == 4
    assert any(str(c).startswith("lower_autocast: cast aten.linear.default (2x)") for c in program.changes)


def test_a_value_that_is_written_between_two_readers_is_cast_for_each() -> None:
    def body(m: Any, x: torch.Tensor) -> torch.Tensor:
        h = x.clone()
        before = m.lin(h)
        h.mul_(2)
        return torch.as_tensor(before + m.lin(h))

    bases = [base_of(n.all_input_nodes[0]).target for n in casts(lowered(body))]
    assert bases.count(aten.clone.default) == 2
    assert list(differences(toy(body), ["chunk[3]"] * 2)) == []


def test_a_boundary_called_in_and_outside_a_block_has_a_trace_for_each_state() -> None:
    def body(m: Any, x: torch.Tensor) -> torch.Tensor:
        y = m.inner(x) + m.inner(x, 2.0)
        with torch.autocast("cpu", enabled=False):
            y = y + m.inner(x)
        with torch.autocast("cpu", torch.float16):
            return torch.as_tensor(y + m.inner(x))

    found = toy(body, boundaries=(Boundary("inner.forward"),))
    assert list(differences(found, ["chunk[3]"] * 2)) == []
    at = bench(found)
    states = {str(autocast_of(n)) for n in at.flat.graph.nodes if n.target is aten.linear.default}
    assert states == {"cpu to bfloat16", "cpu to float16", "None"}
    assert len(at.compiler.tracer.sites) == 4


def test_the_state_of_the_traced_call_is_that_of_all_other_nodes() -> None:
    with torch.autocast("cpu", torch.float16):
        at = bench(toy(BODIES["linear"]))
    linear, mul = (n for n in at.flat.graph.nodes if n.target in (aten.linear.default, aten.mul.Tensor))
    assert autocast_of(linear) == AutocastState((("cpu", torch.bfloat16),))
    assert autocast_of(mul) == AutocastState((("cpu", torch.float16),))


def test_each_pass_keeps_every_bit_of_a_graph_with_blocks() -> None:
    """Debug mode runs the graph before the pass under the states of its nodes."""
    player = Player(toy(BODIES["a block in full precision"]), debug=True)
    assert list(differences(player.toy, ["chunk[3]"] * 2, player=player)) == []


def test_a_lowered_program_runs_without_the_autocast_around_it() -> None:
    player = Player(toy(BODIES["layer norm"]))
    program, x = player.program("chunk[3]"), torch.randn(1, 3, WIDTH)
    player.start(player.toy.module.initial())
    outside = program.run(x)
    with torch.autocast("cpu", torch.float16):
        inside = program.run(x)
        assert torch.is_autocast_enabled("cpu")
    assert inside[0].dtype is torch.bfloat16
    assert torch.equal(outside[0], inside[0])


def test_a_concatenation_that_autocast_leaves_alone_gets_its_own_casts(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where autocast has no rule for it and the operator itself casts its parts."""

    def found(target: Any, args: Any, kwargs: Any, state: AutocastState) -> Any:
        rule = rule_of(target, args, kwargs, state)
        return dataclasses.replace(rule, casts=()) if target is aten.cat.default and isinstance(rule, Rule) else rule

    monkeypatch.setattr("cadence_fx.passes.lower_autocast.rule_of", found)
    assert list(differences(toy(BODIES["cat of two dtypes"]), ["chunk[3]"] * 2)) == []
    at = bench(toy(BODIES["cat of two dtypes"]))
    result = at.run_pass(LowerAutocast())
    (cat,) = (n for n in at.flat.graph.nodes if n.target is aten.cat.default)
    assert {n.meta["val"].dtype for n in cat.all_input_nodes} == {torch.float32}
    assert any(c.what == "promoted" for c in result.changes)


# ------------------------------------------------------------------------------------------- refusals
def einsum(m: Any, x: torch.Tensor) -> torch.Tensor:
    """On the CPU autocast has no rule for it: it casts what reaches the product inside."""
    return torch.einsum("bij,kj->bik", x, m.table)


def test_a_rule_that_casts_cannot_express_is_refused_by_operator_and_line() -> None:
    with pytest.raises(TraceError) as error:
        lowered(einsum)
    text = str(error.value)
    assert text.startswith("CX601 explicit casts do not express what autocast does: lower_autocast left einsum alone")
    assert "aten.einsum.default: under autocast and with explicit casts it runs aten._to_copy.default" in text
    assert "test_lower_autocast.py:" in text
    assert "in einsum" in text
    assert "hint: leave this operator outside the block" in text


def test_a_trace_with_another_dtype_is_refused() -> None:
    at = bench(toy(BODIES["linear"]))
    node = next(n for n in at.flat.graph.nodes if n.target is aten.linear.default)
    meta = node.meta["val"]
    node.meta["val"] = TensorMeta(meta.shape, meta.stride, torch.float32, meta.device)
    with pytest.raises(TraceError, match=r"CX602 .*traced float32\[1, 3, 8\], found bfloat16\[1, 3, 8\]"):
        at.run_pass(LowerAutocast())


def test_without_the_pass_no_program_is_made() -> None:
    with pytest.raises(TraceError, match=r"linear\.default runs under autocast .* 'lower_autocast' is left out"):
        Player(toy(BODIES["linear"]), skip=frozenset({"lower_autocast"})).program("chunk[3]")


def test_a_graph_without_autocast_is_left_as_it_is() -> None:
    at = bench(function(lambda m, x, state: (m.lin(x), {"a": state["a"]}), {"a": 2}, parts={"lin": Scale()}))
    before = targets(at.flat)
    assert not at.run_pass(LowerAutocast()).modified
    assert targets(at.flat) == before


def test_switches_are_as_before_after_a_run_that_fails() -> None:
    inside = list[AutocastState | None]()
    with contextlib.suppress(ZeroDivisionError), under(AutocastState((("cpu", torch.float16),))):
        inside.append(AutocastState.ambient())
        raise ZeroDivisionError
    assert inside == [AutocastState((("cpu", torch.float16),))]
    assert AutocastState.ambient() is None
    assert torch.get_autocast_dtype("cpu") is torch.bfloat16
