"""Remove what nothing reads, and nothing that has an effect.

Before / after::

    ones: "b8[2, 50, 452]" = aten.ones([2, 50, 452], dtype = torch.bool)    # a mask that is never read
    copy_: "f32[2, 8, 452, 128]" = aten.copy_(slice_7, cat_53)              # into vendor scratch that is never read
    randn_like_1: "f32[1, 27840, 1]" = aten.randn_like(to_2)                # unread, but moves the generator

    randn_like_1: "f32[1, 27840, 1]" = aten.randn_like(to_2)

An in-place write lives if the memory it writes is read later, or outlives the call. fx's own elimination knows neither
which buffers are scratch nor what a call_method writes, hence this one.

Leaves alone: random draws, writes to memory that the contract does not declare as scratch, host checks.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from cadence_fx.changes import Change
from cadence_fx.effects import base_of, is_random, is_sync, written
from cadence_fx.pipeline import PassContext, PassResult
from cadence_fx.specialise import FlatGraph

__all__ = ["EliminateDead", "live_nodes"]


def live_nodes(flat: FlatGraph, scratch: frozenset[str], roots: list[fx.Node] | None = None) -> set[fx.Node]:
    """Nodes that an output, a random draw, a check or lasting memory needs.

    Args:
        scratch: dotted paths of attributes whose content no later call reads.
        roots: what the outputs need; the output node by default.
    """
    nodes = list(flat.graph.nodes)
    writers: dict[fx.Node, list[fx.Node]] = {}
    live: set[fx.Node] = set()
    todo: list[fx.Node] = list(roots) if roots is not None else [flat.output]
    for node in nodes:
        for argument in written(node):
            base = base_of(argument)
            writers.setdefault(base, []).append(node)
            lasting = base.op == "placeholder" or (
                base.op == "get_attr" and flat.attributes[str(base.target)] not in scratch
            )
            if lasting:
                todo.append(node)
        if is_random(node) or (is_sync(node) and not node.users):
            todo.append(node)
    while todo:
        node = todo.pop()
        if node in live:
            continue
        live.add(node)
        todo += node.all_input_nodes
        # Whoever reads memory needs every write to it; writes after the last read are kept too, which is safe.
        todo += writers.get(base_of(node), ())
    return live


@dataclass(frozen=True)
class EliminateDead:
    """Remove nodes without a live reader or effect."""

    name: ClassVar[str] = "eliminate_dead"
    after: ClassVar[tuple[str, ...]] = (
        "normalise",
        "lower_autocast",
        "remove_host_syncs",
        "hoist_constants",
        "ring_writeback",
    )

    def requires(self, flat: FlatGraph, context: PassContext) -> str | None:
        return None

    def call(self, flat: FlatGraph, context: PassContext) -> PassResult:
        live = live_nodes(flat, context.scratch)
        removed: Counter[str] = Counter()
        for node in reversed(list(flat.graph.nodes)):
            if node not in live and node.op in ("call_function", "get_attr"):
                if node.op == "call_function":
                    removed[str(node.target)] += 1
                flat.graph.erase_node(node)
        targets = {str(n.target) for n in flat.graph.nodes if n.op == "get_attr"}
        flat.attributes = {t: p for t, p in flat.attributes.items() if t in targets}
        flat.constants = {t: v for t, v in flat.constants.items() if t in targets}
        changes = tuple(
            Change(self.name, "removed", target, "nothing reads it and it has no lasting effect", count=n)
            for target, n in removed.most_common()
        )
        return PassResult(flat, changes)

    def ensures(self, flat: FlatGraph, context: PassContext) -> str | None:
        live = live_nodes(flat, context.scratch)
        dead = [n for n in flat.graph.nodes if n not in live and n.op == "call_function"]
        return f"{dead[0]} is still dead" if dead else None
