"""Compute groups of pointwise operators and copies in one kernel each, where that cannot change a bit.

Before / after::

    mul: "f32[2, 50, 512]" = aten.mul(layer_norm, select_3)             # three kernels, three trips through memory
    add: "f32[2, 50, 512]" = aten.add(mul, select_4)
    cat: "f32[2, 512, 52]" = aten.cat([slice_9, add.transpose(1, 2)], 2)

    cat: "f32[2, 512, 52]" = fused_mul_add_cat(layer_norm, select_3, select_4, slice_9)

Runs on what is captured, not on what runs operator by operator. Which operators are admitted, and on what grounds, is
`cadence_fx.exact_ops`; what makes a group, `cadence_fx.fusion_groups`.

Leaves alone: reductions, normalisations, products, random draws, functions that nobody has proven on this device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from cadence_fx.changes import Change, Rejection, register
from cadence_fx.exact_ops import Admission, Proven, admission, is_function_of_one, nothing_proven
from cadence_fx.fused_operator import FusedOperator, with_groups
from cadence_fx.fusion_groups import fusion_groups
from cadence_fx.pipeline import PassContext, PassResult
from cadence_fx.reroute import read_from_concatenations
from cadence_fx.schedule import operators
from cadence_fx.specialise import FlatGraph, meta_of, source_of

__all__ = ["FusePointwise"]

NOT_PROVEN = register("CX701", "not proven to have eager's bits when compiled")


@dataclass(frozen=True)
class FusePointwise:
    """Fuse groups of admitted operators.

    Args:
        proven: says of a function of one tensor whether its compiled form has eager's bits on this device.
        left: names of nodes that stay as they are.
    """

    proven: Proven = nothing_proven
    left: frozenset[str] = frozenset()
    name: ClassVar[str] = "fuse_pointwise"
    after: ClassVar[tuple[str, ...]] = ("eliminate_dead",)

    def requires(self, flat: FlatGraph, context: PassContext) -> str | None:
        return None

    def call(self, flat: FlatGraph, context: PassContext) -> PassResult:
        return self.fuse(flat)

    def fuse(self, flat: FlatGraph) -> PassResult:
        """A graph with one node for each group; ``flat`` is left as it is."""
        flat = flat.copy()
        read_from_concatenations(flat)
        grounds = {node: admission(node, self.proven) for node in operators(flat)}
        groups = fusion_groups(flat, lambda node: grounds[node] is not None and node.name not in self.left)
        found = with_groups(flat, groups)
        counted: Counter[tuple[str, str, str]] = Counter()
        for group in groups:
            names = ", ".join(str(n.target).split(".")[1] for n in group.nodes)
            why = ", ".join(sorted({str(grounds[n]) for n in group.nodes}))
            counted[names, why, source_of(group.nodes[-1])] += 1
        changes = tuple(
            Change(self.name, "fused", names, f"one kernel in place of {names.count(',') + 1}: {why}", source, count)
            for (names, why, source), count in counted.most_common()
        )
        return PassResult(found, changes, self._rejections(grounds))

    def _rejections(self, grounds: Mapping[fx.Node, Admission | None]) -> tuple[Rejection, ...]:
        """Functions of one tensor that only lack a proof, once for each operator."""
        lacking: dict[str, Rejection] = {}
        for node, ground in grounds.items():
            if ground is None and is_function_of_one(node):
                text = f"{node.target} on {meta_of(node)}"
                hint = "cadence-fx prove compares it with eager on every input"
                found = Rejection(NOT_PROVEN, self.name, node.name, text, (hint,), source_of(node))
                lacking.setdefault(str(node.target), found)
        return tuple(lacking.values())

    def ensures(self, flat: FlatGraph, context: PassContext) -> str | None:
        for node in flat.graph.nodes:
            if isinstance(node.target, FusedOperator) and len(node.target.targets) < 2:
                return f"{node} stands for one operator"
        return None
