"""Targets by name: options reach the function that names them, and mistakes are named."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from cadence_fx.contract import Arg, Contract, Region, Result
from cadence_fx.errors import CadenceError
from cadence_fx.families import FAMILIES, load
from cadence_fx.traffic import SessionMemory, Step


class Summing(nn.Linear):
    """Adds the state to what it returns and counts the calls in it."""

    def __init__(self, width: int) -> None:
        super().__init__(width, 1)

    def forward(self, x: torch.Tensor, state: torch.Tensor) -> Any:  # type: ignore[override]
        return super().forward(x) + state, state + 1


def summing_contract() -> Contract:
    return Contract("toy", clocks=(), regions=(Region("count", (1,), enters=Arg("state"), leaves=Result(1)),))


@pytest.fixture
def target(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A module ``user_target`` with a factory."""

    def make(width: int = 2) -> Any:
        made.append(width)
        inputs = [{"x": torch.zeros(1, width), "state": torch.ones(1)}, {"x": torch.ones(1, width)}]
        return Summing(width), summing_contract(), inputs

    made: list[int] = []
    module: Any = ModuleType("user_target")
    module.make, module.number, module.wrong = make, 5, lambda: (nn.Linear(1, 1), "contract")
    monkeypatch.setitem(sys.modules, "user_target", module)
    return SimpleNamespace(made=made)


def adapter(monkeypatch: pytest.MonkeyPatch, **functions: Any) -> None:
    module = ModuleType("cadence_fx.adapters.moshi")
    for name, function in functions.items():
        setattr(module, name, function)
    monkeypatch.setitem(sys.modules, module.__name__, module)


def test_every_family_is_an_adapter_of_the_same_name() -> None:
    assert {name: f"cadence_fx.adapters.{name}" for name in FAMILIES} == FAMILIES


def test_a_family_without_an_adapter_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cadence_fx.adapters.freeze_omni", None)
    with pytest.raises(CadenceError, match="'freeze_omni' has no adapter in this version; available: token2wav"):
        load("freeze_omni")


def test_an_option_goes_to_each_function_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def build_random(device: str, seed: int, depth: int = 1, heads: int = 1) -> nn.Module:
        seen["build"] = (device, seed, depth, heads)
        return nn.Identity()

    def contract(depth: int = 1, steps: int = 1) -> Any:
        seen["contract"] = (depth, steps)

    adapter(monkeypatch, build_random=build_random, contract=contract, script=lambda *given: [given])
    family = load("moshi", depth=2, steps=3)
    family.build_random("cpu", 7, heads=4)
    family.contract()
    assert seen == {"build": ("cpu", 7, 2, 4), "contract": (2, 3)}
    assert family.name == "moshi"
    given: Any = next(iter(family.script(nn.Identity(), family.contract(), 1, 4)))
    assert given[2:] == (1, 4)


def test_an_option_that_nobody_names_goes_to_the_function_that_takes_any(monkeypatch: pytest.MonkeyPatch) -> None:
    def build_random(device: str, seed: int, **sizes: int) -> Any:
        return sizes

    adapter(monkeypatch, build_random=build_random, contract=lambda steps=1: steps)
    family: Any = load("moshi", depth=2, steps=3)
    assert family.build_random("cpu", 0) == {"depth": 2}
    assert family.contract() == 3


def test_a_factory_gives_the_same_weights_for_the_same_seed(target: SimpleNamespace) -> None:
    family = load("user_target:make", width=3)
    before = torch.get_rng_state()
    one, two, other = (family.build_random("cpu", seed) for seed in (1, 1, 2))
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(one.weight, two.weight)  # type: ignore[arg-type]
    assert not torch.equal(one.weight, other.weight)  # type: ignore[arg-type]
    assert target.made == [3, 3, 3]


def test_a_factory_is_called_once_for_contract_and_inputs(target: SimpleNamespace) -> None:
    family = load("user_target:make")
    contract = family.contract()
    assert contract.name == "toy"
    assert [step.name for step in family.script(nn.Identity(), contract, 0, 2)] == ["start", "call", "call"]
    assert target.made == [2]


def test_the_example_inputs_of_a_factory_are_played_from_a_clone_of_their_start_state(target: SimpleNamespace) -> None:
    family = load("user_target:make")
    module, contract = family.build_random("cpu", 0), family.contract()
    for _ in range(2):  # a second run starts where the first did
        memory = SessionMemory.of(contract)
        steps = list(family.script(module, contract, 0, 2))
        results = [step.action(module, memory) for step in steps]
        assert [step.is_chunk for step in steps] == [False, True, True]
        assert results[0] is None
        assert memory.state.tolist() == [3.0]
        assert torch.equal(results[1][0], module(torch.zeros(1, 2), torch.ones(1))[0])


def test_a_factory_may_give_steps_and_plays_no_more_calls_than_asked(target: SimpleNamespace) -> None:
    steps = [Step("mine", lambda decoder, memory: memory.start(torch.zeros(1)))]
    steps += [Step(f"call {i}", lambda decoder, memory: None, is_chunk=True) for i in range(3)]
    sys.modules["user_target"].stepped = lambda: (Summing(2), summing_contract(), steps)  # type: ignore[attr-defined]
    family = load("user_target:stepped")
    names = [step.name for step in family.script(nn.Identity(), family.contract(), 0, 2)]
    assert names == ["mine", "call 0", "call 1"]


def test_the_stream_of_a_factory_repeats_its_first_example_call(target: SimpleNamespace) -> None:
    family = load("user_target:make")
    module, contract = family.build_random("cpu", 0), family.contract()
    steps = list(family.stream(module, contract, 0, 3))
    assert [step.name for step in steps] == ["start", "call", "call", "call"]
    memory = SessionMemory.of(contract)
    for step in steps:
        step.action(module, memory)
    assert memory.state.tolist() == [4.0]


def test_a_stream_is_the_adapters_own_and_one_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    functions: dict[str, Any] = {"build_random": lambda device, seed: nn.Identity(), "contract": summing_contract}
    adapter(monkeypatch, **functions, stream=lambda *given: [given])
    given: Any = next(iter(load("moshi").stream(nn.Identity(), summing_contract(), 1, 4)))
    assert given[2:] == (1, 4)
    adapter(monkeypatch, **functions)
    with pytest.raises(CadenceError, match=r"the adapter of 'moshi' has no stream\(\)"):
        load("moshi").stream(nn.Identity(), summing_contract(), 1, 4)


@pytest.mark.parametrize(
    ("name", "options", "text"),
    [
        ("moshy", {}, "did you mean 'moshi'?"),
        ("no_such_module:make", {}, "needs the module 'no_such_module'"),
        ("user_target:mak", {}, "user_target has no 'mak' (did you mean 'make'?)"),
        ("user_target:number", {}, "user_target:number is a int"),
        ("user_target:make", {"wide": 1}, "user_target:make has no option 'wide' (did you mean 'width'?)"),
        (":make", {}, "write package.module:factory"),
    ],
)
def test_a_wrong_target_is_named(target: SimpleNamespace, name: str, options: dict[str, Any], text: str) -> None:
    with pytest.raises(CadenceError) as error:
        load(name, **options)
    assert text in str(error.value)


def test_a_factory_with_another_result_is_named(target: SimpleNamespace) -> None:
    with pytest.raises(CadenceError, match=r"returned \(Linear, str\); a factory returns \(module, contract"):
        load("user_target:wrong").contract()
