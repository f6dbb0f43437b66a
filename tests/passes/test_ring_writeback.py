"""RingWriteback: reads in place where that is safe, moves counted, live rows whole until the commit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx

from cadence_fx.catalog import Signature, State, signatures
from cadence_fx.effects import base_of, written
from cadence_fx.passes import EliminateDead, HoistConstants, Normalise, RemoveHostSyncs, RingWriteback
from cadence_fx.pipeline import PassError
from cadence_fx.retention import START, KeepEnds
from tests.toys import (
    TOYS,
    WIDTH,
    Bench,
    Function,
    Player,
    Rows,
    Toy,
    bench,
    bits,
    build,
    cut,
    declare,
    differences,
    function,
    keep_ends,
    state,
    targets,
)

BEFORE = (Normalise(), RemoveHostSyncs(), HoistConstants())


def steady(toy: Toy) -> State:
    """The state that steady calls settle in."""
    return signatures(toy.contract, steady_only=True)[-1].state


def rewritten(toy: Toy, *, settled: bool = True) -> tuple[Bench, Any]:
    at = bench(toy, state=steady(toy) if settled else None)
    at.run_pass(*BEFORE)
    result = at.run_pass(RingWriteback())
    at.run_pass(EliminateDead())
    return at, result


def test_not_in_place_the_modules_own_concatenations_stay_and_the_state_is_written_by_one_copy() -> None:
    at = bench(build("new_first"), state=steady(build("new_first")))
    at.run_pass(*BEFORE)
    result = at.run_pass(RingWriteback(in_place=False))
    at.run_pass(EliminateDead())
    assert not result.rejections
    assert not [c for c in result.changes if c.what == "read in place"]
    into_region = [line for line in notation(at) if line.startswith("region_")]
    assert into_region == ["region_kv[3:13] <- new"]
    assert targets(at.flat).count("cat") >= 4


def notation(at: Bench) -> list[str]:
    """The copies into the region, as 'target[rows] <- source', and the readers, in the docstring's order."""
    lines = []
    for node in at.flat.graph.nodes:
        if node.op == "call_function" and written(node):
            lines.append(f"{span(node.args[0])} <- {span(node.args[1])}")
        elif "scaled_dot_product" in str(node.target):
            lines.append(f"attention {span(node.args[1])}")
    return lines


def span(node: fx.Node) -> str:
    """Owner and rows of a view of a region, in the dimension that grows."""
    base, box = boxed(node)
    if base.op != "get_attr":
        return "new"
    lo, n = box[1 if len(box) == 3 else len(box) - 2]
    return f"{base.target}[{lo}:{lo + n}]"


def boxed(node: fx.Node) -> tuple[fx.Node, list[tuple[int, int]]]:
    """The owner of a view and, for each of its dimensions, start and length of what the view shows."""
    base, chain = base_of(node), list[Any]()
    while node is not base:
        chain.append(node)
        node = node.args[0]  # type: ignore[assignment]
    box = [(0, n) for n in base.meta["val"].shape]
    kept: list[Any] = list(range(len(box)))
    for view in reversed(chain):
        name, dim = str(view.target), (*view.args, 0)[1]
        if "slice" in name and kept[dim] is not None:
            box[kept[dim]] = (box[kept[dim]][0] + view.args[2], view.args[3] - view.args[2])
        elif "select" in name:
            at = kept.pop(dim)
            box[at] = (box[at][0] + view.args[2], 1)
        elif "unsqueeze" in name:
            kept.insert(dim, None)
    return base, box


def attend(m: Any, x: torch.Tensor, s: Rows) -> Any:
    k = torch.cat([x * 2, s["a"]], 1)
    return F.scaled_dot_product_attention(x, k, k), {"a": cut(k)}


def test_attention_reads_the_region_and_only_rows_that_move_are_copied() -> None:
    at, _ = rewritten(function(attend, {"a": 6}, keep_ends()))
    # Envelope 13, extent 10: live rows 3:13, new rows before them, and the head of 6 moves to 3:9 in blocks of 3.
    assert notation(at) == [
        "region_a[0:3] <- new",
        "attention region_a[0:13]",
        "region_a[6:9] <- region_a[3:6]",
        "region_a[3:6] <- region_a[0:3]",
    ]
    assert "cat" not in targets(at.flat)


def test_before_the_limit_nothing_moves_at_all() -> None:
    at, result = rewritten(function(attend, {"a": 6}, keep_ends()), settled=False)
    assert notation(at) == ["region_a[4:7] <- new", "attention region_a[4:13]"]
    assert "100 % of the new state already lies in place, 0 block copies" in str(result.changes[-1])


def test_moves_are_counted_in_the_report() -> None:
    _, result = rewritten(function(attend, {"a": 6}, keep_ends()))
    texts = [str(c) for c in result.changes]
    assert any("read in place concatenation" in t for t in texts)
    assert any("40 % of the new state already lies in place, 2 block copies inside the region, 0" in t for t in texts)


def test_both_halves_of_a_block_are_read_in_place() -> None:
    at, result = rewritten(build("new_first", chunks=(3,), flush=()))
    assert sum(c.count for c in result.changes if c.what == "read in place") == 4  # k and v of two steps
    assert not {"cat", "scratch"} & set(targets(at.flat))
    assert "scratch" not in at.flat.attributes.values()
    # One move for both halves of both steps.
    assert [line for line in notation(at) if "<- region" in line] == [
        "region_kv[6:9] <- region_kv[3:6]", "region_kv[3:6] <- region_kv[0:3]",
    ]  # fmt: skip


# ---------------------------------------------------------------------------------------------- declined
def test_cx401_a_product_keeps_its_concatenation_and_the_region_is_still_written_in_place() -> None:
    at, result = rewritten(build("old_first", chunks=(3,), flush=()))
    found = [r for r in result.rejections if r.code == "CX401"]
    assert found
    assert "read by aten." in found[0].explanation
    assert "only this read is a copy" in found[0].hints[0]
    assert "toys.py" in found[0].source
    assert targets(at.flat).count("cat") == 2
    assert any(c.what == "writeback" for c in result.changes)


def test_cx402_rows_that_would_overwrite_live_ones_are_declined() -> None:
    def f(m: Any, x: torch.Tensor, s: Rows) -> Any:
        k = torch.cat([s["a"], x], 1)  # behind the old rows, where the region has no room
        return F.scaled_dot_product_attention(x, k, k), {"a": cut(torch.cat([x, s["a"]], 1))}

    toy = function(f, {"a": 6}, keep_ends())
    _, result = rewritten(toy)
    (found,) = [r for r in result.rejections if r.code == "CX402"]
    assert "it needs rows" in found.explanation
    assert "its rows do not fit beside the live rows" in str(found)
    assert list(differences(toy, ["chunk[3]"] * 8)) == []


def test_cx402_two_concatenations_for_the_same_rows_are_declined() -> None:
    def f(m: Any, x: torch.Tensor, s: Rows) -> Any:
        k, v = torch.cat([x, s["a"]], 1), torch.cat([x * 2, s["a"]], 1)
        return F.scaled_dot_product_attention(x, k, v), {"a": cut(k)}

    toy = function(f, {"a": 6}, keep_ends())
    _, result = rewritten(toy)
    assert [r.explanation for r in result.rejections] == ["its new rows would overwrite live ones"]
    assert list(differences(toy, ["chunk[3]"] * 8)) == []


def test_cx402_a_state_that_is_written_in_place_is_not_read_in_place() -> None:
    def f(m: Any, x: torch.Tensor, s: Rows) -> Any:
        k = torch.cat([x, s["a"]], 1)
        s["a"].mul_(2)
        return F.scaled_dot_product_attention(x, k, k), {"a": cut(k)}

    _, result = rewritten(function(f, {"a": 6}, keep_ends()))
    assert "the module writes the state argument in place" in str(
        next(r for r in result.rejections if r.code == "CX402")
    )


def test_cx403_a_state_with_rows_of_a_parameter_is_written_back_whole() -> None:
    def f(m: Any, x: torch.Tensor, s: Rows) -> Any:
        return x + 1, {"a": torch.cat([m.table, s["a"][:, :1]], 1)}

    at = bench(function(f, {"a": 2}, parts={"table": torch.randn(1, 1, 8)}))
    result = at.run_pass(RingWriteback())
    (found,) = result.rejections
    assert found.code == "CX403"
    assert found.explanation.startswith("table holds content that no traced copy put there")
    assert "state is not pure movement: written back whole" in str(found)


def test_cx403_a_part_that_is_kept_and_overwritten_is_named() -> None:
    def f(m: Any, x: torch.Tensor, s: Rows) -> Any:
        before = s["a"].clone()
        s["a"][:, :1] = x[:, :1]
        return x + s["a"].sum(), {"a": before}

    result = bench(function(f, {"a": 2})).run_pass(RingWriteback())
    assert [r.explanation for r in result.rejections] == ["the module overwrites a part of state_a that it keeps"]


# ---------------------------------------------------------------------------------------------- promises
class Stop(Exception):
    pass


class StopsAtTheCommit(fx.Interpreter):
    """Raises in front of the node ``at``."""

    def __init__(self, module: fx.GraphModule, at: int) -> None:
        super().__init__(module)
        self.left = at

    def run_node(self, n: fx.Node) -> Any:
        if self.left == 0:
            raise Stop
        self.left -= 1
        return super().run_node(n)


@pytest.mark.parametrize("name", [n for n in TOYS if n != "noisy"])
def test_live_rows_are_untouched_until_the_last_nodes(name: str) -> None:
    """A call that fails anywhere before the commit has changed nothing."""
    toy = build(name)
    player = Player(toy)
    player.start(toy.module.initial())
    for _ in range(3):
        player(toy.calls[0], torch.randn(1, toy.contract.call(toy.calls[0]).sizes["x"][0], 8))
    program = player.program(toy.calls[0])
    (region,) = player.memory.buffers.values()
    nodes = list(program.flat.graph.nodes)
    computes = [i for i, n in enumerate(nodes) if n.op == "call_function" and not written(n) and base_of(n) is n]
    last = max(i for i in computes if nodes[i].target is not torch.ops.aten.clone.default)
    live = bits(region.view())
    x = torch.randn(1, toy.contract.call(toy.calls[0]).sizes["x"][0], 8)
    for at in range(last + 2):
        with pytest.raises(Stop), torch.no_grad():
            StopsAtTheCommit(program.module, at).run(x)
        assert bits(region.view()) == live, nodes[at - 1]


@pytest.mark.parametrize("name", list(TOYS))
def test_no_copy_inside_the_region_overlaps_itself(name: str) -> None:
    player = Player(build(name))
    for signature in signatures(player.toy.contract)[-6:]:
        for node in player.compiler.compile(signature).flat.graph.nodes:
            if node.op == "call_function" and written(node):
                (owner, target), (other, source) = boxed(node.args[0]), boxed(node.args[1])
                apart = [a + n <= b or b + m <= a for (a, n), (b, m) in zip(target, source, strict=False)]
                assert owner is not other or any(apart), node


@pytest.mark.parametrize("name", list(TOYS))
def test_a_second_run_has_no_state_left_to_rewrite(name: str) -> None:
    at = bench(build(name))
    at.run_pass(*BEFORE, RingWriteback())
    with pytest.raises(PassError, match=r"pass 'ring_writeback' cannot run: regions \['\w+'\] have no placeholder"):
        at.run_pass(RingWriteback())


def test_the_promise_names_a_state_that_is_left() -> None:
    at = bench(build("causal_conv"))
    assert RingWriteback().ensures(at.flat, at.context) == "state still enters through ['state_left']"


def test_the_frozen_half_of_a_packed_cache_is_not_copied_again() -> None:
    """Once the first half is frozen, all of it lies in place and only rows behind it are written."""
    toy = build("frozen_halves", chunks=(2,))
    _, result = rewritten(toy)
    (change,) = [c for c in result.changes if c.what == "writeback"]
    # The slow layer's first half, 5 of its 10 rows, and the head of the fast one, 6 of 10.
    assert change.why.startswith("55 % of the new state already lies in place")
    assert list(differences(toy, ["chunk[2]"] * 9)) == []


@pytest.mark.parametrize("call", ["chunk[1]", "chunk[2]", "chunk[5]", "chunk[7]"])
def test_chunks_shorter_and_longer_than_the_window(call: str) -> None:
    toy = build("keep_last")
    full = next(s for s in signatures(toy.contract) if s.state.extent("rows") == 5 and s.call == call)
    program = Player(toy).compiler.compile(Signature(full.state, call))
    (change,) = [c for c in program.changes if c.what == "writeback"]
    rows = int(call[6:-1])
    # Old rows move only where some stay.
    assert ("0 block copies" in change.why) is (rows >= 5)


def test_results_that_are_views_of_old_state_are_copied_before_the_commit() -> None:
    def f(m: Any, x: torch.Tensor, s: Rows) -> Any:
        return s["a"][:, :1], {"a": torch.cat([s["a"], x], 1)[:, -2:]}

    at = bench(function(f, {"a": 2}))
    at.run_pass(RingWriteback())
    order = targets(at.flat)
    assert order.index("clone") < order.index("copy_")


def test_cx404_a_product_on_the_state_itself_gets_a_dense_copy_as_stock_has_it() -> None:
    def f(module: Any, x: torch.Tensor, state: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        old = state["a"]
        rows = old[0] + old[1]  # no concatenation: the state is computed on directly, and its halves lie apart
        seen = torch.softmax(x[0] @ rows.T, -1) @ rows
        new = torch.cat([torch.stack([x[0], x[0] * 2]), old], 1)
        return x + seen, {"a": torch.cat([new[:, :6], new[:, -4:]], 1) if new.shape[1] > 10 else new}

    module = Function(f, {"a": (2, 6, WIDTH)}).eval()
    region = state("a", (2, None, WIDTH), order="new_first", start=6, retain=KeepEnds(START, 4))
    toy = Toy(module, declare((region,), (3,)))
    assert list(differences(toy, toy.calls * 8)) == []
    _, result = rewritten(toy, settled=False)
    found = [r for r in result.rejections if r.code == "CX404"]
    assert found
    assert "computes on them directly" in found[0].explanation
    assert "clone" in " ".join(str(n.target) for n in result.flat.graph.nodes)
