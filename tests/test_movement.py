"""The segment algebra over graphs: what each node holds, also through in-place writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

from cadence_fx.movement import MovementMap
from cadence_fx.segments import Layout
from cadence_fx.specialise import FlatGraph
from tests.toys import flat_of

aten = torch.ops.aten


def filled(layout: Layout, values: dict[fx.Node, torch.Tensor]) -> torch.Tensor:
    """The tensor that a layout describes."""
    out = torch.full(layout.shape, torch.nan)
    for piece in layout.pieces:
        source = values[piece.source]  # type: ignore[index]
        size = [1 if a is None else piece.size[a] for a in piece.axes]
        box = source[tuple(slice(o, o + n) for o, n in zip(piece.origin, size, strict=True))]
        for dim in reversed([d for d, a in enumerate(piece.axes) if a is None]):
            box = box.select(dim, 0)
        walked = [a for a in piece.axes if a is not None]
        box = box.permute(sorted(range(len(walked)), key=walked.__getitem__))
        for dim in range(len(piece.size)):
            if dim not in walked:
                box = box.unsqueeze(dim)
        out[tuple(slice(s, s + n) for s, n in zip(piece.start, piece.size, strict=True))] = box
    return out


class Recorder(fx.Interpreter):
    """Keeps the value that every node had when it ran; of those that change in place, the one at the end."""

    def __init__(self, module: fx.GraphModule, changing: set[fx.Node]) -> None:
        super().__init__(module)
        self.changing = changing
        self.values: dict[fx.Node, torch.Tensor] = {}

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if isinstance(value, torch.Tensor):
            self.values[n] = value if n in self.changing else value.clone()
        return value


def check(f: Callable[..., Any], a: torch.Tensor, b: torch.Tensor) -> tuple[MovementMap, FlatGraph]:
    """Every output's layout, filled from its sources, is the output."""
    flat = flat_of(f, a, b)
    owners = [n for n in flat.graph.nodes if n.op == "placeholder"]
    movement = MovementMap(flat, owners)
    recorder = Recorder(fx.GraphModule(torch.nn.Module(), flat.graph), movement.untracked)
    results = recorder.run(a.clone(), b.clone())
    for node, result in zip(flat.output.args[0], results, strict=True):  # type: ignore[arg-type]
        layout = movement.content(node)
        if not set(layout.sources()) & set(movement.broken):
            assert torch.equal(filled(layout, recorder.values), result)
    return movement, flat


def sources(movement: MovementMap, flat: FlatGraph, index: int = 0) -> list[str]:
    return [str(s) for s in movement.content(flat.output.args[0][index]).sources()]  # type: ignore[index,arg-type]


A, B = torch.arange(24.0).reshape(2, 3, 4), 100 + torch.arange(24.0).reshape(2, 3, 4)


@pytest.mark.parametrize("f", [
    lambda a, b: (torch.cat([a, b], 1)[:, 1:-1],),
    lambda a, b: (torch.cat([a, b], 1)[:, :3].transpose(0, 2), a),
    lambda a, b: (torch.stack([a, b], 2)[:, :, 1],),
    lambda a, b: (torch.cat([t.unsqueeze(0) for t in a.unbind(0)] + [b[1:]]),),
    lambda a, b: (a.repeat(2, 1, 3)[:, 1:], b.permute(2, 0, 1).contiguous()),
    lambda a, b: (torch.cat([*a.split(2, 2), b.chunk(2, 2)[1]], 2),),
    lambda a, b: (a[:, :1].expand(2, 3, 4).clone(), b.squeeze(0).narrow(1, 1, 2)),
    lambda a, b: (a.unsqueeze(1).reshape(2, 3, 4, 1).squeeze(-1),),
], ids=["cat", "transpose", "stack", "unbind", "repeat", "split", "expand", "reshape"])  # fmt: skip
def test_movement_is_followed_to_its_sources(f: Callable[..., Any]) -> None:
    movement, flat = check(f, A, B)
    for index in range(len(flat.output.args[0])):  # type: ignore[arg-type]
        assert set(sources(movement, flat, index)) <= {"a", "b"}


def test_a_concatenation_that_casts_is_no_movement() -> None:
    movement, flat = check(lambda a, b: (torch.cat([a, b.double()], 1), torch.stack([a.double(), b], 1)), A, B)
    assert sources(movement, flat, 0) == ["cat"]
    assert sources(movement, flat, 1) == ["stack"]


def test_writes_into_an_argument_are_seen_by_later_reads_alone() -> None:
    def f(a: torch.Tensor, b: torch.Tensor) -> Any:
        before = a[:, 1:].clone()
        a[:, :2] = b[:, 1:]
        a[0, 2] = b[1, 0]
        return before, a[:, 1:].clone(), a

    movement, flat = check(f, A, B)
    assert sources(movement, flat, 0) == ["a"]
    assert set(sources(movement, flat, 1)) == {"a", "b"}
    assert not movement.broken


def test_a_write_that_is_no_copy_breaks_what_was_known_of_the_memory() -> None:
    def f(a: torch.Tensor, b: torch.Tensor) -> Any:
        a[:, :2] = b[:, 1:]
        a.mul_(2)
        return (a[:, :1].clone(),)

    movement, flat = check(f, A, B)
    assert [str(owner) for owner in movement.broken] == ["a"]
    assert sources(movement, flat) == ["clone"]


def test_a_copy_that_casts_is_no_movement() -> None:
    def f(a: torch.Tensor, b: torch.Tensor) -> Any:
        a.copy_(b)
        return (a,)

    movement, _ = check(f, A.clone(), B.double())
    assert [str(owner) for owner in movement.broken] == ["a"]


def test_what_is_computed_is_a_source_of_its_own() -> None:
    movement, flat = check(lambda a, b: (torch.cat([a, a + b], 1),), A, B)
    assert sources(movement, flat) == ["a", "add"]


def test_a_clone_that_is_written_is_a_source_of_its_own() -> None:
    def f(a: torch.Tensor, b: torch.Tensor) -> Any:
        new = a.clone()
        new[:, :1] = b[:, :1]
        return new, torch.cat([new, b], 1)

    movement, flat = check(f, A, B)
    assert sources(movement, flat) == ["clone"]
    assert sources(movement, flat, 1) == ["cat"]


def test_a_view_that_regroups_a_written_argument_is_copied_there_and_then() -> None:
    def f(a: torch.Tensor, b: torch.Tensor) -> Any:
        kept = torch.cat([a.view(2, 12), b.view(2, 12)], 1)
        a[:, :1] = b[:, :1]
        return (kept,)

    movement, flat = check(f, A, B)
    assert sources(movement, flat) == ["cat"]


Step = tuple[int, int, int, int]
STEPS = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3), st.integers(0, 3), st.integers(1, 3)), max_size=8)


@settings(max_examples=60, deadline=None)
@given(steps=STEPS)
def test_random_programs_of_movement_are_followed_exactly(steps: list[Step]) -> None:
    def f(a: torch.Tensor, b: torch.Tensor) -> Any:
        values = [a, b]
        for kind, i, j, n in steps:
            x, y = values[i % len(values)], values[j % len(values)]
            if kind == 0:
                values.append(torch.cat([x[:, :n], y[:, -n:]], 1))
            elif kind == 1:
                values.append(x.transpose(0, 2).clone().transpose(0, 2))
            elif kind == 2:
                rows = min(n, a.shape[1], y.shape[1])
                a[:, :rows] = y[:, :rows].clone()
            elif kind == 3:
                values.append(torch.stack([x, x], 1)[:, 1])
            elif kind == 4:
                values.append(x[:, n - 1 :] if x.shape[1] > n else x.repeat(1, 2, 1))
            else:
                b.copy_(a[:, : b.shape[1]].clone())
        return tuple(values[-3:])

    check(f, A.clone(), B.clone())
