"""A twin of a module: the same parameter objects, its own buffers, attributes and hooks.

The module that a user passes in is never changed, yet tracing must patch callables and the stock fallback must run
on buffers of another size. Both happen on twins. A twin costs no tensor memory: parameters and tensors are shared by
reference, containers are copied, submodules are twinned.
"""

from __future__ import annotations

import copy
import functools
import types
from typing import Any, TypeVar

import torch

__all__ = ["make_twin", "relocate"]

M = TypeVar("M", bound=torch.nn.Module)
_MODULE_DICTS = ("_parameters", "_buffers")


def make_twin(module: M, share_parameters: bool = False) -> M:
    """A structural copy of ``module`` that shares its parameters and tensors.

    With ``share_parameters`` it also sees when a parameter is replaced by another object: it holds the same dicts.

    ``copy.deepcopy`` would copy weights and refuses old-style weight norm; this copies structure only. Submodules
    that the original uses twice are used twice by the twin, and bound methods stored as attributes are bound anew.
    """
    memo: dict[int, Any] = {}
    twin = _twin_module(module, memo)
    if share_parameters:
        for original in module.modules():
            memo[id(original)].__dict__["_parameters"] = original._parameters
    return twin


def relocate(twin: torch.nn.Module, device: torch.device, leave: frozenset[str] = frozenset()) -> None:
    """Give a twin copies of its parameters and buffers on a device; those of the original stay where they are.

    What is shared within the module stays shared. Tensors in plain attributes stay too, as with ``Module.to``.

    Args:
        leave: dotted paths of buffers that are exchanged anyway, such as scratch of the vendor's sizes.
    """
    moved: dict[int, torch.Tensor] = {}
    for prefix, module in twin.named_modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is None or tensor.device == device or f"{prefix}.{name}".lstrip(".") in leave:
                    continue
                if id(tensor) not in moved:
                    copy = tensor.detach().to(device)
                    is_parameter = isinstance(tensor, torch.nn.Parameter)
                    moved[id(tensor)] = torch.nn.Parameter(copy, tensor.requires_grad) if is_parameter else copy
                tensors[name] = moved[id(tensor)]


def _twin_module(module: M, memo: dict[int, Any]) -> M:
    if id(module) in memo:
        return memo[id(module)]  # type: ignore[no-any-return]
    twin = object.__new__(type(module))
    memo[id(module)] = twin
    state = twin.__dict__
    for name, value in module.__dict__.items():
        if name in _MODULE_DICTS:
            state[name] = dict(value)
        elif name == "_modules":
            state[name] = {k: None if m is None else _twin_module(m, memo) for k, m in value.items()}
        else:
            state[name] = _twin_value(value, memo)
    return twin


def _twin_record(value: Any, memo: dict[int, Any]) -> Any:
    if isinstance(value, functools.partial):
        arguments = [_twin_value(argument, memo) for argument in value.args]
        return functools.partial(_twin_value(value.func, memo), *arguments, **value.keywords)
    record = copy.copy(value)
    memo[id(value)] = record
    vars(record).update({name: _twin_value(item, memo) for name, item in vars(value).items()})
    return record


def _is_record(value: Any) -> bool:
    """True for what modules keep their running state in: namespaces, and dataclasses that can be written."""
    if isinstance(value, types.SimpleNamespace):
        return True
    parameters = getattr(type(value), "__dataclass_params__", None)
    return parameters is not None and not parameters.frozen and hasattr(value, "__dict__")


def _twin_value(value: Any, memo: dict[int, Any]) -> Any:
    """Containers are copied (a call on the twin may fill them); tensors and plain values are shared."""
    if isinstance(value, torch.nn.Module):
        return _twin_module(value, memo)
    if isinstance(value, types.MethodType) and isinstance(value.__self__, torch.nn.Module):
        return types.MethodType(value.__func__, _twin_module(value.__self__, memo))
    if id(value) in memo:
        return memo[id(value)]
    kind = type(value)
    if kind is functools.partial or _is_record(value):
        return _twin_record(value, memo)
    if isinstance(value, dict):
        # OrderedDict (hooks) and a configuration's own class keep their type, which their copy() need not do.
        mapping = copy.copy(value)
        memo[id(value)] = mapping
        for key, item in value.items():
            if (twin := _twin_value(item, memo)) is not item:
                mapping[key] = twin
        return mapping
    if kind in (list, set):
        items: Any = kind()
        memo[id(value)] = items
        twins = [_twin_value(v, memo) for v in value]
        items.extend(twins) if kind is list else items.update(twins)
        return items
    if kind is tuple:
        return tuple(_twin_value(v, memo) for v in value)
    return value
