"""Flat graphs of plain functions, for tests of what works on graphs alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from cadence_fx.specialise import FlatGraph, TensorMeta


def flat_of(function: Callable[..., Any], *tensors: torch.Tensor) -> FlatGraph:
    """The operators of a function that returns a tuple; in-place operators stay as they are."""
    traced = make_fx(function, pre_dispatch=True)(*tensors)
    spec = pytree.tree_structure(function(*(t.clone() for t in tensors)))
    for node in traced.graph.nodes:
        if "val" in node.meta:
            node.meta["val"] = pytree.tree_map_only(torch.Tensor, TensorMeta.of, node.meta["val"])
    return FlatGraph(traced.graph, spec)


def operator_of(flat: FlatGraph, name: str) -> fx.Node:
    """The first node of an operator, by its name in aten."""
    return next(n for n in flat.graph.nodes if str(n.target).startswith(f"aten.{name}."))


def interpret(flat: FlatGraph, inputs: Sequence[torch.Tensor]) -> list[Any]:
    """Run a graph without attributes, node by node."""
    env: dict[fx.Node, Any] = {}
    given = iter(inputs)
    for node in flat.graph.nodes:
        if node.op == "placeholder":
            env[node] = next(given)
        elif node.op == "call_function":
            args, kwargs = fx.map_arg((node.args, node.kwargs), env.__getitem__)
            env[node] = node.target(*args, **kwargs)
    found: Any = fx.map_arg(flat.output.args[0], env.__getitem__)
    return list(found)
