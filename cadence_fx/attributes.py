"""What a trace took for fixed although a user can change it: Python attributes, submodules and hooks.

Tracing runs the module's Python once. A number that it read is a literal of the graph, a submodule and a hook are
inlined. So the reads are recorded while tracing, and a call is admitted only while they would give the same. Globals
that its functions name count as read. What the module's Python would write on each call, a replay would not: such a
module is refused.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from operator import attrgetter, getitem, is_
from typing import Any, NamedTuple

import torch

from cadence_fx.errors import TraceError
from cadence_fx.surroundings import SharedContainer, class_containers, global_reads

__all__ = ["AttributeWatch"]

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_TENSORS = ("_parameters", "_buffers", "_modules")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_DEPTH = 3  # how far a value is followed into containers and configuration objects
_ABSENT = object()
_OWN = frozenset(torch.nn.Module().__dict__) - {"training"}  # the bookkeeping of torch.nn.Module itself
_lock = threading.Lock()
_version = attrgetter("_version")


class _ByName:
    """Items of a dict-like view are attributes: for values that a class defines."""

    def __init__(self, owner: object) -> None:
        self.owner = owner

    def __getitem__(self, name: str) -> Any:
        return getattr(self.owner, name)


class AttributeWatch:
    """Records what traces of ``traced`` read and says whether ``module``, which it is a twin of, still has it.

    Args:
        module: what users can change.
        traced: a twin of it, which is traced.
        ignore: dotted paths of tensors that change without meaning, such as scratch.
    """

    def __init__(self, module: torch.nn.Module, traced: torch.nn.Module, ignore: frozenset[str] = frozenset()) -> None:
        self._ignore = ignore
        self._pairs = [(p, m, t) for (p, m), t in zip(module.named_modules(), traced.modules(), strict=True)]
        self._index = {id(t): i for i, (_, _, t) in enumerate(self._pairs)}
        self._seen: set[tuple[int, str]] = set()
        self.containers: list[Any] = []
        self.keys: list[Any] = []
        self.expected: list[Any] = []
        self.names: list[str] = []
        self.sized: list[Any] = []
        self.sizes: list[int] = []
        self.tensors: list[torch.Tensor] = []
        self.versions: list[int] = []
        self._hooks = [getattr(m, name) for _, m, _ in self._pairs for name in _HOOKS]
        self._any_hooks = any(self._hooks)
        self.sized += [h for h in self._hooks if h]
        for path, mine, _ in self._pairs:
            if mine._modules:
                self.sized.append(mine._modules)
            for key in mine._modules:
                self._expect(mine._modules, key, mine._modules[key], f"{path}.{key}".lstrip("."))
        self.sizes = list(map(len, self.sized))
        self._shared = class_containers(traced.modules())
        self._globals: list[SharedContainer] = []
        for namespace, name in global_reads(traced.modules()):
            self._watch_global(namespace, name)

    # ------------------------------------------------------------------------------------------- recording
    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record attribute reads of the traced twin.

        Raises:
            TraceError: the module's Python changed one of its own attributes.
        """
        before = [_Contents(t) for _, _, t in self._pairs]
        kept = [(shared, shared.container.copy()) for shared in (*self._shared, *self._globals)]
        events: list[_Event] = []
        try:
            with _lock, warnings.catch_warnings(), _recorded(self._index, events):
                warnings.filterwarnings("ignore", "The tensor attribute")  # torch.export names what is judged here
                yield
        finally:
            inside = [(i, name) for i, contents in enumerate(before) for name in contents.restore()]
            filled = [shared.name for shared, items in kept if self._restored(shared, items)]
        temporary = _temporaries(events)
        written = [(e.module, e.name) for e in events if e.wrote and (e.module, e.name) not in temporary]
        changed = [
            f"{self._pairs[i][0]}.{name}".lstrip(".") for i, name in (*written, *inside) if (i, name) not in temporary
        ] + filled
        for event in events:
            key = (event.module, event.name)
            if not event.wrote and event.name not in _OWN and key not in self._seen and key not in temporary:
                self._seen.add(key)
                self._watch(*key)
        if changed:
            raise TraceError(
                f"a call changes the attribute {changed[0]!r}, which a replay would not: pass it as an argument and "
                "return it, and declare it as a Region, or keep what counts calls outside forward"
            )

    def _watch(self, index: int, name: str) -> None:
        path, mine, traced = self._pairs[index]
        label = f"{path}.{name}".lstrip(".")
        if name in traced.__dict__:
            if name not in mine.__dict__ and callable(traced.__dict__[name]):
                return  # a boundary that the tracer has put there; the module has its class's method
            self._follow(mine.__dict__, name, traced.__dict__[name], label, _DEPTH)
        elif not hasattr(torch.nn.Module, name):
            value = getattr(type(traced), name, _ABSENT)
            if isinstance(value, (*_PLAIN, list, tuple, dict)):
                self._follow(_ByName(mine), name, value, label, _DEPTH)

    def _watch_global(self, namespace: dict[str, Any], name: str) -> None:
        value, label = namespace[name], f"{namespace.get('__name__', '')}.{name}"
        if isinstance(value, (dict, list, set)):
            self._globals.append(SharedContainer(label, value))
        simple = isinstance(value, (dict, list, tuple)) and value and _simple(_items(value))
        if simple or _is_plain(value) or isinstance(value, torch.Tensor):
            self._follow(namespace, name, value, label, _DEPTH)

    def _restored(self, shared: SharedContainer, items: Any) -> bool:
        """Put a shared container's items back if a trace changed what is the module's business.

        Its classes' containers are. In globals, libraries keep books of types and shapes; what counts there is a
        tensor, which belongs to the trace and would be met by later calls.
        """
        if _same_items(shared.container, items):
            return False
        if any(shared is other for other in self._globals) and not shared.holds_tensor():
            return False
        _refill(shared.container, items)
        return True

    def _follow(self, container: Any, key: Any, value: Any, label: str, depth: int) -> None:
        """Expect ``value`` (of the traced twin) at ``container[key]`` (of the module), and what lies below it."""
        if _is_plain(value):
            self._expect(container, key, value, label)
            return
        try:
            mine = container[key]
        except (KeyError, IndexError, AttributeError):
            self._expect(container, key, value, label)
            return
        if isinstance(mine, torch.Tensor) and label not in self._ignore and not mine.is_inference():
            self._expect(container, key, mine, label)
            self.tensors.append(mine)
            self.versions.append(mine._version)
        if depth == 0 or isinstance(value, (torch.Tensor, torch.nn.Module, type)) or callable(value):
            return
        if isinstance(value, (dict, list, tuple)):
            items = _items(value)
            if not _simple(items) or type(mine) is not type(value):
                return
            self._expect(container, key, mine, label)  # the container itself: replacing it counts as a change
            self.sized.append(mine)
            self.sizes.append(len(value))
            for k, v in items:
                self._follow(mine, k, v, f"{label}[{k!r}]", depth - 1)
        elif isinstance(getattr(value, "__dict__", None), dict):
            self._expect(container, key, mine, label)
            for k, v in vars(value).items():
                self._follow(vars(mine), k, v, f"{label}.{k}", depth - 1)

    def _expect(self, container: Any, key: Any, value: Any, label: str) -> None:
        self.containers.append(container)
        self.keys.append(key)
        self.expected.append(value)
        self.names.append(label)

    # ------------------------------------------------------------------------------------------- checking
    def changed(self) -> str | None:
        """Name of something that is no longer what the traces read; None in the common case, after one pass in C."""
        try:
            if (
                all(map(is_, map(getitem, self.containers, self.keys), self.expected))
                and list(map(len, self.sized)) == self.sizes
                and list(map(_version, self.tensors)) == self.versions
                and (self._any_hooks or not any(self._hooks))
            ):
                return None
        except (KeyError, IndexError, AttributeError):
            pass
        return self._which()

    def _which(self) -> str | None:
        for i, (container, key) in enumerate(zip(self.containers, self.keys, strict=True)):
            try:
                found = container[key]
            except (KeyError, IndexError, AttributeError):
                return self.names[i]
            if found is self.expected[i]:
                continue
            if _is_plain(found) and _same(found, self.expected[i]):
                self.expected[i] = found  # another object of the same value
                continue
            return self.names[i]
        if list(map(len, self.sized)) != self.sizes:
            return "number of items of a container, submodules or hooks"
        for tensor, version in zip(self.tensors, self.versions, strict=True):
            if tensor._version != version:
                return next(n for n, held in zip(self.names, self.expected, strict=True) if held is tensor)
        return None if self._any_hooks or not any(self._hooks) else "forward hooks"


def _is_plain(value: Any) -> bool:
    """A value that cannot be changed in place."""
    return isinstance(value, _PLAIN) or (type(value) is tuple and all(map(_is_plain, value)))


def _items(value: Any) -> list[tuple[Any, Any]]:
    return list(value.items()) if isinstance(value, dict) else list(enumerate(value))


def _simple(items: list[tuple[Any, Any]]) -> bool:
    """True for a container that looks like configuration or tables and not like a container of modules."""
    return all(isinstance(v, (*_PLAIN, torch.Tensor, dict, list, tuple)) for _, v in items)


class _Event(NamedTuple):
    """An access to an attribute of a traced module: the module's number, the name, whether it set it, to a tensor."""

    module: int
    name: str
    wrote: bool
    tensor: bool


@contextmanager
def _recorded(index: Mapping[int, int], events: list[_Event]) -> Iterator[None]:
    plain, assign, me = object.__getattribute__, torch.nn.Module.__setattr__, threading.get_ident()

    def read(self: torch.nn.Module, name: str) -> Any:
        found = index.get(id(self))
        if found is not None and name[:2] != "__" and threading.get_ident() == me:
            events.append(_Event(found, name, False, False))
        return plain(self, name)

    def write(self: torch.nn.Module, name: str, value: Any) -> None:
        found = index.get(id(self))
        mine = found is not None and threading.get_ident() == me
        if found is not None and mine and not _same(plain(self, "__dict__").get(name, _ABSENT), value):
            events.append(_Event(found, name, True, isinstance(value, torch.Tensor)))
        assign(self, name, value)

    torch.nn.Module.__getattribute__ = read  # type: ignore[method-assign, assignment]
    torch.nn.Module.__setattr__ = write  # type: ignore[method-assign]
    try:
        yield
    finally:
        del torch.nn.Module.__getattribute__
        torch.nn.Module.__setattr__ = assign  # type: ignore[method-assign]


def _temporaries(events: list[_Event]) -> set[tuple[int, str]]:
    """Attributes that a call sets to a tensor before it reads them, as old-style weight norm does with ``weight``."""
    first: dict[tuple[int, str], _Event] = {}
    read_later: set[tuple[int, str]] = set()
    for event in events:
        key = (event.module, event.name)
        opened = first.setdefault(key, event)
        if opened.wrote and not event.wrote:
            read_later.add(key)
    return {key for key, event in first.items() if event.wrote and event.tensor and key in read_later}


class _Contents:
    """A module's attributes and the items of its containers, to see and to undo what a trace changed."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module
        self.attributes = dict(module.__dict__)
        self.inside = {k: v.copy() for k, v in module.__dict__.items() if isinstance(v, (dict, list, set))}

    def restore(self) -> list[str]:
        """Put everything back; names of what had changed."""
        changed, mine = [], self.module.__dict__
        for name, value in list(mine.items()):
            if name not in self.attributes or not _same(self.attributes[name], value):
                changed.append(name)
        changed += [name for name in self.attributes if name not in mine]
        mine.clear()
        mine.update(self.attributes)
        for name, kept in self.inside.items():
            container = mine[name]
            if not _same_items(container, kept):
                changed += _changed_keys(container, kept) if name in _TENSORS else [name]
                _refill(container, kept)
        return changed


def _refill(container: Any, items: Any) -> None:
    container.clear()
    container.extend(items) if isinstance(items, list) else container.update(items)


def _changed_keys(found: Any, kept: Any) -> list[str]:
    return [k for k in {**kept, **found} if found.get(k, _ABSENT) is not kept.get(k, _ABSENT)]


def _same(a: Any, b: Any) -> bool:
    """Equal values; tracing exchanges plain containers for equal ones, which is no change."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, (dict, list, tuple)):
        return _same_items(a, b)
    return isinstance(a, _PLAIN) and repr(a) == repr(b)


def _same_items(a: Any, b: Any) -> bool:
    if len(a) != len(b):
        return False
    if isinstance(b, dict):
        return all(k in a and _same(a[k], v) for k, v in b.items())
    return all(map(_same, a, b)) if isinstance(b, (list, tuple)) else bool(a == b)
