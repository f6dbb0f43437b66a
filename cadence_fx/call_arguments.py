"""The arguments of a signature's call: examples for tracing, drawn ones for runs, scalars and extents."""

from __future__ import annotations

import inspect
import operator
from typing import Any

import torch
import torch.utils._pytree as pytree

from cadence_fx.catalog import Signature
from cadence_fx.contract import Arg, Contract, Region, Value
from cadence_fx.errors import ContractError
from cadence_fx.extents import region_extents, retained
from cadence_fx.memory import Memory, dtype_of

__all__ = ["CallArguments"]

SYMBOLIC_FROM = 3  # extents; each symbol makes tracing slower, and with few values a trace per value is cheaper
_OPEN = object()  # an argument whose value the signature has yet to give


class CallArguments:
    """What the signatures of a contract are called with.

    Attributes:
        parameters: signature of the module's forward.
    """

    contract: Contract
    memory: Memory
    parameters: inspect.Signature | None

    def template(self) -> dict[str, Any]:
        """Every argument of forward as nested dicts, open where the signature decides."""
        args: dict[str, Any] = {}
        assert self.parameters is not None
        for name, parameter in self.parameters.parameters.items():
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                continue
            args[name] = _OPEN if parameter.default is parameter.empty else parameter.default
        places = [r.enters for r in self.contract.states] + [i.place for i in self.contract.inputs]
        places += [s.place for s in self.contract.scalars] + [p for c in self.contract.calls for p, _ in c.scalars]
        for place in places:
            if isinstance(place, Arg):
                if place.keys[0] not in args:
                    raise ContractError(
                        f"{place}: forward has no argument {place.keys[0]!r}; it takes {', '.join(args)}"
                    )
                _grow(args, place.keys, _OPEN)
        missing = [name for name, value in args.items() if value is _OPEN and not any(_root(p) == name for p in places)]
        if missing:
            raise ContractError(
                f"argument {missing[0]!r} of forward is not declared; add an Input, a Region or a Scalar for it"
            )
        return args

    def arguments(self, signature: Signature) -> tuple[dict[str, Any], dict[str, Any]]:
        """Example arguments of a signature, and which of their dimensions vary (the same structure)."""
        args, dynamic = self.template(), self.template()
        call = self.contract.call(signature.call)
        for item in self.contract.inputs:
            sizes = iter(call.sizes.get(item.name, ()))
            shape = [next(sizes) if size is None else size for size in item.shape]
            example = torch.zeros(shape, dtype=dtype_of(item.dtype), device=self.memory.device)
            _grow(args, item.place.keys, example)
            _grow(dynamic, item.place.keys, {d for d, s in enumerate(item.shape) if s is None and shape[d] > 1})
        for region in self.contract.states:
            if isinstance(region.enters, Arg):
                example = self.memory[region.name].example(self.extent(signature, region))
                _grow(args, region.enters.keys, example)
                _grow(dynamic, region.enters.keys, {region.dim} if self.varies(region, example) else set())
        for place, value in self.scalars(signature):
            _grow(args, place.keys, value)
            _grow(dynamic, place.keys, set())
        # Arguments left at their default are constants of the trace.
        return args, pytree.tree_map(
            lambda v: v if isinstance(v, set) else set(), dynamic, is_leaf=lambda v: isinstance(v, set)
        )

    def varies(self, region: Region, example: torch.Tensor) -> bool:
        """True if the growing dimension becomes a symbol: from three extents on; tracing fixes sizes 0 and 1."""
        if not region.grows or region.dim is None or example.shape[region.dim] < 2:
            return False
        return sum(extent > 1 for extent in region_extents(self.contract, region).attended_all) >= SYMBOLIC_FROM

    def drawn(self, signature: Signature) -> dict[Arg, torch.Tensor]:
        """Tensors for a signature: inputs drawn (integers below their bound, floats around zero), state as it lies."""
        generator = torch.Generator().manual_seed(0)
        call = self.contract.call(signature.call)
        found: dict[Arg, torch.Tensor] = {}
        for item in self.contract.inputs:
            sizes = iter(call.sizes.get(item.name, ()))
            shape = [next(sizes) if size is None else size for size in item.shape]
            dtype = dtype_of(item.dtype)
            if dtype.is_floating_point:
                value = torch.randn(shape, generator=generator).to(dtype)
            else:
                value = torch.randint(0, item.high or 2, shape, generator=generator).to(dtype)
            found[item.place] = value.to(self.memory.device)
        for region in self.contract.states:
            if isinstance(region.enters, Arg):
                found[region.enters] = self.memory[region.name].view(self.extent(signature, region))
        return found

    def scalars(self, signature: Signature) -> tuple[tuple[Arg, Value], ...]:
        """Python arguments that the signature fixes."""
        variant = signature.state.variant
        fixed = [(s.place, s.per_start[variant if len(s.per_start) > 1 else 0]) for s in self.contract.scalars]
        return (*fixed, *self.contract.call(signature.call).scalars)

    def extent(self, signature: Signature, region: Region) -> int:
        """Extent with which a region enters a call of this signature."""
        if region.dim is None:
            return 0
        found = signature.state.extent(region.name)
        start = region.starts[signature.state.variant if len(region.starts) > 1 else 0]
        # A pinned region or a ring is always read whole.
        return found if found is not None else retained(region.retain, start, start)


def _root(place: Any) -> str:
    return str(place.keys[0]) if isinstance(place, Arg) else ""


def _grow(container: dict[str, Any], keys: tuple[Any, ...], value: Any) -> None:
    """Set a nested value, making dicts on the way."""
    for key in keys[:-1]:
        if not isinstance(operator.getitem(container, key) if key in container else None, dict):
            container[key] = {}
        container = container[key]
    container[keys[-1]] = value
