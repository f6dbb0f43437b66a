from __future__ import annotations

import copy
import pickle
import re
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest

from cadence_fx.contract import (
    Arg,
    Attr,
    Bound,
    Boundary,
    Call,
    Clock,
    Contract,
    Entry,
    Input,
    RandomStream,
    Region,
    Result,
    Scalar,
)
from cadence_fx.errors import CadenceError, ContractError
from cadence_fx.retention import START, KeepEnds, Ring, Window
from tests.decoder import FRAME, KEEP, alone, chunk, full, last, line, solver_kv

WRONG: Any = (1.5, "turns")  # what the annotations forbid, and what a program without a type checker passes


def refused(text: str) -> Any:
    """The construction inside fails, and its text contains ``text`` literally."""
    return pytest.raises(ContractError, match=re.escape(text))


def test_the_full_decoder_contract_is_consistent():
    assert full().variants == 1


def test_a_contract_error_is_a_cadence_error_and_a_value_error():
    with pytest.raises(ValueError, match="name is empty") as caught:
        Clock("")
    assert isinstance(caught.value, CadenceError)


# ---------------------------------------------------------------------------------------------- names
@pytest.mark.parametrize(
    ("field", "name"),
    [("clocks", "token"), ("regions", "solver_kv"), ("calls", "chunk")],
)
def test_a_name_that_occurs_twice_is_refused(field, name):
    items = getattr(full(), field)
    with refused(
        f"Contract 'token2wav': {field} is {name!r}; it occurs twice, names are unique: rename one or drop it"
    ):
        full(**{field: (*items, items[0])})


def test_a_region_on_an_unknown_clock_gets_a_suggestion():
    with refused("Region 'line': clock is 'mel_fram'; no clock has that name, known are mel_frame, solver_step"):
        alone(replace(line(KEEP, 302), clock="mel_fram"))
    with refused("(did you mean 'mel_frame'?)"):
        alone(replace(line(KEEP, 302), clock="mel_fram"))


def test_a_fixed_clock_that_is_unknown_gets_a_suggestion():
    with refused("Region 'solver_kv': fixed_clocks[0] is 'solver_steps'; no clock has that name") as caught:
        alone(solver_kv(fixed_clocks=((0, "solver_steps"),)))
    assert str(caught.value).endswith("(did you mean 'solver_step'?)")


def test_ticks_of_an_unknown_clock_get_a_suggestion():
    with refused("Call 'c': ticks is 'tokens'; no clock has that name") as caught:
        full(calls=(Call("c", {"tokens": 25}, {"token": (28,)}),))
    assert str(caught.value).endswith("(did you mean 'token'?)")


def test_a_bound_on_an_unknown_clock_gets_a_suggestion():
    with refused("Bound: clock is 'mel_frames'; no clock has that name") as caught:
        full(admit=(Bound("mel_frames", 50),))
    assert str(caught.value).endswith("(did you mean 'mel_frame'?)")


def test_a_boundary_on_an_unknown_clock_gets_a_suggestion():
    with refused("Boundary 'decoder': clock is 'solver'; no clock has that name") as caught:
        full(boundaries=(Boundary("decoder", "solver"),))
    assert str(caught.value).endswith("(did you mean 'solver_step'?)")


def test_a_random_stream_on_an_unknown_clock_is_refused_but_chunk_is_built_in():
    with refused("RandomStream: clock is 'chunks'; no clock has that name"):
        full(random=(RandomStream(clock="chunks"),))
    assert full(random=(RandomStream(clock="chunk"),)).random[0].generator == "device"


def test_an_unknown_parent_clock_is_refused():
    with refused("Clock 'b': of is 'frame'; no clock has that name, known are a, b"):
        Contract("c", (Clock("a"), Clock("b", of="frame")), ())


def test_an_unknown_factor_of_a_product_is_refused():
    with refused("Clock 'b': product is 'step'; no clock has that name, known are a, b"):
        Contract("c", (Clock("a"), Clock("b", product=("a", "step"))), ())


def test_an_entry_that_leaves_an_unknown_region_is_refused():
    with refused("Entry 'prime': leaves is 'solver_k'; no region has that name") as caught:
        full(entries=(Entry("prime", (("solver_k", Result()),)),))
    assert str(caught.value).endswith("(did you mean 'solver_kv'?)")


# ---------------------------------------------------------------------------------------------- clocks
def test_a_cycle_of_parents_is_refused_and_shown():
    with refused("Clock 'a': of is 'c'; it depends on itself (a -> c -> b -> a); one must stand alone"):
        Contract("x", (Clock("a", of="c"), Clock("b", of="a"), Clock("c", of="b")), ())


def test_a_clock_below_a_cycle_does_not_hang_the_check():
    with refused("it depends on itself (b -> b)"):
        Contract("x", (Clock("a", of="b"), Clock("b", of="b")), ())


def test_a_product_of_itself_is_refused():
    with refused("Clock 'p': product is ('a', 'p'); it depends on itself (p -> p)"):
        Contract("x", (Clock("a"), Clock("p", product=("a", "p"))), ())


def test_rates_that_contradict_the_ratio_are_refused():
    with refused("Clock 'frame': hz is 48; ratio 2 of 'token' at 25 Hz makes 50 Hz; leave hz out"):
        Contract("x", (Clock("token", hz=25), Clock("frame", of="token", ratio=Fraction(2), hz=48)), ())
    Contract("x", (Clock("token", hz=12.5), Clock("frame", of="token", ratio=Fraction(2), hz=25)), ())


def test_related_clocks_convert_in_both_directions():
    contract = full()
    assert contract.ratio("sample", "token") == 960
    assert contract.ratio("token", FRAME) == Fraction(1, 2)
    assert contract.ratio("token", "solver_step") is None
    assert contract.elapsed("token", {FRAME: 50}) == 25
    assert contract.elapsed("solver_step", {FRAME: 50}) == 0


# ---------------------------------------------------------------------------------------------- regions
@pytest.mark.parametrize("field", ["enters", "leaves"])
def test_two_states_at_one_place_are_refused(field):
    place = Arg("kv") if field == "enters" else Result(1)
    at: dict[str, Any] = {field: place}
    first, second = (replace(line(KEEP, 302), name=name, **at) for name in ("a", "b"))
    with refused(f"Region 'b': {field} is {str(place)!r}; region 'a' has the same; two states cannot share a place"):
        Contract("c", (Clock(FRAME),), (first, second))


def test_scratch_may_stand_at_the_place_of_a_state():
    state = line(KEEP, 302, enters=Attr("decoder.buffer"))
    scratch = Region("scratch", (4,), mutability="scratch", enters=Attr("decoder.buffer"))
    assert Contract("c", (Clock(FRAME),), (state, scratch)).states == (state,)


@pytest.mark.parametrize("start", [(302, 250), ()])
def test_starts_that_do_not_match_the_variants_are_refused(start):
    other = replace(line(KEEP, (1, 2, 3)), name="other")
    with refused(f"Region 'line': start is {start}; the contract has 3 start variant(s); give 1 value or one for each"):
        Contract("c", (Clock(FRAME),), (line(KEEP, start), other))


def test_scalars_that_do_not_match_the_variants_are_refused():
    with refused(
        "Scalar arg['n']: per_start is (1, 2); the contract has 3 start variant(s); give 1 value or one for each"
    ):
        alone(line(KEEP, (1, 2, 3)), scalars=(Scalar(Arg("n"), (1, 2)),))


def test_sharing_memory_with_an_unknown_region_is_refused():
    with refused("Region 'w': shares is 'x'; no region has that name, known are w"):
        alone(Region("w", (4,), mutability="scratch", shares="x"))


def test_sharing_memory_with_a_region_that_is_no_state_is_refused():
    with refused("Region 'w': shares is 'w'; that region is 'scratch'; name a state region"):
        alone(Region("w", (4,), mutability="scratch", shares="w"))


def test_a_state_region_that_shares_memory_is_refused():
    with refused("Region 'w': shares is 'w'; only a scratch region can share memory, not 'state'"):
        alone(Region("w", (4,), shares="w"))


def test_a_fixed_clock_that_contradicts_the_size_is_refused():
    with refused("Region 'solver_kv': shape[0] is 16; clock 'solver_step' has 10 tick(s); make the two equal"):
        alone(solver_kv(shape=(16, 16, 2, 8, None, 128), fixed_clocks=((0, "solver_step"),)))


def test_a_fixed_clock_without_an_extent_is_refused():
    with refused(
        "Region 'solver_kv': fixed_clocks[0] is 'mel_frame'; that clock is unbounded; give the clock an extent"
    ):
        alone(solver_kv(fixed_clocks=((0, FRAME),)))


def test_a_product_of_bounded_clocks_indexes_a_packed_dimension():
    clocks = (Clock("step", extent=10), Clock("block", extent=16), Clock("both", product=("step", "block")))
    assert Contract("c", clocks, (Region("r", (160, 4), fixed_clocks=((0, "both"),)),)).regions[0].shape == (160, 4)
    with refused("Region 'r': shape[0] is 150; clock 'both' has 160 tick(s)"):
        Contract("c", clocks, (Region("r", (150, 4), fixed_clocks=((0, "both"),)),))
    unbounded = (Clock("step"), *clocks[1:])
    with refused("Region 'r': fixed_clocks[0] is 'both'; that clock is unbounded"):
        Contract("c", unbounded, (Region("r", (160, 4), fixed_clocks=((0, "both"),)),))


def test_a_product_clock_that_drives_a_dimension_is_refused():
    clocks = (Clock("a"), Clock("b", extent=2), Clock("ab", product=("a", "b")))
    with refused("Region 'line': clock is 'ab'; a product drives no single dimension"):
        Contract("c", clocks, (replace(line(KEEP, 0), clock="ab"),))


def test_strides_that_grow_a_region_by_a_fraction_are_refused():
    with refused("Region 'line': strides is 3; with growth 1/2 it is no whole number of elements"):
        alone(line(KEEP, 0, strides=(3,), growth=Fraction(1, 2)))


# ---------------------------------------------------------------------------------------------- inputs and calls
def test_two_inputs_at_one_place_are_refused():
    with refused("Input: place is \"arg['token']\"; another input has the same; declare each argument once"):
        full(inputs=(*full().inputs, Input(Arg("token"), (1, 28))))


def test_an_input_at_the_place_of_a_state_is_refused():
    with refused("Input: place is \"arg['mel']\"; region 'mel' has the same; declare each argument once"):
        full(inputs=(*full().inputs, Input(Arg("mel"), (1, 80, 8))))


def test_a_scalar_at_the_place_of_an_input_is_refused():
    with refused("Scalar: place is \"arg['token']\"; another input has the same; declare each argument once"):
        full(scalars=(Scalar(Arg("token"), (1,)),))


def test_sizes_of_an_unknown_input_get_a_suggestion():
    with refused("Call 'c': sizes is 'tokens'; no input has that name, known are token, spk (did you mean 'token'?)"):
        full(calls=(Call("c", {"token": 25}, {"tokens": (28,)}),))


@pytest.mark.parametrize("sizes", [{"token": (1, 28)}, {}])
def test_a_wrong_number_of_sizes_is_refused(sizes):
    found = sizes.get("token", ())
    with refused(
        f"Call 'c': sizes['token'] is {found}; the input's shape (1, None) leaves 1 size(s) open; give as many"
    ):
        full(calls=(Call("c", {"token": 25}, sizes),))


def test_a_negative_size_is_refused():
    with refused("Call 'c': sizes['token'] is (-1,); a size is not negative"):
        full(calls=(Call("c", {"token": 25}, {"token": (-1,)}),))


def test_a_call_that_passes_none_for_an_input_needs_no_sizes():
    call = Call("c", {"token": 25}, {}, scalars=((Arg("token"), None),))
    assert full(calls=(call,)).call("c") == call


def test_ticks_of_related_clocks_that_disagree_are_refused():
    with refused(
        "Call 'c': ticks['mel_frame'] is 56; the other clocks of this call advance it by 50; give one of them"
    ):
        full(calls=(Call("c", {"token": 25, FRAME: 56}, {"token": (28,)}),))
    full(calls=(Call("c", {"token": 25, FRAME: 50}, {"token": (28,)}),))


def test_ticks_of_a_product_clock_are_refused():
    clocks = (Clock("a"), Clock("ab", product=("a",)))
    with refused("Call 'c': ticks is 'ab'; a product clock advances through its factors; name the factors"):
        Contract("x", clocks, (), calls=(Call("c", {"ab": 1}, {}),))


def test_ticks_that_grow_a_region_by_a_fraction_are_refused():
    with refused("Region 'line': 3 ticks of 'mel_frame' grow it by 3/2, no whole number; mend growth or ratio"):
        alone(line(KEEP, 0, growth=Fraction(1, 2)), calls=(Call("c", {FRAME: 3}, {}),))


def test_strides_that_contradict_the_steady_calls_are_refused():
    with refused("Region 'solver_kv': strides is (25,); the steady calls grow it by 50 (elements); leave strides out"):
        full(regions=(solver_kv(strides=(25,)),))
    with refused("Region 'line': strides is (50,); the steady calls grow it by nothing (elements)"):
        alone(line(KEEP, 302, strides=(50,)), calls=(Call("c", {"solver_step": 1}, {}, steady=True),))


def test_flushes_that_contradict_the_other_calls_are_refused():
    calls = (chunk(), last(5), last(28))
    with refused("Region 'solver_kv': flush is (56,); the other calls grow it by 10, 56 (elements); leave flush out"):
        full(regions=(solver_kv(flush=(56,)),), calls=calls, entries=())
    # A flush as long as a steady call is none that the calls could contradict.
    agreed = solver_kv(strides=(50,), flush=(10, 50, 56))
    assert full(regions=(agreed,), calls=calls).regions == (agreed,)


# ---------------------------------------------------------------------------------------------- limits
@pytest.mark.parametrize("field", ["max_graphs", "max_bytes", "max_constant_bytes"])
def test_a_limit_that_is_not_positive_is_refused(field):
    with refused(f"Contract 'token2wav': {field} is 0; a limit is at least 1"):
        full(**{field: 0})


def test_a_bound_that_admits_nothing_is_refused():
    with refused("Bound on 'mel_frame': at_most is 0; it would admit no call; give at least 1 tick"):
        full(admit=(Bound(FRAME, 0),))


def test_a_bound_below_the_steady_call_is_refused():
    with refused("Call 'chunk': steady is True; every steady call would run as stock: it advances 'mel_frame' by 50, "
                 "admit allows 40; raise the bound"):  # fmt: skip
        full(admit=(Bound(FRAME, 40),))


# ---------------------------------------------------------------------------------------------- single values
@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Arg(WRONG[0]), "Arg: key 1.5 is neither a str nor an int"),
        (lambda: Clock("c", hz=0), "Clock 'c': hz is 0; a rate is positive"),
        (lambda: Clock("c", of="d", ratio=0), "Clock 'c': ratio is 0; a clock only advances"),
        (lambda: Clock("c", ratio=2), "Clock 'c': ratio 2 without a parent"),
        (lambda: Clock("c", extent=0), "Clock 'c': extent is 0; a bounded clock has at least one tick"),
        (lambda: Clock("c", extent=2, product=("a",)), "Clock 'c': a product clock takes its rate and extent from"),
        (lambda: Region("", (1,)), "Region: name is empty"),
        (lambda: Region("r", (1,), lifetime=WRONG[1]), "lifetime is 'turns'; expected one of operator, unit, turn"),
        (lambda: Region("r", (1,), dtype="float33"), "dtype is 'float33'; expected a torch dtype name (did you mean "),
        (lambda: Region("r", (1,), dim=1, clock="c"), "dim is 1; the shape has dimensions 0..0"),
        (lambda: Region("r", (None,)), "shape is (None,); put None at the growing dimension"),
        (lambda: Region("r", (None,), dim=0), "clock is None; dim and clock go together"),
        (lambda: Region("r", (-1,)), "shape is (-1,); a size is not negative"),
        (lambda: Region("r", (1,), reserved=(1, 2)), "reserved is (1, 2); it needs 1 sizes"),
        (lambda: line(KEEP, 1, growth=0), "growth is Fraction(0, 1); a region grows by a positive number"),
        (lambda: Region("r", (1,), fixed_clocks=((1, "c"),)), "fixed_clocks is (1, 'c'); name a dimension of 0..0"),
        (lambda: line(KEEP, -1), "start is (-1,); an extent is not negative"),
        (lambda: line(KEEP, 1, flush=(0,)), "flush is (0,); a call advances its clock by at least one tick"),
        (lambda: line(Ring(8), 3), "a ring of 8 slots starts full (8) or at 0, but start is 3"),
        (lambda: line(Ring(0), 0), "a ring has at least one slot, not 0"),
        (lambda: line(Window(8), 9), "the window holds 8 elements at most, but start is 9"),
        (lambda: line(Window(0), 0), "a window keeps at least one element, not 0"),
        (lambda: line(Window(8, high=4), 0), "high (4) is below length (8)"),
        (lambda: line(KeepEnds(2, 3), 6), "it keeps 5 elements at most, but start is 6"),
        (lambda: line(KeepEnds(START, 0), 6), "a tail has at least one"),
        (lambda: Input(Arg("x"), (1,), "flaot32"), "Input arg['x']: dtype is 'flaot32' (did you mean 'float32'?)"),
        (lambda: Input(Arg("x"), (1,), high=0), "Input arg['x']: high is 0; integers are drawn from 0..high-1"),
        (lambda: Call("c", {"t": 0}, {}), "Call 'c': ticks['t'] is 0; leave clocks out that stand still"),
        (lambda: Call("c", {}, {}, ends=WRONG[1]), "Call 'c': ends is 'turns'; expected one of operator, unit, turn"),
    ],
)  # fmt: skip
def test_a_value_that_cannot_be_right_is_refused_on_its_own(make, text):
    with refused(text):
        make()


def test_looking_up_a_name_that_does_not_exist_suggests_one():
    with refused("no region is called 'solver'; the contract has solver_kv, solver_cnn"):
        full().region("solver")
    with refused("no call is called 'chunks'; ") as caught:
        full().call("chunks")
    assert str(caught.value).endswith("(did you mean 'chunk'?)")


# ---------------------------------------------------------------------------------------------- a value
def test_a_contract_hashes_and_survives_copy_and_pickle():
    contract = full()
    assert contract == full()
    assert hash(contract) == hash(full())
    assert copy.deepcopy(contract) == contract
    assert pickle.loads(pickle.dumps(contract)) == contract


@pytest.mark.parametrize("change", [
    lambda ticks: ticks.__setitem__("token", 1), lambda ticks: ticks.pop("token"), lambda ticks: ticks.clear(),
    lambda ticks: ticks.update(token=1), lambda ticks: ticks.__ior__({}), lambda ticks: ticks.setdefault("x", 1),
])  # fmt: skip
def test_the_maps_of_a_call_are_frozen(change):
    ticks = chunk().ticks
    with pytest.raises(TypeError, match="a contract is frozen"):
        change(ticks)
    assert ticks == {"token": 25}


def test_a_contract_needs_neither_torch_nor_a_gpu():
    import subprocess
    import sys

    names = "contract contract_check contract_json extents catalog changes report explain"
    code = f"import sys, importlib\nfor n in {names.split()}: importlib.import_module('cadence_fx.' + n)\n"
    code += "sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
