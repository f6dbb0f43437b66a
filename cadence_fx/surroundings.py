"""What a module's Python shares with other code: containers of its classes, and globals that its functions read.

Both are found in the code itself, since reading and filling them leaves no trace in the module.
"""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
import torch.utils._pytree as pytree

__all__ = ["SharedContainer", "class_containers", "global_reads"]

_FOREIGN = ("torch", "builtins")  # a library's own books are not the decoder's


class SharedContainer(NamedTuple):
    """A dict, list or set that outlives a call, by name."""

    name: str
    container: Any

    def holds_tensor(self) -> bool:
        return any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(self.container))


def class_containers(modules: Iterable[torch.nn.Module]) -> list[SharedContainer]:
    """Containers that the modules' classes define; all instances share them."""
    return [
        SharedContainer(name, value)
        for cls in _classes(modules)
        for name, value in vars(cls).items()
        if isinstance(value, (dict, list, set)) and name[:2] != "__"
    ]


def global_reads(modules: Iterable[torch.nn.Module]) -> Iterator[tuple[dict[str, Any], str]]:
    """Namespaces and names of globals that methods of the modules refer to, and functions that those call."""
    todo = [_function(value) for cls in _classes(modules) for value in vars(cls).values()]
    seen: set[types.CodeType] = set()
    found: dict[tuple[int, str], dict[str, Any]] = {}
    while todo:
        function = todo.pop()
        if function is None or function.__code__ in seen or _is_foreign(function.__module__):
            continue
        seen.add(function.__code__)
        namespace = function.__globals__
        for name in _names(function.__code__):
            if name in namespace:
                found[id(namespace), name] = namespace
                todo.append(_function(namespace[name]))
    for (_, name), namespace in found.items():
        yield namespace, name


def _classes(modules: Iterable[torch.nn.Module]) -> list[type]:
    classes = dict.fromkeys(cls for module in modules for cls in type(module).__mro__)
    return [cls for cls in classes if not _is_foreign(cls.__module__)]


def _is_foreign(name: str | None) -> bool:
    return (name or "builtins").partition(".")[0] in _FOREIGN


def _function(value: Any) -> types.FunctionType | None:
    value = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
    return value if isinstance(value, types.FunctionType) else None


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)
