"""Places: reading and writing arguments, results and attributes."""

from __future__ import annotations

import collections
import inspect
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from cadence_fx.contract import Arg, Attr, Result
from cadence_fx.errors import ContractError
from cadence_fx.places import bind, get_attr, get_path, method, set_attr, set_path


class Pair(NamedTuple):
    first: int
    second: dict[str, int]


def test_bind_fills_in_defaults_and_names_positional_arguments() -> None:
    def f(x: int, cache: int, *, last: bool = False) -> None: ...

    assert bind(inspect.signature(f), (1,), {"cache": 2}) == {"x": 1, "cache": 2, "last": False}


def test_bind_refuses_what_the_call_would_refuse() -> None:
    def f(x: int) -> None: ...

    with pytest.raises(TypeError, match="unexpected keyword"):
        bind(inspect.signature(f), (1,), {"y": 2})


def test_set_path_copies_the_way_and_leaves_the_rest_alone() -> None:
    root = {"cache": {"kv": 1, "cnn": [2]}, "x": [3]}
    changed = set_path(root, Arg("cache", "kv"), 9)
    assert changed == {"cache": {"kv": 9, "cnn": [2]}, "x": [3]}
    assert root["cache"] == {"kv": 1, "cnn": [2]}
    assert changed["x"] is root["x"]
    assert get_path(changed, Arg("cache", "kv")) == 9


@pytest.mark.parametrize("root", [(1, {"a": 2}), [1, {"a": 2}], Pair(1, {"a": 2})])
def test_set_path_keeps_the_type_of_containers(root: object) -> None:
    changed = set_path(root, Result(1, "a"), 5)
    assert type(changed) is type(root)
    assert get_path(changed, Result(1, "a")) == 5
    assert get_path(root, Result(1, "a")) == 2


def test_set_path_keeps_the_type_of_dicts() -> None:
    root = collections.OrderedDict(a=1, b=2)
    changed = set_path(root, Arg("a"), 3)
    assert type(changed) is collections.OrderedDict
    assert list(changed) == ["a", "b"]


def test_set_path_counts_from_the_end_as_python_does() -> None:
    assert set_path((1, 2, 3), Result(-1), 9) == (1, 2, 9)


def test_the_empty_path_is_the_value_itself() -> None:
    assert get_path(7, Result()) == 7
    assert set_path(7, Result(), 8) == 8


def test_a_path_into_something_else_says_so() -> None:
    with pytest.raises(ContractError, match="cannot reach key 0 in a str; places lead through dicts, tuples and lists"):
        set_path(("text",), Result(0, 0), 1)


@pytest.fixture
def module() -> Any:
    module: Any = nn.Module()
    module.layers = nn.ModuleList([nn.Linear(2, 2), nn.Module()])
    module.layers[1].register_buffer("cache", torch.zeros(2))
    module.layers[1].table = torch.ones(2)
    return module


def test_attributes_are_found_by_dotted_path_and_index(module: Any) -> None:
    assert get_attr(module, "layers.0.weight") is module.layers[0].weight
    assert get_attr(module, Attr("layers.1.table")) is module.layers[1].table


def test_a_buffer_stays_registered_when_it_is_set(module: Any) -> None:
    new = torch.ones(3)
    set_attr(module, "layers.1.cache", new)
    assert module.layers[1].cache is new
    assert "cache" in dict(module.layers[1].named_buffers())


def test_a_plain_tensor_attribute_stays_plain(module: Any) -> None:
    new = torch.ones(3)
    set_attr(module, Attr("layers.1.table"), new)
    assert module.layers[1].table is new
    assert "table" not in dict(module.layers[1].named_buffers())


def test_a_missing_attribute_is_named(module: Any) -> None:
    with pytest.raises(ContractError, match=r"Module has no attribute 'layers.1.cash'"):
        get_attr(module, "layers.1.cash")
    with pytest.raises(ContractError, match=r"has no attribute 'layers.7.weight'"):
        get_attr(module, "layers.7.weight")


def test_method_refuses_what_cannot_be_called(module: Any) -> None:
    assert method(module, "layers.0.forward") == module.layers[0].forward
    with pytest.raises(ContractError, match=r"'layers.1.table' of Module is a Tensor, not a callable"):
        method(module, "layers.1.table")
