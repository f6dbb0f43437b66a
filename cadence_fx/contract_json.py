"""Contracts as JSON and back, exactly.

The dataclasses of `cadence_fx.contract` are the schema: values are written and read by their type annotations, so
a field that is added there needs nothing here. Fields at their default are left out. Places and retention rules,
which are unions, carry a tag: ``{"arg": ["cache", "att"]}`` and ``{"rule": "KeepEnds", "head": "start", "tail": 100}``.
Fractions are written as text (``"3/2"``).
"""

from __future__ import annotations

import json
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from fractions import Fraction
from functools import cache
from typing import Any, Literal, NoReturn, TypeAlias, cast, get_args, get_origin

from cadence_fx.contract import Arg, Attr, Contract, Result
from cadence_fx.errors import ContractError, suggest
from cadence_fx.retention import RULES

__all__ = ["SCHEMA", "from_dict", "from_json", "to_dict", "to_json"]

SCHEMA = 1
Json: TypeAlias = bool | int | float | str | list["Json"] | dict[str, "Json"] | None
_PATHS: dict[str, type[Arg | Result]] = {"arg": Arg, "result": Result}
_TYPE_NAMES = {bool: "true or false", int: "an int", float: "a number", str: "a string", type(None): "null"}


def to_dict(contract: Contract) -> dict[str, Any]:
    """The contract as plain dicts, lists, strings and numbers.

    Raises:
        ContractError: a number is infinite or not a number, which JSON cannot hold.
    """
    body = _encode(contract, "contract")
    assert isinstance(body, dict)
    return {"schema": SCHEMA, **body}


def from_dict(data: Mapping[str, Any]) -> Contract:
    """The contract that `to_dict` wrote.

    Raises:
        ContractError: unknown schema version, unknown or missing field, wrong type, or a contradiction.
    """
    if not isinstance(data, Mapping):
        _wrong("contract", data, "an object")
    found = data.get("schema")
    if found != SCHEMA or isinstance(found, bool):
        raise ContractError(f"contract: schema is {found!r}; this version of cadence_fx reads schema {SCHEMA}")
    body = {key: value for key, value in data.items() if key != "schema"}
    contract = _decode_object(Contract, body, "contract")
    assert isinstance(contract, Contract)
    return contract


def to_json(contract: Contract, indent: int | None = 2) -> str:
    """`to_dict` as text, in the order of the dataclasses' fields."""
    return json.dumps(to_dict(contract), indent=indent, allow_nan=False)


def from_json(text: str) -> Contract:
    """The contract in ``text``.

    Raises:
        ContractError: the text is no JSON, or as for `from_dict`.
    """
    try:
        data = json.loads(text)
    except ValueError as error:
        raise ContractError(f"contract: the text is not JSON ({error}); write it with to_json") from error
    return from_dict(data)


# ---------------------------------------------------------------------------------------------- writing
def _encode(value: object, where: str) -> Json:
    if isinstance(value, (Arg, Result)):
        return {type(value).__name__.lower(): list(value.keys)}
    if isinstance(value, Attr):
        return {"attr": value.path}
    if is_dataclass(value) and not isinstance(value, type):
        written = {
            field.name: _encode(item, f"{where}.{field.name}")
            for field in fields(value)
            if not _is_default(field, item := getattr(value, field.name))
        }
        return {"rule": type(value).__name__, **written} if type(value) in RULES.values() else written
    if isinstance(value, Fraction):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _encode(item, f"{where}[{key!r}]") for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [_encode(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, float) and not math.isfinite(value):
        raise ContractError(f"{where} is {value!r}; JSON holds finite numbers only, leave it out or give None")
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise ContractError(f"{where} is {value!r}; JSON has no form for {type(value).__name__}")


def _is_default(field: Field[Any], value: object) -> bool:
    # Same type as well: 1, 1.0 and True are equal in Python but are three different JSON values.
    return field.default is not MISSING and type(field.default) is type(value) and bool(field.default == value)


# ---------------------------------------------------------------------------------------------- reading
@cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _wrong(where: str, found: object, expected: str) -> NoReturn:
    raise ContractError(f"{where} is {found!r}; expected {expected}")


def _decode_object(cls: type, data: Mapping[str, Any], where: str) -> object:
    hints, known = _hints(cls), fields(cls)
    names = [field.name for field in known]
    for key in data:
        if key not in names:
            raise ContractError(
                f"{where}: unknown field {key!r}; {cls.__name__} has {', '.join(names)}{suggest(key, names)}"
            )
    for field in known:
        if field.name not in data and field.default is MISSING and field.default_factory is MISSING:
            raise ContractError(f"{where}: field {field.name!r} is missing; {cls.__name__} needs it")
    return cls(**{key: _decode(hints[key], value, f"{where}.{key}") for key, value in data.items()})


def _decode(hint: Any, value: Any, where: str) -> object:
    """``value`` as the type ``hint``, one of the few forms that contracts use."""
    origin = get_origin(hint)
    if origin is not None:
        return _decode_generic(origin, get_args(hint), value, where)
    if hint in (Arg, Result, Attr):
        return _decode_tagged((hint,), value, where)
    if is_dataclass(hint):
        if not isinstance(value, Mapping):
            _wrong(where, value, f"an object with the fields of {_name(hint)}")
        return _decode_object(cast(type, hint), value, where)
    if not _is_plain(hint, value):
        _wrong(where, value, _TYPE_NAMES[hint])
    return value


def _decode_generic(origin: Any, args: tuple[Any, ...], value: Any, where: str) -> object:
    if origin in (typing.Union, types.UnionType):
        return _decode_union(args, value, where)
    if origin is tuple:
        return _decode_tuple(args, value, where)
    if origin is Mapping:
        if not isinstance(value, Mapping):
            _wrong(where, value, "an object")
        return {key: _decode(args[1], item, f"{where}[{key!r}]") for key, item in value.items()}
    choices = [str(choice) for choice in args]  # what remains is Literal
    if not isinstance(value, str) or value not in args:
        _wrong(where, value, f"one of {', '.join(choices)}{suggest(str(value), choices)}")
    return value


def _name(hint: Any) -> str:
    return str(hint.__name__)


def _is_plain(hint: Any, value: object) -> bool:
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    return type(value) is hint  # exact: True is no int here


def _decode_tuple(args: tuple[Any, ...], value: Any, where: str) -> tuple[object, ...]:
    if not isinstance(value, (list, tuple)):
        _wrong(where, value, "a list")
    if len(args) == 2 and args[1] is Ellipsis:
        args = (args[0],) * len(value)
    if len(args) != len(value):
        _wrong(where, value, f"a list of {len(args)}")
    return tuple(_decode(arg, item, f"{where}[{i}]") for i, (arg, item) in enumerate(zip(args, value, strict=True)))


def _decode_fraction(value: Any, where: str) -> Fraction:
    if isinstance(value, (int, str)) and not isinstance(value, bool):
        try:
            return Fraction(value)
        except (ValueError, ZeroDivisionError):
            pass
    _wrong(where, value, 'an int or a fraction such as "3/2"')


def _decode_union(members: tuple[Any, ...], value: Any, where: str) -> object:
    if value is None and type(None) in members:
        return None
    tagged = tuple(m for m in members if is_dataclass(m))
    if tagged:
        return _decode_tagged(tagged, value, where)
    if Fraction in members:
        return _decode_fraction(value, where)
    for member in members:
        origin = get_origin(member)
        if origin is tuple and isinstance(value, (list, tuple)):
            return _decode_tuple(get_args(member), value, where)
        if origin is Literal and isinstance(value, str) and value in get_args(member):
            return value
        if origin is None and _is_plain(member, value):
            return value
    _wrong(where, value, " or ".join(_describe(member) for member in members))


def _describe(member: Any) -> str:
    if get_origin(member) is Literal:
        return " or ".join(repr(choice) for choice in get_args(member))
    return "a list" if get_origin(member) is tuple else _TYPE_NAMES[member]


def _decode_tagged(members: tuple[Any, ...], value: Any, where: str) -> object:
    """A place or a retention rule, by its tag."""
    tags = [m.__name__ if m in RULES.values() else m.__name__.lower() for m in members]
    if not isinstance(value, Mapping):
        _wrong(where, value, f"an object that is one of {', '.join(tags)}")
    if "rule" in value or all(member in RULES.values() for member in members):
        name = value.get("rule")
        if name not in tags:
            raise ContractError(
                f"{where}: rule is {name!r}; expected one of {', '.join(tags)}{suggest(str(name), tags)}"
            )
        return _decode_object(RULES[str(name)], {k: v for k, v in value.items() if k != "rule"}, where)
    tag = next(iter(value), "")
    if len(value) != 1 or tag not in tags:
        _wrong(where, dict(value), f"an object with exactly one key of {', '.join(tags)}{suggest(tag, tags)}")
    if tag == "attr":
        return Attr(str(_decode(str, value[tag], f"{where}.attr")))
    keys = _decode_tuple((str | int, Ellipsis), value[tag], f"{where}.{tag}")
    return _PATHS[tag](*cast("tuple[str | int, ...]", keys))
