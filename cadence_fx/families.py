"""Decoder families and user targets by name: what the command line, `verify` and the benchmarks run.

A target is a family (``token2wav``) or ``package.module:factory``, where the factory returns
``(module, contract, example_inputs)``. Nothing is imported before `load` asks for it.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
import torch.utils._pytree as pytree
from torch import nn

from cadence_fx.contract import Contract
from cadence_fx.errors import CadenceError, suggest
from cadence_fx.traffic import SessionMemory, Step, clone_tree

__all__ = ["FAMILIES", "Family", "available", "load"]

FAMILIES: Mapping[str, str] = {
    "token2wav": "cadence_fx.adapters.token2wav",
    "moshi": "cadence_fx.adapters.moshi",
    "personaplex": "cadence_fx.adapters.personaplex",
    "freeze_omni": "cadence_fx.adapters.freeze_omni",
}


class Family(Protocol):
    """A decoder that can be built, described and driven. Options given to `load` are already applied."""

    @property
    def name(self) -> str:
        """The target's name, as reports print it."""

    def build_random(self, device: str, seed: int, **sizes: Any) -> nn.Module:
        """A new module; the same seed and sizes give the same weights."""

    def contract(self, **options: Any) -> Contract:
        """The declaration of that module."""

    def script(self, decoder: nn.Module, contract: Contract, seed: int, chunks: int) -> Iterable[Step]:
        """Traffic: the steps of a stream that passes through all that the contract declares."""

    def stream(self, decoder: nn.Module, contract: Contract, seed: int, chunks: int) -> Iterable[Step]:
        """The regular cadence: a start, then ``chunks`` steady calls. What benchmarks play."""


def available() -> list[str]:
    """The families whose adapters this installation has; nothing of a vendor is imported."""

    def found(module: str) -> bool:
        if module in sys.modules:
            return sys.modules[module] is not None
        return importlib.util.find_spec(module) is not None

    return [name for name, module in FAMILIES.items() if found(module)]


def load(target: str, **options: Any) -> Family:
    """The family or factory of that name.

    An option goes to each of ``build_random`` and ``contract`` that names it as a parameter; one that neither
    names goes to those that take any name.

    Raises:
        CadenceError: there is no such target, it cannot be imported, or none of its functions takes an option.
    """
    if ":" in target:
        return _factory(target, options)
    if target not in FAMILIES:
        raise CadenceError(
            f"no family is called {target!r}{suggest(target, FAMILIES)}; expected one of {', '.join(FAMILIES)}, "
            "or package.module:factory, a factory that returns (module, contract, example_inputs)"
        )
    family = _Adapter(target, _import(FAMILIES[target], target), options)
    _check_options(target, options, (family.source.build_random, family.source.contract))
    return family


# ---------------------------------------------------------------------------------------------- kinds of target
@dataclass(frozen=True)
class _Adapter:
    """An adapter module with options applied."""

    name: str
    source: Any
    options: Mapping[str, Any]

    def build_random(self, device: str, seed: int, **sizes: Any) -> nn.Module:
        build, declare = self.source.build_random, self.source.contract
        mine = _accepted(build, self.options, other=declare)
        module: nn.Module = build(device=device, seed=seed, **{**mine, **sizes})
        return module

    def contract(self, **options: Any) -> Contract:
        build, declare = self.source.build_random, self.source.contract
        contract: Contract = declare(**{**_accepted(declare, self.options, other=build), **options})
        return contract

    def script(self, decoder: nn.Module, contract: Contract, seed: int, chunks: int) -> Iterable[Step]:
        steps: Iterable[Step] = self.source.script(decoder, contract, seed, chunks)
        return steps

    def stream(self, decoder: nn.Module, contract: Contract, seed: int, chunks: int) -> Iterable[Step]:
        if not hasattr(self.source, "stream"):
            raise CadenceError(f"the adapter of {self.name!r} has no stream(), the steady cadence that benchmarks play")
        steps: Iterable[Step] = self.source.stream(decoder, contract, seed, chunks)
        return steps


@dataclass
class _Factory:
    """A user's factory. Its first result gives contract and inputs; each build calls it anew."""

    name: str
    make: Callable[..., Any]
    options: Mapping[str, Any]
    _declared: tuple[Contract, Any] | None = field(default=None, init=False)

    def build_random(self, device: str, seed: int, **sizes: Any) -> nn.Module:
        module, contract, inputs = self._made(seed, sizes)
        self._declared = self._declared or (contract, inputs)
        return module.to(device)

    def contract(self, **options: Any) -> Contract:
        return self._declaration(options)[0]

    def script(self, decoder: nn.Module, contract: Contract, seed: int, chunks: int) -> Iterable[Step]:
        """The example inputs as steps: keyword arguments of each call, the first with the state that all start from."""
        played = 0
        for step in self._examples(decoder, contract):
            if step.is_chunk and played >= chunks:
                return
            played += step.is_chunk
            yield step

    def stream(self, decoder: nn.Module, contract: Contract, seed: int, chunks: int) -> Iterable[Step]:
        """What comes before the first example call, then that call again and again."""
        for step in self._examples(decoder, contract):
            if step.is_chunk:
                yield from itertools.repeat(step, chunks)
                return
            yield step

    def _examples(self, decoder: nn.Module, contract: Contract) -> Iterator[Step]:
        """The example inputs on the decoder's device; a factory may give steps, which are its own."""
        state_name = SessionMemory.of(contract).argument
        device = next((p.device for p in decoder.parameters()), torch.device("cpu"))
        for given in self._declaration({})[1]:
            if isinstance(given, Step):
                yield given
            else:
                moved = pytree.tree_map(lambda v: v.to(device) if isinstance(v, torch.Tensor) else v, given)
                yield from _steps(moved, state_name)

    def _declaration(self, options: Mapping[str, Any]) -> tuple[Contract, Any]:
        if options or self._declared is None:
            _, contract, inputs = self._made(0, options)
            self._declared = contract, inputs
        return self._declared

    def _made(self, seed: int, options: Mapping[str, Any]) -> tuple[nn.Module, Contract, Any]:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            made = self.make(**{**self.options, **options})
        match made:
            case (nn.Module() as module, Contract() as contract, inputs):
                return module, contract, inputs
        raise CadenceError(f"{self.name} returned {_shape(made)}; a factory returns (module, contract, example_inputs)")


def _steps(given: Mapping[str, Any], state_name: str) -> Iterator[Step]:
    """Keyword arguments of a call; with a state among them, the session starts from it."""
    inputs = dict(given)
    if state_name in inputs:
        yield Step("start", partial(_start, inputs.pop(state_name)))
    yield Step("call", partial(_call, inputs), is_chunk=True)


def _start(state: Any, decoder: nn.Module, memory: SessionMemory) -> None:
    memory.start(clone_tree(state))


def _call(inputs: dict[str, Any], decoder: nn.Module, memory: SessionMemory) -> Any:
    return memory.call(decoder, **inputs)


def _factory(target: str, options: Mapping[str, Any]) -> Family:
    module_name, _, attribute = target.partition(":")
    if not module_name or not attribute:
        raise CadenceError(f"{target!r} is no target; write package.module:factory")
    found: Any = _import(module_name, target)
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise CadenceError(f"{module_name} has no {attribute!r}{suggest(part, vars(found))}")
        found = getattr(found, part)
    if not callable(found):
        raise CadenceError(f"{target} is a {type(found).__name__}; a target is a callable without required arguments")
    _check_options(target, options, (found,))
    return _Factory(target, found, options)


# ---------------------------------------------------------------------------------------------- imports and options
def _import(module: str, target: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name in FAMILIES.values():
            raise CadenceError(
                f"{target!r} has no adapter in this version; available: {', '.join(available())}, or your own "
                "package.module:factory"
            ) from error
        raise CadenceError(
            f"{target!r} needs the module {error.name!r}, which is not installed here; the vendors' packages pin old "
            "versions of torch: install them with pip install --no-deps"
        ) from error


def _parameters(function: Callable[..., Any]) -> tuple[set[str], bool]:
    """Names that can be given as keywords, and whether any other name can."""
    parameters = inspect.signature(function).parameters.values()
    named = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    return named, any(p.kind is p.VAR_KEYWORD for p in parameters)


def _accepted(function: Callable[..., Any], options: Mapping[str, Any], other: Callable[..., Any]) -> dict[str, Any]:
    """The options that ``function`` names and, if it takes any name, those that ``other`` does not name."""
    named, takes_any = _parameters(function)
    elsewhere, _ = _parameters(other)
    return {key: value for key, value in options.items() if key in named or (takes_any and key not in elsewhere)}


def _check_options(target: str, options: Mapping[str, Any], functions: Iterable[Callable[..., Any]]) -> None:
    known: set[str] = set()
    for function in functions:
        named, takes_any = _parameters(function)
        if takes_any:
            return
        known |= named - {"device", "seed"}
    for key in options:
        if key not in known:
            listed = ", ".join(sorted(known)) or "none"
            raise CadenceError(f"{target} has no option {key!r}{suggest(key, known)}; its options are {listed}")


def _shape(value: object) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(type(item).__name__ for item in value)})"
    return f"a {type(value).__name__}"
