"""Operators that no device graph can record, each with its reason and the vendor's source line."""

from __future__ import annotations

import torch
from torch import fx

from cadence_fx.changes import Rejection, register
from cadence_fx.effects import is_random, is_sync, written
from cadence_fx.specialise import FlatGraph, TensorMeta, meta_of, source_of

__all__ = ["obstacles"]

CX521 = register("CX521", "cut: an operator waits for a value on the host")
CX522 = register("CX522", "cut: an operator draws from a generator of the host")
CX523 = register("CX523", "cut: an operator works on the host or moves data between devices")
CX524 = register("CX524", "cut: sizes depend on values")
CX525 = register("CX525", "cut: an argument is a value that the host computed")


def obstacles(flat: FlatGraph) -> tuple[dict[fx.Node, str], tuple[Rejection, ...]]:
    """Nodes that must run eagerly with the reason, and a rejection for each that is no mere consequence of another."""
    home = _home(flat)
    reasons: dict[fx.Node, str] = {}
    open_sized: set[fx.Node] = set()
    rejections: list[Rejection] = []
    for node in flat.graph.nodes:
        if node.op != "call_function":
            continue
        source = next((a for a in node.all_input_nodes if a in open_sized), None)
        if source is not None:
            open_sized.add(node)
            reasons[node] = f"{source.name} has a size that depends on values"
            continue
        found = _obstacle(node, home)
        if found is None:
            continue
        code, reasons[node] = found
        if code == CX524:
            open_sized.add(node)
        rejections.append(Rejection(code, "partition", node.name, reasons[node], (), source_of(node)))
    return reasons, tuple(rejections)


def _home(flat: FlatGraph) -> str:
    """Type of the device that the graph works on: the host only if nothing is anywhere else."""
    kinds = {meta.device.type for n in flat.graph.nodes if (meta := meta_of(n)) is not None}
    return next(iter(sorted(kinds - {"cpu"})), "cpu")


def _obstacle(node: fx.Node, home: str) -> tuple[str, str] | None:
    tags = getattr(node.target, "tags", ())
    if torch.Tag.dynamic_output_shape in tags:
        return CX524, f"{node.target} returns as many elements as its values demand"
    if is_sync(node):
        return CX521, f"{node.target} makes the host wait for the device"
    away = [a for a in node.all_input_nodes if (meta := meta_of(a)) is not None and meta.device.type != home]
    meta = meta_of(node)
    on_host = meta is not None and meta.device.type != home
    if is_random(node) and on_host:
        return CX522, f"{node.target} draws on {meta.device if meta else 'the host'}"
    if on_host or (away and not _only_scalars(node, away)):
        where = ", ".join(f"{a.name} on {m.device}" for a in away if (m := meta_of(a)) is not None)
        return CX523, f"{node.target} with {where or 'a result on the host'} in a graph on {home}"
    host_value = next((a for a in node.all_input_nodes if _is_host_value(a)), None)
    if host_value is not None:
        return CX525, f"{node.target} takes {host_value.name}, which is no tensor"
    return None


def _only_scalars(node: fx.Node, away: list[fx.Node]) -> bool:
    """Constant single numbers beside device tensors: they become arguments of the kernel, as in an eager run."""
    is_copy = bool(written(node)) and "copy" in str(node.target)
    beside = len(away) < len(node.all_input_nodes)
    metas = [meta_of(a) for a in away]
    return beside and not is_copy and all(a.op == "get_attr" for a in away) and all(m and m.shape == () for m in metas)


def _is_host_value(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return node.op == "call_function" and not isinstance(value, (TensorMeta, list, tuple, type(None)))
