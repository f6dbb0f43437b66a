"""State stays where it is: concatenate-and-truncate becomes in-place writes of what changed.

Before / after, one block of a solver (new elements first, extent 402, 50 new rows, keep the first 302 and last 100)::

    k: "f32[2, 8, 452, 64]" = aten.cat([k_new, k_old], 2)                   # k_old: a slice of the state argument
    v: "f32[2, 8, 452, 64]" = aten.cat([v_new, v_old], 2)
    attention = aten.scaled_dot_product_attention(q, k, v)
    kv: "f32[2, 8, 452, 128]" = aten.cat([k, v], 3)
    _ = aten.copy_(vendor_scratch, kv)                                      # and once more into a second scratch
    new: "f32[10, 16, 2, 8, 402, 128]" = aten.cat([slice_1, slice_2], 4)    # 500 MB, every call

    _ = aten.copy_(region[step, block, :, :, 6:56, 0:64], k_new)            # beside the live rows
    _ = aten.copy_(region[step, block, :, :, 6:56, 64:128], v_new)
    attention = aten.scaled_dot_product_attention(q, region[..., 6:458, 0:64], region[..., 6:458, 64:128])
    ...
    _ = aten.copy_(region[..., 308:358, :], region[..., 258:308, :])        # at the end: only rows that move, in blocks

How: the segment algebra (`cadence_fx.movement`) says which box of which source every part of the new state is. Compared
with where the region's rows rest (`cadence_fx.memory`), what already lies where it belongs costs nothing; rows that
move become ordered, non-overlapping copies (`cadence_fx.moves`); new rows are written once. Everything that changes
live rows happens at the end of the graph, so a call that fails half-way has changed nothing.

Requires: one placeholder per state region.
Raises: ContractError where the trace moves rows in another order than the contract declares.
Leaves alone, each with a rejection: a concatenation whose readers want contiguous memory (a strided operand may select
another kernel, with other bits), new rows that do not fit beside the live ones, memory written in a way that is no
copy. The state is then still kept in the region, by one copy of the value that the graph computes.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from cadence_fx.changes import Change, Rejection, register
from cadence_fx.declared import order_mismatch
from cadence_fx.effects import base_of
from cadence_fx.errors import ContractError
from cadence_fx.movement import MovementMap
from cadence_fx.passes.eliminate_dead import live_nodes
from cadence_fx.pipeline import PassContext, PassResult
from cadence_fx.specialise import FlatGraph, source_of
from cadence_fx.writeback import RegionWriter

__all__ = ["RingWriteback"]

aten = torch.ops.aten
CX401 = register("CX401", "concatenation kept: a reader wants contiguous memory")
CX402 = register("CX402", "concatenation kept: its rows do not fit beside the live rows")
CX403 = register("CX403", "state is not pure movement: written back whole")
CX404 = register("CX404", "state copied for a reader that may depend on strides")

# Readers that take any strides and give the same bits; the certificate checks that per signature.
_STRIDED_READERS = {aten.scaled_dot_product_attention.default}


@dataclass(frozen=True)
class RingWriteback:
    """Keep state regions in their buffers.

    Args:
        staged_above: more new pieces than this go through one staging buffer.
        in_place: False keeps the module's concatenations and writes the state that they give into its region by one
            copy; what this rewrite is worth can then be measured.
    """

    staged_above: int = 16
    in_place: bool = True
    name: ClassVar[str] = "ring_writeback"
    after: ClassVar[tuple[str, ...]] = ("normalise", "lower_autocast", "remove_host_syncs", "hoist_constants")

    def requires(self, flat: FlatGraph, context: PassContext) -> str | None:
        placeholders = {n.name for n in flat.graph.nodes if n.op == "placeholder"}
        missing = [link.name for link in context.regions if link.input not in placeholders]
        return f"regions {missing} have no placeholder" if missing else None

    def call(self, flat: FlatGraph, context: PassContext) -> PassResult:
        by_name = {n.name: n for n in flat.graph.nodes if n.op == "placeholder"}
        movement = MovementMap(flat, [by_name[link.input] for link in context.regions])
        results = list(flat.output.args[0])  # type: ignore[arg-type]
        live = _live(flat, context, movement)
        writers = [
            RegionWriter(flat, movement, link, by_name[link.input], self.staged_above) for link in context.regions
        ]
        rejections: list[Rejection] = []
        changes: list[Change] = []
        for writer in writers if self.in_place else ():
            inplace, declined = _read_in_place(flat, writer, live, self.name)
            rejections += declined
            changes += [Change(self.name, "read in place", "concatenation", "its rows are adjacent in the region", s, n)
                        for s, n in inplace.items()]  # fmt: skip
        for writer in writers:
            index = writer.link.output
            if index is None:
                continue
            _check_declared(context, writer, movement, results[index])
            summary, refusal = writer.write_back(results[index], as_movement=self.in_place)
            changes.append(Change(self.name, "writeback", writer.link.name, summary))
            if refusal is not None:
                rejections.append(Rejection(CX403, self.name, writer.link.name, refusal))
        owned = {link.output for link in context.regions}
        states = {writer.placeholder for writer in writers}
        _own_results(flat, results, owned, states)
        for writer in writers:
            writer.preserve(states)
        for writer in writers:
            writer.commit()
        for writer in writers:
            for reader in writer.replace_input():
                text = "stock's state is dense, the region's live rows are not, and it computes on them directly"
                rejections.append(Rejection(CX404, self.name, reader.name, text, (), source_of(reader)))
        flat.output.args = (tuple(value for i, value in enumerate(results) if i not in owned),)
        return PassResult(flat, tuple(changes), tuple(rejections))

    def ensures(self, flat: FlatGraph, context: PassContext) -> str | None:
        inputs = {link.input for link in context.regions}
        left = [n.name for n in flat.graph.nodes if n.op == "placeholder" and n.name in inputs]
        return f"state still enters through {left}" if left else None


def _check_declared(context: PassContext, writer: RegionWriter, movement: MovementMap, result: object) -> None:
    link = writer.link
    region = context.contract.region(link.name)
    if not isinstance(result, fx.Node) or link.dim is None:
        return
    layout = movement.content(result).merged()
    start = region.starts[link.variant if len(region.starts) > 1 else 0]
    reason = order_mismatch(region, layout, writer.placeholder, link.old, link.grown, start)
    if reason is not None:
        raise ContractError(f"Region {region.name!r}: {reason}")


def _own_results(flat: FlatGraph, results: list[Any], owned: set[int | None], states: set[fx.Node]) -> None:
    """A result that is a view of old state is copied before the state changes."""
    for i, value in enumerate(results):
        if i not in owned and isinstance(value, fx.Node) and base_of(value) in states:
            with flat.graph.inserting_before(flat.output):
                results[i] = flat.graph.call_function(aten.clone.default, (value,))
            results[i].meta.update(value.meta)


def _live(flat: FlatGraph, context: PassContext, movement: MovementMap) -> set[fx.Node]:
    """What is left once no state is returned as a value and no scratch is written."""
    results = list(flat.output.args[0])  # type: ignore[arg-type]
    owned = {link.output for link in context.regions}
    roots = [v for i, v in enumerate(results) if i not in owned and isinstance(v, fx.Node)]
    for index in owned:
        if index is not None and isinstance(results[index], fx.Node):
            sources = movement.content(results[index]).sources()
            roots += [s for s in sources if isinstance(s, fx.Node)]
    return live_nodes(flat, context.scratch, roots)


def _is_cast(node: fx.Node) -> bool:
    """True for a cast to another dtype and nothing else: exact on any strides, each element on its own."""
    return node.target is aten._to_copy.default and node.kwargs.keys() == {"dtype"}


def _read_in_place(
    flat: FlatGraph, writer: RegionWriter, live: set[fx.Node], pass_name: str
) -> tuple[Counter[str], list[Rejection]]:
    """Turn live concatenations of old and new rows into views of the region."""
    done: Counter[str] = Counter()
    declined: dict[tuple[str, str, str], list[fx.Node]] = {}
    for node in list(flat.graph.nodes):
        if node not in live or node.target is not aten.cat.default or not writer.reads_state(node):
            continue
        casts = [user for user in node.users if user in live and _is_cast(user)]
        readers = {
            str(user.target)
            for user in node.users
            if user in live and user.target not in _STRIDED_READERS and user not in casts
        }
        if readers:
            key = (CX401, source_of(node), f"read by {', '.join(sorted(readers))}")
        else:
            reason = writer.place(node)
            if reason is None:
                for cast in casts:  # its result is as dense as if the concatenation had been made
                    cast.kwargs = {**cast.kwargs, "memory_format": torch.contiguous_format}
                done[source_of(node)] += 1
                continue
            key = (CX402, source_of(node), reason)
        declined.setdefault(key, []).append(node)
    listed = []
    for (code, source, text), nodes in declined.items():
        hints: tuple[str, ...] = (
            ("nothing to do: the region is still written in place, only this read is a copy",) if code == CX401 else ()
        )
        where = f"{nodes[0].name} and {len(nodes) - 1} alike" if len(nodes) > 1 else nodes[0].name
        listed.append(Rejection(code, pass_name, where, text, hints, source))
    return done, listed
