"""The replay engine on a fake backend: every rule fires, and everything is put back."""

from __future__ import annotations

import gc
import json
import threading
import weakref
from typing import Any

import pytest
import torch

from cadence_fx.bits import same_bits
from cadence_fx.library_plans import FULL
from cadence_fx.live_state import HostCopy, StartState
from cadence_fx.replay import Binding, ExactShapeReplay, Refusal
from cadence_fx.staging import alignment, copy_of, like
from tests.fake_backend import FakeBackend


class Stream:
    """A toy decoder: state in place, an index buffer, and noise from the 'device' generator."""

    def __init__(self, backend: FakeBackend, noise: bool = True) -> None:
        self.backend, self.noise = backend, noise
        self.state = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
        self.steps = torch.zeros(1, dtype=torch.int64)
        self.runs = 0

    @property
    def buffers(self) -> list[torch.Tensor]:
        return [self.state, self.steps]

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.runs += 1
        y = x + self.state
        if self.noise:
            y = y + torch.randn(x.shape, generator=self.backend.generator)
        self.state.mul_(0.5).add_(x)
        self.steps += 1
        return y, y[:, 1:]

    def snapshot(self) -> list[torch.Tensor]:
        return [self.state.clone(), self.steps.clone(), self.backend.position()]


def engine(backend: FakeBackend, **options: Any) -> ExactShapeReplay:
    return ExactShapeReplay("cpu", backend=backend, **{"max_graphs": 4, **options})


def example(seed: int = 0, rows: int = 3) -> torch.Tensor:
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(seed))


def equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(same_bits(x, y) for x, y in zip(a, b, strict=True))


def captured(eng: ExactShapeReplay, run: Stream, **options: Any) -> Binding:
    options = {"aliased": run.buffers, "preserve": run.buffers, **options}
    found = eng.capture("key", run, [example()], **options)
    assert isinstance(found, Binding), found
    return found


def refused(eng: ExactShapeReplay, run: Any, **options: Any) -> Refusal:
    found = eng.capture("key", run, options.pop("inputs", [example()]), **options)
    assert isinstance(found, Refusal), found
    return found


# ------------------------------------------------------------------------------------------- what a capture leaves
@pytest.mark.parametrize("warmup_runs", [0, 1, 3])
def test_a_capture_leaves_state_and_generators_as_they_were(warmup_runs: int) -> None:
    """G1-07."""
    backend = FakeBackend()
    run, eng = Stream(backend), engine(backend, warmup_runs=warmup_runs)
    before, host = run.snapshot(), torch.get_rng_state()
    captured(eng, run)
    assert equal(run.snapshot(), before)
    assert torch.equal(torch.get_rng_state(), host)
    assert backend.log.count("warm-up") == warmup_runs


def test_replays_continue_the_stream_exactly_as_stock_would() -> None:
    backend = FakeBackend()
    run, eng = Stream(backend), engine(backend)
    binding = captured(eng, run)
    start = run.snapshot()
    expected = [(*run(example(i)), *run.snapshot()) for i in range(5)]
    run.state.copy_(start[0])
    run.steps.copy_(start[1])
    backend.set_position(start[2])
    for i, want in enumerate(expected):
        got = eng.replay(binding, [example(i)])
        assert equal([*got, *run.snapshot()], list(want))
    assert binding.draws
    assert eng.stats()["replays"] == 5


def test_buffers_that_nobody_preserves_are_not_copied_to_the_host() -> None:
    run = Stream(FakeBackend())
    kept = StartState(run.buffers, [])
    assert kept.live.tensors == ()
    assert [t.dtype for t in kept.indices.tensors] == [torch.int64]


def test_a_key_that_is_captured_is_not_captured_again() -> None:
    backend = FakeBackend()
    eng, run = engine(backend), Stream(backend)
    assert captured(eng, run) is captured(eng, run)
    assert backend.log.count("capture") == 1


# ------------------------------------------------------------------------------------------- certificate
@pytest.mark.parametrize("replay", [1, 2, 3, 4])
def test_one_wrong_bit_in_any_certifying_replay_refuses_and_is_located(replay: int) -> None:
    """G4-08."""
    backend = FakeBackend()
    run, eng = Stream(backend), engine(backend)
    before = run.snapshot()
    backend.flip_on_replay = replay
    refusal = refused(eng, run, aliased=run.buffers, preserve=run.buffers)
    assert refusal.code == "CX508"
    assert refusal.difference is not None
    assert (refusal.difference.where, refusal.difference.index, refusal.difference.count) == ("output[0]", (0, 1), 1)
    assert equal(run.snapshot(), before)


def test_stock_that_leaves_other_state_refuses_with_the_buffer_named() -> None:
    backend = FakeBackend()
    run, eng = Stream(backend, noise=False), engine(backend)

    def stock(x: torch.Tensor) -> Any:
        out = run(x)
        run.state[2, 3] = -0.0
        return out

    refusal = refused(eng, run, aliased=run.buffers, preserve=run.buffers, reference=stock)
    assert refusal.difference is not None
    assert (refusal.code, refusal.difference.where, refusal.difference.index) == ("CX508", "buffer 0", (2, 3))


def test_only_the_compared_part_of_a_buffer_counts() -> None:
    backend = FakeBackend()
    run, eng = Stream(backend, noise=False), engine(backend)

    def stock(x: torch.Tensor) -> Any:
        out = run(x)
        run.state[2, 3] = 7.0  # a row that holds nothing live
        return out

    captured(eng, run, reference=stock, compared=[run.state[:2]])


def test_frozen_random_numbers_are_caught_by_another_seed() -> None:
    """G1-05."""
    backend = FakeBackend()
    backend.frozen = True
    run = Stream(backend)
    refusal = refused(engine(backend), run, aliased=run.buffers)
    assert refusal.code == "CX508"
    assert "random inputs, seed 1" in refusal.detail


def test_a_generator_that_a_replay_does_not_move_is_caught() -> None:
    backend = FakeBackend()
    backend.unmoved = True
    run = Stream(backend)
    refusal = refused(engine(backend), run, aliased=run.buffers)
    assert (refusal.code, refusal.reason) == ("CX509", "generator position")


def test_stock_that_does_not_agree_with_itself_is_not_blamed_on_the_graph() -> None:
    """G4-01."""
    backend = FakeBackend()
    ticks = iter(range(1000))
    refusal = refused(engine(backend), lambda x: x + 1, reference=lambda x: x + 1 + next(ticks) * 1e-3)
    assert (refusal.code, refusal.reason) == ("CX507", "stock not reproducible")


def test_host_randomness_is_refused_and_rewound() -> None:
    backend = FakeBackend()
    eng, host = engine(backend), torch.get_rng_state()
    refusal = refused(eng, lambda x: x + torch.randn(3, 4))
    assert (refusal.code, refusal.reason) == ("CX504", "host randomness")
    assert torch.equal(torch.get_rng_state(), host)
    assert "capture" not in backend.log


def test_a_sibling_that_draws_once_during_the_probe_is_not_taken_for_the_run() -> None:
    backend = FakeBackend()
    calls = iter(range(1000))
    found = engine(backend).capture("key", lambda x: x + 1 if next(calls) else (torch.randn(1), x + 1)[1], [example()])
    assert isinstance(found, Binding)


def test_a_binding_knows_whether_stock_depends_on_alignment() -> None:
    backend = FakeBackend()
    eng = engine(backend)
    free = eng.capture("free", lambda x: x * 2, [example()])
    bound = eng.capture("bound", lambda x: x * 2, [example()], reference=lambda x: x * (2 if alignment(x) > 16 else 3))
    assert isinstance(free, Binding)
    assert isinstance(bound, Binding)
    assert (free.any_alignment, bound.any_alignment) == (True, False)
    odd = like(example(), 16)
    odd.copy_(example())
    assert torch.equal(eng.replay(free, [odd]), example() * 2)
    assert eng.replay(bound, [odd]) == "input 0 has another alignment"
    # Below what every kernel must cope with nothing was tried, since some of stock's kernels fault there.
    below = like(example(), 4)
    below.copy_(example())
    assert eng.replay(free, [below]) == "input 0 has another alignment"


# ------------------------------------------------------------------------------------------- failed captures
@pytest.mark.parametrize(
    ("error", "code"),
    [(RuntimeError("operation not permitted"), "CX505"), (torch.OutOfMemoryError("no memory"), "CX506")],
)
def test_a_failed_capture_is_kept_with_its_text_and_never_tried_again(error: Exception, code: str) -> None:
    """G1-08."""
    backend = FakeBackend()
    run, eng = Stream(backend), engine(backend)
    before = run.snapshot()
    backend.capture_error = error
    refusals = [refused(eng, run, aliased=run.buffers, preserve=run.buffers) for _ in range(5)]
    assert {r.code for r in refusals} == {code}
    assert str(error) in refusals[0].detail
    assert backend.log.count("capture") == 1
    assert equal(run.snapshot(), before)
    assert eng.stats()["refusals"] == {code: 5}
    backend.capture_error = None
    assert isinstance(eng.capture("other", run, [example()], aliased=run.buffers), Binding)


def test_stock_that_differs_only_rarely_is_found_out_before_a_replay_is_blamed() -> None:
    """G4-01."""
    runs: list[int] = []

    def stock(x: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        return x + (1 if len(runs) < 5 else 2)

    assert refused(engine(FakeBackend()), lambda x: x + 3, reference=stock).code == "CX507"


def test_a_pool_whose_first_capture_failed_is_not_used_again() -> None:
    backend = FakeBackend()
    eng = engine(backend)
    backend.capture_error = RuntimeError("no")
    eng.capture("a", lambda x: x + 1, [example()])
    backend.capture_error = None
    for key in "bc":
        eng.capture(key, lambda x: x + 1, [example()])
    assert backend.pools == 2


@pytest.mark.parametrize("failing", [1, 2, 3, 4])
def test_a_run_that_fails_outside_the_capture_restores_everything(failing: int) -> None:
    backend = FakeBackend()
    run, eng = Stream(backend), engine(backend)
    before = run.snapshot()

    def sometimes(x: torch.Tensor) -> Any:
        out = run(x)
        if run.runs == failing:
            raise ValueError("no")
        return out

    refusal = refused(eng, sometimes, aliased=run.buffers, preserve=run.buffers)
    assert (refusal.code, refusal.detail) == ("CX512", "ValueError: no")
    assert equal(run.snapshot(), before)


def test_an_interrupt_passes_and_still_restores() -> None:
    backend = FakeBackend()
    run, eng = Stream(backend), engine(backend)
    before = run.snapshot()
    backend.capture_error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        eng.capture("key", run, [example()], aliased=run.buffers, preserve=run.buffers)
    assert equal(run.snapshot(), before)
    assert gc.isenabled()


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_the_collector_is_paused_in_the_capture_and_as_before_afterwards(enabled: bool, fails: bool) -> None:
    """G1-18."""
    backend = FakeBackend()
    backend.capture_error = RuntimeError("no") if fails else None
    threshold = gc.get_threshold()
    was = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        engine(backend).capture("key", lambda x: x + 1, [example()])
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if was else gc.disable)()
    assert backend.collecting_during_capture is False
    assert gc.get_threshold() == threshold


# ------------------------------------------------------------------------------------------- admission
def test_a_moved_buffer_is_not_replayed_and_nothing_is_written() -> None:
    backend = FakeBackend()
    run, eng = Stream(backend), engine(backend)
    binding = captured(eng, run)
    run.state.data = run.state.clone()
    before, replays = run.snapshot(), backend.replays
    assert eng.replay(binding, [example()]) == "buffer 0 moved"
    assert equal(run.snapshot(), before)
    assert backend.replays == replays


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (example(rows=2), "another form"),
        (example().t().contiguous().t(), "another form"),
        (example().double(), "another form"),
        (None, "NoneType"),
    ],
)
def test_another_form_of_an_input_is_a_reason(value: Any, reason: str) -> None:
    backend = FakeBackend()
    eng = engine(backend)
    binding = eng.capture("key", lambda x: x + 1, [example()])
    assert isinstance(binding, Binding)
    found = eng.replay(binding, [value])
    assert isinstance(found, str)
    assert reason in found
    assert sum(eng.stats()["misses"].values()) == 1
    assert "input" in str(eng.replay(binding, [example(), 1]))


def test_plain_values_are_fixed() -> None:
    eng = engine(FakeBackend())
    binding = eng.capture("key", lambda x, n: x + n, [example(), 1])
    assert isinstance(binding, Binding)
    assert torch.equal(eng.replay(binding, [example(), 1]), example() + 1)
    assert eng.replay(binding, [example(), 2]) == "input 1 is 2, captured with 1"
    assert eng.replay(binding, [example(), True]) == "input 1 is True, captured with 1"


def test_an_input_in_a_buffer_is_not_staged_and_must_stay_there() -> None:
    state = torch.randn(3, 4)
    eng = engine(FakeBackend())
    binding = eng.capture("key", lambda s: s.mul_(2)[0], [state[1:]], aliased=[state])
    assert isinstance(binding, Binding)
    state.fill_(1.0)
    assert torch.equal(eng.replay(binding, [state[1:]]), torch.full((4,), 2.0))
    assert torch.equal(state[:, 0], torch.tensor([1.0, 2.0, 2.0]))
    assert eng.replay(binding, [state[:2]]) == "input 0 moved"


def test_a_broadcast_input_keeps_its_strides() -> None:
    eng = engine(FakeBackend())
    row = torch.randn(4)
    binding = eng.capture("key", lambda x: x * 2, [row.expand(3, 4)])
    assert isinstance(binding, Binding)
    assert torch.equal(eng.replay(binding, [(row + 1).expand(3, 4)]), ((row + 1) * 2).expand(3, 4))


def test_an_input_that_the_run_writes_is_written_by_a_replay_and_not_by_a_capture() -> None:
    def run(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x[:, 1:].add_(y[:, 1:])
        return x * 2

    eng, x, y = engine(FakeBackend()), example(), example(1)
    binding = eng.capture("key", run, [x, y])
    assert isinstance(binding, Binding), binding
    assert equal([x, y], [example(), example(1)])
    for seed in (2, 3):
        got, want = [example(seed), y.clone()], [example(seed), y.clone()]
        assert same_bits(eng.replay(binding, got), run(*want))
        assert equal(got, want)


def test_tensors_of_another_device_are_refused() -> None:
    eng = engine(FakeBackend())
    assert refused(eng, lambda x: x, inputs=[torch.empty(2, device="meta")]).code == "CX511"
    assert refused(eng, lambda x: torch.empty(2, device="meta")).code == "CX511"


# ------------------------------------------------------------------------------------------- ownership
def test_every_returned_tensor_belongs_to_the_caller_for_ever() -> None:
    """G1-20."""
    backend = FakeBackend()
    run, eng = Stream(backend, noise=False), engine(backend)
    binding = captured(eng, run)
    twin = Stream(backend, noise=False)
    outs, refs = [], []
    x = example()
    for _ in range(20):
        refs.append([t.clone() for t in twin(x)])
        out = eng.replay(binding, [x])
        outs.append(out)
        x = out[0]  # output i is input i + 1
    assert all(equal(list(a), b) for a, b in zip(outs, refs, strict=True))
    outs[-1][0].mul_(0)
    assert equal(list(eng.replay(binding, [example(3)])), list(twin(example(3))))


def test_an_alias_binding_returns_the_static_outputs() -> None:
    eng = engine(FakeBackend())
    binding = eng.capture("key", lambda x: x + 1, [example()], alias=True)
    assert isinstance(binding, Binding)
    first, second = eng.replay(binding, [example(1)]), eng.replay(binding, [example(2)])
    assert first.data_ptr() == second.data_ptr()
    assert torch.equal(first, example(2) + 1)


def test_copies_keep_strides_and_sameness() -> None:
    eng = engine(FakeBackend())

    def run(x: torch.Tensor) -> dict[str, Any]:
        y = x + 1
        return {"a": y, "b": [y, y.expand(2, 3, 4), y[:, ::2]], "n": 3}

    binding = eng.capture("key", run, [example()])
    assert isinstance(binding, Binding)
    out, want = eng.replay(binding, [example(1)]), run(example(1))
    assert out["a"] is out["b"][0]
    assert [t.stride() for t in out["b"]] == [t.stride() for t in want["b"]]
    assert equal(out["b"], want["b"])
    assert out["n"] == 3


def test_static_buffers_are_fenced_by_an_event() -> None:
    backend = FakeBackend()
    eng = engine(backend)
    binding = eng.capture("key", lambda x: x + 1, [example()])
    assert isinstance(binding, Binding)
    backend.log.clear()
    for _ in range(2):
        eng.replay(binding, [example()])
    assert backend.log == ["replay", "record", "wait", "replay", "record"]


# ------------------------------------------------------------------------------------------- bounds and life
def test_graphs_beyond_the_limit_are_refused_and_the_kept_ones_replay() -> None:
    """G1-22."""
    backend = FakeBackend()
    eng = engine(backend, max_graphs=2)
    found = [eng.capture(rows, lambda x: x + 1, [example(rows=rows)]) for rows in range(1, 40)]
    assert [isinstance(f, Binding) for f in found[:3]] == [True, True, False]
    assert "max_graphs=2" in str(found[-1])
    assert backend.log.count("capture") == 2
    assert eng.stats()["refusals"] == {"CX502": 37}
    assert isinstance(found[0], Binding)
    assert torch.equal(eng.replay(found[0], [example(rows=1)]), example(rows=1) + 1)


def test_bytes_are_predicted_and_held_to_their_limit() -> None:
    backend = FakeBackend()
    eng = engine(backend, max_bytes=350)
    first = eng.capture("a", lambda x: x + 1, [example()])
    assert isinstance(first, Binding)
    assert (first.predicted_bytes, first.measured_bytes) == (96, 148)
    assert isinstance(eng.capture("b", lambda x: x + 1, [example()]), Binding)
    refusal = eng.capture("c", lambda x: x + 1, [example()])
    assert isinstance(refusal, Refusal)
    assert refusal.detail == "max_bytes=350, in use 296, inputs and outputs need 96"
    eng.retire()
    assert isinstance(eng.capture("c", lambda x: x + 1, [example()]), Binding)


def test_the_first_run_is_one_that_libraries_may_set_themselves_up_in() -> None:
    """On several streams at once, a transform may run before the tables of its new plan are there."""
    backend, order = FakeBackend(), list[str]()

    def chain(x: torch.Tensor) -> torch.Tensor:
        order.append("first" if backend.log[-1] == "first" else "elsewhere")
        return x + 1

    def spread(x: torch.Tensor) -> torch.Tensor:
        order.append("spread")
        return x + 1

    assert isinstance(engine(backend).capture("key", spread, [example()], first=chain), Binding)
    assert order[0] == "first"
    assert "elsewhere" not in order
    assert "spread" in order[1:]


def test_a_graph_is_not_replayed_once_plans_were_dropped() -> None:
    """G1-14."""
    backend = FakeBackend()
    eng = engine(backend)
    planned = eng.capture("transform", lambda x: x * 2, [example()], plans=True)
    other = eng.capture("plain", lambda x: x * 3, [example()])
    assert isinstance(planned, Binding)
    assert isinstance(other, Binding)
    backend.cached_plans = 5
    assert torch.equal(eng.replay(planned, [example()]), example() * 2)
    backend.cached_plans = 4
    replays = backend.replays
    assert str(eng.replay(planned, [example()])).startswith("FFT plans were dropped")
    backend.cached_plans = 9  # others are there now; the one that the graph was captured with is not
    assert str(eng.replay(planned, [example()])).startswith("FFT plans were dropped")
    assert backend.replays == replays
    assert torch.equal(eng.replay(other, [example()]), example() * 3)
    assert eng.stats()["misses"] == {"FFT plans were dropped": 2}
    eng.retire()
    again = eng.capture("transform", lambda x: x * 2, [example()], plans=True)
    assert isinstance(again, Binding)
    assert torch.equal(eng.replay(again, [example()]), example() * 2)


def test_nothing_with_plans_is_captured_while_their_cache_is_full() -> None:
    """G1-14: the next plan would push one out."""
    backend = FakeBackend()
    backend.cached_plans = FULL
    eng = engine(backend)
    assert refused(eng, lambda x: x * 2, plans=True).code == "CX513"
    assert "capture" not in backend.log
    backend.cached_plans = 1
    assert isinstance(eng.capture("key", lambda x: x * 2, [example()], plans=True), Binding)
    assert "mark" in backend.log


def test_a_sealed_engine_replays_and_captures_nothing() -> None:
    eng = engine(FakeBackend())
    binding = eng.capture("a", lambda x: x + 1, [example()])
    eng.seal()
    assert isinstance(binding, Binding)
    assert refused(eng, lambda x: x).code == "CX510"
    assert torch.equal(eng.replay(binding, [example()]), example() + 1)


def test_all_graphs_retire_together_and_a_new_generation_has_its_own_pool() -> None:
    """G1-01."""
    backend = FakeBackend()
    eng = engine(backend)
    old = [eng.capture(i, lambda x, i=i: x + i, [example()]) for i in range(3)]
    backend.flip_on_replay = backend.replays + 1
    refused(eng, lambda x: x * 2)
    assert backend.dropped == []
    eng.retire()
    assert len(backend.dropped) == 4  # the refused one had the same pool
    assert isinstance(old[0], Binding)
    assert eng.replay(old[0], [example()]) == "retired"
    new = eng.capture(0, lambda x: x + 10, [example()])
    assert isinstance(new, Binding)
    assert eng.replay(old[0], [example()]) == "retired"
    assert torch.equal(eng.replay(new, [example()]), example() + 10)
    assert backend.pools == 2


def test_an_outer_capture_gets_reasons_and_destruction_waits_for_its_end() -> None:
    """G1-19."""
    backend = FakeBackend()
    eng = engine(backend)
    binding = eng.capture("a", lambda x: x + 1, [example()])
    assert isinstance(binding, Binding)
    backend.outer = True
    assert eng.replay(binding, [example()]) == "outer capture"
    assert refused(eng, lambda x: x).code == "CX501"
    del eng
    gc.collect()
    assert backend.dropped == []
    backend.outer = False
    other = engine(FakeBackend())
    assert isinstance(other.capture("b", lambda x: x, [example()]), Binding)
    assert len(backend.dropped) == 1


def test_a_refusal_during_an_outer_capture_is_not_for_ever() -> None:
    backend = FakeBackend()
    eng = engine(backend)
    backend.outer = True
    refused(eng, lambda x: x)
    backend.outer = False
    assert isinstance(eng.capture("key", lambda x: x, [example()]), Binding)


def test_a_replay_that_raises_disables_the_engine() -> None:
    backend = FakeBackend()
    eng = engine(backend)
    fail: list[int] = []

    def run(x: torch.Tensor) -> torch.Tensor:
        if fail:
            raise RuntimeError("device lost")
        return x + 1

    binding = eng.capture("a", run, [example()])
    assert isinstance(binding, Binding)
    fail.append(1)
    with pytest.raises(RuntimeError, match="device lost"):
        eng.replay(binding, [example()])
    assert eng.replay(binding, [example()]) == "engine disabled: a replay failed: device lost"
    assert eng.stats()["broken"]


def test_two_threads_share_one_engine_without_mixing() -> None:
    eng = engine(FakeBackend())
    binding = eng.capture("a", lambda x: x * 3, [example()])
    assert isinstance(binding, Binding)
    wrong: list[int] = []

    def work(seed: int) -> None:
        for i in range(200):
            x = example(1000 * seed + i)
            if not torch.equal(eng.replay(binding, [x]), x * 3):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert eng.stats()["replays"] == 400


def test_it_works_inside_inference_mode_and_on_tensors_that_need_gradients() -> None:
    eng = engine(FakeBackend())
    with torch.inference_mode():
        binding = eng.capture("a", lambda x: x * 3, [example()])
        assert isinstance(binding, Binding), binding
        assert torch.equal(eng.replay(binding, [example(1)]), example(1) * 3)
    out = eng.replay(binding, [example(1).requires_grad_()])
    assert not out.requires_grad
    assert torch.equal(out, example(1) * 3)


def test_stats_are_json() -> None:
    backend = FakeBackend()
    eng = engine(backend)
    eng.capture(("a", 1), lambda x: x + 1, [example()])
    backend.capture_error = RuntimeError("no")
    eng.capture("b", lambda x: x + 1, [example()])
    stats = json.loads(json.dumps(eng.stats()))
    assert (stats["captures"], stats["graphs"], stats["refusals"]) == (1, 1, {"CX505": 1})
    assert "no" in stats["failed"]["b"]["detail"]
    assert set(stats["seconds"]) == {"('a', 1)"}


# ------------------------------------------------------------------------------------------- helpers
def test_a_host_copy_goes_in_pieces_and_finds_one_changed_bit_outside_the_first() -> None:
    base = torch.randn(4, 5, 6)
    view = base[:, 1:4, ::2]
    kept = HostCopy([view], limit=16)
    before = base.clone()
    assert kept.difference() is None
    view[2, 1, 1] += 1e-3
    base[0, 0, 0] = 9.0  # beside the view
    found = kept.difference()
    assert found is not None
    assert found.count == 1
    kept.put_back()
    assert torch.equal(view, before[:, 1:4, ::2])
    assert base[0, 0, 0] == 9.0


@pytest.mark.parametrize("value", [torch.nan, -0.0])
def test_a_sign_of_zero_and_a_nan_payload_count(value: float) -> None:
    """G4-08."""
    tensor = torch.tensor([value, 1.0])
    kept = HostCopy([tensor])
    tensor.view(torch.int32)[0] ^= 1 << (31 if value == 0 else 0)
    assert kept.difference() is not None


def test_copies_have_the_strides_of_what_they_copy() -> None:
    for tensor in (torch.randn(3, 4).t(), torch.randn(3, 4)[:, ::2], torch.randn(4).expand(3, 4), torch.randn(0, 4)):
        copy = copy_of(tensor)
        assert copy.stride() == tensor.stride()
        assert torch.equal(copy, tensor)
        assert alignment(like(torch.randn(9)[1:])) == 4


class Brought:
    """A run or an edit that brings memory in, constants or what edits of real graphs need."""

    def __init__(self) -> None:
        self.memory = torch.zeros(4)

    def __call__(self, given: Any) -> Any:
        return 16 if isinstance(given, int) else given + self.memory[0]


@pytest.mark.parametrize("role", ["run", "edit"])
def test_memory_that_a_run_or_an_edit_brought_in_lives_as_long_as_the_graph(role: str) -> None:
    """A graph reads and writes it at its address; nobody else holds it."""
    backend = FakeBackend()
    eng, brought = engine(backend), Brought()
    memory = weakref.ref(brought.memory)
    parts: dict[str, Any] = {"run": lambda x: x + 1, "edit": None, role: brought}
    binding = eng.capture("key", inputs=[torch.ones(3)], **parts)
    assert isinstance(binding, Binding)
    del brought, parts
    gc.collect()
    assert memory() is not None
    eng.retire()
    backend.dropped.clear()  # a fake graph holds what it was recorded from
    gc.collect()
    assert memory() is None
