"""What each node of a graph holds, as far as it is data movement: the segment algebra run over a graph.

Memory that the graph writes in place (state placeholders, buffers) is followed through its views: a node that is a view
is known as one box of its owner, and reading it later sees what was written in between. Everything that computes is a
source of its own.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import torch
from torch import fx

from cadence_fx.effects import base_of, mutated_bases, written
from cadence_fx.segments import Layout, LayoutError, NotMovement, Piece
from cadence_fx.specialise import FlatGraph, TensorMeta, meta_of

__all__ = ["MovementMap", "view_piece"]

aten = torch.ops.aten
Op: TypeAlias = Callable[..., Layout | list[Layout]]


def _slice(x: Layout, dim: int = 0, start: int | None = None, stop: int | None = None, step: int = 1) -> Layout:
    return x.slice(dim, start, stop, step)


def _narrow(x: Layout, dim: int, start: int, length: int) -> Layout:
    return x.slice(dim, start, start + length)


# Operators whose result is a view of their first argument, and what they do to a layout.
_VIEWS: dict[Any, Op] = {
    aten.slice.Tensor: _slice,
    aten.narrow.default: _narrow,
    aten.select.int: lambda x, dim, index: x.select(dim, index),
    aten.transpose.int: lambda x, a, b: x.transpose(a, b),
    aten.permute.default: lambda x, dims: x.permute(dims),
    aten.unsqueeze.default: lambda x, dim: x.unsqueeze(dim),
    aten.squeeze.default: lambda x: x.squeeze(),
    aten.squeeze.dim: lambda x, dim: x.squeeze(dim),
    aten.squeeze.dims: lambda x, dims: x.squeeze(dims),
    aten.expand.default: lambda x, sizes, implicit=False: x.expand(sizes),
    aten.view.default: lambda x, shape: x.reshape(shape),
    aten.split.Tensor: lambda x, size, dim=0: x.split(dim, size),
    aten.split_with_sizes.default: lambda x, sizes, dim=0: x.split(dim, sizes),
    aten.chunk.default: lambda x, n, dim=0: x.chunk(dim, n),
    aten.unbind.int: lambda x, dim=0: x.unbind(dim),
    aten.alias.default: lambda x: x,
    aten.detach.default: lambda x: x,
}
# Operators that copy without computing; reshape and contiguous may do either.
_COPIES: dict[Any, Op] = {
    aten.clone.default: lambda x, **_: x,
    aten.contiguous.default: lambda x, **_: x,
    aten.reshape.default: lambda x, shape: x.reshape(shape),
    aten.repeat.default: lambda x, counts: x.repeat(counts),
}
_JOINS: dict[Any, Callable[[list[Layout], int], Layout]] = {
    aten.cat.default: Layout.cat,
    aten.concat.default: Layout.cat,
    aten.stack.default: Layout.stack,
}


class MovementMap:
    """Layouts of a graph's nodes.

    Args:
        flat: the graph.
        owners: nodes whose memory is followed through in-place writes, beside every get_attr node that is written.
    """

    def __init__(self, flat: FlatGraph, owners: Iterable[fx.Node]) -> None:
        nodes = list(flat.graph.nodes)
        mutated = mutated_bases(nodes)
        owners = tuple(owners)
        self.memory: dict[fx.Node, Layout] = {}
        self.mutated = mutated
        self.untracked = {n for n in mutated if n.op != "get_attr" and n not in owners}
        self.broken: dict[fx.Node, fx.Node] = {}  # owner -> the write that could not be followed
        self._views: dict[fx.Node, Piece | list[Piece | None] | None] = {}
        self._layouts: dict[fx.Node, Layout | list[Layout]] = {}
        self._final: dict[fx.Node, Layout] = {}
        for owner in (*owners, *(n for n in mutated if n.op == "get_attr")):
            meta = meta_of(owner)
            if meta is not None:
                self.memory[owner] = Layout.whole(owner, meta.shape)
                self._views[owner] = self.memory[owner].view_piece()
        for node in nodes:
            if node.op == "call_function":
                self._step(node)
            elif node.op == "output":
                self._final = {n: self.content(n) for n in node.all_input_nodes if meta_of(n) is not None}

    def content(self, node: fx.Node) -> Layout:
        """What ``node`` holds where the walk stands: at the end of the graph after construction."""
        if node in self._final:
            return self._final[node]
        piece = self._views.get(node)
        meta = meta_of(node)
        assert meta is not None
        if isinstance(piece, Piece):
            return self.memory[base_of(node) if base_of(node) in self.memory else _owner(node)].read(piece)
        found = self._layouts.get(node)
        return found if isinstance(found, Layout) else Layout.whole(node, meta.shape)

    def materialised(self, node: fx.Node) -> Layout:
        """What a cat, clone, stack or repeat node holds, as of the place where it stands."""
        found = self._layouts.get(node)
        meta = meta_of(node)
        assert meta is not None
        return found if isinstance(found, Layout) else Layout.whole(node, meta.shape)

    # ------------------------------------------------------------------------------------------- the walk
    def _step(self, node: fx.Node) -> None:
        if written(node):
            self._write(node)
            return
        if node in self.untracked:
            return  # what it holds at first says nothing about what it holds when it is read
        try:
            if node.target is operator.getitem:
                self._item(node)
            elif node.target in _VIEWS:
                self._view(node, _VIEWS[node.target])
            elif node.target in _COPIES and not self._opaque(node.args[0]):
                found = _COPIES[node.target](self.content(node.args[0]), *node.args[1:])  # type: ignore[arg-type]
                self._layouts[node] = found
            elif node.target in _JOINS and all(self._joined(node, n) for n in node.args[0]):  # type: ignore[union-attr]
                parts = [self.content(n) for n in node.args[0]]  # type: ignore[union-attr,arg-type]
                dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
                self._layouts[node] = _JOINS[node.target](parts, dim)  # type: ignore[arg-type]
        except (NotMovement, LayoutError):
            # A source of its own; that it may be a view of tracked memory is what `_write` looks at.
            return

    def _opaque(self, node: Any) -> bool:
        """True if the node's memory is written in place and not followed: only a copy made there and then is safe."""
        if not isinstance(node, fx.Node) or meta_of(node) is None:
            return True
        base = base_of(node)
        return base in self.untracked or (base in self.mutated and not isinstance(self._views.get(node), Piece))

    def _joined(self, node: fx.Node, part: Any) -> bool:
        """True if a part enters a concatenation as it is: one of another dtype is cast there."""
        return not self._opaque(part) and _meta(part).dtype == _meta(node).dtype

    def _view(self, node: fx.Node, op: Op) -> None:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        piece = self._views.get(source)
        if isinstance(piece, Piece):
            found = op(Layout(piece.size, (piece,)), *node.args[1:], **node.kwargs)
            parts = found if isinstance(found, list) else [found]
            pieces = [part.view_piece() for part in parts]
            self._views[node] = pieces if isinstance(found, list) else pieces[0]
            if not isinstance(found, list) and pieces[0] is None:
                self._layouts[node] = found  # an empty view
        elif not self._opaque(source):
            self._layouts[node] = op(self.content(source), *node.args[1:], **node.kwargs)

    def _item(self, node: fx.Node) -> None:
        source, index = node.args
        assert isinstance(source, fx.Node)
        assert isinstance(index, int)
        pieces, layouts = self._views.get(source), self._layouts.get(source)
        if isinstance(pieces, list):
            self._views[node] = pieces[index]
        elif isinstance(layouts, list):
            self._layouts[node] = layouts[index]

    def _write(self, node: fx.Node) -> None:
        for target in written(node):
            piece = self._views.get(target)
            owner = _owner(target)
            if owner not in self.memory:
                continue
            source = node.args[1] if node.target is aten.copy_.default else None
            known = isinstance(piece, Piece) and isinstance(source, fx.Node) and self._copyable(target, source)
            if not known or self._opaque(source):
                # Any element may have changed: nothing that was known of this memory holds any more.
                self.broken.setdefault(owner, node)
                self.memory[owner] = Layout.whole(owner, _meta(owner).shape)
                continue
            assert isinstance(piece, Piece)
            assert isinstance(source, fx.Node)
            self.memory[owner] = self.memory[owner].write(piece, self.content(source).expand(piece.size))
            self._views[node] = piece

    def _copyable(self, target: fx.Node, source: fx.Node) -> bool:
        """A copy that casts computes, so it is no movement."""
        a, b = meta_of(target), meta_of(source)
        return a is not None and b is not None and a.dtype == b.dtype and a.device == b.device


def view_piece(node: fx.Node, owner: fx.Node) -> Piece | None:
    """How a view shows its owner, as one box; None if it does not."""
    chain: list[fx.Node] = []
    current = node
    while current is not owner:
        chain.append(current)
        parent = current.args[0]
        if not isinstance(parent, fx.Node) or current.target not in _VIEWS:
            return None
        current = parent
    meta = meta_of(owner)
    if meta is None:
        return None
    layout = Layout.whole(owner, meta.shape)
    try:
        for step in reversed(chain):
            found = _VIEWS[step.target](layout, *step.args[1:], **step.kwargs)
            if isinstance(found, list):
                return None
            layout = found
    except (NotMovement, LayoutError):
        return None
    return layout.view_piece()


def _owner(node: fx.Node) -> fx.Node:
    return base_of(node)


def _meta(node: fx.Node) -> TensorMeta:
    found = meta_of(node)
    assert found is not None
    return found
