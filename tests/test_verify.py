"""The checker itself: what it must find, where it must say that it was, and what it must not call a proof."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from cadence_fx.bits import first_difference, same_bits
from cadence_fx.drop_in import transform
from cadence_fx.module import CadenceModule
from cadence_fx.traffic import SessionMemory, Step, clone_tree
from cadence_fx.verify import VerifyResult, VerifyStep, compare
from tests.streams import Stream, chunks, contract, drawn, stream

STEPS = 44
FIELDS = {
    "family", "device", "torch", "chunks", "bitwise_equal", "state_equal", "rng_equal", "self_agreement",
    "first_mismatch", "replays", "eager", "catalog", "bytes",
}  # fmt: skip


def _call(x: torch.Tensor) -> Callable[[Any, SessionMemory], Any]:
    return lambda decoder, memory: memory.call(decoder, x)


def traffic(steps: int = STEPS) -> Iterator[Step]:
    """A start, ``steps`` chunks, and a rollback after the sixth."""
    yield Step("start", lambda decoder, memory: memory.start(decoder.start()))  # type: ignore[operator]
    for i, x in enumerate(chunks([2] * steps, seed=11)):
        yield Step("chunk", _call(x), is_chunk=True)
        if i == 5:
            yield Step("snapshot", lambda decoder, memory: memory.snapshot("mark"))
        if i == 8:
            yield Step("rollback", lambda decoder, memory: memory.restore("mark"))


def bump(tensor: torch.Tensor, index: tuple[int, ...]) -> None:
    """One unit in the last place."""
    tensor.view(torch.int32)[index] += 1


class Tampered:
    """A transform with a fault that is put in at one chunk."""

    def __init__(self, at: int, fault: Callable[[torch.Tensor, CadenceModule], None]) -> None:
        self.stock = stream()
        self.fast = transform(self.stock, contract())
        self.chunk, self.at, self.fault = 0, at, fault
        run = self.fast._run

        def faulty(*args: Any) -> Any:
            result = run(*args)
            self.chunk += 1
            if self.chunk == self.at:
                self.fault(result[0], self.fast)
            return result

        self.fast.__dict__["_run"] = faulty

    def compared(self, steps: int = STEPS) -> VerifyResult:
        torch.manual_seed(0)
        return compare(self.stock, self.fast, contract(), traffic(steps), family="toy")


def rows_of(fast: CadenceModule) -> torch.Tensor:
    return fast.memory["rows"].view()


def test_without_a_fault_everything_agrees() -> None:
    result = Tampered(0, lambda y, fast: None).compared()
    assert result.ok
    assert result.first_mismatch is None
    assert result.chunks == STEPS
    assert all(step.how == "plan" for step in result.steps if step.is_chunk)


def test_one_bit_in_the_last_sample_of_chunk_forty_is_found_there() -> None:
    """G4-08 b."""
    result = Tampered(40, lambda y, fast: bump(y, (0, 1, 7))).compared()
    found = result.first_mismatch
    assert found is not None
    assert (found["step"], found["name"], found["kind"], found["index"]) == (42, "chunk", "pcm", [0, 1, 7])
    assert found["count"] == 1
    assert found["expected"] != found["found"]
    assert [s.index for s in result.steps if not s.equal_pcm] == [42]
    assert all(s.equal_state for s in result.steps)
    assert not result.ok


def test_one_bit_in_one_row_of_the_state_is_found_at_its_chunk() -> None:
    """G4-08 a: named at chunk three, before any output shows it."""
    result = Tampered(3, lambda y, fast: bump(rows_of(fast), (0, 4, 2))).compared(8)
    found = result.first_mismatch
    assert found is not None
    assert (found["step"], found["kind"], found["where"], found["index"]) == (3, "state", "state rows", [0, 4, 2])
    assert result.steps[3].equal_pcm
    assert not result.steps[4].equal_state


def test_a_bit_of_state_that_is_read_much_later_is_found_when_it_changes() -> None:
    """G4-08 e: the context's oldest sample is dropped before any output depends on it, and is still a difference."""
    result = Tampered(4, lambda y, fast: bump(fast.memory["context"].tensor, (0, 0, 0))).compared(8)
    found = result.first_mismatch
    assert found is not None
    assert (found["step"], found["kind"], found["index"]) == (4, "state", [0, 0, 0])


def _negative_zero(y: torch.Tensor, fast: CadenceModule) -> None:
    context = fast.memory["context"].tensor
    assert context[0, 0, 0] == 0  # six samples of context, two calls of two: still the zeros of the start
    context[0, 0, 0] = -0.0


def test_the_sign_of_a_zero_is_a_difference() -> None:
    """G4-08 c."""
    found = Tampered(1, _negative_zero).compared(4).first_mismatch
    assert found is not None
    assert (found["step"], found["index"], found["expected"], found["found"]) == (1, [0, 0, 0], "0.0", "-0.0")


def test_the_payload_of_a_nan_is_a_difference() -> None:
    """G4-08 d."""
    one, other = (torch.tensor([0, bits], dtype=torch.int32).view(torch.float32) for bits in (0x7FC00000, 0x7FC00001))
    assert not same_bits(one, other)
    difference = first_difference("y", one, other)
    assert difference is not None
    assert (difference.index, difference.expected, difference.found) == ((1,), "nan", "nan")
    assert same_bits(one, one.clone())


DTYPES = [torch.float16, torch.bfloat16, torch.float64, torch.complex64, torch.int8, torch.bool]


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_of_every_dtype_are_compared(dtype: torch.dtype) -> None:
    a = torch.zeros(2, 3).to(dtype)
    b = a.clone()
    assert first_difference("x", {"a": [a]}, {"a": [b]}) is None
    b[1, 2] = 1
    difference = first_difference("x", {"a": [a]}, {"a": [b]})
    assert difference is not None
    assert difference.where == "x['a'][0]"
    assert difference.index == (1, 2)


def test_other_shapes_types_and_structures_are_differences() -> None:
    a = torch.zeros(2)
    assert "float32[2]" in str(first_difference("x", a, a.double()))
    assert "stock has torch.float32[2], found torch.float32[1, 2]" in str(first_difference("x", a, a[None]))
    assert first_difference("x", 1, True) is not None
    assert first_difference("x", {"a": a}, {"b": a}) is not None
    assert first_difference("x", (a, None), (a, 0)) is not None


def _draw(y: torch.Tensor, fast: CadenceModule) -> None:
    torch.rand(1)


def test_a_generator_that_moved_by_one_draw_is_a_difference() -> None:
    result = Tampered(3, _draw).compared(6)
    found = result.first_mismatch
    assert found is not None
    assert (found["step"], found["kind"]) == (3, "rng")
    assert [s.index for s in result.steps if not s.equal_rng] == [3]
    assert all(s.equal_pcm and s.equal_state for s in result.steps)


class Drawing(Stream):
    def forward(self, x: torch.Tensor, state: Any) -> Any:
        y, new = super().forward(x, state)
        return y + torch.rand(1), new


def test_a_generator_that_did_not_move_is_a_difference() -> None:
    m = drawn(Drawing())
    fast = transform(m, contract())
    run = fast._run

    def rewinding(*args: Any) -> Any:
        before = torch.get_rng_state()
        result = run(*args)
        torch.set_rng_state(before)
        return result

    fast.__dict__["_run"] = rewinding
    result = compare(m, fast, contract(), traffic(3))
    assert result.first_mismatch is not None
    assert (result.first_mismatch["step"], result.first_mismatch["kind"]) == (1, "rng")


class Unrepeatable(Stream):
    calls = 0

    def forward(self, x: torch.Tensor, state: Any) -> Any:
        y, new = super().forward(x, state)
        Unrepeatable.calls += 1
        return y + Unrepeatable.calls, new


def test_stock_that_does_not_agree_with_itself_is_said_to() -> None:
    """G4-01: neither the transform's fault nor its success."""
    m = drawn(Unrepeatable())
    result = compare(m, transform(m, contract()), contract(), traffic(2))
    assert not result.self_agreement
    assert not result.ok


class Constant(Stream):
    value = 0.0

    def forward(self, x: torch.Tensor, state: Any) -> Any:
        y, new = super().forward(x, state)
        return torch.full_like(y, self.value), new


@pytest.mark.parametrize("value", [0.0, 0.99])
def test_constant_or_saturated_outputs_prove_nothing(value: float) -> None:
    m = drawn(Constant())
    m.value = value
    result = compare(m, transform(m, contract()), contract(), traffic(4))
    assert result.first_mismatch is None
    assert result.vacuous
    assert not result.ok


def test_no_steps_are_no_proof() -> None:
    m = stream()
    assert not compare(m, transform(m, contract()), contract(), []).ok


def test_the_result_is_plain_json_with_the_fields_that_are_promised() -> None:
    seen: list[VerifyStep] = []
    m = stream()
    result = compare(m, transform(m, contract()), contract(), traffic(8), family="toy", progress=seen.append)
    data = json.loads(json.dumps(result.to_dict()))
    assert data.keys() >= FIELDS
    assert (data["family"], data["device"], data["torch"], data["chunks"]) == ("toy", "cpu", torch.__version__, 8)
    assert data["bitwise_equal"] is data["state_equal"] is data["rng_equal"] is data["self_agreement"] is True
    assert data["first_mismatch"] is None
    assert data["eager"] == {}
    assert data["catalog"] == 7
    assert data["bytes"]["ours_regions"] == result.module.memory.nbytes  # type: ignore[union-attr]
    assert [s.index for s in seen] == list(range(len(result.steps)))


def test_two_runs_have_one_digest_and_another_output_has_another() -> None:
    def digest(tampered: Tampered) -> str:
        return tampered.compared(5).digest()

    same = [digest(Tampered(0, lambda y, fast: None)) for _ in range(2)]
    assert same[0] == same[1]
    assert digest(Tampered(3, lambda y, fast: bump(y, (0, 0, 0)))) != same[0]


def test_a_mismatch_is_in_the_json() -> None:
    data = json.loads(json.dumps(Tampered(3, lambda y, fast: bump(y, (0, 1, 3))).compared(6).to_dict()))
    assert data["bitwise_equal"] is False
    assert data["first_mismatch"].keys() == {"step", "name", "kind", "where", "index", "expected", "found", "count"}


def test_clones_are_equal_and_apart() -> None:
    tree = {"a": [torch.zeros(2)], "b": 1}
    copy = clone_tree(tree)
    copy["a"][0] += 1
    assert torch.equal(tree["a"][0], torch.zeros(2))  # type: ignore[index]
