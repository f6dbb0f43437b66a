from __future__ import annotations

import random
import re
from dataclasses import replace

import pytest

from cadence_fx import catalog
from cadence_fx.catalog import (
    Signature,
    State,
    admitted,
    after,
    catalog_regions,
    predicted_bytes,
    reachable,
    signatures,
    starts,
)
from cadence_fx.contract import Arg, Attr, Bound, Call, Clock, Contract, Input, Region
from cadence_fx.errors import ContractError
from cadence_fx.extents import region_extents
from cadence_fx.retention import KeepAll, Pinned, Ring, Window
from tests.decoder import FRAME, KEEP, chunk, flush, full, last, line, solver_kv

KV = 10 * 16 * 2 * 8 * 128 * 4  # bytes of one frame of the solver's attention state


def forced_flushes() -> Contract:
    """A duplex driver that flushes after any unit, with 10 to 50 frames."""
    calls = (chunk(), *(flush(frames) for frames in range(10, 50, 2)))
    return full(regions=(solver_kv(),), calls=calls)


def values(contract: Contract, region: str) -> list[int]:
    return sorted({state.extent(region) or 0 for state in reachable(contract).nodes})


# ---------------------------------------------------------------------------------------------- the decoder
def test_the_steady_cadence_of_the_decoder_has_three_signatures():
    found = signatures(full(), steady_only=True)
    assert [s.call for s in found] == ["chunk"] * 3
    assert [dict(s.state.extents) for s in found] == [
        {"solver_kv": 302, "conformer_kv": 302, "mel": 0, "source": 0, "speech": 0},
        {"solver_kv": 352, "conformer_kv": 352, "mel": 8, "source": 3840, "speech": 3840},
        {"solver_kv": 402, "conformer_kv": 402, "mel": 8, "source": 3840, "speech": 3840},
    ]


def test_twenty_eight_last_lengths_make_eighty_seven_signatures():
    # 3 extents x (1 chunk + 28 last lengths): the 87 of an ideal 25-token cadence.
    found = signatures(full())
    assert len(found) == len(set(found)) == 3 + 3 * 28 == 87
    assert [s.call for s in found[:3]] == ["chunk", "last[1]", "last[2]"]


def test_forced_flushes_reach_forty_seven_extents():
    # A turn that opens with f in {10, 12, ..., 50} walks from 302 to 302 + f and on: 302 and the even numbers from
    # 312 to 402, the 47 values that the vendor's duplex driver reaches; 304 to 310 need a flush below 10 frames.
    # That driver has 1,122 (extent, call) pairs where this has 47 x 21 = 987 without last chunks and 47 x 26 = 1,222
    # with its five: it flushes early only in a turn's first unit, an order that a contract does not declare. What is
    # declared here is a superset, so no call of that driver misses the catalog.
    contract = forced_flushes()
    found = values(contract, "solver_kv")
    assert found == [302, *range(312, 403, 2)]
    assert len(found) == 47
    assert len(signatures(contract)) == 47 * 21
    lasts = tuple(last(tokens) for tokens in range(3, 8))
    assert len(signatures(replace(contract, calls=(*contract.calls, *lasts)))) == 47 * 26
    assert region_extents(contract, contract.region("solver_kv")).attended_all == tuple(found)


def test_at_the_saturated_extent_forced_flushes_have_twenty_six_signatures():
    contract = forced_flushes()
    contract = replace(contract, calls=(*contract.calls, *(last(tokens) for tokens in range(3, 8))))
    saturated = [s for s in signatures(contract) if s.state.extent("solver_kv") == 402]
    assert len(saturated) == 21 + 5


# ---------------------------------------------------------------------------------------------- moves
def test_all_regions_move_at_once_and_a_last_chunk_goes_back_to_the_start():
    contract = full()
    (start,) = starts(contract)
    first = after(contract, start, "chunk")
    assert first.extent("solver_kv") == 352
    assert first.extent("mel") == 8
    assert after(contract, first, "last[28]") == start
    assert first.extent("workspace") is None


def test_an_unknown_call_gets_a_suggestion():
    (start,) = starts(full())
    with pytest.raises(ContractError, match=r"no call is called 'chunks'.*did you mean 'chunk'\?"):
        after(full(), start, "chunks")


def test_a_session_region_keeps_its_extent_when_the_turn_ends():
    regions = (line(KEEP, 302), replace(line(Window(200), 0, lifetime="session"), name="log"))
    calls = (Call("chunk", {FRAME: 50}, {}, steady=True), Call("last", {FRAME: 20}, {}, ends="turn"))
    contract = Contract("c", (Clock(FRAME),), regions, calls=calls)
    state = after(contract, after(contract, starts(contract)[0], "chunk"), "last")
    assert state.extents == (("line", 302), ("log", 70))


def test_edges_carry_the_names_of_all_calls_that_take_them():
    graph = reachable(full())
    first, second, third = graph.nodes
    assert graph.edges[first, second]["calls"] == ("chunk",)
    assert graph.edges[third, third]["calls"] == ("chunk",)
    assert graph.edges[second, first]["calls"] == tuple(f"last[{tokens}]" for tokens in range(1, 29))
    assert not graph.has_edge(first, third)


def test_each_start_variant_has_its_own_states():
    contract = full(regions=(solver_kv(start=(302, 250)),), calls=(chunk(), last(5)))
    graph = reachable(contract)
    assert [(s.variant, s.extent("solver_kv")) for s in graph.nodes] == [
        (0, 302), (1, 250), (0, 352), (1, 300), (0, 402), (1, 350),
    ]  # fmt: skip
    assert all(source.variant == target.variant for source, target in graph.edges)
    assert len(signatures(contract)) == 2 * 3 * 2


def test_the_order_of_the_catalog_does_not_depend_on_the_run():
    assert signatures(forced_flushes()) == signatures(forced_flushes())
    assert signatures(full())[0] == Signature(starts(full())[0], "chunk")


def test_a_random_walk_never_leaves_the_catalog():
    contract, picks = full(calls=(*full().calls, *(flush(frames) for frames in range(10, 20, 2)))), random.Random(0)
    known, (state,) = set(signatures(contract)), starts(contract)
    for _ in range(300):
        call = picks.choice(contract.calls).name
        assert Signature(state, call) in known
        state = after(contract, state, call)


# ---------------------------------------------------------------------------------------------- what stays out
def test_calls_beyond_a_bound_are_no_signatures_but_still_move_state():
    calls = (chunk(), flush(20), Call("long", {FRAME: 54}, {"token": (30,)}))
    contract = full(calls=calls, admit=(Bound("token", 25),))
    assert [admitted(contract, call) for call in calls] == [True, True, False]
    assert "long" not in {s.call for s in signatures(contract)}
    assert 356 in values(contract, "solver_kv")  # 302 + 54, after a call that runs as stock
    assert {s.call for s in signatures(full(calls=calls))} == {"chunk", "flush[20]", "long"}


def test_excluded_regions_are_no_part_of_a_state():
    unbounded = replace(line(KeepAll(), 0), name="unbounded")
    unit = replace(line(Window(6000, high=8000), 6000), name="unit")
    contract = full(regions=(solver_kv(), unbounded, unit), calls=(chunk(),))
    assert [r.name for r in catalog_regions(contract)] == ["solver_kv", "unit"]
    contract = replace(contract, max_graphs=30)
    assert [r.name for r in catalog_regions(contract)] == ["solver_kv"]
    assert len(signatures(contract)) == 3
    assert predicted_bytes(contract, frozenset()).excluded == ("unbounded", "unit")


def test_a_catalog_without_end_is_refused_with_a_way_out(monkeypatch):
    monkeypatch.setattr(catalog, "MAX_STATES", 2)
    with pytest.raises(ContractError, match=re.escape("Contract 'token2wav': calls reach more than 2 states; declare")):
        reachable(full())


def test_a_contract_without_growing_regions_has_one_state():
    ring = line(Ring(3000), 0, order="ring")
    contract = Contract("moshi", (Clock(FRAME),), (ring,), calls=(Call("step", {FRAME: 1}, {}, steady=True),))
    assert signatures(contract) == (Signature(State(0, ()), "step"),)


# ---------------------------------------------------------------------------------------------- equation 6
def test_without_aliases_every_class_stages_its_own_copy_of_the_state():
    contract = full(regions=(solver_kv(),), calls=(chunk(),), entries=())
    found = predicted_bytes(contract, frozenset())
    inputs = 28 * 4 + 192 * 4
    assert [row.staged_bytes for row in found.classes] == [extent * KV + inputs for extent in (302, 352, 402)]
    assert (found.frozen, found.frozen_total) == ((), 0)
    assert found.total == found.staged_total == (302 + 352 + 402) * KV + 3 * inputs


def test_an_alias_trades_the_copies_for_one_envelope():
    contract = full(regions=(solver_kv(),), calls=(chunk(), last(28)), entries=())
    found = predicted_bytes(contract, frozenset({"solver_kv"}))
    assert found.frozen == (("solver_kv", 458 * KV),)
    assert found.frozen_total == 600_309_760
    assert found.staged_total == 6 * (28 * 4 + 192 * 4)
    assert found.total == found.staged_total + found.frozen_total


def test_an_aliased_input_is_not_staged():
    contract = full(regions=(solver_kv(),), calls=(chunk(),), entries=())
    found = predicted_bytes(contract, frozenset({"solver_kv", "spk"}))
    assert {row.staged_bytes for row in found.classes} == {28 * 4}


def test_an_input_that_the_call_replaces_by_none_is_not_staged():
    call = Call("silent", {"token": 25}, {}, scalars=((Arg("token"), None),), steady=True)
    found = predicted_bytes(full(regions=(solver_kv(),), calls=(call,), entries=()), frozenset({"solver_kv"}))
    assert {row.staged_bytes for row in found.classes} == {192 * 4}


def test_state_of_fixed_shape_and_pinned_state_are_staged_whole():
    regions = (Region("cnn", (5,), enters=Arg("cnn")), line(Pinned(), 3, enters=Arg("pinned")))
    contract = Contract("c", (Clock(FRAME),), regions, calls=(Call("step", {FRAME: 1}, {}),))
    assert predicted_bytes(contract, frozenset()).staged_total == 4 * 5 + 4 * 3


def test_state_at_an_attribute_is_at_a_fixed_address_without_being_named():
    ring = line(Ring(16), 0, enters=Attr("layer.ring"))
    constant = Region("table", (99,), mutability="constant", enters=Attr("table"))
    contract = Contract("c", (Clock(FRAME),), (ring, constant), calls=(Call("step", {FRAME: 1}, {}),))
    found = predicted_bytes(contract, frozenset())
    assert (found.staged_total, found.frozen) == (0, (("line", 64),))


def test_state_of_fixed_shape_beyond_max_bytes_is_excluded_too():
    regions = (Region("cnn", (5,), enters=Arg("cnn")), Region("big", (500,), enters=Arg("big")))
    contract = Contract("c", (Clock(FRAME),), regions, calls=(Call("step", {FRAME: 1}, {}),), max_bytes=1000)
    found = predicted_bytes(contract, frozenset())
    assert (found.excluded, found.staged_total) == (("big",), 20)


def test_scratch_that_shares_memory_freezes_nothing_of_its_own():
    assert "workspace" not in dict(predicted_bytes(full(), frozenset()).frozen)


def test_an_unknown_alias_gets_a_suggestion():
    with pytest.raises(ContractError, match=r"aliased is 'solver'; no region or input has that name.*'solver_kv'"):
        predicted_bytes(full(), frozenset({"solver"}))


def test_predicted_bytes_convert_to_json():
    contract = Contract(
        "c", (Clock(FRAME),), (line(Window(2), 0, enters=Arg("x")),),
        inputs=(Input(Arg("y"), (3,), "float16"),), calls=(Call("step", {FRAME: 1}, {}, steady=True),),
    )  # fmt: skip
    assert predicted_bytes(contract, frozenset({"line"})).to_dict() == {
        "classes": [
            {"call": "step", "variant": 0, "extents": {"line": extent}, "staged_bytes": 6} for extent in (0, 1, 2)
        ],
        "frozen": {"line": 12},
        "excluded": [],
        "staged_total": 18,
        "frozen_total": 12,
        "total": 30,
    }
