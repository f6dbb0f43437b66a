"""G1, hazards of CUDA graphs, as a user of `transform` meets them: each step against an untouched twin."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from cadence_fx.bits import same_bits
from cadence_fx.contract import Arg, Call, Input
from cadence_fx.drop_in import transform
from cadence_fx.errors import TraceError
from cadence_fx.partition import partition
from cadence_fx.replay import Binding, Refusal
from cadence_fx.traffic import Step
from cadence_fx.verify import compare
from tests.case_toys import ON_ALL, Backend, Twins, contract, fixed
from tests.streams import WIDTH, drawn

LAST = fixed("last", 1, WIDTH)
SHARED: dict[int, torch.Tensor] = {}


class Stateless(nn.Module):
    """Something to declare as state, so that only what a case is about is peculiar."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)

    def start(self) -> dict[str, torch.Tensor]:
        return {"last": torch.zeros(1, WIDTH)}


# ------------------------------------------------------------------------------------------- scratch made on first use
class Solver(Stateless):
    """Keeps scratch, zero between calls, in a container that the first call of each width fills."""

    of_class: dict[int, torch.Tensor] = {}  # noqa: RUF012 - the hazard

    def __init__(self, place: str) -> None:
        super().__init__()
        self.place, self.own = place, dict[int, torch.Tensor]()

    def held(self) -> dict[int, torch.Tensor]:
        return {"own": self.own, "class": self.of_class, "global": SHARED}[self.place]

    def forward(self, x: torch.Tensor, state: Any) -> Any:
        scratch = self.held().setdefault(x.shape[2], torch.zeros(x.shape[2], device=x.device))
        scratch += x.sum((0, 1))
        y = self.lin(x * scratch)
        scratch.zero_()
        return y, {"last": y[:, -1]}


@pytest.mark.parametrize("place", ["own", "class", "global"])
def test_scratch_that_forward_makes_on_first_use_runs_as_stock_and_no_trace_fills_it(on: Backend, place: str) -> None:
    """G1-03: the container would keep a tensor of the trace, or one from a graph's pool."""
    SHARED.clear()
    Solver.of_class.clear()
    twins = Twins(lambda: Solver(place), contract((7, 9, 11), LAST), on, warm=None)
    with pytest.raises(TraceError, match="a call changes the attribute"):
        twins.fast.warmup()
    held: Any = twins.fast.stock.held
    assert not held()
    twins.steps(on.chunks([7, 9, 7, 9, 11, 7]))
    assert twins.counted("not compiled: a call ") == 6
    assert [type(v) for v in held().values()] == [torch.Tensor]
    assert twins.accounted


def test_scratch_that_was_made_before_the_trace_is_still_state(on: Backend) -> None:
    """G1-03: nobody knows that it is zero between calls, so it may not become part of a program."""
    SHARED.clear()
    twins = Twins(lambda: Solver("own"), contract((7, 9), LAST), on, warm=None)
    twins.steps(on.chunks([7]))
    with pytest.raises(TraceError, match=r"a call writes .* in place"):
        twins.fast.warmup()
    twins.steps(on.chunks([9, 7]))
    assert twins.counted("not compiled: ") == 3


class LazyRun:
    """The same for the engine, which sees a callable only; notes whether scratch was made while capturing."""

    def __init__(self, capturing: Callable[[], bool]) -> None:
        self.held: dict[int, torch.Tensor] = {}
        self.capturing, self.made = capturing, list[bool]()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[1] not in self.held:
            self.made.append(self.capturing())
            self.held[x.shape[1]] = torch.zeros(x.shape[1], device=x.device)
        scratch = self.held[x.shape[1]]
        big = (x.repeat(64, 1) * 2).cos()
        scratch += x.sum(0)
        y = x * scratch + big[: x.shape[0]]
        scratch.zero_()
        return y


@pytest.mark.parametrize("warmup_runs", [0, 2])
def test_the_engine_makes_lazy_scratch_outside_of_the_pool(captures: Backend, warmup_runs: int) -> None:
    """G1-03: graphs that are captured later, with large temporaries, never write over it."""
    engine = captures.engine(warmup_runs=warmup_runs)
    log = getattr(engine.backend, "log", [])
    run = LazyRun(lambda: engine.backend.is_capturing() or log[-1:] == ["capture"])
    twin = LazyRun(lambda: False)
    bindings: dict[int, Any] = {}
    for rows in [7, 9, 7, 9, 11, 7, 9, 11]:
        (x,) = captures.chunks([rows], seed=rows, width=64)
        if rows not in bindings:
            bindings[rows] = engine.capture(rows, run, [x[0]])
        assert isinstance(bindings[rows], Binding), bindings
        assert same_bits(twin(x[0]), engine.replay(bindings[rows], [x[0]]))
    assert run.made == [False]
    assert engine.stats()["replays"] == 8


# ------------------------------------------------------------------------------------------- host constants
class HostConstants(nn.Module):
    """Builds frequencies, a mask and a number on the host, as timestep embeddings do."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH, dtype=dtype)

    def start(self) -> dict[str, torch.Tensor]:
        return {"last": torch.zeros(1, WIDTH, dtype=self.lin.weight.dtype)}

    @staticmethod
    def frequencies() -> torch.Tensor:
        return torch.exp(-math.log(1e4) * torch.arange(0, 64) / 64)

    def forward(self, x: torch.Tensor, t: torch.Tensor, state: Any) -> Any:
        f = self.frequencies().to(x.device)
        mask = torch.full((x.shape[1], x.shape[1]), float("-inf")).triu(1).to(x)
        x = x + torch.cos(t * f).sum() + torch.softmax(mask, -1).sum() + torch.tensor(0.1, device=x.device)
        y = self.lin(x.to(state["last"].dtype))
        return y, {"last": y[:, -1]}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_constants_that_are_born_on_the_host_are_hoisted_with_their_own_bits(on: Backend, dtype: str) -> None:
    """G1-10: computed where stock computes them, since an exponential of the host is not one of the device."""
    kind = getattr(torch, dtype)
    inputs = (Input(Arg("x"), (1, None, WIDTH), dtype), Input(Arg("t"), (1,)))
    declared = contract((4, 9), fixed("last", 1, WIDTH, dtype=dtype), inputs=inputs)
    twins = Twins(lambda: HostConstants(kind), declared, on)
    for i, x in enumerate(on.chunks([4, 9, 4, 9], dtype=kind)):
        twins.step(x, t=torch.tensor([i / 7], device=on.device))
    assert twins.served == 4
    pool = twins.fast.compiler.constants.values.values()
    assert sum(same_bits(HostConstants.frequencies().to(on.device), v) for v in pool) == 1
    assert sum(c.count for c in twins.fast.report.rewrites if c.what == "hoisted") >= 2
    assert {v.device for v in pool} == {on.device}


# ------------------------------------------------------------------------------------------- Python positions
RING, TABLE_ROWS = 8, 96


class Positions(nn.Module):
    """Rotary rows and a ring, both at a position. Subclasses differ in where the position lives."""

    table: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("table", torch.linspace(0, 30, TABLE_ROWS * WIDTH).view(TABLE_ROWS, WIDTH).cos())

    def start(self) -> dict[str, torch.Tensor]:
        return {"k": torch.zeros(1, RING, WIDTH), "pos": torch.zeros(1, dtype=torch.int64)}

    def attend(self, x: torch.Tensor, k: torch.Tensor, at: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        k = k.index_copy(1, at % RING, self.lin(x) * self.table[at])
        return x @ k.transpose(1, 2), k


class InPython(Positions):
    def __init__(self) -> None:
        super().__init__()
        self.pos = 0

    def forward(self, x: torch.Tensor, state: Any) -> Any:
        y, k = self.attend(x, state["k"], torch.arange(self.pos, self.pos + x.shape[1], device=x.device))
        self.pos += x.shape[1]
        return y, {"k": k, "pos": state["pos"] + x.shape[1]}


class InState(Positions):
    def forward(self, x: torch.Tensor, state: Any) -> Any:
        y, k = self.attend(x, state["k"], state["pos"] + torch.arange(x.shape[1], device=x.device))
        return y, {"k": k, "pos": state["pos"] + x.shape[1]}


class AsArgument(Positions):
    def forward(self, x: torch.Tensor, at: int, state: Any) -> Any:
        y, k = self.attend(x, state["k"], torch.arange(at, at + x.shape[1], device=x.device))
        return y, {"k": k, "pos": state["pos"] + x.shape[1]}


POSITIONS = (fixed("k", 1, RING, WIDTH), fixed("pos", 1, dtype="int64"))


def test_a_position_in_a_python_attribute_runs_as_stock_and_stays_right(on: Backend) -> None:
    """G1-12."""
    twins = Twins(InPython, contract((2,), *POSITIONS), on, warm=None)
    twins.steps(on.chunks([2] * 12))
    assert twins.fast.pos == twins.stock.pos == 24
    assert twins.counted("not compiled: a call changes the attribute 'pos'") == 12


@ON_ALL
def test_a_position_in_a_tensor_moves_with_every_replay(on: Backend) -> None:
    """G1-12: ten turns of the ring, the same input each time, and no two outputs alike."""
    twins = Twins(InState, contract((2,), *POSITIONS), on)
    (x,) = on.chunks([2])
    seen = [twins.step(x) for _ in range(40)]
    assert twins.served == 40
    assert not any(same_bits(a, b) for i, a in enumerate(seen[:12]) for b in seen[:i])


def test_a_position_that_is_an_argument_is_part_of_the_signature(on: Backend) -> None:
    """G1-12: declared positions have programs of their own, all others run as stock."""
    calls = tuple(
        Call(f"at[{n}]", {"frame": 2}, {"x": (2,)}, ((Arg("at"), n),), steady=n == 0) for n in range(0, RING, 2)
    )
    twins = Twins(AsArgument, contract((2,), *POSITIONS, calls=calls), on)
    for i, x in enumerate(on.chunks([2] * 12)):
        twins.step(x, at=2 * i % RING)
    assert (twins.served, twins.fast.stats()["programs"]) == (12, 4)
    for at in (1, 8, 80):
        twins.step(*on.chunks([2]), at=at)
    assert twins.counted("signature not in the catalog") == 3


def test_a_position_that_an_engine_froze_is_found_at_the_second_step(on: Backend) -> None:
    """G1-12: the fault itself, put in on purpose."""
    twins = Twins(InState, contract((2,), *POSITIONS), on)
    run = twins.fast._run

    def frozen(*args: Any) -> Any:
        twins.fast._adopt(args[2])
        twins.fast.memory["pos"].tensor.zero_()
        return run(*args)

    twins.fast.__dict__["_run"] = frozen
    start = {k: v.to(on.device) for k, v in twins.stock.start().items()}

    def begin(decoder: Any, memory: Any) -> None:
        memory.start({k: v.clone() for k, v in start.items()})

    def chunk(x: torch.Tensor) -> Step:
        return Step("chunk", lambda decoder, memory: memory.call(decoder, x), is_chunk=True)

    steps = [Step("start", begin), *map(chunk, on.chunks([2] * 4))]
    found = compare(twins.stock, twins.fast, twins.fast.contract, steps)
    assert found.self_agreement
    assert found.first_mismatch is not None
    assert (found.first_mismatch["step"], found.first_mismatch["kind"]) == (2, "pcm")


def test_the_engine_refuses_a_callable_that_moves_a_python_position(captures: Backend) -> None:
    """G1-12: two runs of it do not agree, so there is nothing that a replay could be compared with."""
    model = InPython().to(captures.device)
    k = torch.zeros(1, RING, WIDTH, device=captures.device)

    def run(x: torch.Tensor) -> torch.Tensor:
        y, _ = model(x, {"k": k, "pos": torch.zeros(1)})
        return y

    found = captures.engine().capture("a", run, captures.chunks([2]))
    assert isinstance(found, Refusal)
    assert (found.code, found.reason) == ("CX507", "stock not reproducible")


# ------------------------------------------------------------------------------------------- inverse STFT
class Vocoder(nn.Module):
    """Convolutions to magnitude and phase, an inverse transform, a limiter."""

    win: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.heads = nn.Conv1d(WIDTH, WIDTH, 3), nn.Conv1d(WIDTH, 18, 1)
        self.register_buffer("win", torch.hann_window(16))

    def start(self) -> dict[str, torch.Tensor]:
        return {"left": torch.zeros(1, WIDTH, 2)}

    def forward(self, x: torch.Tensor, state: Any) -> Any:
        seen = torch.cat([state["left"], x.transpose(1, 2)], -1)
        magnitude, phase = self.heads(torch.tanh(self.conv(seen))).chunk(2, 1)
        wave = torch.istft(torch.polar(magnitude.exp(), phase), 16, 4, 16, window=self.win)
        return wave.clamp(-0.99, 0.99), {"left": seen[..., -2:]}


@ON_ALL
@pytest.mark.parametrize("skip", [(), ("remove_host_syncs",)], ids=["rewritten", "cut"])
def test_an_inverse_transform_is_exact_whether_it_is_captured_or_cut_out(on: Backend, skip: tuple[str, ...]) -> None:
    """G1-14: it looks at its window on the host, and its plan is made in the first call of a length."""
    prime = 131 if on.is_cuda else 31
    lengths = (10, 13, prime)
    if on.is_cuda:
        torch.backends.cuda.cufft_plan_cache.clear()
    twins = Twins(Vocoder, contract(lengths, fixed("left", 1, WIDTH, 2)), on, skip=skip)
    for x in on.chunks([10, 13, prime, 10, 13]):
        twins.step(x)
    assert twins.served == 5
    for program in twins.fast.programs.values():
        attributes = {t: twins.fast.compiler.fetch(program.flat, t) for t in program.flat.attributes}
        parts = partition(program.flat, "chunk", attributes).segments
        assert [s.capturable for s in parts] == ([True, False, True] if skip else [True])
        assert not skip or "aten.istft.default makes the host wait" in parts[1].reason
        row = twins.fast._captures.rows[program.signature] if on.captures else None  # type: ignore[union-attr]
        assert row is None or len(row.all_bindings) == (2 if skip else 1)


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [(10,), (10, 13)])
def test_a_graph_whose_plans_were_cleared_is_not_replayed(repeatable: None, lengths: tuple[int, ...]) -> None:
    """G1-14: its kernels belong to the plan, and a replay without it crashes; stock makes itself a new one."""
    on = Backend.of("cuda")
    twins = Twins(Vocoder, contract(lengths, fixed("left", 1, WIDTH, 2)), on)
    for x in on.chunks(lengths):
        twins.step(x)
    assert twins.served == len(lengths)
    torch.backends.cuda.cufft_plan_cache.clear()
    for x in on.chunks([*lengths, *lengths], seed=2):
        twins.step(x)
    found = twins.fast.stats()
    assert found["replays"] == len(lengths)
    assert found["plan"] == 2 * len(lengths)
    assert any("FFT plans were dropped" in reason for reason in found["misses"]), found["misses"]
    twins.fast.refresh()
    twins.fast.warmup("all")
    for x in on.chunks(lengths, seed=3):
        twins.step(x)
    assert twins.served == 2 * len(lengths)


@pytest.mark.gpu
def test_a_device_without_a_number_is_the_current_one(repeatable: None) -> None:
    """G1-28: tensors name it with its number, and so must everything that is compared with them."""
    model = drawn(Vocoder()).to("cuda")
    fast = transform(model, contract((10,), fixed("left", 1, WIDTH, 2)), device="cuda").warmup()
    (x,) = Backend.of("cuda").chunks([10])
    state = {"left": torch.zeros(1, WIDTH, 2, device="cuda")}
    expected, found = model(x, state)[0], fast(x, state)[0]
    assert same_bits(expected, found)
    assert fast.stats()["replays"] == 1
