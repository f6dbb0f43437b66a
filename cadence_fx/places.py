"""Reading and writing the places that a contract names: arguments, results, attributes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from cadence_fx.contract import Arg, Attr, Result
from cadence_fx.errors import ContractError

__all__ = ["bind", "get_attr", "get_path", "method", "owner_of", "set_attr", "set_path"]


def bind(signature: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments by parameter name, defaults filled in.

    Raises:
        TypeError: as a plain call of the function would.
    """
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    return dict(bound.arguments)


def get_path(root: Any, place: Arg | Result) -> Any:
    """The value below ``root`` (the bound arguments, or a result) at ``place``."""
    value = root
    for key in place.keys:
        value = value[key]
    return value


def set_path(root: Any, place: Arg | Result, value: Any) -> Any:
    """A copy of the containers on the way to ``place`` with ``value`` there; ``root`` is left as it is."""
    return _set(root, place.keys, value)


def _set(root: Any, keys: tuple[str | int, ...], value: Any) -> Any:
    if not keys:
        return value
    key, rest = keys[0], keys[1:]
    child = _set(root[key], rest, value)
    if isinstance(root, dict):
        return type(root)({**root, key: child}) if type(root) is not dict else {**root, key: child}
    if isinstance(root, (tuple, list)):
        items = list(root)
        items[int(key)] = child
        if hasattr(root, "_fields"):
            return type(root)(*items)
        return type(root)(items)
    raise ContractError(
        f"cannot reach key {key!r} in a {type(root).__name__}; places lead through dicts, tuples and lists"
    )


def owner_of(module: torch.nn.Module, path: str) -> tuple[Any, str]:
    """What holds the attribute at a dotted path, and its name there."""
    prefix, _, name = path.rpartition(".")
    owner: Any = module
    for part in prefix.split(".") if prefix else ():
        owner = owner[int(part)] if part.isdigit() and not hasattr(owner, part) else getattr(owner, part)
    return owner, name


def get_attr(module: torch.nn.Module, place: Attr | str) -> Any:
    """The attribute at a dotted path.

    Raises:
        ContractError: the module has no such attribute.
    """
    path = place if isinstance(place, str) else place.path
    try:
        owner, name = owner_of(module, path)
        return getattr(owner, name)
    except (AttributeError, IndexError, KeyError) as error:
        raise ContractError(f"{type(module).__name__} has no attribute {path!r}: {error}") from None


def set_attr(module: torch.nn.Module, place: Attr | str, value: Any) -> None:
    """Set the attribute at a dotted path; a registered buffer stays registered."""
    owner, name = owner_of(module, place if isinstance(place, str) else place.path)
    if isinstance(owner, torch.nn.Module) and name in owner._buffers:
        owner._buffers[name] = value
    elif isinstance(value, torch.Tensor) and isinstance(owner, torch.nn.Module):
        owner.__dict__[name] = value
    else:
        setattr(owner, name, value)


def method(module: torch.nn.Module, path: str) -> Callable[..., Any]:
    """The callable at a dotted path, as ContractError if it is missing or not callable."""
    found = get_attr(module, path)
    if not callable(found):
        raise ContractError(f"{path!r} of {type(module).__name__} is a {type(found).__name__}, not a callable")
    return found  # type: ignore[no-any-return]
