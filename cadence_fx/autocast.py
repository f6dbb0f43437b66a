"""Autocast as a value: which state an operator was traced under, and running code under such a state or under none.

A graph is traced with operators as they are before autocast, so each node carries the state that it runs under in
``meta["autocast"]`` until `cadence_fx.passes.LowerAutocast` has written the casts out. From then on autocast must be
off wherever the graph's operators run: a lowered graph that ran under it would cast twice.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import fx

__all__ = [
    "DEVICE_TYPES",
    "AutocastState",
    "Unlowered",
    "autocast_of",
    "entered",
    "nested",
    "runnable",
    "under",
    "without_autocast",
]

DEVICE_TYPES = ("cpu", "cuda")
R = TypeVar("R")


@dataclass(frozen=True)
class AutocastState:
    """For which kinds of device autocast is enabled, and the dtype that it casts to; each kind has its own switch.

    Attributes:
        enabled: (device type, dtype), sorted by device type.
    """

    enabled: tuple[tuple[str, torch.dtype], ...]

    @staticmethod
    def ambient() -> AutocastState | None:
        """The state of this thread, or None where autocast is off for every kind of device. About a microsecond."""
        found = tuple(
            (kind, torch.get_autocast_dtype(kind)) for kind in DEVICE_TYPES if torch.is_autocast_enabled(kind)
        )
        return AutocastState(found) if found else None

    def __str__(self) -> str:
        return ", ".join(f"{kind} to {str(dtype).removeprefix('torch.')}" for kind, dtype in self.enabled)


def entered(
    outer: AutocastState | None, device_type: str, dtype: torch.dtype | None, enabled: bool
) -> AutocastState | None:
    """The state inside ``torch.autocast(device_type, dtype, enabled)`` that is entered under ``outer``."""
    states = dict(outer.enabled) if outer is not None else {}
    states.pop(device_type, None)
    if enabled:
        states[device_type] = torch.get_autocast_dtype(device_type) if dtype is None else dtype
    return AutocastState(tuple(sorted(states.items(), key=lambda item: item[0]))) if states else None


def autocast_of(node: fx.Node) -> AutocastState | None:
    """The state that a node runs under; None where autocast is off, and everywhere in a lowered graph."""
    found = node.meta.get("autocast")
    return found if isinstance(found, AutocastState) else None


@contextmanager
def under(state: AutocastState | None) -> Iterator[None]:
    """Run under exactly this state, whatever the caller's is.

    The switches are set themselves: ``torch.autocast`` would warn of a device that is not there, where tracing and
    fake tensors need none.
    """
    wanted = dict(state.enabled) if state is not None else {}
    before = {kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in DEVICE_TYPES}
    try:
        for kind, (_, dtype) in before.items():
            torch.set_autocast_dtype(kind, wanted.get(kind, dtype))
            torch.set_autocast_enabled(kind, kind in wanted)
        yield
    finally:
        for kind, (on, dtype) in before.items():
            torch.set_autocast_dtype(kind, dtype)
            torch.set_autocast_enabled(kind, on)


def nested() -> bool:
    """True within any ``torch.autocast`` of this thread, disabled ones too: casts are cached until all end."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting() > 0


def without_autocast(function: Callable[..., R]) -> Callable[..., R]:
    """The function, run with autocast off; without autocast around it, that costs one look at the switches."""

    @functools.wraps(function)
    def run(*args: object, **kwargs: object) -> R:
        if AutocastState.ambient() is None:
            return function(*args, **kwargs)
        with under(None):
            return function(*args, **kwargs)

    return run


class Unlowered(fx.Interpreter):
    """Runs each operator of a graph under the state that it was traced under: stock's casts, made by autocast."""

    def run_node(self, n: fx.Node) -> Any:
        with under(autocast_of(n)):
            return super().run_node(n)


def runnable(module: fx.GraphModule) -> fx.GraphModule:
    """The graph module, whose forward now runs under the states of its nodes and not under the caller's.

    Where no node has a state, as in every lowered graph, that is the generated code with autocast off.

    The wrapper goes on the class, which every GraphModule has to itself: on the instance it would be a cycle, and the
    module's tensors would live until the next collection.
    """
    kind: Any = type(module)
    if any(autocast_of(node) is not None for node in module.graph.nodes):
        kind.forward = lambda self, *args: Unlowered(self).run(*args)
    else:
        kind.forward = without_autocast(kind.forward)
    return module
