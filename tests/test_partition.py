"""Partitions of toy graphs: where they are cut and why, and that no cut changes a bit."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from cadence_fx.bits import same_bits
from cadence_fx.errors import CadenceError
from cadence_fx.obstacles import obstacles
from cadence_fx.partition import Granularity, Partition, Segment, partition
from cadence_fx.replay import Binding, ExactShapeReplay
from cadence_fx.specialise import FlatGraph, TensorMeta
from cadence_fx.staging import copy_of
from tests.fake_backend import FakeBackend

GRANULARITIES: tuple[Granularity, ...] = ("chunk", "callable", "step")
aten = torch.ops.aten


def _meta(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return TensorMeta.of(value)
    return tuple(_meta(v) for v in value) if isinstance(value, (list, tuple)) else value


class _Filler(fx.Interpreter):
    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if n.op != "output":
            n.meta["val"] = _meta(value)
        return value


def flat_of(function: Any, *inputs: Any) -> FlatGraph:
    """A flat graph of ATen operators, each with its metadata."""

    def call(*args: Any) -> Any:
        return pytree.tree_leaves(function(*args))

    with torch.no_grad():
        module = make_fx(call)(*[copy_of(v) for v in inputs])
        graph = module.graph
        constants = {str(n.target): getattr(module, str(n.target)) for n in graph.nodes if n.op == "get_attr"}
        kept = {k: v.clone() for k, v in constants.items()}
        _Filler(module).run(*[copy_of(v) for v in inputs])
        for key, value in kept.items():
            constants[key].copy_(value)
    return FlatGraph(graph, pytree.tree_flatten(graph.output_node().args[0])[1], {}, constants)


def place_by(flat: FlatGraph, *where: tuple[int, tuple[tuple[str, int], ...]]) -> FlatGraph:
    """Give the next ``n`` operators each place in turn; the rest is outside."""
    nodes = [n for n in flat.graph.nodes if n.op == "call_function"]
    chains = [chain for count, chain in where for _ in range(count)]
    for node, chain in zip(nodes, chains + [()] * len(nodes), strict=False):
        node.meta["where"] = chain
    return flat


def stock(flat: FlatGraph, inputs: Sequence[Any]) -> tuple[Any, ...]:
    """The whole graph, as it is."""
    module = fx.GraphModule(torch.nn.Module(), fx.Graph())
    for name, value in flat.constants.items():
        setattr(module, name, value)
    module.graph = flat.graph
    return tuple(module(*inputs))


class Static:
    """A runner that does what graphs do: inputs staged, outputs in memory that the next run overwrites."""

    def __init__(self) -> None:
        self.memory: dict[str, tuple[Any, ...]] = {}
        self.ran: list[str] = []

    def __call__(self, segment: Segment, values: Sequence[Any]) -> Sequence[Any]:
        self.ran.append(segment.name)
        if not segment.capturable:
            return segment.module(*values)
        staged = [copy_of(v) if isinstance(v, torch.Tensor) else v for v in values]
        found = segment.module(*staged)
        static = self.memory.setdefault(segment.name, tuple(copy_of(v) for v in found))
        for old, new in zip(static, found, strict=True):
            old.copy_(new)
        return static


def check(flat: FlatGraph, inputs: Sequence[torch.Tensor], granularity: Granularity, runs: int = 3) -> Partition:
    """Runs the partition eagerly and as graphs would, beside the whole graph; outputs, inputs and state must agree."""
    parts = partition(flat, granularity)
    static = Static()
    start = {k: v.clone() for k, v in flat.constants.items()}
    results = []
    ways = (
        lambda given: stock(flat, given),
        lambda given: parts.run(given),
        lambda given: parts.run(given, static, copy_outputs=True),
    )
    for way in ways:
        torch.manual_seed(3)
        for k, v in start.items():
            flat.constants[k].copy_(v)
        given = [copy_of(v) for v in inputs]
        seen = []
        for _ in range(runs):
            seen.append([v.clone() for v in way(given)])
        state = [v.clone() for v in flat.constants.values()]
        results.append([t for s in seen for t in s] + given + state + [torch.get_rng_state()])
    for other in results[1:]:
        for i, (a, b) in enumerate(zip(results[0], other, strict=True)):
            assert same_bits(a, b), f"value {i} of {granularity}"
    return parts


X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))


# ------------------------------------------------------------------------------------------- bits
def writes(state: torch.Tensor) -> Any:
    def toy(x: torch.Tensor) -> Any:
        y = x * 2
        head = y[:2]
        y.add_(1)  # after the view was made
        z = head + 0.5
        state[:, 1:].copy_(y[:, :5])
        y[:, 0].mul_(3)
        w = state.sum(0) + head.sum()
        return z, w, y, head

    return toy


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_writes_in_place_reach_every_reader_across_cuts(granularity: Granularity) -> None:
    flat = flat_of(writes(torch.randn(4, 6)), X)
    count = flat.calls()
    for size in (1, 2, 3, 5):
        chains = [(size, (("part", i),)) for i in range(count // size + 1)]
        check(place_by(flat, *chains), [X], granularity)


@pytest.mark.parametrize("seed", range(20))
def test_eager_operators_anywhere_change_no_bit(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    flat = flat_of(writes(torch.randn(4, 6)), X)
    nodes = [n for n in flat.graph.nodes if n.op == "call_function"]
    rng = random.Random(seed)
    blocked = {n: "by lot" for n in nodes if rng.random() < 0.4}
    monkeypatch.setattr("cadence_fx.partition.obstacles", lambda flat: (blocked, ()))
    chains = [(rng.randrange(1, 5), (("part", i),)) for i in range(len(nodes))]
    check(place_by(flat, *chains), [X], rng.choice(GRANULARITIES))


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_an_input_that_is_written_is_written_for_the_caller(granularity: Granularity) -> None:
    def toy(x: torch.Tensor, n: torch.Tensor) -> Any:
        a = x + n
        x[1:].mul_(2)
        b = x + a
        x.t().add_(1)
        return b, x[0]

    flat = flat_of(toy, X, torch.ones(6))
    check(place_by(flat, *[(1, (("p", i),)) for i in range(20)]), [X, torch.ones(6)], granularity)


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_random_draws_keep_their_order(granularity: Granularity) -> None:
    def toy(x: torch.Tensor) -> Any:
        a = torch.randn(4, 6)
        b = x + 1
        c = torch.rand(6)
        d = torch.randn_like(b)
        return a + b, c * d

    flat = flat_of(toy, X)
    parts = check(place_by(flat, *[(1, (("p", i),)) for i in range(20)]), [X], granularity)
    assert any(s.draws for s in parts.segments)


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_views_that_may_be_copies_are_decided_by_their_shapes(granularity: Granularity) -> None:
    def toy(x: torch.Tensor) -> Any:
        y = x + 1
        same = y.reshape(24)  # a view
        other = y.t().reshape(24)  # a copy, made before the write
        kept = y.contiguous()
        y.mul_(2)
        first, second = y.split(2)
        values, indices = torch.sort(second)
        return same + 1, other + 1, kept + 1, first, values, indices

    flat = flat_of(toy, X)
    check(place_by(flat, *[(1, (("p", i),)) for i in range(40)]), [X], granularity)


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_an_istft_that_was_left_in_is_cut_out(granularity: Granularity) -> None:
    window = torch.hann_window(16)

    def toy(x: torch.Tensor) -> Any:
        spectrum = torch.complex(x.sin(), x.cos())
        audio = torch.istft(spectrum, 16, 4, 16, window)
        return audio.clamp(-1, 1) * 0.5, x.exp()

    x = torch.randn(1, 9, 20)
    parts = check(istft_graph(toy, x), [x], granularity)
    assert [s.capturable for s in parts.segments] == [True, False, True]
    assert "istft" in parts.segments[1].reason
    assert [(r.code, r.node, r.source) for r in parts.rejections] == [
        ("CX521", "istft_default", "vocoder.py:7 in forward")
    ]
    assert len(parts.segments[0].nodes) == 4  # what does not wait for it stays together


def istft_graph(toy: Any, x: torch.Tensor) -> FlatGraph:
    """make_fx would look into istft: this keeps the operator whole."""
    window = torch.hann_window(16)
    graph = fx.Graph()
    a = graph.placeholder("x")
    w = graph.get_attr("window")
    sin, cos = graph.call_function(aten.sin.default, (a,)), graph.call_function(aten.cos.default, (a,))
    z = graph.call_function(aten.complex.default, (sin, cos))
    y = graph.call_function(aten.istft.default, (z, 16, 4, 16, w))
    y.meta["source"] = "vocoder.py:7 in forward"
    c = graph.call_function(aten.clamp.default, (y, -1, 1))
    m = graph.call_function(aten.mul.Tensor, (c, 0.5))
    e = graph.call_function(aten.exp.default, (a,))
    graph.output((m, e))
    values = {a: x, w: window}
    with torch.no_grad():
        for node in graph.nodes:
            if node.op == "call_function":
                values[node] = node.target(*fx.node.map_arg(node.args, values.__getitem__))
    for node, value in values.items():
        node.meta["val"] = _meta(value)
    want = toy(x)
    assert same_bits(values[m], want[0])
    return FlatGraph(graph, pytree.tree_flatten(want)[1], {}, {"window": window})


# ------------------------------------------------------------------------------------------- where it is cut
def solver(x: torch.Tensor) -> Any:
    y = x + 1
    for _ in range(3):
        y = y * 0.5
        y = y.sin()
    return y.exp()


def placed_solver() -> FlatGraph:
    steps = [(2, (("solver", 0), ("solver.step", i))) for i in range(3)]
    return place_by(flat_of(solver, X), (1, ()), *steps)


@pytest.mark.parametrize(("granularity", "sizes"), [("chunk", [8]), ("callable", [1, 6, 1]), ("step", [1, 2, 2, 2, 1])])
def test_granularity_decides_where_to_cut(granularity: Granularity, sizes: list[int]) -> None:
    parts = check(placed_solver(), [X], granularity)
    assert [len(s.nodes) for s in parts.segments] == sizes
    assert all(s.capturable for s in parts.segments)
    assert parts.rejections == ()


def test_a_node_that_a_pass_made_stays_with_its_neighbours() -> None:
    flat = placed_solver()
    node = next(n for n in flat.graph.nodes if n.name == "sin_1")
    del node.meta["where"]
    assert [len(s.nodes) for s in partition(flat, "step").segments] == [1, 2, 2, 2, 1]


def test_scattered_eager_operators_are_gathered_into_as_few_segments_as_dependencies_allow() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    outs = []
    for i in range(4):
        row = graph.call_function(aten.select.int, (x, 0, i))
        one = graph.call_function(aten.add.Tensor, (row, 1))
        wait = graph.call_function(aten.is_nonzero.default, (graph.call_function(aten.sum.default, (one,)),))
        wait.meta["val"] = True
        outs.append(graph.call_function(aten.mul.Tensor, (one, 2)))
    graph.output(tuple(outs))
    for node in graph.nodes:
        if "val" not in node.meta:
            shape = (4, 6) if node.op == "placeholder" else () if node.target is aten.sum.default else (6,)
            node.meta["val"] = TensorMeta(shape, (6, 1)[2 - len(shape) :], torch.float32, torch.device("cpu"))
    parts = partition(FlatGraph(graph, pytree.tree_flatten(tuple(outs))[1]), "chunk")
    assert [(s.capturable, len(s.nodes)) for s in parts.segments] == [(True, 12), (False, 4)]


# ------------------------------------------------------------------------------------------- obstacles
def graph_on_device(target: Any, args: Sequence[Any], kind: str, metas: dict[str, tuple[str, tuple[int, ...]]]) -> Any:
    """One operator in a graph on ``kind``; nothing of it is run."""
    graph = fx.Graph()
    values: dict[str, fx.Node] = {}
    for name in [a for a in args if isinstance(a, str)]:
        values[name] = graph.get_attr(name) if name.startswith("const") else graph.placeholder(name)
        device, shape = metas[name]
        values[name].meta["val"] = TensorMeta(shape, (1,) * len(shape), torch.float32, torch.device(device))
    node = graph.call_function(target, tuple(values.get(a, a) if isinstance(a, str) else a for a in args))
    device, shape = metas["out"]
    node.meta["val"] = TensorMeta(shape, (1,) * len(shape), torch.float32, torch.device(device))
    node.meta["source"] = "model.py:3 in forward"
    anchor = graph.placeholder("anchor")
    anchor.meta["val"] = TensorMeta((1,), (1,), torch.float32, torch.device(kind))
    graph.output((node,))
    return obstacles(FlatGraph(graph, pytree.tree_flatten((0,))[1]))


@pytest.mark.parametrize(
    ("target", "args", "metas", "code"),
    [
        (aten.add.Tensor, ("a", "b"), {"a": ("cuda", (3,)), "b": ("cuda", (3,)), "out": ("cuda", (3,))}, None),
        (aten.randn.default, ([3],), {"out": ("cuda", (3,))}, None),
        (aten.randn.default, ([3],), {"out": ("cpu", (3,))}, "CX522"),
        (aten.arange.default, (3,), {"out": ("cpu", (3,))}, "CX523"),
        (aten._to_copy.default, ("a",), {"a": ("cpu", (3,)), "out": ("cuda", (3,))}, "CX523"),
        (aten._to_copy.default, ("const",), {"const": ("cpu", ()), "out": ("cuda", ())}, "CX523"),
        (aten.mul.Tensor, ("a", "const"), {"a": ("cuda", (3,)), "const": ("cpu", ()), "out": ("cuda", (3,))}, None),
        (aten.mul.Tensor, ("a", "b"), {"a": ("cuda", (3,)), "b": ("cpu", ()), "out": ("cuda", (3,))}, "CX523"),
        (aten.copy_.default, ("a", "const"), {"a": ("cuda", ()), "const": ("cpu", ()), "out": ("cuda", ())}, "CX523"),
        (aten.nonzero.default, ("a",), {"a": ("cuda", (3,)), "out": ("cuda", (2, 1))}, "CX524"),
        (aten.equal.default, ("a", "b"), {"a": ("cuda", (3,)), "b": ("cuda", (3,)), "out": ("cuda", ())}, "CX521"),
    ],
)
def test_what_a_device_graph_cannot_record_is_named(target: Any, args: Any, metas: Any, code: str | None) -> None:
    reasons, rejections = graph_on_device(target, args, "cuda", metas)
    assert [r.code for r in rejections] == ([] if code is None else [code])
    assert len(reasons) == len(rejections)
    assert all(r.source == "model.py:3 in forward" and r.explanation for r in rejections)


def test_what_follows_from_a_size_that_depends_on_values_is_eager_too() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    a = graph.call_function(aten.add.Tensor, (x, 1))
    n = graph.call_function(aten.nonzero.default, (a,))
    f = graph.call_function(aten.sin.default, (n,))
    graph.output((a, f))
    for node in graph.nodes:
        node.meta["val"] = TensorMeta((4,), (1,), torch.float32, torch.device("cpu"))
    parts = partition(FlatGraph(graph, pytree.tree_flatten((0, 0))[1]), "chunk")
    assert [(s.capturable, s.nodes) for s in parts.segments] == [
        (True, ("add_tensor",)),
        (False, ("nonzero_default", "sin_default")),
    ]
    assert [r.code for r in parts.rejections] == ["CX524"]


def test_a_value_of_the_host_makes_its_reader_eager() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    i = graph.call_function(aten._local_scalar_dense.default, (x,))
    y = graph.call_function(aten.mul.Tensor, (x, i))
    graph.output((y,))
    for node in (x, y):
        node.meta["val"] = TensorMeta((), (), torch.float32, torch.device("cpu"))
    i.meta["val"] = 2.0
    parts = partition(FlatGraph(graph, pytree.tree_flatten((0,))[1]), "chunk")
    assert [(s.capturable, len(s.nodes)) for s in parts.segments] == [(False, 2)]
    assert [r.code for r in parts.rejections] == ["CX521", "CX525"]
    assert torch.equal(parts.run([torch.tensor(3.0)])[0], torch.tensor(9.0))


# ------------------------------------------------------------------------------------------- form
def test_a_segment_says_what_it_reads_and_writes() -> None:
    state, scale = torch.randn(4, 6), torch.randn(6)

    def toy(x: torch.Tensor) -> Any:
        y = x * scale
        state[:, :3].copy_(y[:, 3:])
        return y + state

    flat = flat_of(toy, X)
    names = {id(v): k for k, v in flat.constants.items()}
    (segment,) = partition(flat, "chunk").segments
    assert segment.writes == {names[id(state)]}
    assert segment.reads == {names[id(state)], names[id(scale)]}
    assert (segment.inputs, len(segment.outputs)) == (("arg0_1",), 1)


def test_segments_are_graph_modules_and_the_input_graph_is_unchanged() -> None:
    flat = placed_solver()
    before = str(flat.graph)
    parts = partition(flat, "step")
    assert all(isinstance(s.module, fx.GraphModule) for s in parts.segments)
    assert str(flat.graph) == before
    assert not dict(parts.segments[0].module.named_buffers())


def test_values_are_released_after_their_last_reader() -> None:
    import weakref

    parts = partition(placed_solver(), "step")
    alive: list[weakref.ref[torch.Tensor]] = []
    most = 0

    def runner(segment: Segment, values: Sequence[Any]) -> Sequence[Any]:
        nonlocal most
        out = segment.module(*values)
        alive.extend(weakref.ref(v) for v in out)
        most = max(most, sum(ref() is not None for ref in alive))
        return out

    parts.run([X], runner)
    assert most <= 2


def test_an_unknown_granularity_is_an_error() -> None:
    with pytest.raises(CadenceError, match="expected 'chunk', 'callable' or 'step'"):
        partition(placed_solver(), "frame")  # type: ignore[arg-type]


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_the_engine_replays_the_capturable_segments(granularity: Granularity) -> None:
    state = torch.randn(4, 6)
    flat = flat_of(writes(state), X)
    place_by(flat, *[(3, (("part", i),)) for i in range(20)])
    parts = partition(flat, granularity)
    engine = ExactShapeReplay("cpu", backend=FakeBackend(), max_graphs=64)
    bindings: dict[str, Binding] = {}

    def runner(segment: Segment, values: Sequence[Any]) -> Sequence[Any]:
        if segment.name not in bindings:
            buffers = [flat.constants[name] for name in sorted(segment.reads)]
            found = engine.capture(
                segment.name, segment.module, values, aliased=buffers, preserve=buffers, alias=True
            )  # fmt: skip
            assert isinstance(found, Binding), found
            bindings[segment.name] = found
        out = engine.replay(bindings[segment.name], values)
        assert not isinstance(out, str), out
        return out

    start = {k: v.clone() for k, v in flat.constants.items()}
    seen = []
    for way in (lambda x: stock(flat, [x]), lambda x: parts.run([x], runner, copy_outputs=True)):
        for k, v in start.items():
            flat.constants[k].copy_(v)
        outs = [t.clone() for i in range(4) for t in way(X * i)]
        seen.append([*outs, *[v.clone() for v in flat.constants.values()]])
    assert all(same_bits(a, b) for a, b in zip(*seen, strict=True))
    assert engine.stats()["replays"] == 4 * len(parts.segments)
