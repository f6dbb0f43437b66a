"""The driver of passes: order, promises, and who is blamed."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from cadence_fx.changes import Change, Rejection
from cadence_fx.compiler import Compiler
from cadence_fx.errors import ContractError
from cadence_fx.memory import Memory
from cadence_fx.passes import DEFAULT_PASSES, EliminateDead, HoistConstants, Normalise, RingWriteback
from cadence_fx.pipeline import PassContext, PassError, PassResult, order_passes, run_passes
from cadence_fx.specialise import FlatGraph
from tests.toys import CPU, Bench, Player, bench, build


def Probe(name: str = "probe", after: tuple[str, ...] = (), **behaviour: Any) -> Any:
    """A pass that does what its fields say; typed as anything, since real passes have their name on the class."""
    return _Probe(name, after, **behaviour)


@dataclass(frozen=True)
class _Probe:
    name: str
    after: tuple[str, ...]
    refuses: str | None = None
    breaks: str | None = None
    action: Any = None
    changes: tuple[Change, ...] = ()

    def requires(self, flat: FlatGraph, context: PassContext) -> str | None:
        return self.refuses

    def call(self, flat: FlatGraph, context: PassContext) -> PassResult:
        if self.action is not None:
            self.action(flat)
        return PassResult(flat, self.changes, (Rejection("CX999", self.name, "n", "why"),))

    def ensures(self, flat: FlatGraph, context: PassContext) -> str | None:
        return self.breaks


def names(*passes: Any) -> list[str]:
    return [p.name for p in order_passes(passes)]


def test_passes_keep_the_given_order_where_nothing_constrains_it() -> None:
    assert names(Probe("b"), Probe("a"), Probe("c")) == ["b", "a", "c"]


def test_a_pass_waits_for_those_it_comes_after() -> None:
    assert names(Probe("b", ("a",)), Probe("c"), Probe("a")) == ["c", "a", "b"]
    assert names(*reversed(DEFAULT_PASSES)) == [p.name for p in DEFAULT_PASSES]


def test_a_pass_that_is_left_out_constrains_nothing() -> None:
    assert names(Probe("b", ("a",)), Probe("c")) == ["b", "c"]


def test_a_cycle_is_named() -> None:
    with pytest.raises(PassError, match=r"passes wait for each other: (a -> b -> a|b -> a -> b)"):
        order_passes([Probe("a", ("b",)), Probe("c"), Probe("b", ("a",))])


def test_two_passes_of_one_name_are_refused() -> None:
    with pytest.raises(PassError, match=r"two passes share a name: \['a', 'a'\]"):
        order_passes([Probe("a"), Probe("a")])


@pytest.fixture
def at() -> Bench:
    return bench(build("causal_conv"))


def test_a_requirement_that_does_not_hold_names_the_pass(at: Bench) -> None:
    with pytest.raises(PassError, match="pass 'probe' cannot run: no moon"):
        at.run_pass(Probe(refuses="no moon"))


def test_a_pass_that_lies_about_its_result_is_caught(at: Bench) -> None:
    with pytest.raises(PassError, match="pass 'probe' left a wrong graph: two outputs"):
        at.run_pass(Probe(breaks="two outputs"))


def test_a_pass_that_raises_is_named_with_those_before_it(at: Bench) -> None:
    def fail(flat: FlatGraph) -> None:
        raise KeyError("lost")

    with pytest.raises(PassError, match=r"pass 'probe' failed after \['normalise'\]: KeyError: 'lost'"):
        at.run_pass(Normalise(), Probe(action=fail))


def test_a_graph_that_reads_a_value_before_it_is_made_is_caught(at: Bench) -> None:
    def swap(flat: FlatGraph) -> None:
        first, second = [n for n in flat.graph.nodes if n.op == "call_function"][:2]
        assert first in second.all_input_nodes
        second.append(first)

    with pytest.raises(PassError, match="pass 'probe' failed after none"):
        at.run_pass(Probe(action=swap))


def test_an_error_of_the_contract_passes_through(at: Bench) -> None:
    def fail(flat: FlatGraph) -> None:
        raise ContractError("mend it")

    with pytest.raises(ContractError, match="mend it"):
        at.run_pass(Probe(action=fail))


def test_changes_and_rejections_of_all_passes_are_collected_in_order(at: Bench) -> None:
    one, two = Change("a", "x", "n", "why"), Change("b", "y", "n", "why")
    result = at.run_pass(Probe("a", changes=(one,)), Probe("b", changes=(two,)))
    assert result.changes == (one, two)
    assert [r.pass_name for r in result.rejections] == ["a", "b"]
    assert result.modified
    assert not PassResult(at.flat).modified


def test_the_observer_sees_each_graph_before_and_after(at: Bench) -> None:
    seen: list[tuple[str, str, str]] = []
    first = str(at.flat.graph)

    def watch(name: str, before: FlatGraph, result: PassResult) -> None:
        seen.append((name, str(before.graph), str(result.flat.graph)))

    run_passes(at.flat, at.context, (Normalise(), HoistConstants(), RingWriteback(), EliminateDead()), watch)
    assert [name for name, _, _ in seen] == ["normalise", "hoist_constants", "ring_writeback", "eliminate_dead"]
    assert seen[0][1] == first
    assert all(left[2] == right[1] for left, right in itertools.pairwise(seen))
    assert seen[2][1] != seen[2][2]


def test_times_are_added_up_by_pass(at: Bench) -> None:
    seconds = {"normalise": 1.0}
    run_passes(at.flat, at.context, (Normalise(),), seconds=seconds)
    assert seconds["normalise"] > 1.0


def test_the_compilers_observer_gets_copies_by_stage() -> None:
    seen: dict[str, FlatGraph] = {}
    player = Player(build("new_first"), observer=lambda signature, name, flat: seen.setdefault(name, flat))
    program = player.program("chunk[3]")
    assert list(seen) == ["before", *(p.name for p in DEFAULT_PASSES)]
    assert seen["before"].calls() == program.nodes_before
    assert seen["eliminate_dead"].graph is not program.flat.graph


def test_a_skipped_pass_does_not_run_and_an_unknown_one_is_refused() -> None:
    toy = build("new_first")
    program = Player(toy, skip=frozenset({"hoist_constants"})).program("chunk[3]")
    assert "hoist_constants" not in {change.pass_name for change in program.changes}
    with pytest.raises(ContractError, match=r"skip names no pass: \['hoist'\]; passes are \['normalise'"):
        Compiler(toy.module, toy.contract, Memory(toy.contract, CPU), skip=frozenset({"hoist"}))


def test_an_argument_that_nobody_declares_is_an_error_at_once() -> None:
    toy = build("causal_conv")
    bare = replace(toy.contract, inputs=(), calls=())
    with pytest.raises(ContractError, match="argument 'x' of forward is not declared; add an Input"):
        Compiler(toy.module, bare, Memory(toy.contract, torch.device("cpu")))
