"""The benchmark's controls, as far as no device is needed: what is wrapped, shared, captured and refused."""

from __future__ import annotations

import copy
import dataclasses
import importlib.metadata
import shutil
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from cadence_fx import bench_controls
from cadence_fx.bench_cell import CellUnavailable
from cadence_fx.bench_controls import CONTROLS, compile_boundaries, failure
from cadence_fx.compiled_captures import CompiledCaptures
from cadence_fx.compiled_segments import CompiledSegments, close, inductor
from cadence_fx.contract import Boundary, Contract
from cadence_fx.drop_in import transform
from cadence_fx.errors import CadenceError
from cadence_fx.families import load
from cadence_fx.module import CadenceModule
from cadence_fx.partition import Partition, partition
from cadence_fx.program import Program
from cadence_fx.traffic import SessionMemory, Step
from tests.fake_backend import FakeBackend
from tests.toys import WIDTH, Player, Toy, build, differences, draw, same_bits

BLOCK = Boundary("block.forward")
CHUNK = "chunk[3]"


def looped() -> Toy:
    """A solver of two steps whose block is declared as a boundary."""
    toy = build("new_first")
    return Toy(toy.module, dataclasses.replace(toy.contract, boundaries=(BLOCK,)))


def eager(module: torch.fx.GraphModule, arguments: Any) -> Any:
    return module


@pytest.fixture(scope="module", autouse=True)
def _compiler_is_loaded() -> None:
    """Torch's own modules warn when they are first imported; whichever test came first would take it for a result."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.compiler.cudagraph_mark_step_begin()


class ToyFamily:
    """The toy as a family: streams of chunks from a drawn start."""

    name = "toy"

    def __init__(self, boundaries: tuple[Boundary, ...] = (BLOCK,)) -> None:
        self.boundaries = boundaries

    def build_random(self, device: str, seed: int, **sizes: Any) -> nn.Module:
        return build("new_first", seed).module

    def contract(self, **options: Any) -> Contract:
        return dataclasses.replace(looped().contract, boundaries=self.boundaries)

    def script(self, decoder: nn.Module, contract: Contract, seed: int, chunks: int) -> Iterator[Step]:
        generator = torch.Generator().manual_seed(seed)
        initial: Any = decoder.initial
        yield Step("start", lambda decoder, memory: memory.start(initial()))
        for _ in range(chunks):
            x = draw(looped(), CHUNK, generator)
            yield Step("chunk", lambda decoder, memory, x=x: memory.call(decoder, x), is_chunk=True)  # type: ignore[misc]

    stream = script


# ---------------------------------------------------------------------------------------------- compiled segments
class CompiledPlayer(Player):
    """Runs programs through compiled segments."""

    def __init__(self, toy: Toy, compiled: CompiledSegments) -> None:
        super().__init__(toy)
        self.compiled = compiled

    def parts(self, program: Program) -> Partition:
        attributes = {t: self.compiler.fetch(program.flat, t) for t in program.flat.attributes}
        return partition(program.flat, "step", attributes)

    def program(self, call: str) -> Program:
        program = super().program(call)
        parts = self.parts(program)
        return dataclasses.replace(program, run=lambda *inputs: self.compiled.run(parts, inputs))


def test_closed_segments_give_the_plans_bits() -> None:
    toy = looped()
    compiled = CompiledSegments(eager)
    assert list(differences(toy, [CHUNK] * 6, player=CompiledPlayer(toy, compiled))) == []


def test_steps_of_a_loop_are_one_function_of_other_arguments() -> None:
    toy = looped()
    player = CompiledPlayer(toy, CompiledSegments(eager))
    segments = player.parts(Player.program(player, CHUNK)).segments
    first, second = (close(s) for s in segments if s.where)
    assert first.text == second.text
    pairs = [(a, b) for a, b in zip(first.order, second.order, strict=True) if isinstance(a, torch.Tensor)]
    kv = player.memory["kv"].tensor.untyped_storage().data_ptr()
    written = [(a, b) for a, b in pairs if isinstance(b, torch.Tensor) and a.untyped_storage().data_ptr() == kv]
    assert written
    assert all(a.data_ptr() != b.data_ptr() and a.shape == b.shape for a, b in written)
    player.start(toy.module.initial())
    player(CHUNK, draw(toy, CHUNK, torch.Generator()))
    assert len(player.compiled.functions) < len([s for s in segments if s.capturable])


def test_arguments_never_overlap() -> None:
    """K and V of a row lie side by side: they stay views of one argument, while layers and steps are taken apart."""
    player = CompiledPlayer(looped(), CompiledSegments(eager))
    for segment in player.parts(Player.program(player, CHUNK)).segments:
        spans = []
        for item in close(segment).order:
            if isinstance(item, torch.Tensor) and item.untyped_storage().nbytes() > item.nbytes:
                length = sum((n - 1) * s for n, s in zip(item.shape, item.stride(), strict=True)) * item.itemsize
                spans.append((item.data_ptr(), item.data_ptr() + length))
        assert all(a[1] < b[0] for a, b in zip(sorted(spans), sorted(spans)[1:], strict=False))


def test_what_writes_state_outside_all_boundaries_is_not_compiled() -> None:
    toy = looped()
    toy = Toy(toy.module, dataclasses.replace(toy.contract, boundaries=()))
    compiled = CompiledSegments(eager)
    assert list(differences(toy, [CHUNK] * 3, player=CompiledPlayer(toy, compiled))) == []
    assert not any(segment.writes for segment in compiled.closed)


@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler on a CPU")
@pytest.mark.filterwarnings("ignore")
def test_inductor_compiles_a_step_to_nearly_the_same_numbers() -> None:
    player = CompiledPlayer(looped(), CompiledSegments(eager))
    player.start(player.toy.module.initial())
    step = next(s for s in player.parts(Player.program(player, CHUNK)).segments if s.where)
    closed = close(step)
    given = [torch.randn(1, 3, WIDTH, generator=torch.Generator().manual_seed(1)) for _ in step.inputs]
    kv, outcomes = player.memory["kv"].tensor, []
    before = kv.clone()
    module = torch.fx.GraphModule(nn.Module(), closed.graph)
    with torch.no_grad():
        for function in (module, inductor(copy.deepcopy(module), closed.arguments(given))):
            kv.copy_(before)
            outcomes.append((*function(*closed.arguments(given)), kv.clone()))
    assert not same_bits(outcomes[0][-1], before)
    for expected, found in zip(*outcomes, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------------------------------------- captures
def captured(compile: Any) -> tuple[CadenceModule, CompiledCaptures]:
    toy = looped()
    fast = transform(toy.module, toy.contract, backend="plan")
    return fast, CompiledCaptures.instead_of(fast, compile, FakeBackend())


def play(toy: Toy, module: Any, chunks: int = 4) -> list[torch.Tensor]:
    generator, memory = torch.Generator().manual_seed(3), SessionMemory.of(toy.contract)
    torch.manual_seed(0)
    memory.start(toy.module.initial())
    with torch.no_grad():
        return [memory.call(module, draw(toy, CHUNK, generator))[0].clone() for _ in range(chunks)]


def outcome(fast: CadenceModule, run: Callable[[Program, list[Any]], Any]) -> list[list[torch.Tensor]]:
    """Output and state after each program of the cadence, from one state."""
    found = []
    for signature, program in fast.programs.items():
        for buffer in fast.memory.buffers.values():
            buffer.tensor.copy_(torch.randn(buffer.tensor.shape, generator=torch.Generator().manual_seed(2)))
        drawn = fast.compiler.drawn(signature)
        with torch.no_grad():
            outputs = run(program, [drawn[place] for place in program.inputs])
        views = [fast.memory[link.name].view(link.new).clone() for link in program.links]
        found.append([*(v.clone() for v in outputs if isinstance(v, torch.Tensor)), *views])
    return found


def test_compiled_functions_are_captured_and_replayed() -> None:
    fast, captures = captured(eager)
    fast.warmup("steady")
    assert len(captures.rows) == 3
    assert all(row.captured for row in captures.rows.values())
    expected = outcome(fast, lambda program, inputs: program.run(*inputs))
    found = outcome(fast, captures.run)
    assert all(same_bits(a, b) for x, y in zip(expected, found, strict=True) for a, b in zip(x, y, strict=True))


def test_a_capture_is_certified_against_the_compiled_functions_and_not_against_stock() -> None:
    def rounded(module: torch.fx.GraphModule, arguments: Any) -> Any:
        return lambda *given: tuple(v * (1 + 1e-3) for v in module(*given))

    fast, captures = captured(rounded)
    fast.warmup("steady")
    assert all(row.captured for row in captures.rows.values())
    expected = outcome(fast, lambda program, inputs: program.run(*inputs))
    assert not same_bits(expected[0][0], outcome(fast, captures.run)[0][0])


def test_compiling_over_a_live_state_is_refused() -> None:
    fast, _ = captured(eager)
    fast.memory.live = True
    with pytest.raises(CadenceError, match="before the first state"):
        fast.warmup("steady")


def test_captures_need_a_device() -> None:
    with pytest.raises(CellUnavailable, match="captures need a CUDA device"):
        CONTROLS["compiler_in_engine"].make(ToyFamily(), "cpu", 0)


# ---------------------------------------------------------------------------------------------- torch.compile
def test_only_the_named_callables_of_this_decoder_are_replaced() -> None:
    calls: list[str] = []

    def counted(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            calls.append("block")
            return original(*args)

        return call

    stock, wrapped = build("new_first").module, build("new_first").module
    compile_boundaries(wrapped, (BLOCK.path,), counted)
    toy = looped()
    assert all(same_bits(a, b) for a, b in zip(play(toy, stock), play(toy, wrapped), strict=True))
    assert len(calls) == 4 * wrapped.steps
    assert "forward" not in stock.block.__dict__


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_boundaries_run_the_decoder(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    modes, marks, real = [], [], torch.compile

    def compile(function: Any, mode: str) -> Any:
        modes.append(mode)
        return real(function, backend=backend)

    monkeypatch.setattr(torch, "compile", compile)
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: marks.append("step"))
    decoder = CONTROLS["compile_reduce_overhead"].make(ToyFamily(), "cpu", 0)
    assert modes == ["reduce-overhead"]
    warm = len(marks)
    assert warm >= 3 * 4
    toy = looped()
    for expected, found in zip(play(toy, toy.module), play(toy, decoder), strict=True):
        torch.testing.assert_close(found, expected)
    assert len(marks) == warm + 4


def test_results_of_graphs_are_copied_before_the_next_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    static = torch.zeros(2)
    copying = bench_controls._returning_copies(lambda value: {"out": static.fill_(value)})
    first = copying(1.0)
    copying(2.0)
    assert first["out"].tolist() == [1.0, 1.0]

    monkeypatch.setattr(torch, "compile", lambda function, mode: function)
    wrapped = list[Any]()

    def noted(function: Any) -> Any:
        wrapped.append(function)
        return function

    monkeypatch.setattr(bench_controls, "_returning_copies", noted)
    CONTROLS["compile_max_autotune"].make(ToyFamily(), "cpu", 0)
    assert wrapped == []
    CONTROLS["compile_reduce_overhead"].make(ToyFamily(), "cpu", 0)
    assert len(wrapped) == 1


def test_modes_without_graphs_mark_no_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, mode: function)
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: pytest.fail("a step was marked"))
    CONTROLS["compile_max_autotune"].make(ToyFamily(), "cpu", 0)


def test_what_the_compiler_raises_is_the_result_with_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(function: Any, mode: str) -> Any:
        def call(*args: Any) -> Any:
            error = RuntimeError("backend raised:\nmore")
            error.inner_exception = ValueError("\n  Error: accessing tensor output\nStack trace")  # type: ignore[attr-defined]
            raise error

        return call

    monkeypatch.setattr(torch, "compile", broken)
    with pytest.raises(CellUnavailable) as caught:
        CONTROLS["compile_reduce_overhead"].make(ToyFamily(), "cpu", 0)
    assert str(caught.value) == "block.forward: ValueError: Error: accessing tensor output"
    assert failure(KeyError()) == "KeyError"


def test_a_callable_that_cannot_be_compiled_is_left_as_stock_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def half_broken(function: Any, mode: str) -> Any:
        def call(*args: Any) -> Any:
            raise NotImplementedError("no such operator")

        return function if function.__self__.__class__ is nn.Linear else call

    monkeypatch.setattr(torch, "compile", half_broken)
    family = ToyFamily((Boundary("block.forward"), Boundary("block.out.forward")))
    decoder: Any = CONTROLS["compile_reduce_overhead"].make(family, "cpu", 0)
    assert decoder.stats() == {"left_as_stock": {"block.forward": "NotImplementedError: no such operator"}}
    assert "forward" in decoder.block.out.__dict__
    toy = looped()
    assert all(same_bits(a, b) for a, b in zip(play(toy, toy.module), play(toy, decoder), strict=True))


def test_the_loop_and_the_rest_can_be_compiled_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, mode: function)
    CONTROLS["compile_reduce_overhead_rest"].make(ToyFamily(), "cpu", 0)
    with pytest.raises(CellUnavailable, match="declares no such callable"):
        CONTROLS["compile_reduce_overhead_loop"].make(ToyFamily(), "cpu", 0)
    with pytest.raises(CellUnavailable, match="declares no such callable"):
        CONTROLS["compile_reduce_overhead"].make(ToyFamily(()), "cpu", 0)


# ---------------------------------------------------------------------------------------------- the vendor's graphs
def test_a_family_without_vendor_graphs_says_so() -> None:
    with pytest.raises(CellUnavailable, match="toy: the adapter knows no CUDA graphs"):
        CONTROLS["vendor_graph"].make(ToyFamily(), "cpu", 0)


def test_the_vendors_graphs_need_a_device() -> None:
    from cadence_fx.adapters import token2wav_controls

    family: Any = SimpleNamespace(name="token2wav")
    assert bench_controls._vendor_graph_of(family) is token2wav_controls.vendor_graph
    with pytest.raises(CellUnavailable, match="need a CUDA device"):
        CONTROLS["vendor_graph"].make(family, "cpu", 0)


def test_buckets_follow_from_the_contract() -> None:
    from cadence_fx.adapters.token2wav import contract
    from cadence_fx.adapters.token2wav_controls import capacity, widths

    assert widths(contract()) == (50,)
    assert widths(contract(flush_tokens=(9, 14))) == (18, 28, 50)
    assert capacity(contract()) == 500
    assert capacity(contract((302, 450))) == 1000
    with pytest.raises(CadenceError, match="the state reaches 1020 frames"):
        capacity(contract(920, last_tokens=(11,)))


def test_another_version_of_the_vendors_capture_is_noticed() -> None:
    from cadence_fx.adapters.token2wav_controls import rebucketed

    def numbers() -> list[tuple[int, int]]:
        made = []
        for size in [30, 48, 96]:
            made.append((size, 500 if size == 30 or size == 48 else 1000))
        return made

    capture: Any = numbers
    other: Any = lambda: (30, 48, 96)  # noqa: E731
    assert capture() == [(30, 500), (48, 500), (96, 1000)]
    assert rebucketed(capture, (28, 50), 1000)() == [(28, 1000), (50, 1000)]
    with pytest.raises(CadenceError, match="holds no 500: this is another version"):
        rebucketed(other, (50,), 500)


class ReplayedGraph:
    """A CUDA graph's stand-in: a replay computes what was captured again, into the same outputs."""

    estimator: Any = None
    replays = 0

    def replay(self) -> None:
        ReplayedGraph.replays += 1
        (buffers,) = self.estimator.inference_buffers_chunk.values()
        x, *_ = buffers["static_outputs"]
        x.copy_(self.estimator.blocks_forward_chunk(*buffers["static_inputs"], *buffers["static_outputs"][1:]))


@pytest.mark.vendor
def test_the_vendors_branch_fires_at_the_live_width(monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        importlib.metadata.version("stepaudio2-minicpmo")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("stepaudio2-minicpmo is not installed (pip install --no-deps)")
    from cadence_fx.adapters import token2wav
    from cadence_fx.adapters.token2wav_controls import vendor_graph

    estimator = token2wav._vendor()[2].DiT(320, 80, mlp_ratio=0.25, depth=16, num_heads=8, hidden_size=512)
    torch.manual_seed(0)
    for parameter in estimator.parameters():
        nn.init.normal_(parameter.requires_grad_(False), std=0.03)
    flow = SimpleNamespace(decoder=SimpleNamespace(estimator=estimator))
    flow.scatter_cuda_graph = lambda on: estimator._init_cuda_graph_all()
    monkeypatch.setattr(ReplayedGraph, "estimator", estimator)
    monkeypatch.setattr(ReplayedGraph, "replays", 0)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", ReplayedGraph)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph: torch.no_grad())
    x, mu, cond = torch.randn(3, 2, 80, 50)
    given = (
        x,
        mu,
        torch.rand(2),
        torch.randn(2, 80),
        cond,
        torch.randn(16, 2, 1024, 2),
        torch.randn(16, 2, 8, 77, 128),
    )
    expected = [value.clone() for value in estimator.forward_chunk(*given)]
    assert ReplayedGraph.replays == 0
    vendor_graph(SimpleNamespace(flow=flow), token2wav.contract())
    assert estimator.max_size_chunk == {50: 500}
    for found, value in zip(estimator.forward_chunk(*given), expected, strict=True):
        torch.testing.assert_close(found, value, rtol=1e-3, atol=1e-4)
    assert ReplayedGraph.replays == 1


@pytest.mark.vendor
def test_the_vendors_graphs_are_for_the_released_depth() -> None:
    from cadence_fx.adapters.token2wav_controls import vendor_graph

    shallow = SimpleNamespace(flow=SimpleNamespace(decoder=SimpleNamespace(estimator=SimpleNamespace(blocks=[1, 2]))))
    with pytest.raises(CadenceError, match="for 16 blocks, the estimator has 2"):
        vendor_graph(shallow, load("token2wav").contract())
