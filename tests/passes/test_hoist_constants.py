"""HoistConstants: what no clock touches is computed once, by the same operators, within the budget."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from cadence_fx.catalog import signatures
from cadence_fx.constants import ConstantPool
from cadence_fx.passes import EliminateDead, HoistConstants, Normalise
from tests.toys import TOYS, WIDTH, Bench, Player, Rows, bench, build, function, same_bits, targets


def inputs(at: Bench) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = [n.meta["val"].shape for n in at.flat.graph.nodes if n.op == "placeholder"]
    return [torch.randn(shape, generator=generator) for shape in shapes]


def hoisted(at: Bench) -> list[str]:
    return [target for target in at.flat.constants if target.startswith("constant_")]


def test_time_embedding_and_modulation_are_computed_once() -> None:
    at = bench(build("new_first"))
    result = at.run_pass(Normalise(), HoistConstants(), EliminateDead())
    left = targets(at.flat)
    assert not {"linspace", "cos", "repeat", "silu", "ones"} & set(left)
    assert left.count("linear") == 4  # qkv and out of two steps; the two modulations are gone
    changes = [c for c in result.changes if c.pass_name == "hoist_constants"]
    assert any("toys.py" in c.source and c.count == 2 for c in changes)
    assert "its clock is slower than the call's" in str(changes[0])


@pytest.mark.parametrize("name", list(TOYS))
def test_a_hoisted_graph_has_the_same_bits_and_a_second_run_changes_nothing(name: str) -> None:
    at = bench(build(name))
    at.run_pass(Normalise())
    before = at.execute(at.flat, *inputs(at))
    at.run_pass(HoistConstants())
    after = at.execute(at.flat, *inputs(at))
    assert all(same_bits(x, y) for x, y in zip(before, after, strict=True))
    text = str(at.flat.graph)
    assert not at.run_pass(HoistConstants()).modified
    assert str(at.flat.graph) == text


def test_host_only_hoists_what_the_host_computes_up_to_its_copy_to_the_device() -> None:
    """The meta device stands for a GPU: device constants are not computed, so that it has no values does not matter."""

    def f(m: Any, x: torch.Tensor, state: Rows) -> Any:
        table = torch.arange(WIDTH).exp().to("meta")  # the vendor's way: made on the host, moved in every call
        gain = m.table.sin().cos()  # a constant of the device
        return (x.to("meta") + table) * gain, {"a": state["a"]}

    at = bench(function(f, {"a": 2}, parts={"table": torch.zeros(WIDTH, device="meta")}))
    at.run_pass(Normalise())
    at.run_pass(HoistConstants(host_only=True))
    at.run_pass(EliminateDead())
    left = targets(at.flat)
    assert not {"arange", "exp"} & set(left)
    assert left.count("to") == 1  # that of x, which is no constant
    assert {"sin", "cos"} <= set(left)
    (value,) = (v for t, v in at.flat.constants.items() if t.startswith("constant_"))
    assert value.device.type == "meta"


def test_all_signatures_share_one_pool() -> None:
    player = Player(build("new_first"))
    first, *others = signatures(player.toy.contract)
    player.compiler.compile(first)
    held = dict(player.compiler.constants.values)
    for signature in others:
        program = player.compiler.compile(signature)
        assert all(any(value is v for v in held.values()) for value in program.flat.constants.values())
    assert player.compiler.constants.values.keys() == held.keys()


def test_a_program_says_which_attributes_its_constants_come_from() -> None:
    program = Player(build("new_first")).program("chunk[3]")
    assert {"block.modulation.weight", "block.modulation.bias"} <= program.depends
    assert "block.qkv.weight" not in program.depends


def test_cx201_what_does_not_fit_the_budget_is_left_with_the_numbers() -> None:
    toy = build("new_first")
    small = replace(toy.contract, max_constant_bytes=2 * WIDTH * 4 + 1)
    at = bench(toy, contract=small)
    at.run_pass(Normalise())
    before = at.execute(at.flat, *inputs(at))
    result = at.run_pass(HoistConstants())
    assert result.rejections
    assert {r.code for r in result.rejections} == {"CX201"}
    text = str(result.rejections[0])
    assert "constant does not fit the byte budget" in text
    assert "bytes of the budget are left" in text or "of the budget are left" in text
    assert f"raise max_constant_bytes, now {small.max_constant_bytes}" in text
    assert at.context.constants.nbytes() <= small.max_constant_bytes
    assert all(same_bits(x, y) for x, y in zip(before, at.execute(at.flat, *inputs(at)), strict=True))


def written_constant(m: Any, x: torch.Tensor, s: Rows) -> Any:
    fresh = torch.arange(WIDTH, dtype=torch.float32).cos()
    fresh[:2] = x[0, 0, :2]
    return x + fresh, {"a": s["a"] * 1}


def drawn(m: Any, x: torch.Tensor, s: Rows) -> Any:
    return x + torch.randn(WIDTH).cos(), {"a": s["a"] * 1}


def scratch_value(m: Any, x: torch.Tensor, s: Rows) -> Any:
    m.table.add_(1)
    return x + m.table.cos(), {"a": s["a"] * 1}


@pytest.mark.parametrize("f", [written_constant, drawn, scratch_value], ids=lambda f: f.__name__)
def test_what_is_written_or_drawn_is_computed_in_every_call(f: Any) -> None:
    at = bench(function(f, {"a": 2}, parts={"table": torch.zeros(WIDTH)}))
    at.run_pass(HoistConstants())
    assert "cos" in targets(at.flat)
    if f is not written_constant:
        assert hoisted(at) == []


def test_equal_computations_are_one_constant_and_different_literals_are_two() -> None:
    def f(m: Any, x: torch.Tensor, s: Rows) -> Any:
        return x + m.table.cos() + m.table.cos() + (m.table * 2).cos() + (m.table * 2.5).cos(), {"a": s["a"] * 1}

    at = bench(function(f, {"a": 2}, parts={"table": torch.randn(WIDTH)}))
    at.run_pass(HoistConstants())
    assert len(hoisted(at)) == 3


def test_the_pool_counts_each_storage_once_and_none_that_is_shared() -> None:
    pool, own = ConstantPool(), torch.zeros(8)
    table = torch.zeros(100)
    for i, value in enumerate((own, own[2:], table[5:])):
        pool.put(pool.identity(("key", i)), value, frozenset())
    assert pool.nbytes(shared=[table]) == 32
    assert pool.nbytes() == 432
    assert pool.identity(("key", 0)) == 0
    pool.clear()
    assert pool.nbytes() == 0
    assert pool.identity(("key", 1)) == 1
