"""Captured programs behind admission, with a backend that stands in for CUDA graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cadence_fx import live_state
from cadence_fx.agreement import Disagreement, first_disagreement
from cadence_fx.captures import AS_STOCK, PINNED, Captures
from cadence_fx.drop_in import transform
from cadence_fx.module import CadenceModule
from cadence_fx.refusal import NOT_REPEATABLE
from tests.fake_backend import FakeBackend
from tests.streams import chunks, contract, drawn, stream
from tests.toys import same_bits


def captured(streams_of: Any = None, **options: Any) -> tuple[Any, CadenceModule, FakeBackend]:
    """A stream module, its transform with captures on a fake backend, and the backend."""
    module = drawn(stream())
    fast = transform(module, contract((2, 3)))
    backend = FakeBackend()
    fast.__dict__["_captures"] = Captures(
        fast.contract, fast.compiler, fast.memory, fast._stock, streams=1, backend=backend, **options
    )
    return module, fast, backend


def play(module: Any, fast: CadenceModule, lengths: list[int]) -> bool:
    """The same calls to both; whether every output and state has the same bits."""
    a, b = module.start(), module.start()
    same = True
    for x in chunks(lengths):
        with torch.no_grad():
            expected, a = module(x, a)
        found, b = fast(x, b)
        same &= same_bits(expected, found) and all(same_bits(a[k], b[k]) for k in a)
    return same


def test_every_signature_is_captured_in_warm_up_and_replayed_bit_for_bit() -> None:
    module, fast, _ = captured()
    fast.warmup("all").seal()
    rows = fast._captures.rows  # type: ignore[union-attr]
    assert rows
    assert all(row.captured for row in rows.values())
    assert play(module, fast, [2, 3, 2, 2, 3, 3, 2, 2])
    stats = fast.stats()
    assert (stats["replays"], stats["plan"], stats["stock"]) == (8, 0, 0)


def test_a_signature_that_was_not_captured_runs_from_the_plan_and_is_counted() -> None:
    module, fast, _ = captured()
    fast.warmup("steady")
    assert play(module, fast, [3, 2, 3])
    stats = fast.stats()
    assert stats["replays"] + stats["plan"] == 3
    assert sum(stats["misses"].values()) == stats["plan"]


def test_a_hot_signature_is_captured_during_traffic_where_that_is_allowed() -> None:
    module, fast, _ = captured(capture_after=2)
    assert play(module, fast, [2] * 12)
    stats = fast.stats()
    assert stats["replays"] >= 3
    assert stats["replays"] + stats["plan"] == 12
    module, fast, _ = captured(capture_after=2)
    fast.warmup("steady").seal()
    warm = len(fast._captures.rows)  # type: ignore[union-attr]
    assert play(module, fast, [3, 2, 3, 3, 3, 3])
    assert len(fast._captures.rows) == warm  # type: ignore[union-attr]


def test_a_capture_leaves_live_state_and_generators_as_they_were() -> None:
    module, fast, _ = captured()
    state = module.start()
    for x in chunks([2, 2, 2]):
        _, state = fast(x, state)
    before = {k: v.clone() for k, v in state.items()}
    position = torch.get_rng_state()
    fast.warmup("all")
    assert all(same_bits(before[k], state[k]) for k in before)
    assert torch.equal(position, torch.get_rng_state())
    found, _ = fast(chunks([2])[0], state)
    with torch.no_grad():
        expected, _ = module(chunks([2])[0], before)
    assert same_bits(expected, found)


def test_a_replay_with_other_bits_is_refused_and_calls_stay_exact() -> None:
    module, fast, backend = captured()
    backend.flip_on_replay = 1
    fast.warmup("all")
    rows = list(fast._captures.rows.values())  # type: ignore[union-attr]
    assert [r.code for row in rows for r in row.refusals] == ["CX508"]
    assert sum(not row.captured for row in rows) == 1
    assert play(module, fast, [2, 3, 2, 2, 3, 2, 2, 2, 3, 3])
    assert fast.stats()["replays"] + fast.stats()["plan"] == 10


def test_edited_weights_retire_all_graphs_at_once() -> None:
    module, fast, _ = captured()
    fast.warmup("all")
    with torch.no_grad():
        next(iter(fast.parameters())).mul_(1.5)
    assert play(module, fast, [2, 2])
    assert fast.stats()["replays"] == 0
    assert fast.warmup("all") is fast
    assert play(module, fast, [2, 2])
    assert fast.stats()["replays"] == 2


def test_cut_at_boundaries_or_steps_the_bits_are_the_same() -> None:
    module, fast, _ = captured(granularity="step")
    fast.warmup("all")
    assert play(module, fast, [2, 3, 2, 2])


def test_an_operator_that_does_not_agree_with_itself_is_named() -> None:
    class Flaky(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    calls = iter(range(100))
    y = graph.call_function(torch.ops.aten.add.Tensor, (x, 1.0))
    y.meta["source"] = "decoder.py:7 in step"
    graph.output((graph.call_function(lambda v: v + float(next(calls)), (y,)),))
    from cadence_fx.specialise import FlatGraph

    flat = FlatGraph(graph, torch.utils._pytree.tree_structure((0,)))
    module = torch.fx.GraphModule(Flaky(), graph)
    found = first_disagreement(flat, module, [torch.ones(3)], torch.device("cpu"))
    assert found is not None
    assert "lambda" in found.operator
    steady = transform(drawn(stream()), contract((2,)))
    assert steady.self_agreement() is None


def unrepeatable(fast: CadenceModule, always: bool = False) -> None:
    """Stock on these captures gives other bits in every run, unless cuDNN's kernels are pinned (or even then)."""
    captures = fast._captures
    assert captures is not None
    original, runs = captures.reference, iter(range(1, 10_000))

    def reference(program: Any) -> Any:
        stock = original(program)

        def run(*inputs: Any) -> Any:
            outputs = stock(*inputs)
            if torch.backends.cudnn.deterministic and not always:
                return outputs
            return tuple(v + next(runs) if isinstance(v, torch.Tensor) else v for v in outputs)

        return run

    captures.reference = reference  # type: ignore[method-assign]


def test_where_stock_differs_from_itself_the_certificate_is_made_under_pinned_kernels_and_says_so() -> None:
    """G4-01: the report tells which guarantee holds under which flags; the flags are as they were."""
    module, fast, _ = captured()
    unrepeatable(fast)
    fast.warmup("steady")
    assert not torch.backends.cudnn.deterministic
    rows = list(fast._captures.rows.values())  # type: ignore[union-attr]
    assert all(row.captured and row.guarantee == PINNED for row in rows)
    assert all([r.code for r in row.refusals] == [NOT_REPEATABLE] for row in rows)
    assert PINNED in str(fast.report)
    assert fast.disagreement is None  # this stock is made to differ outside of any operator
    assert play(module, fast, [2, 2, 2, 2])
    assert fast.stats()["replays"] == 4


def test_where_stock_differs_from_itself_even_under_pinned_kernels_nothing_is_captured() -> None:
    module, fast, _ = captured()
    unrepeatable(fast, always=True)
    fast.warmup("steady")
    rows = list(fast._captures.rows.values())  # type: ignore[union-attr]
    assert not any(row.captured for row in rows)
    assert all([r.code for r in row.refusals] == [NOT_REPEATABLE, NOT_REPEATABLE] for row in rows)
    assert play(module, fast, [2, 2])
    assert fast.stats()["misses"] == {"capture refused: stock not reproducible": 2}


def test_certified_as_stock_where_stock_agrees_with_itself() -> None:
    _, fast, _ = captured()
    fast.warmup("steady")
    assert all(row.guarantee == AS_STOCK for row in fast._captures.rows.values())  # type: ignore[union-attr]


def test_the_report_names_the_operator_in_which_stock_differs_from_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """G4-01."""
    _, fast, _ = captured()
    unrepeatable(fast)
    found = Disagreement("conv_1", "aten.conv1d.default", "decoder.py:12")
    monkeypatch.setattr(CadenceModule, "self_agreement", lambda self, signature=None: found)
    fast.warmup("steady")
    assert "stock: aten.conv1d.default (conv_1) does not agree with itself [decoder.py:12]" in fast.report.notes


def test_warm_up_gives_the_pinned_memory_of_its_certificates_back(monkeypatch: pytest.MonkeyPatch) -> None:
    released: list[str] = []
    monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: released.append("host"), raising=False)
    _, fast, _ = captured()
    fast.warmup("steady")
    assert released == []  # nothing was pinned: CUDA is not in use
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    live_state.release_pinned()
    assert released == ["host"]
