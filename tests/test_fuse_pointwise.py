"""Fused groups: which operators join, that bits and effects stay, and that a wrong kernel is refused."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn

from cadence_fx.drop_in import transform
from cadence_fx.exact_compile import compile_exact, exact_settings
from cadence_fx.exact_ops import admission
from cadence_fx.fused_operator import FusedKernels, FusedOperator
from cadence_fx.fusion import Fuser
from cadence_fx.fusion_groups import fusion_groups
from cadence_fx.passes import FusePointwise
from cadence_fx.proofs import Proofs
from cadence_fx.specialise import FlatGraph
from tests.case_toys import HostCaptures, aligned, contract, fixed
from tests.fake_backend import FakeBackend
from tests.flat_graphs import flat_of, interpret
from tests.streams import WIDTH, drawn
from tests.toys import same_bits

X, Y = torch.randn(2, 6, 8), torch.randn(2, 6, 8)
ROW, PIECE = torch.randn(2, 1, 8), torch.randn(2, 8, 3)


def names(flat: FlatGraph) -> list[tuple[str, ...]]:
    groups = fusion_groups(flat, lambda node: admission(node) is not None)
    return [tuple(str(n.target).split(".")[1] for n in group.nodes) for group in groups]


def operators_as_they_are(module: fx.GraphModule, arguments: Any) -> Callable[..., Any]:
    """In place of a compiler, where a test is about graphs."""
    return module


def fused(function: Callable[..., Any], *tensors: torch.Tensor) -> FlatGraph:
    """The fused graph, its groups run operator by operator, after its outputs and effects were compared."""
    flat = flat_of(function, *tensors)
    found = FusePointwise().fuse(flat).flat
    found.graph.lint()
    nodes = [n for n in found.graph.nodes if isinstance(n.target, FusedOperator)]
    FusedKernels(operators_as_they_are).prepare(nodes, lambda target: tensors[0])
    mine, theirs = ([t.clone() for t in tensors] for _ in range(2))
    expected, outputs = function(*theirs), interpret(found, mine)
    assert all(same_bits(a, b) for a, b in zip([*expected, *theirs], [*outputs, *mine], strict=True))
    return found


def kernels(flat: FlatGraph) -> list[FusedOperator]:
    return [n.target for n in flat.graph.nodes if isinstance(n.target, FusedOperator)]


# ---------------------------------------------------------------------------------------------- groups
@pytest.mark.parametrize(
    ("what", "function", "tensors", "expected"),
    [
        ("a chain", lambda x, y: (x * y + x - 0.5,), (X, Y), [("mul", "add", "sub")]),
        ("a broadcast row", lambda x, r: (x * (1 + r) + 1,), (X, ROW), [("add", "mul", "add")]),
        ("a row that others read too", lambda x, r: (x * (q := 1 + r), q), (X, ROW), []),
        ("pieces of a concatenation", lambda x, p: (torch.cat([p, (x * 2 + 1).transpose(1, 2)], 2),), (X, PIECE),
         [("mul", "add", "cat")]),
        ("a part of a large value", lambda x, y: ((z := x + y)[:, :2] * 2, z), (X, Y), []),
        ("two results of one size", lambda x, y: ((z := x + y) * 2, z), (X, Y), [("add", "mul")]),
        ("a product between", lambda x, y: ((x + y) @ torch.ones(8, 8) * 2 + 1,), (X, Y), [("mul", "add")]),
        ("unproven functions", lambda x: (torch.sin(x * 2) * 3,), (X,), []),
        ("two chains that do not meet", lambda x, y: (x * 2 + 1, y * 3 - 1), (X, Y), [("mul", "add"), ("mul", "sub")]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_what_runs_over_the_same_elements_joins(
    what: str, function: Callable[..., Any], tensors: tuple[torch.Tensor, ...], expected: list[tuple[str, ...]]
) -> None:
    assert names(flat_of(function, *tensors)) == expected
    assert len(kernels(fused(function, *tensors))) == len(expected)


def test_a_group_never_waits_for_itself() -> None:
    """``a`` and ``c`` could be one kernel, were it not for the sum between them."""

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        a = x * 2
        b = a.sum(-1, keepdim=True)
        return (a + b * 1.5,)

    found = fused(function, X)
    assert [k.targets for k in kernels(found)] == [("aten.mul.Tensor", "aten.add.Tensor")]
    flat = flat_of(function, X)
    (group,) = fusion_groups(flat, lambda node: admission(node) is not None)
    assert [str(n) for n in group.nodes] == ["mul_1", "add"]


def test_two_groups_do_not_wait_for_each_other() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        a, b = x + 1, y + 1
        p, q = torch.sin(a), torch.sin(b)
        return a * q, b * p  # each could join its sum, but not both

    found = fused(function, X, Y)
    assert len(kernels(found)) == 1


def test_a_write_into_a_buffer_joins_and_keeps_its_place() -> None:
    def function(buffer: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        before = buffer.sum()
        buffer[:, 1:3].copy_((x * y + 1)[:, :2])
        after = buffer.sum()
        buffer.zero_()
        return before, after

    buffer = torch.randn(2, 6, 8)
    found = fused(function, buffer, X[:, :2], Y[:, :2])
    (kernel,) = kernels(found)
    assert kernel.targets[-1] == "aten.copy_.default"
    assert len(kernel.writes) == 1


def test_a_group_does_not_read_the_memory_that_it_writes() -> None:
    def function(buffer: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        buffer[:, :3].copy_(buffer[:, 3:] * x + 1)
        return (buffer + 0,)

    found = fused(function, torch.randn(2, 6, 8), X[:, :3])
    assert all("aten.copy_.default" not in kernel.targets for kernel in kernels(found))


CONTEXT = torch.randn(2, 8, 2)


@pytest.mark.parametrize(
    ("what", "end", "expected"),
    [
        ("its end", lambda h: h[:, 4:].transpose(1, 2), ("mul", "add", "cat")),
        ("its end, with a dimension more", lambda h: h[:, 4:].permute(0, 2, 1).unsqueeze(0), ("mul", "add", "cat")),
        ("a part of its columns", lambda h: h[:, 1:3, :8].transpose(1, 2), ("mul", "add", "cat")),
        ("one row of it", lambda h: h[:, 5].unsqueeze(-1).expand(-1, -1, 2), ("mul", "add")),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_copy_reads_from_a_concatenation_what_it_read_from_a_part(
    what: str, end: Callable[..., Any], expected: tuple[str, ...]
) -> None:
    def function(state: torch.Tensor, context: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = x * 2 + 1
        seen = torch.cat([context, h.transpose(1, 2)], 2)
        y = torch.relu(seen)
        state.copy_(end(h))
        return (y,)

    found = fused(function, torch.zeros(end(X).shape), CONTEXT, X)
    assert [tuple(t.split(".")[1] for t in k.targets) for k in kernels(found)] == [expected]


def test_a_copy_before_the_concatenation_still_reads_the_part() -> None:
    def function(state: torch.Tensor, context: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = x * 2 + 1
        state.copy_(h[:, 4:].transpose(1, 2))
        return (torch.cat([context + state.sum(), h.transpose(1, 2)], 2).relu(),)

    found = fused(function, torch.zeros(2, 8, 2), CONTEXT, X)
    assert ("aten.mul.Tensor", "aten.add.Tensor") in [k.targets for k in kernels(found)]


def test_random_draws_keep_their_order() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        a = torch.rand_like(x) * 2 + x
        b = torch.rand_like(x) - 1 + a
        return a, b

    flat = flat_of(function, X)
    found = FusePointwise().fuse(flat).flat
    FusedKernels(operators_as_they_are).prepare(
        [n for n in found.graph.nodes if isinstance(n.target, FusedOperator)], lambda target: X
    )
    torch.manual_seed(3)
    expected = function(X)
    torch.manual_seed(3)
    assert all(same_bits(a, b) for a, b in zip(expected, interpret(found, [X]), strict=True))


def test_what_lacks_a_proof_is_named_once_with_a_way_out() -> None:
    flat = flat_of(lambda x: (torch.sin(x) + torch.sin(x * 2) + torch.softmax(x, 0),), X)
    (rejection,) = FusePointwise().fuse(flat).rejections
    assert rejection.code == "CX701"
    assert "aten.sin.default" in rejection.explanation
    assert "prove" in rejection.hints[0]
    assert FusePointwise(lambda node: True).fuse(flat).rejections == ()


# ---------------------------------------------------------------------------------------------- compiling
def test_equal_groups_share_a_function_and_other_layouts_do_not() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        a = torch.sin(x * 2 + 1)
        b = torch.sin(a * 2 + 1)
        return (b, y.transpose(0, 1) * 2 + 1)

    found = FusePointwise().fuse(flat_of(function, X, Y)).flat
    nodes = [n for n in found.graph.nodes if isinstance(n.target, FusedOperator)]
    made = FusedKernels(operators_as_they_are)
    made.prepare(nodes, lambda target: X)
    assert (len(nodes), len(made.functions)) == (3, 2)


def test_a_compiled_group_has_eagers_bits_and_leaves_the_configuration_alone() -> None:
    from torch._inductor import config

    before = config.get_config_copy()

    def function(buffer: torch.Tensor, x: torch.Tensor, r: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x * (1 + r) + 0.3
        buffer[:, 1:3].copy_((y * y)[:, :2])
        return (torch.cat([buffer[:, :1] * 2, y - 1], 1),)

    buffer = torch.randn(2, 6, 8)
    flat = flat_of(function, buffer, X, ROW)
    found = FusePointwise().fuse(flat).flat
    nodes = [n for n in found.graph.nodes if isinstance(n.target, FusedOperator)]
    FusedKernels().prepare(nodes, lambda target: X)
    mine, theirs = buffer.clone(), buffer.clone()
    expected, outputs = function(theirs, X, ROW), interpret(found, [mine, X, ROW])
    assert same_bits(expected[0], outputs[0])
    assert same_bits(mine, theirs)
    assert config.get_config_copy() == before


def test_a_function_of_another_layout_is_an_error() -> None:
    def transposed(module: fx.GraphModule, arguments: Any) -> Callable[..., Any]:
        return lambda *given: [t.transpose(0, 1).contiguous().transpose(0, 1) for t in module(*given)]

    found = FusePointwise().fuse(flat_of(lambda x: (x * 2 + 1,), X)).flat
    nodes = [n for n in found.graph.nodes if isinstance(n.target, FusedOperator)]
    (text,) = FusedKernels(transposed).prepare(nodes, lambda target: X).values()
    assert re.search(r"fused_mul_add: compiled to .* expected float32\[2, 6, 8\]", text)


# ---------------------------------------------------------------------------------------------- in captures
class Gated(nn.Module):
    """A convolution over a kept context, a modulation, a periodic activation, a norm and a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.rows = nn.Conv1d(WIDTH, WIDTH, 3), nn.Linear(WIDTH, 2 * WIDTH)

    def start(self) -> dict[str, torch.Tensor]:
        return {"left": torch.zeros(1, WIDTH, 2)}

    def forward(self, x: torch.Tensor, state: Any) -> Any:
        seen = torch.cat([state["left"], x.transpose(1, 2)], -1)
        scale, shift = self.rows(x.mean(1, keepdim=True)).transpose(1, 2).chunk(2, 1)
        y = self.conv(seen) * (1 + scale) + shift
        y = y + torch.sin(y * 1.25) ** 2 * 0.7
        return torch.layer_norm(y.transpose(1, 2), [WIDTH]) * 2 + x, {"left": seen[..., -2:]}


def captured(compile: Callable[..., Any]) -> tuple[Any, Any]:
    """A module and its transform, whose captures on a fake backend fuse with that compiler."""
    module, declared = drawn(Gated()), contract((3, 5), fixed("left", 1, WIDTH, 2))
    fast = transform(module, declared, backend="plan")
    captures = HostCaptures(declared, fast.compiler, fast.memory, fast._stock, streams=1, backend=FakeBackend())
    captures.fuser = Fuser(torch.device("cpu"), lambda node: True, FusedKernels(compile))
    fast.__dict__["_captures"] = captures
    return module, fast


def play(module: Any, fast: Any, lengths: list[int]) -> bool:
    a, b = module.start(), module.start()
    same = True
    for i, length in enumerate(lengths):
        x = torch.randn(1, length, WIDTH, generator=torch.Generator().manual_seed(i))
        with torch.no_grad():
            expected, a = module(aligned(x), a)
        found, b = fast(aligned(x), b)
        same &= same_bits(expected, found) and all(same_bits(a[k], b[k]) for k in a)
    return same


def test_captures_are_fused_and_certified_and_the_report_shows_each_group() -> None:
    module, fast = captured(operators_as_they_are)
    fast.warmup("all")
    rows = fast._captures.rows.values()
    assert rows
    assert all(row.captured and row.fused is not None for row in rows)
    assert play(module, fast, [3, 5, 3, 3, 5, 5, 3, 3])
    assert fast.stats()["replays"] == 8
    report = fast.report
    assert "pointwise operators in" in report.to_dict()["classes"][0]["capture"]["fused"]
    (change,) = {c for c in report.rewrites if c.pass_name == "fuse_pointwise" and "sin" in c.where}
    assert "IEEE, proven" in change.why
    assert "test_fuse_pointwise.py" in change.source


def test_a_wrong_kernel_is_refused_by_the_certificate_and_nothing_is_fused() -> None:
    def off_by_one_bit(module: fx.GraphModule, arguments: Any) -> Callable[..., Any]:
        def run(*given: torch.Tensor) -> list[torch.Tensor]:
            found = [t.clone() for t in module(*given)]
            if found:
                found[0].view(-1).view(torch.int32)[0] ^= 1
            return found

        return run

    module, fast = captured(off_by_one_bit)
    fast.warmup("all")
    for row in fast._captures.rows.values():
        assert row.captured
        assert row.fused is None
        assert row.refusals[0].code == "CX508"
    assert play(module, fast, [3, 5, 3, 3])
    assert fast.stats()["replays"] == 4


def test_a_compiler_that_contracts_is_refused() -> None:
    """The mutation of the settings that exactness rests on; where the processor has no such instruction, bits agree."""
    x, y, z = (torch.randn(4096, generator=torch.Generator().manual_seed(i)) for i in range(3))
    flat = flat_of(lambda x, y, z: (x * y + z,), x, y, z)
    module = fx.GraphModule(torch.nn.Module(), flat.graph)
    contracting = {**exact_settings(), "cpp.enable_floating_point_contract_flag": "fast"}
    contracted = compile_exact(module, [x, y, z], contracting)(x, y, z)[0]
    exact = compile_exact(module, [x, y, z])(x, y, z)[0]
    assert same_bits(exact, x * y + z)
    fma = (x.double() * y.double() + z.double()).float()
    if not same_bits(contracted, exact):
        assert (contracted == fma).float().mean() > 0.9
    else:
        pytest.skip("this processor contracts nothing")


def test_a_compiler_that_fails_leaves_the_operators(caplog: pytest.LogCaptureFixture) -> None:
    def broken(module: fx.GraphModule, arguments: Any) -> Callable[..., Any]:
        raise RuntimeError("no compiler here")

    module, fast = captured(broken)
    with caplog.at_level(logging.WARNING, logger="cadence_fx.fusion"):
        fast.warmup("all")
    assert "no compiler here" in caplog.text
    assert all(row.captured and row.fused is None for row in fast._captures.rows.values())
    assert play(module, fast, [3, 5])


def test_only_the_group_that_cannot_be_compiled_is_left_alone() -> None:
    def picky(module: fx.GraphModule, arguments: Any) -> Callable[..., Any]:
        if any("sin" in str(node.target) for node in module.graph.nodes):
            raise RuntimeError("no sine here")
        return module

    module, fast = captured(picky)
    fast.warmup("all")
    for row in fast._captures.rows.values():
        assert row.captured
        assert row.fused is not None
        assert not any("sin" in change.where for change in row.fused.changes)
    assert play(module, fast, [3, 5, 3])


def test_proofs_are_looked_up_when_something_is_fused_and_not_missed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    looked_up = list[torch.device]()

    def on(device: torch.device) -> Any:
        looked_up.append(device)
        raise OSError("no driver")

    monkeypatch.setattr(Proofs, "on", on)
    module, fast = captured(operators_as_they_are)
    fuser = Fuser(torch.device("cpu"), kernels=FusedKernels(operators_as_they_are))
    fast._captures.fuser = fuser
    assert looked_up == []
    with caplog.at_level(logging.WARNING, logger="cadence_fx.fusion"):
        fast.warmup("all")
    assert looked_up == [torch.device("cpu")]
    assert "proofs of cpu cannot be looked up: OSError: no driver" in caplog.text
    for row in fast._captures.rows.values():
        assert row.fused is not None
        assert not any("sin" in change.where for change in row.fused.changes)
        assert [r.code for r in row.fused.rejections] == ["CX701", "CX701"]  # sin and pow
    assert play(module, fast, [3, 5])


def test_the_pass_can_be_skipped_by_name() -> None:
    declared = contract((3,), fixed("left", 1, WIDTH, 2))
    fast = transform(drawn(Gated()), declared, backend="plan", skip=("fuse_pointwise",))
    made = HostCaptures(fast.contract, fast.compiler, fast.memory, fast._stock, streams=1, backend=FakeBackend())
    assert made.fuser is None
