from __future__ import annotations

import json
import random
from typing import Any

import pytest
import sympy
from hypothesis import given, settings
from hypothesis import strategies as st

from cadence_fx.contract import Call, Clock, Contract, Region
from cadence_fx.extents import (
    PROMPT,
    STRIDE,
    Move,
    all_extents,
    catalog_width,
    reachable_extents,
    region_extents,
    travel,
)
from cadence_fx.retention import START, KeepAll, KeepEnds, Pinned, Retention, Ring, Window
from tests.decoder import FRAME, KEEP, alone, full, line, solver_kv


def derived(region: Region, **changes: object):
    return region_extents(alone(region, **changes), region)


# ---------------------------------------------------------------------------------------------- released numbers
def test_the_shared_decoder_has_three_attended_extents_and_one_envelope_of_458():
    found = derived(solver_kv(strides=(50,), flush=tuple(range(2, 57, 2))))
    assert found.attended == (302, 352, 402)
    assert (found.window, found.stride, found.width, found.verdict) == (100, 50, 3, "capture")
    assert (found.envelope, found.bytes, found.reserved_bytes) == (458, 600_309_760, 2_097_152_000)
    assert round(found.rho or 0, 2) == 3.49
    assert found.attended_all == tuple(range(302, 403, 2))


def test_half_the_solver_steps_double_the_over_reservation():
    found = derived(solver_kv(shape=(5, 16, 2, 8, None, 128), strides=(50,), flush=tuple(range(2, 57, 2))))
    assert found.bytes == 300_154_880
    assert round(found.rho or 0, 2) == 6.99


def test_a_unit_stride_window_is_excluded_with_its_width_in_the_reason():
    found = derived(line(Window(6000, high=8000), 6000, strides=(1,)))
    assert (found.width, len(found.attended), found.verdict) == (2001, 2001, "exclude")
    assert found.reason == "2001 attended extents (W = 2000, s = 1) are more than max_graphs = 128"


@pytest.mark.parametrize(
    ("hop", "stride", "expected"),
    [(12, 24, (302, 326, 350, 374, 398, 402)), (10, 20, (302, 322, 342, 362, 382, 402)), (25, 50, (302, 352, 402))],
)
def test_the_hop_in_tokens_sets_the_catalog_width(hop, stride, expected):
    clocks = (Clock("token", hz=25), Clock(FRAME, of="token", ratio=2))
    region = line(KEEP, 302)
    found = region_extents(
        Contract("hop", clocks, (region,), calls=(Call("c", {"token": hop}, {}, steady=True),)), region
    )
    assert found.attended == expected
    assert (found.stride, found.width) == (stride, len(expected))


@pytest.mark.parametrize("start", [0, 3000])
def test_a_ring_is_always_read_whole_and_has_one_shape(start):
    found = derived(line(Ring(3000), start, strides=(1,), order="ring"))
    assert (found.window, found.width, found.attended, found.envelope) == (0, 1, (3000,), 3000)
    assert found.verdict == "capture"


def test_a_left_context_of_ten_filled_by_the_first_call_has_two_shapes():
    found = derived(line(Window(10), 0, strides=(40,)))
    assert (found.attended, found.width, found.envelope) == ((0, 10), 2, 50)


def test_two_prompt_lengths_have_the_same_travel_and_their_own_extents():
    found = derived(line(KEEP, (302, 250), strides=(50,)))
    assert (found.window, found.width) == (100, 3)
    assert found.by_variant == ((302, 352, 402), (250, 300, 350))
    assert found.attended == (250, 300, 302, 350, 352, 402)


# ---------------------------------------------------------------------------------------------- closed forms
def test_the_travel_of_prompt_and_window_does_not_depend_on_the_prompt():
    assert travel(KeepEnds(START, 100)) == 100
    assert travel(KeepEnds(200, 100)) == 300 - PROMPT
    assert travel(Window(8)) == 8 - PROMPT
    assert travel(Window(6000, high=8000)) == 8000 - sympy.Min(6000, PROMPT)
    assert travel(Pinned()) == travel(Ring(7)) == 0
    assert travel(KeepAll()) == sympy.oo


def test_the_width_is_symbolic_in_the_stride():
    width = catalog_width(100)
    assert width == 1 + sympy.ceiling(100 / STRIDE)
    assert [width.subs(STRIDE, s) for s in (50, 24, 20, 1)] == [3, 6, 6, 101]


def test_a_window_that_falls_back_below_its_start_counts_both_walks():
    found = derived(line(Window(10, high=20), 15, strides=(1,)))
    assert found.attended == tuple(range(10, 21))
    assert (found.window, found.width) == (10, 11)


def test_where_closed_form_and_enumeration_differ_the_reason_says_which_counts():
    found = derived(line(Window(10, high=20), 10, strides=(3,)))
    assert found.attended == (10, 13, 16, 19)
    assert found.width == 5
    assert found.reason == "4 attended extents by enumeration, which counts; 1 + ceil(10/3) gives K = 5"


def test_several_steady_strides_use_the_smallest_and_the_reason_says_so():
    found = derived(line(KEEP, 0, strides=(50, 25)))
    assert found.stride == 25
    assert found.attended == (0, 25, 50, 75, 100)
    assert found.reason.endswith("the closed form takes the smallest of the strides 25, 50")


def test_strides_are_ticks_and_growth_turns_them_into_elements():
    found = derived(line(Window(3840), 0, strides=(50,), flush=(56,), growth=480))
    assert (found.stride, found.attended, found.envelope) == (24_000, (0, 3840), 3840 + 56 * 480)


# ---------------------------------------------------------------------------------------------- verdicts
def test_an_unbounded_region_is_excluded_and_has_no_envelope():
    found = derived(line(KeepAll(), 302, strides=(50,), reserved=(4698,)))
    assert (found.verdict, found.window, found.width, found.envelope, found.bytes) == (
        "exclude",
        None,
        None,
        None,
        None,
    )
    assert found.reserved_bytes == 4 * 4698
    assert found.rho is None
    assert "KeepAll never truncates" in found.reason


def test_a_region_that_no_steady_call_grows_is_excluded():
    found = derived(line(KEEP, 302))
    assert (found.verdict, found.width, found.bytes) == ("exclude", None, None)
    assert found.reason == "travel W = 100, but no steady call grows it: mark the regular call steady, or give strides"


def test_an_envelope_beyond_max_bytes_is_excluded_with_both_numbers():
    found = derived(line(Window(8), 8, strides=(2,)), max_bytes=39)
    assert found.reason == "the envelope takes 40 B, more than max_bytes = 39"
    assert derived(line(Window(8), 8, strides=(2,)), max_bytes=40).verdict == "capture"


def test_a_region_that_starts_at_its_limit_has_one_shape():
    found = derived(line(Window(8), 8, strides=(2,)))
    assert (found.width, found.attended, found.envelope) == (1, (8,), 10)
    assert found.reason == "one attended extent: it starts at its limit and stays there"


def test_scratch_that_shares_has_no_bytes_but_stock_reserves_them():
    shared = {found.region: found for found in all_extents(full())}["workspace"]
    assert (shared.bytes, shared.reserved_bytes, shared.rho, shared.shares) == (0, 2_097_152_000, None, "solver_kv")
    assert "uses the memory of 'solver_kv'" in shared.reason


def test_scratch_of_fixed_shape_counts_its_bytes_and_lives_during_a_call():
    found = derived(Region("staging", (16, 2, 1024, 2), mutability="scratch", lifetime="unit"))
    assert (found.bytes, found.lifetime, found.envelope) == (262_144, "unit", None)
    assert found.reason == "scratch of fixed shape: exists only during a call, as in stock"


def test_a_pinned_region_with_a_dimension_keeps_its_start():
    found = derived(line(Pinned(), (5, 7)))
    assert (found.attended, found.envelope, found.bytes, found.width) == ((5, 7), 7, 28, 1)


def test_a_constant_has_one_shape():
    assert derived(Region("noise", (1, 80, 30000), mutability="constant")).reason == "constant: one shape"


# ---------------------------------------------------------------------------------------------- calls
def test_a_last_chunk_widens_the_envelope_but_no_attended_extent():
    found = region_extents(full(), full().region("solver_kv"))
    assert found.attended == found.attended_all == (302, 352, 402)
    assert (found.envelope, found.bytes) == (458, 600_309_760)


def test_a_region_that_outlives_the_turn_is_not_reset_by_a_last_chunk():
    calls = (Call("chunk", {FRAME: 4}, {}, steady=True), Call("last", {FRAME: 1}, {}, ends="turn"))
    for lifetime, expected in (("turn", (0, 4, 8)), ("session", tuple(range(9)))):
        region = line(Window(8), 0, lifetime=lifetime)
        found = region_extents(Contract("c", (Clock(FRAME),), (region,), calls=calls), region)
        assert found.attended_all == expected


def test_extents_convert_to_json():
    found = derived(line(KEEP, 302, strides=(50,)))
    plain = json.loads(json.dumps(found.to_dict()))
    assert plain["attended"] == [302, 352, 402]
    assert plain["by_variant"] == [[302, 352, 402]]
    assert {"family", "region", "window", "stride", "width", "verdict", "reason", "envelope", "bytes", "rho"} <= set(
        plain
    )


# ---------------------------------------------------------------------------------------------- brute force
@st.composite
def traffic(draw: st.DrawFn) -> Any:
    start = draw(st.integers(0, 12))
    length = draw(st.integers(1, 12))
    head = draw(st.one_of(st.just(START), st.integers(start, 12)))
    rule = draw(
        st.sampled_from(
            [
                Window(start + length),
                Window(start + length, side="head"),
                Window(length, high=start + length),
                KeepEnds(head, length),  # type: ignore[arg-type]
            ]
        )
    )
    advances = st.lists(st.integers(1, 9), min_size=1, max_size=3, unique=True).map(tuple)
    return rule, start, draw(advances), draw(st.one_of(st.just(()), advances))


def truncate(rule: Retention, content: list[int], start: int) -> list[int]:
    """What the models do, written with slices of a list."""
    if isinstance(rule, Window):
        if len(content) <= (rule.high or rule.length):
            return content
        return content[: rule.length] if rule.side == "head" else content[-rule.length :]
    assert isinstance(rule, KeepEnds)
    head = start if rule.head == START else int(rule.head)
    if len(content) > head + rule.tail:
        content = content[:head] + content[-rule.tail :]
    return content


def append(order: str, content: list[int], new: list[int]) -> list[int]:
    return new + content if order == "new_first" else content + new


def simulate(rule: Retention, order: str, start: int, growths: tuple[int, ...]) -> set[int]:
    seen: set[int] = set()
    todo = [list(range(start))]
    while todo:
        content = todo.pop()
        if len(content) in seen:
            continue
        seen.add(len(content))
        todo += [truncate(rule, append(order, content, [-1] * growth), start) for growth in growths]
    return seen


@settings(deadline=None)
@given(case=traffic(), order=st.sampled_from(["new_first", "old_first"]))
def test_enumerated_extents_equal_those_of_appending_and_slicing_lists(case, order):
    rule, start, strides, flush = case
    found = derived(line(rule, start, strides=strides, flush=flush, order=order))
    assert set(found.attended) == simulate(rule, order, start, strides)
    assert set(found.attended_all) == simulate(rule, order, start, strides + flush)


@settings(deadline=None)
@given(case=traffic(), order=st.sampled_from(["new_first", "old_first"]), seed=st.integers(0, 2**16))
def test_no_simulated_call_exceeds_the_envelope(case, order, seed):
    rule, start, strides, flush = case
    found = derived(line(rule, start, strides=strides, flush=flush, order=order))
    content, picks = list(range(start)), random.Random(seed)
    for _ in range(40):
        content = append(order, content, [-1] * picks.choice(strides + flush))
        assert len(content) <= (found.envelope or 0)
        content = truncate(rule, content, start)
        assert len(content) in found.attended_all


@given(start=st.integers(0, 300), tail=st.integers(1, 200), stride=st.integers(1, 60))
def test_prompt_and_window_reach_exactly_the_closed_form_number_of_extents(start, tail, stride):
    rule = KeepEnds(START, tail)
    window = travel(rule).subs(PROMPT, start)
    assert len(reachable_extents(rule, start, [Move(stride, True)])) == catalog_width(window, stride)
