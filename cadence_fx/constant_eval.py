"""Which nodes of a graph are constants, and their values.

The clock of a node is the join of its inputs' clocks; a pure node over parameters, buffers that no call writes, and
literals has no clock at all. Its value is computed by running the very operators of the graph on the device they are
placed on, so that the bits are stock's (an exponential on the CPU is not one on the GPU).
"""

from __future__ import annotations

import operator
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from cadence_fx.effects import base_of, is_random, mutated_bases, written
from cadence_fx.specialise import FlatGraph, TensorMeta

if TYPE_CHECKING:
    from cadence_fx.pipeline import PassContext

__all__ = ["ConstantEvaluator"]

aten = torch.ops.aten
_UNINITIALISED = {aten.empty.memory_format, aten.empty_like.default, aten.new_empty.default, aten.empty_strided.default}


class ConstantEvaluator:
    """Constants of one graph; values are kept in the context's pool under structural identities."""

    def __init__(self, flat: FlatGraph, context: PassContext) -> None:
        self.flat, self.context, self.pool = flat, context, context.constants
        self.mutated = mutated_bases(flat.graph.nodes)
        self._constant: dict[fx.Node, bool] = {}
        self._depends: dict[fx.Node, frozenset[str]] = {}
        self._identity: dict[fx.Node, int] = {}
        self._values: dict[fx.Node, Any] = {}
        for node in flat.graph.nodes:
            self._constant[node] = self._classify(node)

    def is_constant(self, node: fx.Node) -> bool:
        """True if the node's value is the same in every call and in every session."""
        found = self._constant.get(node)
        if found is None:
            found = self._constant[node] = self._classify(node)
        return found

    def _classify(self, node: fx.Node) -> bool:
        if node in self.mutated or base_of(node) in self.mutated:
            return False
        if node.op == "get_attr":
            return self.flat.attributes[str(node.target)] not in self.context.scratch
        if node.op != "call_function" or is_random(node) or written(node) or node.target in _UNINITIALISED:
            return False
        return all(self.is_constant(n) for n in node.all_input_nodes)

    def depends(self, node: fx.Node) -> frozenset[str]:
        """Dotted paths of the attributes that the value comes from."""
        if node not in self._depends:
            if node.op == "get_attr":
                self._depends[node] = frozenset({self.flat.attributes[str(node.target)]})
            else:
                self._depends[node] = frozenset().union(*(self.depends(n) for n in node.all_input_nodes))
        return self._depends[node]

    def identity(self, node: fx.Node) -> int:
        """Structural identity: equal for equal computations, in any graph of the same module."""
        if node not in self._identity:
            if node.op == "get_attr":
                target = str(node.target)
                lifted = self.flat.constants.get(target)
                key: Hashable = ("attribute", self.flat.attributes[target], None if lifted is None else _bits(lifted))
            else:
                key = (str(node.target), self._key(node.args), self._key(node.kwargs))
            self._identity[node] = self.pool.identity(key)
        return self._identity[node]

    def _key(self, value: Any) -> Hashable:
        if isinstance(value, fx.Node):
            return ("node", self.identity(value))
        if isinstance(value, (list, tuple)):
            return tuple(self._key(v) for v in value)
        if isinstance(value, dict):
            return tuple((k, self._key(v)) for k, v in sorted(value.items()))
        return (type(value).__name__, str(value))

    def value(self, node: fx.Node) -> Any:
        """The constant's value; computed on first use."""
        if node not in self._values:
            pooled = self.pool.values.get(self.identity(node)) if node.op != "get_attr" else None
            self._values[node] = pooled if pooled is not None else self._compute(node)
        return self._values[node]

    def _compute(self, node: fx.Node) -> Any:
        if node.op == "get_attr":
            return self.context.fetch(self.flat, str(node.target))
        given: Any = fx.map_arg((node.args, node.kwargs), self.value)
        args, kwargs = given
        with torch.no_grad():
            if node.target is operator.getitem:
                return args[0][args[1]]
            return node.target(*args, **kwargs)  # type: ignore[operator]

    def ancestors(self, node: fx.Node) -> set[fx.Node]:
        """Operators that computing the constant takes."""
        found: set[fx.Node] = set()
        todo = [node]
        while todo:
            current = todo.pop()
            if current.op == "call_function" and current not in found:
                found.add(current)
                todo += current.all_input_nodes
        return found

    def is_tensor(self, node: fx.Node) -> bool:
        return isinstance(node.meta.get("val"), TensorMeta)


def _bits(tensor: torch.Tensor) -> Hashable:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return (tuple(tensor.shape), str(tensor.dtype), str(tensor.device), bytes(flat.view(torch.uint8).tolist()))
