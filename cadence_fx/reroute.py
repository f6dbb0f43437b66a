"""Copies read from a concatenation what they read from its parts, so that a part has one reader and can be fused.

A causal convolution takes ``cat([context, h])``, and the new context is the end of ``h``: as long as ``h`` itself is
read, it must be in memory, and a kernel that computes the concatenation cannot keep it to itself::

    cat = aten.cat([context, h], 2)                     cat = aten.cat([context, h], 2)
    aten.copy_(state, h[..., 48:50])            ->      aten.copy_(state, cat[..., 50:52])

Only copies are changed: what they read has the same bits and other strides, which matters to no copy.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from cadence_fx.movement import view_piece
from cadence_fx.schedule import is_view, viewed
from cadence_fx.segments import Piece
from cadence_fx.specialise import FlatGraph, TensorMeta, meta_of

__all__ = ["read_from_concatenations"]

aten = torch.ops.aten


def read_from_concatenations(flat: FlatGraph) -> None:
    """Change the sources of copies in place."""
    position = {node: i for i, node in enumerate(flat.graph.nodes)}
    parts: dict[fx.Node, tuple[fx.Node, int, int, Piece]] = {}
    for node in flat.graph.nodes:
        if node.target is aten.cat.default:
            for owner, found in _parts(node):
                parts.setdefault(owner, found)
    for node in list(flat.graph.nodes):
        if node.target is not aten.copy_.default or not isinstance(node.args[1], fx.Node):
            continue
        source = node.args[1]
        owner = viewed(source)
        if owner not in parts or position[parts[owner][0]] > position[node]:
            continue
        with flat.graph.inserting_before(node):
            view = _seen_through(source, owner, *parts[owner])
        if view is not None:
            node.update_arg(1, view)
    for node in reversed(list(flat.graph.nodes)):
        if is_view(node) and not node.users:
            flat.graph.erase_node(node)


def _parts(cat: fx.Node) -> Iterator[tuple[fx.Node, tuple[fx.Node, int, int, Piece]]]:
    """Operators that a concatenation reads in all their dimensions.

    Each with the concatenation, its dimension, where the operator's part begins in it, and the part as a view.
    """
    pieces: Any = cat.args[0]
    meta = meta_of(cat)
    if meta is None:
        return
    given: Any = cat.args[1] if len(cat.args) > 1 else cat.kwargs.get("dim", 0)
    dim = int(given) % len(meta.shape)
    start = 0
    for part in pieces:
        found = meta_of(part)
        if found is None or len(found.shape) != len(meta.shape):
            return
        owner = viewed(part)
        piece = view_piece(part, owner)
        if owner.op == "call_function" and piece is not None and set(piece.axes) == set(range(len(meta.shape))):
            yield owner, (cat, dim, start, piece)
        start += found.shape[dim]


def _seen_through(source: fx.Node, owner: fx.Node, cat: fx.Node, dim: int, start: int, part: Piece) -> fx.Node | None:
    """A view of the concatenation that shows what ``source`` shows of the owner; None if it has not all of it."""
    wanted = view_piece(source, owner)
    whole = meta_of(cat)
    if wanted is None or whole is None or None in wanted.axes:
        return None
    view, place = cat, dict[int, int]()  # dimension of the source -> dimension of the concatenation
    for axis, (mine, theirs) in enumerate(zip(part.axes, wanted.axes, strict=True)):
        assert mine is not None
        assert theirs is not None
        first = wanted.origin[axis] - part.origin[axis]
        size = wanted.size[theirs]
        if first < 0 or first + size > part.size[mine]:
            return None
        first += start if mine == dim else 0
        if (first, size) != (0, whole.shape[mine]):
            view = _view(view, aten.slice.Tensor, mine, first, first + size)
        place[theirs] = mine
    order = [place[d] for d in sorted(place)]
    if order != sorted(order):
        view = _view(view, aten.permute.default, order)
    for d in range(len(wanted.size)):
        if d not in place:
            view = _view(view, aten.unsqueeze.default, d)
    return view


def _view(node: fx.Node, target: Any, *args: Any) -> fx.Node:
    meta = meta_of(node)
    assert meta is not None
    shown = target(meta.empty("meta"), *args)
    made = node.graph.call_function(target, (node, *args))
    made.meta = {**node.meta, "val": replace(TensorMeta.of(shown), device=meta.device)}
    return made
