"""What autocast does to one operator, found by running it, and the same written out as explicit casts.

No list of operators is kept here: torch's lists differ by device and version. The operator runs on fake tensors under
the state, and a dispatch mode notes which operators arrive below autocast. Casts of the operator's own inputs that come
first are what its rule casts. The operator then runs without autocast on inputs that are cast in the same way; only
where the very same operators arrive, in the same order, on the same values and with the same results in shape, strides
and dtype, is that its lowered form. Some rules set an operator's ``dtype`` instead, which is tried where there is one.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from cadence_fx.autocast import AutocastState, under
from cadence_fx.specialise import TensorMeta

__all__ = ["Cast", "Rule", "rule_of", "with_dtype"]

aten = torch.ops.aten
_QUERIES = {torch.ops.prim.device.default}  # asks a tensor where it is; nothing runs


@dataclass(frozen=True)
class Cast:
    """One cast: which tensor among the operator's flattened arguments, how, and what it gives."""

    index: int
    kwargs: tuple[tuple[str, Any], ...]
    meta: TensorMeta


@dataclass(frozen=True)
class Rule:
    """An operator's lowered form.

    Attributes:
        casts: in autocast's order; none where autocast leaves the operator alone.
        target: the operator, or its overload that takes ``dtype``.
        dtype: value of its argument of that name, where the rule sets one.
        results: metadata of the result's tensors.
        shares: a result may lie in a cast's memory.
    """

    casts: tuple[Cast, ...]
    target: Any
    dtype: torch.dtype | None
    results: tuple[TensorMeta, ...]
    shares: bool = False


@dataclass
class _Recording:
    """Operators that arrived below autocast, as text that is equal where they did the same."""

    events: list[str]
    casts: list[Cast]
    results: tuple[TensorMeta, ...]
    shares: bool

    def first_difference(self, other: _Recording) -> str | None:
        """Where another recording departs from this one, or None."""
        for mine, theirs in zip(self.events, other.events, strict=False):
            if mine != theirs:
                return f"{mine} and {theirs}"
        if len(self.events) != len(other.events):
            longer = max(self.events, other.events, key=len)
            return f"{longer[min(len(self.events), len(other.events))]}, which only one of them runs"
        return None


def rule_of(target: Any, args: Any, kwargs: Any, state: AutocastState) -> Rule | str:
    """The lowered form of an operator under a state.

    Args:
        target: an operator overload.
        args, kwargs: of the call, a `TensorMeta` where a tensor goes.

    Returns:
        The rule, or the reason why explicit casts cannot express what autocast does.
    """
    leaves, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
    typed = tuple((type(leaf), leaf) for leaf in leaves)  # True, 1 and 1.0 are equal, and other arguments
    try:
        hash(typed)
    except TypeError:
        return _derive(target, typed, spec, state)
    return _derived(target, typed, spec, state)


def _derive(target: Any, typed: tuple[Any, ...], spec: pytree.TreeSpec, state: AutocastState) -> Rule | str:
    leaves = [leaf for _, leaf in typed]
    try:
        wanted = _record(target, leaves, spec, state)
    except Exception as error:  # noqa: BLE001
        return f"it cannot be run on fake tensors: {type(error).__name__}: {error}"
    reasons: list[str] = []
    for form, dtype, casts in _forms(target, leaves, spec, wanted, state):
        try:
            found = _record(form, leaves, spec, None, casts, dtype)
        except Exception as error:  # noqa: BLE001
            reasons.append(f"with explicit casts it raises {type(error).__name__}: {error}")
            continue
        difference = wanted.first_difference(found)
        if difference is None:
            return Rule(tuple(casts), form, dtype, wanted.results, wanted.shares)
        reasons.append(f"under autocast and with explicit casts it runs {difference}")
    return reasons[min(1, len(reasons) - 1)]  # the first is of no casts at all


_derived = lru_cache(maxsize=8192)(_derive)  # calls of one module have few distinct forms


def _forms(
    target: Any, leaves: Sequence[Any], spec: pytree.TreeSpec, wanted: _Recording, state: AutocastState
) -> Iterator[tuple[Any, torch.dtype | None, list[Cast]]]:
    """Forms to try: as it is, with all leading casts or fewer of them, and with a dtype."""
    yield target, None, []
    for count in range(len(wanted.casts), 0, -1):  # the last ones may be the operator's own
        yield target, None, wanted.casts[:count]
    dtypes = dict.fromkeys([torch.float32, *(dtype for _, dtype in state.enabled)])
    for form in _overloads(target):
        args, kwargs = pytree.tree_unflatten(leaves, spec)
        if _argument(form, "dtype", args, kwargs) is None:
            for dtype in dtypes:
                yield form, dtype, []


def _overloads(target: Any) -> list[Any]:
    """Overloads of an operator that have a ``dtype`` and no output argument, itself first."""
    packet = getattr(target, "overloadpacket", None)
    if packet is None:
        return []
    found = [target, *(getattr(packet, name) for name in packet.overloads())]
    names = {form: [argument.name for argument in form._schema.arguments] for form in dict.fromkeys(found)}
    return [form for form, known in names.items() if "dtype" in known and "out" not in known]


def _argument(target: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    index = [argument.name for argument in target._schema.arguments].index(name)
    return args[index] if index < len(args) else kwargs.get(name)


def with_dtype(
    target: Any, args: Sequence[Any], kwargs: dict[str, Any], dtype: torch.dtype
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of an operator with its ``dtype`` set, by position where it was given by position."""
    index = [argument.name for argument in target._schema.arguments].index("dtype")
    if index < len(args):
        return (*args[:index], dtype, *args[index + 1 :]), kwargs
    return tuple(args), {**kwargs, "dtype": dtype}


# ---------------------------------------------------------------------------------------------- running on fake tensors
def _record(
    target: Any, leaves: Sequence[Any], spec: pytree.TreeSpec, state: AutocastState | None,
    casts: Sequence[Cast] = (), dtype: torch.dtype | None = None,
) -> _Recording:  # fmt: skip
    """Run the operator on fresh fake tensors, after these casts, and note what arrives."""
    with _quiet(), FakeTensorMode(), torch.no_grad(), under(None):
        given = [leaf.empty() if isinstance(leaf, TensorMeta) else leaf for leaf in leaves]
        recorder = _Recorder({id(leaf): i for i, leaf in enumerate(given) if isinstance(leaf, torch.Tensor)})
        inputs = list(given)
        with recorder, under(state):
            for cast in casts:
                inputs[cast.index] = aten._to_copy.default(given[cast.index], **dict(cast.kwargs))
            args, kwargs = pytree.tree_unflatten(inputs, spec)
            if dtype is not None:
                args, kwargs = with_dtype(target, args, kwargs, dtype)
            result = target(*args, **kwargs)
        made = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        recorder.events.append(f"returns {recorder.described(result)}")
        storages = {tensor.untyped_storage()._cdata for tensor in recorder.cast}
        shares = any(tensor.untyped_storage()._cdata in storages for tensor in made)
        return _Recording(recorder.events, recorder.casts, tuple(map(TensorMeta.of, made)), shares)


@contextmanager
def _quiet() -> Iterator[None]:
    """Forms that cannot run are part of the search; torch would print a traceback for each."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


class _Recorder(TorchDispatchMode):
    """Notes operators, their arguments by where they come from, and what they give."""

    def __init__(self, inputs: dict[int, int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.inputs = inputs
        self.names = {key: f"input {index}" for key, index in inputs.items()}
        self.events: list[str] = []
        self.casts: list[Cast] = []
        self.cast: list[torch.Tensor] = []
        self.alive: list[torch.Tensor] = []  # an id is a name only while its tensor lives

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        result = func(*args, **given)
        if func in _QUERIES:
            return result
        leading = len(self.casts) == len(self.events)
        if leading and func is aten._to_copy.default and id(args[0]) in self.inputs:
            self.casts.append(Cast(self.inputs[id(args[0])], tuple(given.items()), TensorMeta.of(result)))
            self.cast.append(result)
        text = f"{func}{self.described((args, given))}"
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.alive.append(leaf)
                self.names.setdefault(id(leaf), f"value {len(self.alive)}")
        self.events.append(f"{text} -> {self.described(result)}")
        return result

    def described(self, tree: Any) -> str:
        return str(pytree.tree_map(self._leaf, tree))

    def _leaf(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        meta = TensorMeta.of(leaf)
        return f"{self.names.get(id(leaf), 'a new value')}: {meta} strides {list(meta.stride)} on {meta.device}"
