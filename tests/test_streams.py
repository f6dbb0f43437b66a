"""Whole streams of small modules: compiled programs against plain calls, bit by bit, state and generator included."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from cadence_fx.catalog import Signature, signatures, starts
from cadence_fx.compiler import Compiler
from cadence_fx.contract import Arg, Attr, Call, Clock, Contract, Input, Region, Result
from cadence_fx.memory import Memory
from cadence_fx.retention import START, KeepEnds, Window
from tests.toys import CPU, TOYS, WIDTH, Player, Toy, build, cut, differences, function, keep_ends

Rows = dict[str, torch.Tensor]


def streams(toy: Toy, chunks: int = 9) -> list[str]:
    return list(differences(toy, [toy.calls[i % len(toy.calls)] for i in range(chunks)]))


@pytest.mark.parametrize("name", list(TOYS))
def test_every_signature_of_the_catalog_compiles(name: str) -> None:
    toy = build(name)
    player = Player(toy)
    for signature in signatures(toy.contract):
        assert player.compiler.compile(signature).nodes_after > 0


@pytest.mark.parametrize("name", list(TOYS))
def test_a_stream_has_the_bits_of_plain_calls(name: str) -> None:
    toy = build(name)
    assert list(differences(toy, [toy.calls[i % len(toy.calls)] if i % 3 else toy.calls[0] for i in range(12)])) == []


# ---------------------------------------------------------------------------------------------- state that moves
def clone_written_afterwards(m: Any, x: torch.Tensor, s: Rows) -> Any:
    new = s["a"].clone()
    new[:, :1] = x[:, :1]
    return x * 2, {"a": new}


def delay_of_two(m: Any, x: torch.Tensor, s: Rows) -> Any:
    return x + s["b"][:, :1], {"a": x[:, -2:] * 2, "b": s["a"]}


def exchange(m: Any, x: torch.Tensor, s: Rows) -> Any:
    return x + s["b"][:, :1], {"a": s["b"], "b": s["a"]}


def old_rows_as_output(m: Any, x: torch.Tensor, s: Rows) -> Any:
    return s["a"][:, :1], {"a": torch.cat([s["a"], x], 1)[:, -2:]}


def old_state_as_output(m: Any, x: torch.Tensor, s: Rows) -> Any:
    return s["a"], {"a": x[:, -2:] * 2}


def broadcast_of_an_old_row(m: Any, x: torch.Tensor, s: Rows) -> Any:
    return x + 1, {"a": torch.cat([s["a"][:, 1:], s["a"][:, :1].expand(1, 1, WIDTH)], 1)}


def regrouped_view(m: Any, x: torch.Tensor, s: Rows) -> Any:
    return x + 1, {"a": s["a"].reshape(1, WIDTH, 2).transpose(1, 2)}


def rotated(m: Any, x: torch.Tensor, s: Rows) -> Any:
    return x + s["a"].sum(), {"a": torch.cat([s["a"][:, 1:], s["a"][:, :1]], 1)}


def flipped(m: Any, x: torch.Tensor, s: Rows) -> Any:
    return x + s["a"][:, :1], {"a": s["a"].flip(1)}


def rows_of_the_input(m: Any, x: torch.Tensor, s: Rows) -> Any:
    return x + s["a"][:, :1], {"a": x[:, -2:]}


def constant_rows(m: Any, x: torch.Tensor, s: Rows) -> Any:
    return x + s["a"].sum(), {"a": torch.cat([m.table[:, :1], s["a"][:, :1]], 1)}


def ring_slot(m: Any, x: torch.Tensor, s: Rows) -> Any:
    slot = (s["b"][0, :, 0].long() + 1) % 2
    return x + s["a"].sum(), {
        "a": s["a"].index_copy(1, slot, x[:, :1]),
        "b": slot.float().view(1, 1, 1).expand(1, 1, 8),
    }


def ring_slot_in_place(m: Any, x: torch.Tensor, s: Rows) -> Any:
    s["a"].index_copy_(1, s["b"][0, :, 0].long() % 2, x[:, :1])
    s["b"].add_(1)
    return x + s["a"].sum(), {"a": s["a"], "b": s["b"]}


def shifted_by_slices(m: Any, x: torch.Tensor, s: Rows) -> Any:
    new = s["a"].clone()
    new[:, 1:] = s["a"][:, :-1]
    new[:, :1] = x[:, -1:]
    return x + new.sum(), {"a": new}


def rolled(m: Any, x: torch.Tensor, s: Rows) -> Any:
    new = torch.roll(s["a"], -1, 1)
    new[:, -1:] = x[:, -1:]
    return x + new.sum(), {"a": new}


MOVED: list[Callable[..., Any]] = [
    clone_written_afterwards, delay_of_two, exchange, old_rows_as_output, old_state_as_output, broadcast_of_an_old_row,
    regrouped_view, rotated, flipped, rows_of_the_input, constant_rows, shifted_by_slices,
    rolled,
]  # fmt: skip


@pytest.mark.parametrize("f", MOVED, ids=lambda f: f.__name__)
def test_state_that_moves_keeps_its_bits(f: Callable[..., Any]) -> None:
    rows = {"a": 2, "b": 2} if f in (delay_of_two, exchange) else {"a": 2}
    assert streams(function(f, rows, parts={"table": torch.randn(1, 2, WIDTH)})) == []


# ---------------------------------------------------------------------------------------------- in-place writes
def writes_its_state(m: Any, x: torch.Tensor, s: Rows) -> Any:
    s["a"][:, :1] = x[:, :1]
    return x + s["a"].sum(), {"a": s["a"]}


def writes_its_state_and_returns_what_it_was(m: Any, x: torch.Tensor, s: Rows) -> Any:
    before = s["a"].clone()
    s["a"][:, :1] = x[:, :1]
    return x + s["a"].sum(), {"a": before.clone()}


def writes_its_state_and_rotates_it(m: Any, x: torch.Tensor, s: Rows) -> Any:
    s["a"][:, :1] = x[:, :1]
    return x + s["a"].sum(), {"a": torch.cat([s["a"][:, 1:], s["a"][:, :1]], 1)}


def scales_its_state(m: Any, x: torch.Tensor, s: Rows) -> Any:
    s["a"].mul_(0.5)
    return x + s["a"].sum(), {"a": s["a"]}


def scales_its_state_and_keeps_rows_of_before(m: Any, x: torch.Tensor, s: Rows) -> Any:
    before = torch.cat([s["a"][:, 1:], s["a"][:, :1]], 1)
    s["a"].mul_(0.5)
    return x + s["a"].sum(), {"a": before}


def scales_a_part_that_was_copied_in(m: Any, x: torch.Tensor, s: Rows) -> Any:
    s["a"][:, :1] = x[:, :1]
    s["a"].mul_(2)
    return x + 1, {"a": s["a"][:, [0, 0]], "b": s["a"][:, :1].clone()}


def clears_its_input(m: Any, x: torch.Tensor, s: Rows) -> Any:
    both = torch.cat([x, x], 1)
    x.zero_()
    return both + 1, {"a": both[:, 2:4]}


def clears_a_source(m: Any, x: torch.Tensor, s: Rows) -> Any:
    y = x * 2
    kept, last = y.clone(), torch.stack([y[:, -1:], y[:, -1:]], 1)[:, 0]
    y.zero_()
    return x + 1, {"a": kept[:, :2], "b": last}


def adds_to_a_copy_by_to(m: Any, x: torch.Tensor, s: Rows) -> Any:
    b = s["a"].to(s["a"].dtype, copy=True)
    b += 1
    return x + b.sum() + s["a"].sum(), {"a": s["a"] * 1}


WRITERS: list[Callable[..., Any]] = [
    writes_its_state, writes_its_state_and_returns_what_it_was, writes_its_state_and_rotates_it, scales_its_state,
    scales_its_state_and_keeps_rows_of_before, scales_a_part_that_was_copied_in, clears_its_input, clears_a_source,
    adds_to_a_copy_by_to,
]  # fmt: skip


@pytest.mark.parametrize("f", WRITERS, ids=lambda f: f.__name__)
def test_in_place_writes_keep_their_bits(f: Callable[..., Any]) -> None:
    rows = {"a": 2, "b": 1} if f in (scales_a_part_that_was_copied_in, clears_a_source) else {"a": 2}
    assert streams(function(f, rows)) == []


# ---------------------------------------------------------------------------------------------- attention
def attends_twice_around_a_write(m: Any, x: torch.Tensor, s: Rows) -> Any:
    k = torch.cat([x, s["a"]], 1)
    y = F.scaled_dot_product_attention(x, k, k)
    s["a"].mul_(2)
    return y + F.scaled_dot_product_attention(y, k, k), {"a": cut(k)}


def attends_while_a_source_changes(m: Any, x: torch.Tensor, s: Rows) -> Any:
    new = x * 2
    k = torch.cat([new[:, 1:], new[:, :1], s["a"]], 1)
    new.mul_(3)
    return F.scaled_dot_product_attention(x, k, k), {"a": cut(k)}


def attends_to_the_output_of_attention(m: Any, x: torch.Tensor, s: Rows) -> Any:
    k = torch.cat([x, s["a"]], 1)
    y = F.scaled_dot_product_attention(x, k, k)
    k2 = torch.cat([y, s["a"]], 1)  # these rows would lie where those of k are
    return y + F.scaled_dot_product_attention(x, k2, k), {"a": cut(k2)}


@pytest.mark.parametrize("f", [attends_twice_around_a_write, attends_while_a_source_changes,
                               attends_to_the_output_of_attention], ids=lambda f: f.__name__)  # fmt: skip
def test_attention_keeps_its_bits(f: Callable[..., Any]) -> None:
    assert streams(function(f, {"a": 6}, keep_ends(), flush=(1,))) == []


def test_rows_that_are_new_twice_keep_their_bits() -> None:
    def f(m: Any, x: torch.Tensor, s: Rows) -> Any:
        k = torch.cat([x, x, s["a"]], 1)
        return F.scaled_dot_product_attention(x, k, k), {"a": cut(k)}

    assert streams(function(f, {"a": 6}, keep_ends(growth=2))) == []


@pytest.mark.parametrize("shares", ["a", None])
def test_scratch_that_is_read_again_never_touches_the_live_rows(shares: str | None) -> None:
    def f(m: Any, x: torch.Tensor, s: Rows) -> Any:
        rows = s["a"].shape[1] + x.shape[1]
        m.buffer[:, :rows] = torch.cat([x, s["a"]], 1)
        k = m.buffer[:, :rows]
        return torch.softmax(x @ k.transpose(1, 2), -1) @ k, {"a": cut(k)}

    scratch = Region("buffer", (1, None, WIDTH), dim=1, clock="frame", start=6, retain=KeepEnds(START, 4),
                     enters=Attr("buffer"), mutability="scratch", lifetime="unit", shares=shares)  # fmt: skip
    assert streams(function(f, {"a": 6}, keep_ends(), scratch, parts={"buffer": torch.zeros(1, 40, WIDTH)})) == []


@pytest.mark.parametrize("factor", [1.0, 2.0], ids=["rows of the other", "new rows"])
def test_many_pieces_go_through_staging(factor: float) -> None:
    def f(m: Any, x: torch.Tensor, s: Rows) -> Any:
        a, b = s["a"], s["b"]
        old = [b[:, 19 - i : 20 - i] for i in range(20)]
        new = [a[:, 19 - i : 20 - i] * factor if factor != 1 else a[:, 19 - i : 20 - i] for i in range(20)]
        return x + 1, {"a": torch.cat(old, 1), "b": torch.cat(new, 1)}

    toy = function(f, {"a": 20, "b": 20})
    assert "through staging" in str(Player(toy).program("chunk[3]").changes)
    assert streams(toy) == []


# ---------------------------------------------------------------------------------------------- names
def test_attributes_whose_paths_look_alike_are_two_attributes() -> None:
    def f(m: Any, x: torch.Tensor, s: Rows) -> Any:
        return x * m.b_c + m.b.c, {"a": s["a"] * m.b_c}

    inner = torch.nn.Module()
    inner.register_buffer("c", torch.randn(WIDTH))
    assert streams(function(f, {"a": 2}, parts={"b_c": torch.randn(WIDTH), "b": inner})) == []


@pytest.mark.parametrize("name", ["region_a", "stage_a", "constant_0"])
def test_an_attribute_named_like_the_librarys_own_stays_the_modules(name: str) -> None:
    def f(m: Any, x: torch.Tensor, s: Rows) -> Any:
        own = getattr(m, name)
        return x * own + torch.arange(WIDTH) * own, {"a": s["a"] + own}

    assert streams(function(f, {"a": 2}, parts={name: torch.randn(WIDTH)})) == []


class NamedLikePython(torch.nn.Module):
    def forward(self, input: torch.Tensor, id: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return input + id.sum(), id * 2


def test_arguments_named_like_words_of_python_are_found() -> None:
    region = Region("a", (1, 2), enters=Arg("id"), leaves=Result(1))
    call = Call("call", {"frame": 1}, {"input": (3,)}, steady=True)
    contract = Contract("words", (Clock("frame"),), (region,), (Input(Arg("input"), (1, None)),), (call,))
    memory = Memory(contract, CPU)
    program = Compiler(NamedLikePython(), contract, memory).compile(Signature(starts(contract)[0], "call"))
    memory["a"].adopt(torch.tensor([[1.0, 2.0]]))
    assert program.inputs == (Arg("input"),)
    assert program.run(torch.zeros(1, 3))[0].tolist() == [[3.0, 3.0, 3.0]]
    assert memory["a"].view().tolist() == [[2.0, 4.0]]


def test_a_pinned_region_has_the_extent_of_its_start_variant() -> None:
    def f(m: Any, x: torch.Tensor, s: Rows) -> Any:
        return x + s["a"].sum(), {"a": s["a"] * 2}

    region = Region("a", (1, None, WIDTH), dim=1, clock="frame", start=(6, 4), enters=Arg("state", "a"),
                    leaves=Result(1, "a"))  # fmt: skip
    toy = function(f, {"a": 6}, region)
    compiler = Player(toy).compiler
    assert [compiler.compile(Signature(s, "chunk[3]")).links[0].old for s in starts(toy.contract)] == [6, 4]


# ---------------------------------------------------------------------------------------------- random streams
@settings(max_examples=8, deadline=None, derandomize=True)
@given(name=st.sampled_from(["new_first", "old_first"]), start=st.integers(2, 9), tail=st.integers(2, 6),
       steady=st.integers(2, 6), short=st.integers(1, 3), order=st.lists(st.integers(0, 1), min_size=8, max_size=10),
       seed=st.integers(0, 99))  # fmt: skip
def test_random_streams_through_attention_have_the_bits_of_plain_calls(
    name: str, start: int, tail: int, steady: int, short: int, order: list[int], seed: int
) -> None:
    flush = () if short == steady else (short,)
    toy = build(name, seed, start=start, tail=tail, chunks=(steady,), flush=flush)
    assert list(differences(toy, [toy.calls[i % len(toy.calls)] for i in order], seed)) == []


@settings(max_examples=8, deadline=None, derandomize=True)
@given(chunks=st.lists(st.integers(1, 8), min_size=1, max_size=3, unique=True), seed=st.integers(0, 99))
def test_random_chunks_shorter_and_longer_than_a_window(chunks: list[int], seed: int) -> None:
    toy = build("keep_last", seed, chunks=tuple(chunks))
    assert list(differences(toy, [toy.calls[(i * i + seed) % len(toy.calls)] for i in range(9)], seed)) == []


@pytest.mark.parametrize("f", [ring_slot, ring_slot_in_place], ids=lambda f: f.__name__)
def test_a_ring_whose_index_is_state_keeps_its_bits(f: Callable[..., Any]) -> None:
    toy = function(f, {"a": 2, "b": 1})
    toy.module.initial = lambda: {"a": torch.randn(1, 2, WIDTH), "b": torch.zeros(1, 1, WIDTH)}
    assert streams(toy) == []


@pytest.mark.parametrize("order", ["old_first", "new_first"])
def test_a_window_read_by_attention_is_read_in_place_and_keeps_its_bits(order: str) -> None:
    def f(m: Any, x: torch.Tensor, s: Rows) -> Any:
        k = torch.cat([s["a"], x] if order == "old_first" else [x.flip(1), s["a"]], 1)
        return F.scaled_dot_product_attention(x, k, k), {"a": k[:, -7:] if order == "old_first" else k[:, :7]}

    window = Window(7, side="tail" if order == "old_first" else "head")
    toy = function(f, {"a": 6}, keep_ends(order=order, retain=window), chunks=(3, 2))
    assert "read in place" in str(Player(toy).program("chunk[3]").changes)
    assert streams(toy) == []
