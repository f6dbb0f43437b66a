"""The replay engine on a real device: hazards of CUDA graphs that users have reported, each by its case number."""

from __future__ import annotations

import gc
import os
import random
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from cadence_fx.bits import same_bits
from cadence_fx.graph_backend import CudaBackend, CudaGraphHandle
from cadence_fx.modes import ambient_modes
from cadence_fx.replay import Binding, ExactShapeReplay, Refusal

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("repeatable")]
CUDA = torch.device("cuda")
# Beginning a capture flags the default generator: a thread that draws from it in that instant gets an error from torch.
PER_GENERATOR = tuple(int(n) for n in torch.__version__.split(".")[:2]) < (2, 13)


class Server:
    """What a server does: replay where it may, run eagerly where not, and count the reasons."""

    def __init__(self, **options: Any) -> None:
        self.engine = ExactShapeReplay(CUDA, **{"max_graphs": 16, **options})
        self.found: dict[Any, Binding | Refusal] = {}
        self.replays = 0
        self.eager: list[str] = []

    def __call__(self, run: Callable[..., Any], *inputs: Any, key: Any = None, **options: Any) -> Any:
        key = key if key is not None else tuple(tuple(v.shape) for v in inputs)
        found = self.found.get(key)
        if found is None:
            found = self.engine.capture(key, run, inputs, **options)
            if not isinstance(found, Refusal) or found.reason != "outer capture":
                self.found[key] = found
        if isinstance(found, Binding):
            out = self.engine.replay(found, inputs)
            if not isinstance(out, str):
                self.replays += 1
                return out
            self.eager.append(out)
        else:
            self.eager.append(found.reason)
        return run(*inputs)


def same(a: Any, b: Any) -> bool:
    a = a if isinstance(a, (tuple, list)) else [a]
    b = b if isinstance(b, (tuple, list)) else [b]
    return len(a) == len(b) and all(same_bits(x, y) for x, y in zip(a, b, strict=True))


def churn() -> None:
    blocks = [torch.full((random.randrange(1, 1 << 20),), float("nan"), device=CUDA) for _ in range(64)]
    random.shuffle(blocks)
    del blocks[::2]
    torch.cuda.empty_cache()


def proj() -> torch.nn.Module:
    return torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(3)]).to(CUDA).eval()


# ------------------------------------------------------------------------------------------- lifetime of graphs
def test_a_small_pool_of_split_k_graphs_survives_churn_and_retires_as_a_whole() -> None:
    """G1-01."""
    layers = [torch.nn.Linear(8192, 640, dtype=torch.bfloat16, device=CUDA) for _ in range(4)]

    def run(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(layer(x) for layer in layers)

    xs = {t: torch.randn(t, 8192, dtype=torch.bfloat16, device=CUDA) for t in range(50, 55)}
    serve, other = Server(max_graphs=3), Server()
    for t in [50, 51, 52, 53, 54, 50, 51, 52]:
        assert same(serve(run, xs[t]), run(xs[t]))
    assert (serve.replays, serve.eager) == (6, ["graph limit"] * 2)
    assert same(other(run, xs[50]), run(xs[50]))
    other.engine.retire()
    del other
    gc.collect()
    churn()
    for t in [50, 51, 52, 53] * 10:
        assert same(serve(run, xs[t]), run(xs[t]))
    serve.engine.retire()
    serve.found.clear()
    churn()
    for t in [54, 53, 52, 54, 53, 52]:
        assert same(serve(run, xs[t]), run(xs[t]))
    stats = serve.engine.stats()
    assert (stats["captures"], stats["retired"], stats["graphs"]) == (6, 3, 3)


def test_memory_is_flat_once_the_graph_limit_is_reached() -> None:
    """G1-22."""
    model, serve = proj(), Server(max_graphs=8)
    reserved = 0
    for sweep in range(2):
        for t in range(1, 61):
            x = torch.randn(t, 256, device=CUDA)
            assert same(serve(model, x), model(x))
            if sweep == 0 and t == 20:
                reserved = torch.cuda.memory_reserved()
    assert serve.engine.stats()["captures"] == 8
    assert torch.cuda.memory_reserved() <= reserved + (8 << 20)
    assert serve.eager == ["graph limit"] * (2 * 52)
    before = serve.replays
    for _ in range(100):
        serve(model, torch.randn(5, 256, device=CUDA))
    assert serve.replays == before + 100


def test_a_byte_limit_refuses_before_capturing() -> None:
    """G1-22."""
    model = proj()
    engine = ExactShapeReplay(CUDA, max_graphs=8, max_bytes=1 << 16)
    found = engine.capture("a", model, [torch.randn(64, 256, device=CUDA)])
    assert isinstance(found, Refusal)
    assert (found.code, engine.stats()["captures"]) == ("CX503", 0)


# ------------------------------------------------------------------------------------------- random numbers
def noise(x: torch.Tensor) -> torch.Tensor:
    return x + 0.1 * torch.randn_like(x) + torch.rand(1, device=x.device)


def test_a_seed_that_is_set_after_capture_is_obeyed_and_the_generator_moves_as_in_stock() -> None:
    """G1-05."""
    x, serve = torch.randn(3, 50, device=CUDA), Server()
    serve(noise, x)
    assert isinstance(serve.found[((3, 50),)], Binding), serve.found

    def play(step: Callable[[], Any], seed: int) -> list[Any]:
        torch.cuda.manual_seed(seed)
        found: list[Any] = []
        for i in range(4):
            found.append(step())
            if i == 1:
                found.append(torch.randn(3, device=CUDA))
                state = torch.cuda.get_rng_state()
            if i == 2:
                torch.cuda.set_rng_state(state)
        return [*found, torch.cuda.get_rng_state()]

    for seed in [0, 1, 0, 12345]:
        a, b = play(lambda: serve(noise, x), seed), play(lambda: noise(x), seed)
        assert same(a, b)
        assert not same(a[0], a[1])
    assert serve.eager == []


def test_a_replay_draws_from_whatever_state_the_default_generator_has_then() -> None:
    """G1-05."""
    x, serve = torch.randn(3, 50, device=CUDA), Server()
    serve(noise, x)
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    mine, session = generator.graphsafe_get_state(), generator.clone_state()
    session.manual_seed(99)
    try:
        generator.graphsafe_set_state(session)
        got = [serve(noise, x) for _ in range(3)]
        session.manual_seed(99)
        assert same(got, [noise(x) for _ in range(3)])
    finally:
        generator.graphsafe_set_state(mine)
    assert serve.eager == []


class Live:
    """A counter, a ring of rows, a left context and noise, all in place."""

    def __init__(self) -> None:
        generator = torch.Generator(CUDA).manual_seed(7)
        self.pos = torch.zeros(1, dtype=torch.int64, device=CUDA)
        self.ring = torch.randn(1, 16, 64, device=CUDA, generator=generator)
        self.left = torch.randn(1, 64, 6, device=CUDA, generator=generator)
        self.weight = torch.randn(64, 64, 7, device=CUDA, generator=generator) * 0.05

    @property
    def buffers(self) -> list[torch.Tensor]:
        return [self.pos, self.ring, self.left]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        steps = x.shape[1]
        at = (self.pos + torch.arange(steps, device=x.device)) % 16
        self.ring.index_copy_(1, at, x)
        self.pos += steps
        frames = torch.cat([self.left, x.transpose(1, 2)], 2)
        self.left.copy_(frames[:, :, -6:])
        y = torch.conv1d(frames, self.weight).transpose(1, 2)
        y = torch.nn.functional.scaled_dot_product_attention(y, self.ring, self.ring)
        return y + torch.randn_like(y)

    def state(self) -> list[torch.Tensor]:
        return [b.clone() for b in self.buffers] + [torch.cuda.get_rng_state(), torch.get_rng_state()]


@pytest.mark.parametrize("warmup_runs", [0, 1, 3])
def test_a_capture_in_the_middle_of_a_session_is_invisible(warmup_runs: int) -> None:
    """G1-07."""
    live, twin = Live(), Live()
    serve = Server(warmup_runs=warmup_runs)
    chunks = [torch.randn(1, n, 64, device=CUDA) for n in (2, 2, 2, 3, 3, 2, 3)]

    def play(step: Callable[[torch.Tensor], Any], of: Live) -> list[Any]:
        torch.manual_seed(11)
        seen: list[Any] = []
        for chunk in chunks:
            seen += [step(chunk), *of.state()]
        return seen

    want = play(twin, twin)
    got = play(lambda x: serve(live, x, aliased=live.buffers, preserve=live.buffers), live)
    assert same(got, want)
    assert serve.eager == [], serve.found


# ------------------------------------------------------------------------------------------- failed captures
class Bad:
    """Looks at a value on the host in the middle, with or without a draw before that."""

    def __init__(self, draws: bool) -> None:
        self.draws, self.buffer, self.attempts = draws, torch.ones(8, device=CUDA), 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if torch.cuda.is_current_stream_capturing():
            self.attempts += 1
        y = x * 2 + (torch.randn_like(x) if self.draws else 0)
        if int(y.sum()) > 10**9:
            y = -y
        return y + self.buffer


@pytest.mark.parametrize("draws", [False, True])
def test_a_failed_capture_leaves_a_working_process(draws: bool) -> None:
    """G1-08."""
    bad, x = Bad(draws), torch.randn(8, device=CUDA)
    serve, model = Server(), proj()
    y = torch.randn(4, 256, device=CUDA)
    assert same(serve(model, y, key="before"), model(y))
    serve(noise, y, key="noise before")
    position = torch.cuda.get_rng_state()
    found = serve.engine.capture("bad", bad, [x], aliased=[bad.buffer], preserve=[bad.buffer])
    assert isinstance(found, Refusal)
    assert (found.code, bad.attempts) == ("CX505", 1)
    assert found.detail
    assert torch.equal(torch.cuda.get_rng_state(), position)
    assert torch.equal(bad.buffer, torch.ones(8, device=CUDA))
    for i in range(5):
        torch.cuda.manual_seed(i)
        got = serve(bad, x, key="bad", aliased=[bad.buffer], preserve=[bad.buffer])
        torch.cuda.manual_seed(i)
        assert same(got, bad(x))
    assert bad.attempts == 1
    torch.cuda.synchronize()
    z = torch.randn(64, 64, device=CUDA)
    assert torch.isfinite(z @ z).all()
    # Graphs from before and after it, in this engine and another, with and without draws.
    for server in (serve, Server()):
        for key, run in (("before", model), ("noise before", noise), ("after", model), ("noise after", noise)):
            torch.cuda.manual_seed(3)
            got = server(run, y, key=key)
            torch.cuda.manual_seed(3)
            assert same(got, run(y))
    assert serve.eager == ["capture failed"] * 5
    churn()
    assert same(serve(model, y, key="before"), model(y))


def test_a_first_capture_that_fails_does_not_spoil_the_next_ones() -> None:
    """G1-08."""
    serve, model = Server(), proj()
    assert serve(Bad(False), torch.randn(8, device=CUDA), key="bad") is not None
    torch.cuda.empty_cache()
    for t in (1, 2, 3):
        x = torch.randn(t, 256, device=CUDA)
        assert same(serve(model, x), model(x))
    assert serve.replays == 3


def test_branches_that_only_a_capture_takes_are_found_out() -> None:
    """G1-27."""

    def run(x: torch.Tensor) -> torch.Tensor:
        return x * (2 if torch.cuda.is_current_stream_capturing() else 3)

    found = Server().engine.capture("a", run, [torch.randn(8, device=CUDA)])
    assert isinstance(found, Refusal)
    assert found.code == "CX508"


# ------------------------------------------------------------------------------------------- the rest of the process
@pytest.mark.parametrize(
    "generator",
    [
        "its own",
        pytest.param("the default", marks=pytest.mark.skipif(PER_GENERATOR, reason="torch < 2.13: see CudaBackend")),
    ],
)
def test_sibling_threads_never_see_a_capture(generator: str) -> None:
    """G1-16."""
    rng = torch.Generator(CUDA) if generator == "its own" else None
    model1, model2 = proj(), proj()
    errors: list[BaseException] = []
    stop = threading.Event()

    def guarded(work: Callable[[], None]) -> Callable[[], None]:
        def loop() -> None:
            try:
                torch.zeros(1, device=CUDA)  # a thread whose first use of a device is a product gets a warning
                with torch.no_grad():
                    while not stop.is_set():
                        work()
            except BaseException as error:  # noqa: BLE001
                errors.append(error)

        return loop

    x = torch.randn(16, 256, device=CUDA)
    own = torch.cuda.Stream()

    def list_values() -> None:
        model1(x)[:4].tolist()

    def draw() -> None:
        with torch.cuda.stream(own):
            torch.randn(64, device=CUDA, generator=rng).cpu()
            torch.randn(64).to(CUDA).cpu()

    threads = [threading.Thread(target=guarded(work)) for work in (list_values, draw)]
    for thread in threads:
        thread.start()
    serve, wrong = Server(max_graphs=64), 0
    try:
        end, t = time.monotonic() + 3, 0
        while time.monotonic() < end or t < 10:
            t += 1
            y = torch.ones(t % 50 + 1, 256, device=CUDA) * t
            wrong += not same(serve(model2, y), model2(y))
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert errors == []
    assert wrong == 0
    # A thread that draws from the host's generator all the time looks like a run that does: then nothing is captured.
    stats = serve.engine.stats()
    assert stats["captures"] >= 1
    assert set(stats["refusals"]) <= {"CX504"}


class Trap:
    """Frees device memory when the collector finds it."""

    def __init__(self) -> None:
        self.tensor = torch.empty(1 << 22, device=CUDA)
        self.me = self

    def __del__(self) -> None:
        del self.tensor
        torch.cuda.current_stream().query()


@pytest.mark.parametrize("enabled", [True, False])
def test_garbage_is_not_collected_inside_a_capture(enabled: bool) -> None:
    """G1-18."""
    model = proj()
    threshold, was = gc.get_threshold(), gc.isenabled()
    for _ in range(8):
        old = Server()
        old(model, torch.randn(3, 256, device=CUDA))
        cycle = [old]
        cycle.append(cycle)  # type: ignore[arg-type]
    del old, cycle

    def run(x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            Trap() if not torch.cuda.is_current_stream_capturing() else None
            x = model(x)
        return x

    serve = Server()
    try:
        (gc.enable if enabled else gc.disable)()
        gc.set_threshold(1)
        for t in range(1, 9):
            x = torch.randn(t, 256, device=CUDA)
            assert same(serve(run, x), run(x))
        assert gc.isenabled() is enabled
        assert gc.get_threshold()[0] == 1
    finally:
        gc.set_threshold(*threshold)
        (gc.enable if was else gc.disable)()
    assert serve.eager == []


def test_inside_an_outer_capture_the_caller_gets_reasons_and_runs_eagerly() -> None:
    """G1-19."""
    model, serve, doomed = proj(), Server(), Server()
    x = torch.randn(4, 256, device=CUDA)
    serve(model, x)
    doomed(model, x)
    gc.collect()  # what other tests have left is no part of this one
    torch.cuda.synchronize()
    outer = torch.cuda.CUDAGraph()
    with torch.cuda.graph(outer):
        out = serve(model, x)
        unseen = serve(model, torch.cat([x, x]))
        doomed.engine.retire()
        doomed.found.clear()
        del doomed
        gc.collect()
    assert serve.eager == ["outer capture"] * 2
    for _ in range(3):
        x.copy_(torch.randn(4, 256, device=CUDA))
        outer.replay()
        assert same(out, model(x))
        assert same(unseen, model(torch.cat([x, x])))
        assert same(serve(model, x), model(x))
    churn()
    assert same(serve(model, torch.cat([x, x])), model(torch.cat([x, x])))


def test_the_first_cuda_call_of_a_cold_process_may_be_a_capture() -> None:
    """G1-27."""
    code = """
        import torch
        from cadence_fx.replay import Binding, ExactShapeReplay
        torch.set_grad_enabled(False)
        torch.backends.cudnn.deterministic = True
        cuda = torch.device("cuda")
        weight = torch.randn(64, 64)
        def run(x, w):
            y = torch.conv1d((x @ w)[None], w[:3, :3, None])[0]
            y = torch.fft.irfft(torch.fft.rfft(y, dim=-1), n=64, dim=-1)
            y = y.cumsum(-1)
            top, at = y.topk(5, -1)
            z = torch.zeros_like(y)
            z.index_put_((torch.arange(3, device=y.device)[:, None], at), top)
            return z.sort(-1).values + y
        engine = ExactShapeReplay(cuda, max_graphs=8)
        for i in range(3):
            if i:
                torch.backends.cuda.cufft_plan_cache.clear()
            x, w = torch.randn(3, 64).to(cuda), weight.to(cuda)
            binding = engine.capture(i, run, [x, w])
            assert isinstance(binding, Binding), binding
            torch._C._cuda_clearCublasWorkspaces()
            out, want = engine.replay(binding, [x, w]), run(x, w)
            assert torch.equal(out.view(torch.int32), want.view(torch.int32))
        print("exact")
    """
    env = {**os.environ, "CUDA_MODULE_LOADING": "LAZY"}
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert done.stdout.strip() == "exact", done.stderr[-3000:]


class Two:
    """Half of the work on a stream of its own, properly forked and joined."""

    def __init__(self) -> None:
        self.f, self.g, self.side = proj(), proj(), torch.cuda.Stream()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        current = torch.cuda.current_stream()
        self.side.wait_stream(current)
        with torch.cuda.stream(self.side):
            a = self.f(x)
        b = self.g(x)
        current.wait_stream(self.side)
        return a + b


@pytest.mark.parametrize("caller", ["default", "own", "alternating"])
def test_side_streams_and_callers_on_any_stream_are_exact(caller: str) -> None:
    """G1-28."""
    two, serve = Two(), Server()
    streams = [torch.cuda.default_stream(), torch.cuda.Stream(), torch.cuda.Stream()]
    outs = []
    for i in range(50):
        stream = {"default": streams[0], "own": streams[1], "alternating": streams[i % 3]}[caller]
        with torch.cuda.stream(stream):
            x = torch.randn(7, 256, device=CUDA)
            outs.append((x, serve(two, x)))
    torch.cuda.synchronize()
    assert all(same(y, two(x)) for x, y in outs)
    assert serve.eager == [], serve.found


def test_state_stays_ordered_when_the_caller_changes_streams_without_waiting() -> None:
    """G1-28."""
    live, twin, serve = Live(), Live(), Server()
    streams = [torch.cuda.Stream() for _ in range(3)]
    x = torch.randn(1, 2, 64, device=CUDA)
    torch.manual_seed(0)
    want = [twin(x * i) for i in range(30)]
    torch.manual_seed(0)
    torch.cuda.synchronize()
    got = []
    for i in range(30):
        with torch.cuda.stream(streams[i % 3]):
            got.append(serve(live, x * i, aliased=live.buffers, preserve=live.buffers))
    torch.cuda.synchronize()
    assert same(got, want)
    assert serve.eager == [], serve.found


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
def test_a_device_that_is_not_current_is_served() -> None:
    """G1-28."""
    device = torch.device("cuda", 1)
    model = proj().to(device)
    engine = ExactShapeReplay(device, max_graphs=2)
    x = torch.randn(3, 256, device=device)
    binding = engine.capture("a", model, [x])
    assert isinstance(binding, Binding)
    assert same(engine.replay(binding, [x]), model(x))
    assert torch.cuda.current_device() == 0


def test_two_threads_share_one_engine_without_mixing() -> None:
    """G1-16."""
    model, serve = proj(), Server()
    serve(model, torch.randn(6, 256, device=CUDA))
    wrong: list[int] = []

    def work(seed: int) -> None:
        generator = torch.Generator(CUDA).manual_seed(seed)
        with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
            for i in range(200):
                x = torch.randn(6, 256, device=CUDA, generator=generator)
                if not same(serve(model, x), model(x)):
                    wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert serve.engine.stats()["replays"] == 401


# ------------------------------------------------------------------------------------------- outputs
def test_returned_tensors_belong_to_the_caller_for_ever() -> None:
    """G1-20."""
    model, serve = proj(), Server()

    def run(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.tanh(model(x))
        return y, y[:, ::2]

    x, outs, refs = torch.randn(5, 256, device=CUDA), [], []
    for _ in range(20):
        refs.append(run(x))
        outs.append(serve(run, x))
        x = outs[-1][0]  # output i is input i + 1
    assert all(same(a, b) for a, b in zip(outs, refs, strict=True))
    assert [t.stride() for t in outs[0]] == [t.stride() for t in refs[0]]
    outs[-1][0].mul_(0)
    x = torch.randn(5, 256, device=CUDA)
    assert same(serve(run, x), run(x))


def test_state_at_a_fixed_address_is_replayed_and_moved_state_is_not() -> None:
    state = torch.randn(4, 256, device=CUDA)
    engine = ExactShapeReplay(CUDA, max_graphs=2)
    binding = engine.capture("a", lambda x: state.add_(x).sum(0), [state.clone()], aliased=[state], preserve=[state])
    assert isinstance(binding, Binding)
    x, twin = torch.randn(4, 256, device=CUDA), state.clone()
    assert same(engine.replay(binding, [x]), twin.add_(x).sum(0))
    assert same(state, twin)
    keep = state.data
    state.data = state.clone()
    assert engine.replay(binding, [x]) == "buffer 0 moved"
    assert same(keep, twin)


# ------------------------------------------------------------------------------------------- proof
def test_a_sum_that_stock_does_not_repeat_is_never_blamed_on_the_graph() -> None:
    """G4-01."""

    def long(x: torch.Tensor) -> torch.Tensor:
        return torch.cumsum(x / 24000, 0)

    x = torch.rand(480_000, device=CUDA)
    first = long(x)
    repeats = all(same(first, long(x)) for _ in range(50))
    found = Server().engine.capture("long", long, [x])
    if repeats:
        assert isinstance(found, Binding), found
    elif isinstance(found, Refusal):
        assert (found.code, found.reason) == ("CX507", "stock not reproducible")
        assert found.difference is not None
    short = Server().engine.capture("short", long, [x[:64].clone()])
    assert isinstance(short, Binding), short


def test_precision_switches_that_are_part_of_the_key_are_obeyed_at_once() -> None:
    """G4-03."""
    conv, linear = torch.nn.Conv1d(64, 64, 5, device=CUDA), torch.nn.Linear(512, 512, device=CUDA)

    def run(x: torch.Tensor) -> torch.Tensor:
        return linear(conv(x))

    x, serve = torch.randn(2, 64, 516, device=CUDA), Server()
    precision, tf32 = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    seen = []
    try:
        for setting in ("highest", "high", "medium", "highest"):
            for cudnn in (True, False):
                torch.set_float32_matmul_precision(setting)
                torch.backends.cudnn.allow_tf32 = cudnn
                out = serve(run, x, key=ambient_modes("cuda"))
                assert same(out, run(x)), (setting, cudnn)
                seen.append(out)
    finally:
        torch.set_float32_matmul_precision(precision)
        torch.backends.cudnn.allow_tf32 = tf32
    assert not same(seen[0], seen[2])  # the switch does something here
    assert serve.eager == []


class Corrupt(CudaBackend):
    """Does something wrong right after the n-th replay."""

    def __init__(self, harm: Callable[[], None], after: int) -> None:
        super().__init__(CUDA)
        self.harm, self.left = harm, after

    def replay(self, graph: CudaGraphHandle, draws: bool) -> None:
        super().replay(graph, draws)
        self.left -= 1
        if self.left == 0:
            self.harm()


def _flip(tensor: torch.Tensor, index: tuple[int, ...], bit: int) -> None:
    bits = tensor.view(torch.int32)
    bits[index] = bits[index] ^ (1 << bit if bit < 31 else -(1 << 31))


@pytest.mark.parametrize("after", [1, 2, 3, 4])
@pytest.mark.parametrize(("index", "bit"), [((1, 2), 0), ((3, 255), 0), ((0, 0), 31), ((0, 1), 0)])
def test_the_checker_finds_one_wrong_bit_of_state_in_any_replay(index: tuple[int, ...], bit: int, after: int) -> None:
    """G4-08: one unit in the last place, the last element, the sign of a zero, the payload of a NaN."""
    state = torch.ones(4, 256, device=CUDA)

    def run(x: torch.Tensor) -> torch.Tensor:
        state.mul_(0.5).add_(x)
        state[0, 0].zero_()  # an assignment would copy a scalar from the host, which no capture permits
        state[0, 1].fill_(float("nan"))
        return x * 2

    def harm() -> None:
        _flip(state, index, bit)

    engine = ExactShapeReplay(CUDA, backend=Corrupt(harm, after), max_graphs=2)
    found = engine.capture("a", run, [torch.randn(4, 256, device=CUDA)], aliased=[state], preserve=[state])
    assert isinstance(found, Refusal)
    assert found.difference is not None
    assert (found.code, found.difference.where, found.difference.index) == ("CX508", "buffer 0", index)
    assert torch.equal(state, torch.ones(4, 256, device=CUDA))


def test_the_checker_finds_a_generator_that_did_not_move() -> None:
    """G4-08."""

    class Still(CudaBackend):
        def replay(self, graph: CudaGraphHandle, draws: bool) -> None:
            position = self.position()
            super().replay(graph, draws)
            self.set_position(position)

    engine = ExactShapeReplay(CUDA, backend=Still(CUDA), max_graphs=2)
    found = engine.capture("a", noise, [torch.randn(8, device=CUDA)])
    assert isinstance(found, Refusal)
    assert found.code == "CX509"


def test_host_randomness_is_refused() -> None:
    engine = ExactShapeReplay(CUDA, max_graphs=2)
    before = torch.get_rng_state()
    found = engine.capture("a", lambda x: x + float(torch.rand(())), [torch.randn(8, device=CUDA)])
    assert isinstance(found, Refusal)
    assert found.code == "CX504"
    assert torch.equal(torch.get_rng_state(), before)


def test_a_capture_adds_no_copy_of_live_state_to_the_peak() -> None:
    state = torch.randn(64, 1 << 20, device=CUDA)  # 256 MiB

    def run(x: torch.Tensor) -> torch.Tensor:
        state[:, :8].add_(x)
        return state[:, :8].sum(1)

    engine = ExactShapeReplay(CUDA, max_graphs=2)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    kept = state[:2, :64].clone()
    found = engine.capture("a", run, [torch.randn(64, 8, device=CUDA)], aliased=[state], preserve=[state])
    assert isinstance(found, Binding), found
    assert torch.cuda.max_memory_allocated() - before < 160 << 20
    assert same(state[:2, :64], kept)
