"""One region's share of the ring writeback: where rows lie in a call, what moves at its end, which nodes do it."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import fx

from cadence_fx.effects import base_of, mutated_bases, view_input, written
from cadence_fx.movement import MovementMap
from cadence_fx.moves import Copy, Fill, Move, Spill, Step, plan_moves
from cadence_fx.pieces import outside
from cadence_fx.pipeline import RegionLink
from cadence_fx.segments import Layout, Piece
from cadence_fx.specialise import FlatGraph, TensorMeta, meta_of

__all__ = ["RegionWriter"]

aten = torch.ops.aten
Box = tuple[tuple[int, ...], tuple[int, ...]]


class RegionWriter:
    """Rewrites one region of one graph. Boxes are in coordinates of the region's buffer."""

    def __init__(
        self, flat: FlatGraph, movement: MovementMap, link: RegionLink, placeholder: fx.Node, staged_above: int
    ) -> None:
        self.flat, self.movement, self.link, self.placeholder = flat, movement, link, placeholder
        self.staged_above = staged_above
        self.copies: list[Piece] = []  # new pieces to copy into the buffer at the end
        self.steps: tuple[Step, ...] = ()  # what moves inside the buffer at the end
        self.staged = False
        self._roots: dict[str, fx.Node] = {}
        self._first = next(iter(flat.graph.nodes))
        # The buffer as it is during the call: live rows, then the rows that are placed beside them.
        self.image = Layout.whole(None, link.shape)
        old = self._box(self._full_start(link.old_offset), self._full_size(link.old))
        if link.old or link.dim is None:
            self.image = self.image.write(self._view(old), Layout.whole(placeholder, self._full_size(link.old)))

    # ------------------------------------------------------------------------------------------- geometry
    def _full_start(self, offset: int) -> tuple[int, ...]:
        return tuple(offset if d == self.link.dim else 0 for d in range(len(self.link.shape)))

    def _full_size(self, extent: int) -> tuple[int, ...]:
        return tuple(extent if d == self.link.dim else n for d, n in enumerate(self.link.shape))

    @staticmethod
    def _box(start: tuple[int, ...], size: tuple[int, ...]) -> Box:
        return start, size

    def _view(self, box: Box) -> Piece:
        start, size = box
        return Piece((0,) * len(start), size, None, start, tuple(range(len(start))))

    # ------------------------------------------------------------------------------------------- reads
    def reads_state(self, node: fx.Node) -> bool:
        """True if a concatenation holds old rows of this region beside new ones."""
        sources = self.movement.materialised(node).sources()
        return self.placeholder in sources and len(sources) > 1

    def place(self, node: fx.Node) -> str | None:
        """Make a concatenation a view of the buffer, new rows written beside live ones; the reason if impossible."""
        if self.placeholder in self.movement.mutated:
            return "the module writes the state argument in place, so a view of it may change before it is read"
        layout = self.movement.materialised(node).merged()
        old = [p for p in layout.pieces if p.source is self.placeholder]
        rank = len(layout.shape)
        if len({p.axes for p in old}) != 1 or self.link.dim is None:
            return "its old rows come from different dimensions of the region"
        axes = old[0].axes
        walked = [a for a in axes if a is not None]
        if sorted(walked) != [d for d in range(rank) if layout.shape[d] != 1 or d in walked]:
            return "it has dimensions that the region lacks"
        # One map from the concatenation to the buffer must fit all old pieces.
        shifts = {
            tuple(o + (self.link.old_offset if s == self.link.dim else 0) - (0 if a is None else p.start[a])
                  for s, (o, a) in enumerate(zip(p.origin, axes, strict=True)))
            for p in old
        }  # fmt: skip
        if len(shifts) != 1:
            return "its old rows are not adjacent in the region"
        origin = shifts.pop()
        size = tuple(1 if a is None else layout.shape[a] for a in axes)
        if any(o < 0 or o + n > limit for o, n, limit in zip(origin, size, self.link.shape, strict=True)):
            end = tuple(o + n for o, n in zip(origin, size, strict=True))
            return f"it needs rows {origin} to {end} of {self.link.shape}"
        view = Piece((0,) * rank, layout.shape, None, origin, axes)
        held = self.image.read(view)
        for piece in layout.pieces:
            if piece.source is self.placeholder:
                continue
            clash = [q for q in held.pieces if q.source is not None and _overlap(q, piece)]
            if clash:
                return "its new rows would overwrite live ones"
        self._emit_place(node, layout, view)
        return None

    def _emit_place(self, node: fx.Node, layout: Layout, view: Piece) -> None:
        with self.flat.graph.inserting_before(node):
            window = self._emit_view(self._buffer(), view)
            for piece in layout.pieces:
                if piece.source is not self.placeholder:
                    target = self._slices(window, piece.start, piece.size)
                    self._copy(target, self._emit_piece(piece))
        self.image = self.image.write(view, layout)
        node.replace_all_uses_with(window)

    # ------------------------------------------------------------------------------------------- writes
    def write_back(self, result: fx.Node, as_movement: bool = True) -> tuple[str, str | None]:
        """Plan how the buffer comes to hold the new state; what was planned, and why not as movement if not.

        Args:
            result: the new state.
            as_movement: False plans one copy of the value that the graph computes, whatever it is made of.
        """
        if self.placeholder in self.movement.mutated:
            live = self._box(self._full_start(self.link.old_offset), self._full_size(self.link.old))
            self.image = self.image.write(self._view(live), self.movement.memory[self.placeholder])
        layout, refusal = self._result_layout(result) if as_movement else (self._computed(result), None)
        stays = self._resting(layout)
        by_source: dict[Any, list[Piece]] = {}
        for held in self.image.pieces:
            if held.source is not None:
                by_source.setdefault(held.source, []).append(held)
        moved = list[Piece]()
        new = list[Piece]()
        for piece in stays.pieces:
            found = _located(piece, by_source.get(piece.source, []))
            if found is None:
                new.append(piece)
            else:
                moved += found
        # Pieces that come from the buffer itself merge across steps, blocks and halves into a few boxes.
        boxes = Layout(self.link.shape, tuple(moved)).merged().pieces
        moves = [Move(p.start, p.origin, p.size) for p in boxes]
        self.steps = plan_moves(moves)
        self.copies = new
        self.staged = len(new) > self.staged_above and not moves
        kept = sum(prod(m.size) for m in moves if m.dst == m.src)
        total = prod(self._full_size(self.link.new))
        summary = (
            f"{100 * kept // max(total, 1)} % of the new state already lies in place, {len(self.steps)} block copies "
            f"inside the region, {len(new)} copies of new elements{' through staging' if self.staged else ''}"
        )
        return summary, refusal

    @staticmethod
    def _computed(result: fx.Node) -> Layout:
        meta = meta_of(result)
        assert meta is not None
        return Layout.whole(result, meta.shape)

    def _result_layout(self, result: fx.Node) -> tuple[Layout, str | None]:
        layout = self.movement.content(result).merged()
        whole = Layout.whole(result, layout.shape)
        for source in layout.sources():
            assert isinstance(source, fx.Node)
            if source.op == "get_attr" or source in self.movement.broken or base_of(source) in self.movement.broken:
                write = self.movement.broken.get(source) or self.movement.broken.get(base_of(source))
                return whole, f"{source} holds content that no traced copy put there" + (
                    f" (written by {write})" if write else ""
                )
            if source is not result and base_of(source) in self.movement.untracked:
                return whole, f"{source} is written in place after it was copied from"
            if self._overwritten(layout, source):
                return whole, f"the module overwrites a part of {source} that it keeps"
        return layout, None

    def _overwritten(self, layout: Layout, source: fx.Node) -> bool:
        """True if the layout holds elements of a state argument that the graph has overwritten in place meanwhile."""
        if source.op != "placeholder" or source not in self.movement.mutated:
            return False
        left = [p for p in self.movement.memory[source].pieces if p.source is source]
        pieces = [p for p in layout.pieces if p.source is source]
        return any(_located(piece, left) is None for piece in pieces)

    def _resting(self, layout: Layout) -> Layout:
        """The new state as pieces in buffer coordinates."""
        dim, offset = self.link.dim, self.link.new_offset
        pieces = [
            Piece(
                tuple(s + offset if d == dim else s for d, s in enumerate(p.start)), p.size, p.source, p.origin, p.axes
            )
            for p in layout.pieces
        ]
        return Layout(layout.shape, tuple(pieces))

    def preserve(self, states: set[fx.Node]) -> None:
        """Clone new elements that lie in some region's live rows; all regions commit after these clones."""
        if self.staged:
            return  # staging reads its sources where they arise
        with self.flat.graph.inserting_before(self.flat.output):
            for i, piece in enumerate(self.copies):
                source = piece.source
                assert isinstance(source, fx.Node)
                if base_of(source) in states:
                    clone = self._call(aten.clone.default, self._emit_piece(piece))
                    rank = len(piece.size)
                    self.copies[i] = Piece(piece.start, piece.size, clone, (0,) * rank, tuple(range(rank)))

    def commit(self) -> None:
        """Emit staging where sources arise, then moves and copies before the output."""
        graph, output = self.flat.graph, self.flat.output
        stage: fx.Node | None = None
        if self.staged:
            stage = self._attribute(f"stage_{self.link.name}")
            for piece in self.copies:
                source = piece.source
                assert isinstance(source, fx.Node)
                with graph.inserting_before(source.next):
                    self._copy(self._slices(stage, piece.start, piece.size), self._emit_piece(piece))
        with graph.inserting_before(output):
            buffer = self._buffer()
            spills: dict[int, fx.Node] = {}
            for step in self.steps:
                if isinstance(step, Copy):
                    self._copy(self._slices(buffer, step.dst, step.size), self._slices(buffer, step.src, step.size))
                elif isinstance(step, Spill):
                    spills[step.slot] = self._call(aten.clone.default, self._slices(buffer, step.src, step.size))
                elif isinstance(step, Fill):
                    self._copy(self._slices(buffer, step.dst, step.size), spills[step.slot])
            if stage is not None:
                self._copy(buffer, stage)
            else:
                for piece in self.copies:
                    self._copy(self._slices(buffer, piece.start, piece.size), self._emit_piece(piece))

    def replace_input(self) -> list[fx.Node]:
        """Readers of the state argument read the live rows of the buffer instead.

        Stock's state is dense, the live rows are a view with the buffer's strides. A reader that computes on it
        directly could then run another kernel, so it gets a dense copy; the first nodes of such readers are returned.
        """
        with self.flat.graph.inserting_before(self._first):
            buffer = self._buffer()
        with self.flat.graph.inserting_after(buffer):
            live = self._live_view(buffer)
        dense = [] if self._is_dense() else [u for u in self.placeholder.users if not any_strides(u)]
        if dense:
            with self.flat.graph.inserting_after(live):
                copy = self._call(aten.clone.default, live)
                copy.kwargs = {"memory_format": torch.contiguous_format}
            for user in dense:
                user.replace_input_with(self.placeholder, copy)
        self.placeholder.replace_all_uses_with(live, delete_user_cb=lambda user: user is not live)
        self.flat.graph.erase_node(self.placeholder)
        return dense

    def _is_dense(self) -> bool:
        """The live rows are one piece of memory, or the call writes the state itself, which a copy would hide."""
        dim, shape = self.link.dim, self.link.shape
        whole = dim is None or self.link.old in (0, shape[dim]) or prod(shape[:dim]) == 1
        return whole or self.placeholder in mutated_bases(self.flat.graph.nodes)

    def _live_view(self, buffer: fx.Node) -> fx.Node:
        dim = self.link.dim
        if dim is None:
            return buffer
        return self._call(aten.slice.Tensor, buffer, dim, self.link.old_offset, self.link.old_offset + self.link.old)

    # ------------------------------------------------------------------------------------------- emission
    def _buffer(self) -> fx.Node:
        return self._attribute(self.link.buffer)

    def _attribute(self, name: str) -> fx.Node:
        if name not in self._roots:
            with self.flat.graph.inserting_before(self._first):
                node = self.flat.graph.create_node("get_attr", name)
            meta = meta_of(self.placeholder)
            assert meta is not None
            node.meta["val"] = TensorMeta(self.link.shape, _contiguous(self.link.shape), meta.dtype, meta.device)
            node.meta["region"] = self.link.name
            self.flat.attributes[name] = name
            self._roots[name] = node
        return self._roots[name]

    def _call(self, target: Any, *args: Any) -> fx.Node:
        node = self.flat.graph.call_function(target, args)
        meta = meta_of(args[0])
        assert meta is not None
        node.meta["val"] = _view_meta(target, meta, args[1:])
        node.meta["region"] = self.link.name
        return node

    def _copy(self, target: fx.Node, source: fx.Node) -> None:
        self._call(aten.copy_.default, target, source)

    def _slices(self, node: fx.Node, start: tuple[int, ...], size: tuple[int, ...]) -> fx.Node:
        meta = meta_of(node)
        assert meta is not None
        for dim, (lo, n, limit) in enumerate(zip(start, size, meta.shape, strict=True)):
            if (lo, n) != (0, limit):
                node = self._call(aten.slice.Tensor, node, dim, lo, lo + n)
        return node

    def _emit_view(self, node: fx.Node, view: Piece) -> fx.Node:
        """A view of the buffer with the dimensions of ``view``."""
        size = tuple(1 if a is None else view.size[a] for a in view.axes)
        node = self._slices(node, view.origin, size)
        return self._arrange(node, view.axes, len(view.size))

    def _emit_piece(self, piece: Piece) -> fx.Node:
        """The box of a source that a piece holds, in the order of the tensor's dimensions."""
        source = piece.source
        assert isinstance(source, fx.Node)
        size = tuple(1 if a is None else piece.size[a] for a in piece.axes)
        node = self._arrange(self._slices(source, piece.origin, size), piece.axes, len(piece.size))
        meta = meta_of(node)
        assert meta is not None
        return node if meta.shape == piece.size else self._call(aten.expand.default, node, list(piece.size))

    def _arrange(self, node: fx.Node, axes: tuple[int | None, ...], rank: int) -> fx.Node:
        """Drop fixed dimensions, order the others as the tensor has them, add missing ones of size 1."""
        for dim in reversed([d for d, a in enumerate(axes) if a is None]):
            node = self._call(aten.select.int, node, dim, 0)
        walked = [a for a in axes if a is not None]
        order = sorted(range(len(walked)), key=walked.__getitem__)
        if order != list(range(len(order))):
            node = self._call(aten.permute.default, node, order)
        for dim in range(rank):
            if dim not in walked:
                node = self._call(aten.unsqueeze.default, node, dim)
        return node


# Readers that give the same bits whatever the strides: they copy, or (attention) are checked by the certificate.
_ANY_STRIDES = {
    aten.cat.default, aten.concat.default, aten.stack.default, aten.clone.default, aten.contiguous.default,
    aten.copy_.default, aten.repeat.default, aten.scaled_dot_product_attention.default,
}  # fmt: skip


def any_strides(node: fx.Node) -> bool:
    """True if a reader of state, or all that read the views it makes, does not care about strides."""
    if node.op == "output" or node.target in _ANY_STRIDES:
        return True
    is_view = node.op == "call_function" and view_input(node) is not None and not written(node)
    return is_view and all(any_strides(user) for user in node.users)


def _overlap(a: Piece, b: Piece) -> bool:
    return all(x < y + m and y < x + n for x, n, y, m in zip(a.start, a.size, b.start, b.size, strict=True))


def _located(piece: Piece, held: list[Piece]) -> list[Piece] | None:
    """The piece as parts that lie in the buffer (source None, origin = where they lie), or None if some do not."""
    walked = {a for a in piece.axes if a is not None}
    if any(n != 1 and d not in walked for d, n in enumerate(piece.size)):
        return None  # broadcast: there is no single place where it lies
    parts, left = list[Piece](), [piece]
    for other in held:
        # The buffer may hold the same content twice: each element is taken from one place.
        found = [part for rest in left if (part := _shared(rest, other)) is not None]
        for part in found:
            left = outside(left, [(d, s, s + n) for d, (s, n) in enumerate(zip(part.start, part.size, strict=True))])
        parts += found
    return None if left else parts


def _shared(piece: Piece, other: Piece) -> Piece | None:
    """The box of ``piece`` whose content ``other``, a piece of the buffer, holds too."""
    lo, hi = list(piece.start), [s + n for s, n in zip(piece.start, piece.size, strict=True)]
    at = list(other.start)
    for source_dim, (mine, theirs) in enumerate(zip(piece.axes, other.axes, strict=True)):
        o_mine, o_theirs = piece.origin[source_dim], other.origin[source_dim]
        if mine is None and theirs is None:
            if o_mine != o_theirs:
                return None
        elif mine is None:
            # One fixed element of the source: where does the other hold it?
            assert theirs is not None
            if not 0 <= o_mine - o_theirs < other.size[theirs]:
                return None
            at[theirs] = other.start[theirs] + o_mine - o_theirs
        else:
            if theirs is not None and theirs != mine:
                return None
            length = 1 if theirs is None else other.size[theirs]
            shift = piece.start[mine] - o_mine + o_theirs  # where the other's box lies in the piece's coordinates
            first, last = max(lo[mine], shift), min(hi[mine], shift + length)
            if first >= last:
                return None
            at[mine] = other.start[mine] + first - shift
            lo[mine], hi[mine] = first, last
    size = tuple(h - s for h, s in zip(hi, lo, strict=True))
    return Piece(tuple(lo), size, None, tuple(at), tuple(range(len(size))))


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def _view_meta(target: Any, meta: TensorMeta, args: tuple[Any, ...]) -> TensorMeta:
    """Metadata of the few view operators that are emitted here."""
    shape, stride = list(meta.shape), list(meta.stride)
    if target is aten.slice.Tensor:
        shape[args[0]] = args[2] - args[1]
    elif target is aten.select.int:
        del shape[args[0]], stride[args[0]]
    elif target is aten.permute.default:
        shape, stride = [shape[d] for d in args[0]], [stride[d] for d in args[0]]
    elif target is aten.unsqueeze.default:
        inner = stride[args[0]] * shape[args[0]] if args[0] < len(shape) else 1
        shape.insert(args[0], 1)
        stride.insert(args[0], inner)
    elif target is aten.expand.default:
        stride = [s if n == m else 0 for s, n, m in zip(stride, args[0], shape, strict=True)]
        shape = list(args[0])
    elif target is aten.clone.default:
        stride = list(_contiguous(tuple(shape)))
    return TensorMeta(tuple(shape), tuple(stride), meta.dtype, meta.device)
