"""Write out the casts that autocast would make, so that the graph runs without it.

Before / after, a projection in a block ``with torch.autocast("cuda", torch.float16)``::

    linear: "f16[1, 50, 512]" = aten.linear(x, weight, bias)                # autocast: cuda to float16

    x16: "f16[1, 50, 512]" = aten._to_copy(x, dtype = torch.float16)
    w16: "f16[512, 512]" = aten._to_copy(weight, dtype = torch.float16)     # a constant: computed once
    b16: "f16[512]" = aten._to_copy(bias, dtype = torch.float16)
    linear: "f16[1, 50, 512]" = aten.linear(x16, w16, b16)

What an operator's rule casts is found by running it under the state, see `cadence_fx.autocast_rules`. A cast that a
neighbour has made already is used again, where nothing writes that memory.

Requires: ``meta["autocast"]`` of each node, as `cadence_fx.specialise` sets it.
Raises: TraceError where explicit casts cannot express a rule, or the traced dtypes are not those that it gives; the
    text names operator and source line. There is no partly lowered graph: the signature runs as stock.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.utils._pytree as pytree
from torch import fx

from cadence_fx.autocast import AutocastState, autocast_of
from cadence_fx.autocast_rules import Cast, Rule, rule_of, with_dtype
from cadence_fx.changes import Change, Rejection, register
from cadence_fx.effects import base_of, mutated_bases, written
from cadence_fx.errors import TraceError
from cadence_fx.pipeline import PassContext, PassResult
from cadence_fx.specialise import FlatGraph, TensorMeta, meta_of, source_of

__all__ = ["LowerAutocast"]

aten = torch.ops.aten
_JOINS = {aten.cat.default, aten.concat.default, aten.stack.default}
CX601 = register("CX601", "explicit casts do not express what autocast does")
CX602 = register("CX602", "the trace has another result than the operator under autocast")


@dataclass(frozen=True)
class LowerAutocast:
    """Replace the autocast state of nodes by casts and dtype arguments."""

    name: ClassVar[str] = "lower_autocast"
    after: ClassVar[tuple[str, ...]] = ("normalise",)

    def requires(self, flat: FlatGraph, context: PassContext) -> str | None:
        return None

    def call(self, flat: FlatGraph, context: PassContext) -> PassResult:
        lowering = _Lowering(flat)
        done: Counter[tuple[str, str, str]] = Counter()
        for node in list(flat.graph.nodes):
            state = autocast_of(node)
            if state is None:
                continue
            rule = self._rule(node, state)
            if rule is not None and (rule.casts or rule.dtype is not None):
                lowering.rewrite(node, rule)
                what = "cast" if rule.casts else f"set to {rule.dtype}"
                done[what, str(rule.target), str(state)] += 1
            elif rule is not None and lowering.promote(node):
                done["promoted", str(node.target), str(state)] += 1
            node.meta["autocast"] = None
        changes = tuple(
            Change(self.name, what, target, f"autocast's rule for it, {state}, written out", count=n)
            for (what, target, state), n in done.most_common()
        )
        return PassResult(flat, changes)

    def ensures(self, flat: FlatGraph, context: PassContext) -> str | None:
        left = next((n for n in flat.graph.nodes if autocast_of(n) is not None), None)
        return None if left is None else f"{left} still runs under autocast"

    def _rule(self, node: fx.Node, state: AutocastState) -> Rule | None:
        """The node's rule; None where it takes no tensor of its own: autocast looks at tensors only."""
        if not isinstance(node.target, torch._ops.OpOverload):
            return None
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta.get("val"))
        if not any(isinstance(leaf, TensorMeta) for leaf in pytree.tree_leaves((args, kwargs))):
            return None
        rule = rule_of(node.target, args, kwargs, state)
        if isinstance(rule, str):
            hint = "leave this operator outside the block, or call it on tensors that you cast yourself"
            raise _refused(CX601, node, rule, hint)
        traced = [leaf for leaf in pytree.tree_leaves(node.meta["val"]) if isinstance(leaf, TensorMeta)]
        if list(map(_value, traced)) != list(map(_value, rule.results)):
            found = f"traced {', '.join(map(str, traced))}, found {', '.join(map(str, rule.results))}"
            raise _refused(CX602, node, found)
        return rule


def _refused(code: str, node: fx.Node, reason: str, *hints: str) -> TraceError:
    """A rejection as an error: a graph with some casts missing is of no use, so the signature runs as stock."""
    return TraceError(
        str(Rejection(code, LowerAutocast.name, node.name, f"{node.target}: {reason}", hints, source_of(node)))
    )


def _value(meta: TensorMeta) -> tuple[Any, ...]:
    return meta.shape, meta.dtype, meta.device


def _cast_meta(node: fx.Node, dtype: torch.dtype) -> TensorMeta:
    """Metadata of a cast, whose strides are the operator's to say."""
    meta = node.meta["val"]
    fake = meta.empty("meta")
    return TensorMeta(meta.shape, tuple(aten._to_copy.default(fake, dtype=dtype).stride()), dtype, meta.device)


class _Lowering:
    """Rewrites nodes of one graph and remembers the casts that it has made."""

    def __init__(self, flat: FlatGraph) -> None:
        self.graph = flat.graph
        self.mutated = mutated_bases(flat.graph.nodes)
        self.made: dict[Any, fx.Node] = {}

    def rewrite(self, node: fx.Node, rule: Rule) -> None:
        """Put the rule's casts before the node, and its dtype into the node's arguments."""
        leaves, spec = pytree.tree_flatten((node.args, node.kwargs))
        alone = rule.shares or bool(written(node))  # what the node does to the cast must not show elsewhere
        for cast in rule.casts:
            leaves[cast.index] = self.cast(node, leaves[cast.index], cast, alone)
        args, kwargs = pytree.tree_unflatten(leaves, spec)
        if rule.dtype is not None:
            args, kwargs = with_dtype(rule.target, args, kwargs, rule.dtype)
        node.target, node.args, node.kwargs = rule.target, tuple(args), dict(kwargs)

    def promote(self, node: fx.Node) -> bool:
        """Write out the casts that a concatenation of several dtypes makes by itself; True if there are any.

        It copies each part into the result, with or without autocast, so these are its casts. As operators of their own
        they leave the concatenation as pure movement, which can stay where the state lies.
        """
        result = meta_of(node)
        if node.target not in _JOINS or result is None:
            return False
        parts = list(node.args[0])  # type: ignore[arg-type]
        found = [part for part in parts if (meta := meta_of(part)) is not None and meta.dtype != result.dtype]
        for part in dict.fromkeys(found):
            meta = _cast_meta(part, result.dtype)
            made = self.cast(node, part, Cast(parts.index(part), (("dtype", result.dtype),), meta), alone=False)
            parts = [made if p is part else p for p in parts]
        node.args = (parts, *node.args[1:])
        return bool(found)

    def cast(self, node: fx.Node, source: fx.Node, cast: Cast, alone: bool) -> fx.Node:
        key = (source, cast.kwargs, node.meta.get("where"))
        shared = not alone and base_of(source) not in self.mutated
        if shared and key in self.made:
            return self.made[key]
        with self.graph.inserting_before(node):
            made = self.graph.call_function(aten._to_copy.default, (source,), dict(cast.kwargs))
        made.meta["val"] = cast.meta
        made.meta["source"], made.meta["where"] = source_of(node), node.meta.get("where", ())
        if shared:
            self.made[key] = made
        return made
