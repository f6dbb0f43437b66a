"""Twins: the same tensors, containers of their own, and the original never changed."""

from __future__ import annotations

import collections
import dataclasses
import functools
import types
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.nn.utils import weight_norm as hooked_weight_norm  # the spelling that vendors still use

import cadence_fx
from cadence_fx.twin import make_twin, relocate
from tests.streams import Workspace, drawn, workspace_contract


class Settings(dict):
    """A dict with attributes, as vocoder configurations are."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


class Holder(nn.Module):
    table: torch.Tensor
    cache: torch.Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("cache", None)
        self.register_buffer("table", torch.arange(4.0), persistent=False)
        self.history: dict[str, Any] = {}
        self.log: list[Any] = [[], set()]
        self.settings = Settings(scale=2.0, sizes=[1, 2])
        self.ordered = collections.OrderedDict(a=1)
        self.counts: dict[str, int] = collections.defaultdict(int)
        self.plain = torch.ones(4)
        self.shape = (torch.ones(1), [3])
        self.again = self.linear
        self.call = self.scaled

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        self.history["last"] = x.shape
        return x * self.settings.scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.counts["calls"] += 1
        self.log[0].append(1)
        return self.again(self.call(x)) + self.table


def test_a_twin_shares_parameters_and_tensors_and_computes_the_same() -> None:
    module = Holder()
    twin = make_twin(module)
    assert type(twin) is Holder
    assert all(a is b for a, b in zip(module.parameters(), twin.parameters(), strict=True))
    assert twin.table is module.table
    assert twin.plain is module.plain
    x = torch.randn(2, 4)
    assert torch.equal(twin(x), module(x))
    assert twin.state_dict().keys() == module.state_dict().keys()


def test_what_a_call_on_the_twin_writes_stays_in_the_twin() -> None:
    module = Holder()
    twin = make_twin(module)
    twin(torch.randn(2, 4))
    twin.cache = torch.zeros(1)
    twin.settings["scale"] = 3.0
    twin.settings.sizes.append(3)
    twin.ordered["b"] = 2
    twin.shape[1].append(4)
    assert module.history == {}
    assert module.log == [[], set()]
    assert not module.counts
    assert module.cache is None
    assert module.settings == {"scale": 2.0, "sizes": [1, 2]}
    assert module.ordered == {"a": 1}
    assert module.shape[1] == [3]


@dataclasses.dataclass
class Running:
    calls: int = 0
    rows: list[int] = dataclasses.field(default_factory=list)


class Records(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.running, self.space = Running(), types.SimpleNamespace(calls=0)
        self.bump_by_two = functools.partial(self.bump, 2)

    def bump(self, n: int) -> None:
        self.running.calls += n
        self.running.rows.append(n)
        self.space.calls += n

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.bump(1)
        self.bump_by_two()
        return x


def test_records_and_partials_of_the_twin_are_its_own() -> None:
    module = Records()
    twin = make_twin(module)
    twin(torch.zeros(1))
    assert twin.running == Running(3, [1, 2])
    assert twin.space.calls == 3
    assert module.running == Running()
    assert module.space.calls == 0


def test_containers_keep_their_types() -> None:
    twin = make_twin(Holder())
    assert type(twin.settings) is Settings
    assert twin.settings.scale == 2.0
    assert type(twin.ordered) is collections.OrderedDict
    assert type(twin.counts) is collections.defaultdict


def test_a_submodule_used_twice_is_used_twice_by_the_twin() -> None:
    module = Holder()
    twin = make_twin(module)
    assert twin.again is twin.linear
    assert twin.linear is not module.linear


def test_bound_methods_are_bound_to_the_twin() -> None:
    module = Holder()
    twin: Any = make_twin(module)
    assert twin.call.__self__ is twin


def test_a_module_that_refers_to_itself_has_a_twin_that_does_too() -> None:
    module = Holder()
    module.__dict__["me"] = module
    module.history["me"] = module.history
    twin = make_twin(module)
    assert twin.me is twin
    assert twin.history["me"] is twin.history


def test_hooks_run_on_the_twin_and_are_removed_from_it_alone() -> None:
    module, seen = Holder(), []
    module.linear.register_forward_hook(lambda m, args, out: seen.append(m))
    twin = make_twin(module)
    twin(torch.randn(1, 4))
    assert seen == [twin.linear]
    twin.linear._forward_hooks.clear()
    assert len(module.linear._forward_hooks) == 1


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("spell", [hooked_weight_norm, parametrizations.weight_norm], ids=["hook", "parametrization"])
def test_both_spellings_of_weight_norm_compute_on_the_twin(spell: Any) -> None:
    module = nn.Sequential(spell(nn.Conv1d(2, 3, 3)), nn.Tanh())
    twin = make_twin(module)
    x = torch.randn(1, 2, 8)
    before = dict(module[0].__dict__)
    assert torch.equal(twin(x), module(x))
    assert twin.state_dict().keys() == module.state_dict().keys()
    assert all(a is b for a, b in zip(module.parameters(), twin.parameters(), strict=True))
    twin[0].__dict__["weight"] = torch.zeros(3, 2, 3)
    assert module[0].__dict__.keys() == before.keys()
    with torch.no_grad():
        next(iter(module.parameters())).mul_(2)
    del twin[0].__dict__["weight"]
    assert torch.equal(twin(x), module(x))  # an edit of the shared weight reaches both


# ---------------------------------------------------------------------------------------------- another device
class Tied(torch.nn.Module):
    """Tied weights, a buffer, a table in a plain attribute, and scratch of a vendor's size."""

    table: torch.Tensor
    big: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        self.b.weight = self.a.weight
        self.a.requires_grad_(False)
        self.register_buffer("table", torch.arange(4.0))
        self.register_buffer("big", torch.zeros(1000, 4))
        self.plain = torch.ones(3)


def test_a_twin_on_another_device_leaves_the_original_where_it_is() -> None:
    module = Tied()
    before = {name: id(t) for name, t in [*module.named_parameters(), *module.named_buffers()]}
    twin = make_twin(module)
    relocate(twin, torch.device("meta"), frozenset({"big"}))
    assert {name: id(t) for name, t in [*module.named_parameters(), *module.named_buffers()]} == before
    assert {t.device.type for t in module.parameters()} == {"cpu"}
    assert {t.device.type for t in twin.parameters()} == {twin.table.device.type} == {"meta"}
    assert twin.b.weight is twin.a.weight
    assert not twin.a.weight.requires_grad
    assert twin.b.bias.requires_grad
    assert twin.big is module.big  # exchanged by whoever serves
    assert twin.plain is module.plain


def test_a_twin_on_its_own_device_shares_everything() -> None:
    module = Tied()
    twin = make_twin(module)
    relocate(twin, torch.device("cpu"))
    assert all(a is b for a, b in zip(module.parameters(), twin.parameters(), strict=True))
    assert all(a is b for a, b in zip(module.buffers(), twin.buffers(), strict=True))


def test_a_transform_for_another_device_takes_no_buffer_of_the_vendors_size_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("cadence_fx.module.ambient_modes", lambda kind: ())  # torch knows no autocast for this device
    module = drawn(Workspace())
    fast = cadence_fx.transform(module, workspace_contract(), device="meta", backend="plan")
    assert {p.device.type for p in fast.parameters()} == {"meta"}
    assert {p.device.type for p in module.parameters()} == {"cpu"}
    assert max(b.numel() for b in fast.buffers()) < module.big.numel() / 100
