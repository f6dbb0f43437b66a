"""Flat graphs: metadata is what the operators really give, for every node of every signature."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

from cadence_fx.catalog import Signature, signatures, starts
from cadence_fx.errors import TraceError
from cadence_fx.specialise import FlatGraph, TensorMeta, meta_of, source_of, specialise
from tests.toys import CPU, TOYS, Player, bench, build


class Checker(fx.Interpreter):
    """Runs a graph and compares every value with the node's metadata."""

    def __init__(self, module: fx.GraphModule, flat: FlatGraph) -> None:
        super().__init__(module)
        self.checked = 0

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        expected = n.meta.get("val")
        if isinstance(value, torch.Tensor):
            assert isinstance(expected, TensorMeta), n
            found = TensorMeta.of(value)
            same = [a == b for a, b, size in zip(found.stride, expected.stride, found.shape, strict=True) if size > 1]
            assert (found.shape, found.dtype, found.device) == (expected.shape, expected.dtype, expected.device), n
            assert all(same) or value.numel() == 0, (n, found, expected)
            self.checked += 1
        elif isinstance(value, (list, tuple)) and n.op != "output":
            assert expected is not None
            assert [m.shape for m in expected] == [tuple(v.shape) for v in value], n
        return value


@pytest.mark.parametrize("name", list(TOYS))
def test_metadata_equals_the_real_shapes_on_every_signature(name: str) -> None:
    player = Player(build(name))
    contract = player.toy.contract
    for signature in signatures(contract)[:8]:
        flat, _, _ = player.compiler.flat(signature)
        _, tensors = player.compiler.trace(signature)
        checker = Checker(player.compiler.build(flat), flat)
        checker.run(*[torch.randn(t.shape) for t in tensors])
        assert checker.checked > 3


def test_the_body_of_a_boundary_is_inlined_with_its_tick() -> None:
    flat = bench(build("new_first")).flat
    where = {node.meta.get("where") for node in flat.graph.nodes if node.op == "call_function"}
    assert where == {(), (("block.forward", 0),), (("block.forward", 1),)}


def test_nodes_know_the_line_that_made_them() -> None:
    flat = bench(build("new_first")).flat
    node = next(n for n in flat.graph.nodes if "scaled_dot_product" in str(n.target))
    assert source_of(node).split(":")[0].endswith("toys.py")
    assert source_of(node).endswith("in forward")


def test_a_copy_is_independent() -> None:
    flat = bench(build("old_first")).flat
    before = str(flat.graph)
    copy = flat.copy()
    assert str(copy.graph) == before
    assert copy.calls() == flat.calls()
    copy.graph.erase_node(copy.output)
    copy.attributes["new"] = "x"
    assert str(flat.graph) == before
    assert "new" not in flat.attributes


def test_shapes_that_a_trace_does_not_cover_are_an_error() -> None:
    compiler = Player(build("old_first")).compiler
    signature = Signature(starts(compiler.contract)[0], "chunk[3]")
    trace, tensors = compiler.trace(signature)
    shapes = [t.shape for t in tensors]
    shapes[0] = torch.Size((1, 3, 9))
    with pytest.raises(TraceError, match=r"does not cover input shapes \[\[1, 3, 9\], .*dimension 2 of input 0 is 9"):
        specialise(compiler.tracer, trace, shapes, [t.dtype for t in tensors], ["x", "kv"])


def test_metadata_counts_elements_and_bytes() -> None:
    meta = TensorMeta((2, 3, 4), (12, 4, 1), torch.bfloat16, CPU)
    assert (meta.numel, meta.nbytes, str(meta)) == (24, 48, "bfloat16[2, 3, 4]")
    assert meta_of(fx.Graph().placeholder("x")) is None
