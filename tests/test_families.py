"""Targets by name: options reach the function that names them, and mistakes are named."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from cadence_fx.contract import Contract
from cadence_fx.errors import CadenceError
from cadence_fx.families import FAMILIES, load


@pytest.fixture
def target(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A module ``user_target`` with a factory; its contract is not checked."""
    checker: Any = ModuleType("cadence_fx.contract_check")
    checker.check = lambda contract: None
    monkeypatch.setitem(sys.modules, "cadence_fx.contract_check", checker)

    def make(width: int = 2) -> Any:
        made.append(width)
        return nn.Linear(width, 1), Contract(name="toy", clocks=(), regions=()), [(torch.zeros(1, width),)]

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
    assert [given[2] for given in family.script(nn.Identity(), family.contract(), 1, 4)] == [1]


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
    assert [args[0].shape for args in family.script(nn.Identity(), contract, 0)] == [(1, 2)]
    assert target.made == [2]


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
