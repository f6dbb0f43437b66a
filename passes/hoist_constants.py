"""Compute once what no clock touches.

Before / after::

    arange: "i64[128]" = aten.arange(0, 128, device = cpu)                  # the vendor's frequency table, ten times a
        chunk
    ...
    linear_77: "f32[2, 1, 4608]" = aten.linear(silu_11, adaln_weight, adaln_bias)   # 160 modulations of a solve
    chunk: "..." = aten.chunk(linear_77, 9, -1)
    weight: "f32[64, 64, 11]" = aten._weight_norm(v, g)                     # 82 weights a chunk
    add: "f32[2, 50, 512]" = aten.add(mul, chunk[0])

    add: "f32[2, 50, 512]" = aten.add(mul, self.constant_17)

Values come from the graph's own operators on their own device, one per distinct computation, shared by all signatures.

With ``host_only``, only constants that the host makes are hoisted, up to and including their copy to the device: what
a capture cannot record. Constants of the device are then computed in every call, as stock does.

Requires: graphs of one module share one pool. Only what non-constant nodes read is kept.
Leaves alone: values that are written in place (a fresh one per call is due), random draws, and, with a rejection, those
    that the
byte budget has no room for: the largest saving per byte goes first.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from cadence_fx.changes import Change, Rejection, register
from cadence_fx.constant_eval import ConstantEvaluator
from cadence_fx.pipeline import PassContext, PassResult
from cadence_fx.specialise import FlatGraph, meta_of, source_of

__all__ = ["HoistConstants"]

CX201 = register("CX201", "constant does not fit the byte budget")


@dataclass(frozen=True)
class HoistConstants:
    """Replace constant values that non-constant nodes read by attributes.

    Args:
        host_only: hoist nothing but what the host computes.
    """

    host_only: bool = False
    name: ClassVar[str] = "hoist_constants"
    after: ClassVar[tuple[str, ...]] = ("normalise", "lower_autocast", "remove_host_syncs")

    def requires(self, flat: FlatGraph, context: PassContext) -> str | None:
        return None

    def call(self, flat: FlatGraph, context: PassContext) -> PassResult:
        evaluator = ConstantEvaluator(flat, context)
        chosen, rejections = self._choose(flat, context, evaluator)
        by_source: Counter[str] = Counter()
        targets: dict[int, fx.Node] = {}
        for node in chosen:
            identity = evaluator.identity(node)
            if identity not in targets:
                context.constants.put(identity, evaluator.value(node), evaluator.depends(node))
                targets[identity] = _attribute(flat, f"constant_{identity}", node, evaluator.value(node))
            node.replace_all_uses_with(targets[identity])
            by_source[source_of(node) or str(node.target)] += 1
        why = "its clock is slower than the call's: parameters, fixed buffers and literals only"
        changes = tuple(
            Change(self.name, "hoisted", "constant", why, source, n) for source, n in by_source.most_common()
        )
        return PassResult(flat, changes, rejections)

    def _choose(
        self, flat: FlatGraph, context: PassContext, evaluator: ConstantEvaluator
    ) -> tuple[list[fx.Node], tuple[Rejection, ...]]:
        """Constants at the frontier, within the budget."""

        def hoists(node: fx.Node) -> bool:
            return evaluator.is_constant(node) and (not self.host_only or _is_of_host(node))

        frontier = [
            node
            for node in flat.graph.nodes
            if node.op == "call_function"
            and hoists(node)
            and evaluator.is_tensor(node)
            and any(not hoists(user) for user in node.users)
        ]
        costs = {node: _own_bytes(flat, context, evaluator, node) for node in frontier}
        total = context.constants.nbytes() + sum(costs.values())
        if total <= context.contract.max_constant_bytes:
            return frontier, ()
        ranked = sorted(frontier, key=lambda n: len(evaluator.ancestors(n)) / (costs[n] + 1), reverse=True)
        room = context.contract.max_constant_bytes - context.constants.nbytes()
        chosen: set[fx.Node] = set()
        rejections = []
        for node in ranked:
            if costs[node] <= room:
                room -= costs[node]
                chosen.add(node)
            else:
                explanation = f"it takes {costs[node]} bytes, {max(room, 0)} of the budget are left"
                hints = (f"raise max_constant_bytes, now {context.contract.max_constant_bytes}",)
                rejections.append(Rejection(CX201, self.name, node.name, explanation, hints, source_of(node)))
        return [n for n in frontier if n in chosen], tuple(rejections)

    def ensures(self, flat: FlatGraph, context: PassContext) -> str | None:
        missing = [
            t for t in flat.constants if t.startswith("constant_") and not isinstance(flat.constants[t], torch.Tensor)
        ]
        return f"constants {missing} have no value" if missing else None


def _is_of_host(node: fx.Node) -> bool:
    """True if the host computes the value, or the device takes it from the host."""
    metas = [meta_of(near) for near in (node, *node.all_input_nodes)]
    return any(meta is not None and meta.device.type == "cpu" for meta in metas)


def _own_bytes(flat: FlatGraph, context: PassContext, evaluator: ConstantEvaluator, node: fx.Node) -> int:
    """Bytes that keeping the value adds: none if the pool has it or if it is a view of an attribute."""
    if evaluator.identity(node) in context.constants.values:
        return 0
    value = evaluator.value(node)
    paths = evaluator.depends(node)
    for target, path in flat.attributes.items():
        if path in paths and target not in flat.constants:
            owned = context.fetch(flat, target)
            if owned.untyped_storage().data_ptr() == value.untyped_storage().data_ptr():
                return 0
    return int(value.untyped_storage().nbytes())


def _attribute(flat: FlatGraph, target: str, node: fx.Node, value: torch.Tensor) -> fx.Node:
    first = next(iter(flat.graph.nodes))
    with flat.graph.inserting_before(first):
        made = flat.graph.create_node("get_attr", target)
    made.meta["val"] = node.meta["val"]
    made.meta["source"] = source_of(node)
    flat.attributes[target] = target
    flat.constants[target] = value
    return made
