from __future__ import annotations

import json
import re
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cadence_fx.contract import Arg, Attr, Bound, Call, Clock, Contract, Region, Result, Scalar
from cadence_fx.contract_json import SCHEMA, from_dict, from_json, to_dict, to_json
from cadence_fx.errors import ContractError
from cadence_fx.retention import START, KeepAll, KeepEnds, Pinned, Ring, Window
from tests.decoder import full, solver_kv


def refused(text: str) -> Any:
    return pytest.raises(ContractError, match=re.escape(text))


def small(**changes: Any) -> dict[str, Any]:
    """A small contract as a dict, to be spoilt."""
    region = {"name": "kv", "shape": [None], "dim": 0, "clock": "frame", "retain": {"rule": "Window", "length": 8}}
    plain = {"schema": 1, "name": "small", "clocks": [{"name": "frame"}], "regions": [region]}
    return plain | changes


def spoilt(**changes: Any) -> dict[str, Any]:
    plain = small()
    plain["regions"][0].update(changes)
    return plain


# ---------------------------------------------------------------------------------------------- round trip
def test_the_full_decoder_contract_survives_the_round_trip():
    contract = full()
    assert from_json(to_json(contract)) == contract
    assert to_json(from_json(to_json(contract))) == to_json(contract)


def test_the_json_carries_its_schema_version_and_reads_well():
    plain = to_dict(full())
    assert next(iter(plain.items())) == ("schema", 1)
    assert SCHEMA == 1
    assert plain["clocks"][1] == {"name": "mel_frame", "of": "token", "ratio": "2"}
    region = plain["regions"][0]
    assert region["retain"] == {"rule": "KeepEnds", "head": "start", "tail": 100}
    assert region["enters"] == {"arg": ["cache", "estimator_att_cache"]}
    assert "lifetime" not in region  # defaults are left out
    assert plain["regions"][-1]["enters"] == {"attr": "decoder.att_cache_buffer"}


names = st.text("abcdefg_[]'\"é", min_size=1, max_size=6)
keys = st.one_of(names, st.integers(-3, 9))
values = st.one_of(st.none(), st.booleans(), st.integers(), names, st.floats(allow_nan=False, allow_infinity=False))
places = st.one_of(
    st.lists(keys, max_size=3).map(lambda path: Arg(*path)),
    st.lists(keys, max_size=3).map(lambda path: Result(*path)),
    names.map(Attr),
)
rules = st.sampled_from(
    [KeepAll(), Pinned(), Ring(9), Window(9), Window(9, high=11, side="head"), KeepEnds(START, 3), KeepEnds(9, 1)]
)
ratios = st.fractions(min_value=Fraction(1, 9), max_value=9, max_denominator=9)


@st.composite
def contracts(draw: st.DrawFn) -> Contract:
    regions = []
    for name in draw(st.lists(names, unique=True, max_size=3)):
        growing = draw(st.booleans())
        where: dict[str, Any] = {"dim": 1, "clock": "frame", "retain": draw(rules)} if growing else {}
        if growing:
            where |= {"start": draw(st.sampled_from([0, 9, (9, 9)])), "growth": draw(st.integers(1, 5))}
            where |= {"strides": tuple(draw(st.lists(st.integers(1, 9), max_size=2)))}
            where |= {"order": draw(st.sampled_from(["new_first", "old_first", "ring", "replace"]))}
        regions.append(
            Region(
                name,
                (2, None if growing else 4),
                dtype=draw(st.sampled_from(["float32", "bfloat16"])),
                lifetime=draw(st.sampled_from(["unit", "turn", "session"])),
                reserved=draw(st.sampled_from([None, (3, 99)])),
                mutability=draw(st.sampled_from(["scratch", "constant"])),  # states must not share a place
                enters=draw(st.one_of(st.none(), places)),
                leaves=draw(st.one_of(st.none(), places)),
                **where,
            )
        )
    tokens = Clock("token", of="frame", ratio=draw(ratios))
    clocks = (Clock("frame", hz=draw(st.one_of(st.none(), st.integers(1, 99), st.floats(0.5, 99)))), tokens)
    scalars = draw(st.lists(st.tuples(st.lists(keys, max_size=2).map(lambda path: Arg(*path)), values), max_size=2))
    fixed = {place: Scalar(place, (value,)) for place, value in scalars}
    ends: Any = draw(st.sampled_from([None, "turn"]))
    steady = draw(st.booleans())
    call = Call("c", {"frame": 3}, {}, scalars=tuple(scalars), steady=steady, ends=ends)
    calls = () if any(r.strides for r in regions) else (call,)
    bounds = (Bound("frame", draw(st.integers(3, 9))),)
    return Contract(
        draw(names),
        clocks,
        tuple(regions),
        calls=calls,
        scalars=tuple(fixed.values()),
        admit=bounds,
        max_bytes=draw(st.one_of(st.none(), st.integers(1, 2**60))),
    )


def typed(contract: Contract) -> str:
    return repr(contract)  # unlike ==, tells 1, 1.0 and True apart


@settings(deadline=None)
@given(contracts())
def test_any_contract_survives_the_round_trip_with_its_types(contract):
    again = from_json(to_json(contract))
    assert again == contract
    assert typed(again) == typed(contract)


# ---------------------------------------------------------------------------------------------- refusals
@pytest.mark.parametrize("schema", [2, None, "1", True])
def test_an_unknown_schema_version_is_refused(schema):
    with refused(f"contract: schema is {schema!r}; this version of cadence_fx reads schema 1"):
        from_dict(small(schema=schema))


def test_an_unknown_field_gets_a_suggestion():
    with refused("contract.regions[0]: unknown field 'lifetme'; Region has name, shape") as caught:
        from_dict(spoilt(lifetme="turn"))
    assert str(caught.value).endswith("(did you mean 'lifetime'?)")


def test_a_missing_field_is_named():
    with refused("contract.clocks[0]: field 'name' is missing; Clock needs it"):
        from_dict(small(clocks=[{}]))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"dim": "0"}, "contract.regions[0].dim is '0'; expected an int"),
        ({"dim": True}, "contract.regions[0].dim is True; expected an int"),
        ({"dtype": 32}, "contract.regions[0].dtype is 32; expected a string"),
        ({"shape": 8}, "contract.regions[0].shape is 8; expected a list"),
        ({"shape": [1.5]}, "contract.regions[0].shape[0] is 1.5; expected an int or null"),
        ({"start": "x"}, "contract.regions[0].start is 'x'; expected a list or an int"),
        ({"growth": 0.5}, "contract.regions[0].growth is 0.5; expected an int or a fraction such as \"3/2\""),
        ({"growth": "1/0"}, "contract.regions[0].growth is '1/0'; expected an int or a fraction"),
        ({"order": "newfirst"}, "contract.regions[0].order is 'newfirst'; expected one of new_first, "),
        ({"order": "newfirst"}, "old_first, ring, replace (did you mean 'new_first'?)"),
        ({"fixed_clocks": [[0]]}, "contract.regions[0].fixed_clocks[0] is [0]; expected a list of 2"),
        ({"retain": {"rule": "Windw", "length": 8}}, "rule is 'Windw'; expected one of KeepAll, Pinned, "),
        ({"retain": {"rule": "Windw", "length": 8}}, "Ring, Window, KeepEnds (did you mean 'Window'?)"),
        ({"retain": {"length": 8}}, "contract.regions[0].retain: rule is None"),
        ({"retain": "Window"}, "contract.regions[0].retain is 'Window'; expected an object that is one of KeepAll"),
        ({"retain": {"rule": "KeepEnds", "head": "end", "tail": 1}}, "head is 'end'; expected an int or 'start'"),
        ({"enters": {"args": ["x"]}}, "exactly one key of arg, result, attr (did you mean 'arg'?)"),
        ({"enters": {"arg": [1.5]}}, "contract.regions[0].enters.arg[0] is 1.5; expected a string or an int"),
        ({"enters": {"attr": 3}}, "contract.regions[0].enters.attr is 3; expected a string"),
        ({"clock": "fram"}, "Region 'kv': clock is 'fram'; no clock has that name"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_refused_with_its_path(changes, text):
    with refused(text):
        from_dict(spoilt(**changes))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"regions": [3]}, "contract.regions[0] is 3; expected an object with the fields of Region"),
        ({"calls": [{"name": "c", "ticks": [], "sizes": {}}]}, "contract.calls[0].ticks is []; expected an object"),
        ({"calls": [{"name": "c", "ticks": {}, "sizes": {}, "steady": 1}]}, "steady is 1; expected true or false"),
        ({"calls": [{"name": "c", "ticks": {}, "sizes": {}, "ends": "tur"}]}, "calls[0].ends is 'tur'; expected "),
        ({"clocks": [{"name": "frame", "hz": "50"}]}, "contract.clocks[0].hz is '50'; expected a number or null"),
    ],
)  # fmt: skip
def test_a_wrong_part_is_refused_with_its_path(changes, text):
    with refused(text):
        from_dict(small(**changes))


def test_text_that_is_no_json_is_refused():
    with refused("contract: the text is not JSON ("):
        from_json("{")
    with refused("contract is []; expected an object"):
        from_json("[]")


def test_numbers_that_json_cannot_hold_are_refused_when_writing():
    with refused("contract.scalars[0].per_start[0] is inf; JSON holds finite numbers only"):
        to_dict(full(scalars=(Scalar(Arg("x"), (float("inf"),)),)))


def test_values_without_a_json_form_are_refused_when_writing():
    odd: Any = (1j,)
    with refused("contract.scalars[0].per_start[0] is 1j; JSON has no form for complex"):
        to_dict(full(scalars=(Scalar(Arg("x"), odd),)))


def test_a_code_string_stays_a_string():
    contract = full(regions=(solver_kv(enters=Attr("__import__('os').getcwd()")),))
    assert json.loads(to_json(contract))["regions"][0]["enters"] == {"attr": "__import__('os').getcwd()"}
    assert from_json(to_json(contract)) == contract
