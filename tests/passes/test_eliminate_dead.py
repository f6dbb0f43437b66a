"""EliminateDead: what nothing reads goes, what has an effect stays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from cadence_fx.contract import Attr, Region
from cadence_fx.passes import EliminateDead, Normalise
from cadence_fx.passes.eliminate_dead import live_nodes
from tests.toys import TOYS, WIDTH, Bench, Rows, bench, build, function, same_bits, targets


def scratch() -> Region:
    return Region("table", (4, WIDTH), enters=Attr("table"), mutability="scratch", lifetime="unit")


def left(f: Callable[..., Any], *, as_scratch: bool) -> tuple[list[str], Bench]:
    regions = (scratch(),) if as_scratch else ()
    at = bench(function(f, {"a": 2}, *regions, parts={"table": torch.zeros(4, WIDTH)}))
    at.run_pass(Normalise(), EliminateDead())
    return targets(at.flat), at


def never_read(m: Any, x: torch.Tensor, s: Rows) -> Any:
    m.table[:3] = x[0].sin()
    torch.ones(3, 3).tril()
    return x + 1, {"a": s["a"] * 2}


def read_later(m: Any, x: torch.Tensor, s: Rows) -> Any:
    m.table[:3] = x[0].sin()
    return x + m.table[:2].sum(), {"a": s["a"] * 2}


def drawn(m: Any, x: torch.Tensor, s: Rows) -> Any:
    torch.randn(3).exp()
    torch.empty(3).normal_()
    return x + 1, {"a": s["a"] * 2}


def writes_an_argument(m: Any, x: torch.Tensor, s: Rows) -> Any:
    y = s["a"] * 2
    s["a"].zero_()
    return x + 1, {"a": y}


def writes_a_temporary(m: Any, x: torch.Tensor, s: Rows) -> Any:
    y, z = x * 3, x * 4
    y[:, 0].add_(1)
    z[:, 0].sub_(1)
    return x + y, {"a": s["a"] * 2}


def test_an_unread_write_to_scratch_goes_with_all_that_led_to_it() -> None:
    found, at = left(never_read, as_scratch=True)
    assert found == ["add", "mul"]
    assert at.flat.attributes == {}


def test_an_unread_write_to_memory_that_outlives_the_call_stays() -> None:
    found, _ = left(never_read, as_scratch=False)
    assert {"sin", "copy_"} <= set(found)
    assert "ones" not in found


@pytest.mark.parametrize("as_scratch", [True, False])
def test_a_write_that_is_read_later_stays(as_scratch: bool) -> None:
    found, _ = left(read_later, as_scratch=as_scratch)
    assert {"sin", "copy_"} <= set(found)


def test_draws_that_nobody_reads_stay_for_they_move_the_generator() -> None:
    found, _ = left(drawn, as_scratch=True)
    assert {"randn", "normal_"} <= set(found)
    assert "exp" not in found


def test_a_write_to_an_argument_stays() -> None:
    assert "zero_" in left(writes_an_argument, as_scratch=True)[0]


def test_a_write_to_a_temporary_lives_as_long_as_its_readers() -> None:
    found, _ = left(writes_a_temporary, as_scratch=True)
    assert "add_" in found
    assert "sub_" not in found


def test_removals_are_counted_by_operator() -> None:
    at = bench(build("new_first"))
    result = at.run_pass(EliminateDead())
    found = {c.where: c.count for c in result.changes}
    assert found["aten.ones.default"] == 2
    assert "eliminate_dead: removed aten.ones.default (2x): nothing reads it" in " ".join(map(str, result.changes))


@pytest.mark.parametrize("name", list(TOYS))
def test_the_bits_and_the_generator_stay_and_a_second_run_changes_nothing(name: str) -> None:
    at = bench(build(name))
    inputs = [torch.randn(n.meta["val"].shape) for n in at.flat.graph.nodes if n.op == "placeholder"]
    before, position = at.execute(at.flat, *inputs), torch.get_rng_state()
    at.run_pass(EliminateDead())
    after = at.execute(at.flat, *inputs)
    assert all(same_bits(x, y) for x, y in zip(before, after, strict=True))
    assert torch.equal(position, torch.get_rng_state())
    text = str(at.flat.graph)
    assert not at.run_pass(EliminateDead()).modified
    assert str(at.flat.graph) == text


def test_the_promise_names_a_dead_node() -> None:
    at = bench(build("new_first"))
    assert str(EliminateDead().ensures(at.flat, at.context)).endswith(" is still dead")


def test_roots_other_than_the_output_can_be_asked_for() -> None:
    at = bench(function(never_read, {"a": 2}, scratch(), parts={"table": torch.zeros(4, WIDTH)}))
    results = list(at.flat.output.args[0])  # type: ignore[arg-type]
    live = live_nodes(at.flat, at.context.scratch, [results[0]])
    assert sorted(str(n.target) for n in live if n.op == "call_function") == ["aten.add.Tensor"]
