"""A compiled signature, and how it is called by people."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx

from cadence_fx.autocast import runnable
from cadence_fx.catalog import Signature
from cadence_fx.changes import Change, Rejection
from cadence_fx.contract import Arg
from cadence_fx.pipeline import RegionLink
from cadence_fx.specialise import FlatGraph

__all__ = ["Program", "build_module", "describe"]


@dataclass
class Program:
    """The rewritten graph of one signature, ready to run on the contract's buffers.

    Attributes:
        run: tensors of ``inputs`` in order -> the graph's outputs that are no state.
        inputs: places of the tensor arguments.
        links: how each state region is touched; extents before and after.
        out_spec, state_at: structure of the result, and region name -> index among its leaves.
        depends: attributes that hoisted constants come from.
        mutates: regions whose state tensors the module writes in place.
    """

    signature: Signature
    run: Callable[..., Any]
    module: fx.GraphModule
    flat: FlatGraph
    inputs: tuple[Arg, ...]
    links: tuple[RegionLink, ...]
    out_spec: pytree.TreeSpec
    state_at: dict[str, int]
    changes: tuple[Change, ...]
    rejections: tuple[Rejection, ...]
    depends: frozenset[str]
    mutates: frozenset[str]
    nodes_before: int
    nodes_after: int
    seconds: float

    @cached_property
    def lowered(self) -> bool:
        """True if casts of autocast are written out in the graph."""
        return any(change.pass_name == "lower_autocast" for change in self.changes)

    def result(self, outputs: Sequence[Any], states: Mapping[str, torch.Tensor]) -> Any:
        """The module's result from the graph's outputs and the regions' views."""
        leaves = iter(outputs)
        by_index = {index: states[name] for name, index in self.state_at.items()}
        values = [by_index[i] if i in by_index else next(leaves) for i in range(self.out_spec.num_leaves)]
        return pytree.tree_unflatten(values, self.out_spec)


def build_module(flat: FlatGraph, fetch: Callable[[FlatGraph, str], torch.Tensor]) -> fx.GraphModule:
    """A GraphModule of ``flat`` whose attributes are the very tensors that ``fetch`` gives for its targets.

    It runs each operator under the autocast state that the node says, so with autocast off once casts are explicit.
    """
    root = {str(n.target): fetch(flat, str(n.target)) for n in flat.graph.nodes if n.op == "get_attr"}
    holder = torch.nn.Module()
    for name, tensor in root.items():
        # Plain attributes: GraphModule would register buffers, which state_dict and .to() would then see.
        object.__setattr__(holder, name, tensor)
    module = fx.GraphModule(holder, flat.graph)
    module.__dict__.update(root)
    return runnable(module.eval())


def describe(signature: Signature) -> str:
    """A signature for people: the call and the extents it starts from."""
    extents = ", ".join(f"{name}={extent}" for name, extent in signature.state.extents)
    return f"call {signature.call!r} at {extents}"
