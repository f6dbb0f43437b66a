"""Region buffers: where rows rest, what is adopted, and what is refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cadence_fx.errors import AdmissionError, ContractError
from cadence_fx.memory import Memory, RegionBuffer, dtype_of
from tests.toys import CPU, HEAD, HEADS, build, same_bits, state


def buffer(order: str = "new_first", envelope: int = 12, reserved: tuple[int, ...] | None = None) -> RegionBuffer:
    return RegionBuffer.allocate(state("kv", (2, None, 3), order=order, reserved=reserved), envelope, CPU)


def rows(n: int) -> torch.Tensor:
    return torch.arange(2 * n * 3, dtype=torch.float32).reshape(2, n, 3)


@pytest.mark.parametrize(("order", "offset"), [("new_first", 7), ("old_first", 0), ("replace", 0)])
def test_rows_rest_where_their_order_leaves_room(order: str, offset: int) -> None:
    held = buffer(order)
    held.adopt(rows(5))
    assert held.offset(5) == offset
    assert held.extent == 5
    assert same_bits(held.tensor[:, offset : offset + 5], rows(5))
    assert same_bits(held.view(), rows(5))


def test_a_buffer_without_state_has_no_view() -> None:
    with pytest.raises(AdmissionError, match="region 'kv' holds no state yet: prime it first"):
        buffer().view()


def test_the_live_view_is_resident_and_a_clone_is_not() -> None:
    held = buffer()
    assert not held.is_resident(rows(5))
    held.adopt(rows(5))
    assert held.is_resident(held.view())
    assert not held.is_resident(held.view().clone())
    assert not held.is_resident(held.view(4))
    assert not held.is_resident(held.tensor.narrow(1, 0, 5))


def test_adopting_the_live_view_copies_nothing() -> None:
    held = buffer()
    held.adopt(rows(5))
    version = held.tensor._version
    held.adopt(held.view())
    assert held.tensor._version == version


@settings(max_examples=60, deadline=None)
@given(order=st.sampled_from(["new_first", "old_first"]), start=st.integers(0, 11), data=st.data())
def test_any_view_of_the_buffer_itself_is_adopted_as_if_cloned(order: str, start: int, data: st.DataObject) -> None:
    held = buffer(order)
    held.tensor.copy_(rows(12))
    view = held.tensor.narrow(1, start, data.draw(st.integers(0, 12 - start)))
    expected = view.clone()
    held.adopt(view)
    assert same_bits(held.view(), expected)


def test_an_example_over_the_buffers_memory_is_adopted_too() -> None:
    held = buffer("old_first")
    held.tensor.copy_(rows(12))
    example = held.example(4)
    assert example.is_contiguous()
    assert example.data_ptr() == held.tensor.data_ptr()
    expected = example.clone()
    held.adopt(example)
    assert same_bits(held.view(), expected)


def test_a_region_of_fixed_shape_is_adopted_from_any_strides() -> None:
    held = RegionBuffer.allocate(state("left", (3, 3)), 0, CPU)
    held.adopt(torch.arange(9.0).reshape(3, 3))
    expected = held.tensor.t().clone()
    held.adopt(held.tensor.t())
    assert same_bits(held.tensor, expected)


@pytest.mark.parametrize(("tensor", "reason"), [
    (torch.zeros(2, 5, 3, dtype=torch.float64), "dtype is torch.float64, expected torch.float32"),
    (torch.zeros(2, 5, 3, device="meta"), "device is meta, expected cpu"),
    (torch.zeros(2, 5), "it has 2 dimensions, expected 3"),
    (torch.zeros(2, 13, 3), "dimension 1 is 13, the envelope is 12"),
    (torch.zeros(4, 5, 3), "dimension 0 is 4, expected 2"),
])  # fmt: skip
def test_what_is_no_state_is_refused_with_the_reason(tensor: torch.Tensor, reason: str) -> None:
    assert buffer().fit(tensor) == reason


def test_a_state_of_the_reserved_size_is_cut_to_the_demanded_one() -> None:
    fitted = buffer(reserved=(16, 100, 3)).fit(torch.ones(16, 5, 3))
    assert isinstance(fitted, torch.Tensor)
    assert fitted.shape == (2, 5, 3)


def test_check_names_the_region_and_writes_nothing() -> None:
    memory = Memory(build("new_first").contract, CPU)
    with pytest.raises(ContractError, match="state 'kv': dimension 4 is 9, expected 8; pass the state that"):
        memory.check({"kv": torch.zeros(2, 1, HEADS, 6, 2 * HEAD + 1)})
    with pytest.raises(ContractError, match="state 'kv': it is a NoneType"):
        memory.check({"kv": None})
    assert memory.extents() == {"kv": None}


def test_memory_holds_the_envelope_of_each_region_and_no_more() -> None:
    toy = build("new_first", start=6, tail=4, chunks=(3,), flush=(1, 2))
    memory = Memory(toy.contract, CPU)
    assert memory["kv"].envelope == 6 + 4 + 3
    assert memory.nbytes == 2 * HEADS * 13 * 2 * HEAD * 4
    assert memory.scratch(toy.contract.region("scratch")) is memory["kv"].tensor


def test_dtypes_are_found_by_name() -> None:
    assert dtype_of("bfloat16") is torch.bfloat16
