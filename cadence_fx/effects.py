"""What an operator does beside computing: which argument it aliases, which it writes, whether it draws or waits.

Read from operator schemas and tags, so that any traced decoder is covered and nothing is guessed from names.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import torch
from torch import fx

__all__ = ["base_of", "is_random", "is_sync", "mutated_bases", "view_input", "written"]

aten = torch.ops.aten

# Returns its input in eval mode, which its schema does not say.
_MAY_ALIAS = {aten.dropout.default}
# Wait for the device and look at a value on the host.
_SYNCS = {
    aten.istft.default, aten._local_scalar_dense.default, aten.item.default, aten.nonzero.default,
    aten.equal.default, aten.is_nonzero.default, aten.masked_select.default,
}  # fmt: skip


@lru_cache(maxsize=4096)
def _alias_and_writes(target: Any) -> tuple[int | None, tuple[int | str, ...]]:
    """Index of the argument that the result may alias, and positions (or names) of written arguments."""
    if target is operator.getitem or target in _MAY_ALIAS:
        return 0, ()
    if (writes_at := getattr(target, "writes", None)) is not None:  # a group of operators in one kernel
        return None, tuple(writes_at)
    schema = getattr(target, "_schema", None)
    if schema is None:
        return None, ()
    writes: list[int | str] = []
    sets: list[tuple[int, set[str]]] = []
    for i, argument in enumerate(schema.arguments):
        info = argument.alias_info
        if info is None:
            continue
        if info.is_write:
            writes.append(argument.name if argument.kwarg_only else i)
        sets.append((i, set(info.before_set) | set(info.after_set)))
    alias = None
    for result in schema.returns:
        info = result.alias_info
        if info is not None and sets:
            names = set(info.before_set) | set(info.after_set)
            alias = next((i for i, found in sets if found & names), sets[0][0])
    return alias, tuple(writes)


def view_input(node: fx.Node) -> fx.Node | None:
    """The argument whose memory the node's value may share, or None if the value is new memory."""
    if node.op != "call_function":
        return None
    alias, _ = _alias_and_writes(node.target)
    if alias is None or alias >= len(node.args):
        return None
    found = node.args[alias]
    return found if isinstance(found, fx.Node) else None


def written(node: fx.Node) -> tuple[fx.Node, ...]:
    """The arguments that the node writes in place."""
    if node.op != "call_function":
        return ()
    _, writes = _alias_and_writes(node.target)
    found = [
        node.kwargs.get(w) if isinstance(w, str) else (node.args[w] if w < len(node.args) else None) for w in writes
    ]
    return tuple(a for a in found if isinstance(a, fx.Node))


def base_of(node: fx.Node) -> fx.Node:
    """The node that owns the memory that ``node`` may be a view of (itself if it is none)."""
    while (parent := view_input(node)) is not None:
        node = parent
    return node


def mutated_bases(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Owners of memory that some node writes in place."""
    return {base_of(argument) for node in nodes for argument in written(node)}


def is_random(node: fx.Node) -> bool:
    """True if the node draws from a generator: it may be neither removed, repeated nor reordered."""
    tags = getattr(node.target, "tags", ())
    return node.op == "call_function" and torch.Tag.nondeterministic_seeded in tags and not _is_eval_dropout(node)


def _is_eval_dropout(node: fx.Node) -> bool:
    return node.target is aten.dropout.default and len(node.args) > 2 and node.args[2] is False


def is_sync(node: fx.Node) -> bool:
    """True if the node makes the host wait for a value of the device."""
    if node.op != "call_function":
        return False
    tags = getattr(node.target, "tags", ())
    if node.target is aten.index.Tensor:
        return any(_is_mask(index) for index in node.args[1] if index is not None)  # type: ignore[union-attr]
    return node.target in _SYNCS or torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags


def _is_mask(index: object) -> bool:
    """True if an index selects by truth: how many elements it selects is known on the device only."""
    value = index.meta.get("val") if isinstance(index, fx.Node) else None
    return getattr(value, "dtype", torch.bool) in (torch.bool, torch.uint8)
