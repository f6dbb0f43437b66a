"""A prompt pass on the state's own memory: live state survives it whenever its result is not taken over."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from cadence_fx.bits import same_bits
from cadence_fx.contract import Entry, Result
from cadence_fx.drop_in import transform
from cadence_fx.module import CadenceModule
from tests.streams import WIDTH, Workspace, chunks, drawn, workspace_contract

WINDOW, ENVELOPE = 12, 14  # the calls below grow by two


class Primed(Workspace):
    """Makes its first state in the workspace, as vendors do, and hands out a view of it."""

    def prime(self, rows: int, error: BaseException | None = None, dtype: torch.dtype = torch.float32) -> Any:
        noise = torch.randn(1, rows, WIDTH, generator=torch.Generator().manual_seed(rows))
        self.big[:, :rows] = noise + torch.rand(1)
        if error is not None and self.big.shape[1] < 1000:  # only on the demanded size
            raise error
        return {"rows": self.big[:, :rows].to(dtype)}


def primed() -> tuple[Any, CadenceModule]:
    declared = workspace_contract(WINDOW)
    rows, scratch = declared.regions
    declared = dataclasses.replace(
        declared,
        regions=(rows, dataclasses.replace(scratch, shares="rows")),
        entries=(Entry("prime", (("rows", Result("rows")),)),),
    )
    module = drawn(Primed(WINDOW))
    fast = transform(module, declared)
    fast.warmup("steady")
    return module, fast


def live(module: Any, fast: CadenceModule) -> tuple[Any, Any]:
    """Both after a prompt pass and two calls."""
    torch.manual_seed(0)
    theirs = {"rows": module.prime(4)["rows"].clone()}
    torch.manual_seed(0)
    ours = fast.prime(4)
    for x in chunks([2, 2]):
        expected, theirs = module(x, theirs)
        found, ours = fast(x, ours)
        assert same_bits(expected, found)
    return theirs, ours


def goes_on(module: Any, fast: CadenceModule, theirs: Any, ours: Any) -> None:
    for x in chunks([2] * 5, seed=9):
        expected, theirs = module(x, theirs)
        found, ours = fast(x, ours)
        assert same_bits(expected, found)
        assert same_bits(theirs["rows"], ours["rows"])
    assert fast.stats()["stock"] == 0


def test_a_second_prompt_needs_no_memory_of_the_vendors_size_and_starts_a_new_stream() -> None:
    module, fast = primed()
    live(module, fast)
    sizes = []
    original = torch.zeros

    def zeros(*size: Any, **kwargs: Any) -> torch.Tensor:
        sizes.append(size)
        return original(*size, **kwargs)

    torch.manual_seed(1)
    theirs = {"rows": module.prime(6)["rows"].clone()}
    torch.manual_seed(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "zeros", zeros)
        ours = fast.prime(6)
    assert sizes == []  # the workspace was the state's memory
    goes_on(module, fast, theirs, ours)


@pytest.mark.parametrize("error", [KeyError("voice"), KeyboardInterrupt()])
def test_a_prompt_pass_that_fails_leaves_the_live_stream_whole(error: BaseException) -> None:
    module, fast = primed()
    theirs, ours = live(module, fast)
    with pytest.raises(type(error)):
        fast.prime(6, error)
    goes_on(module, fast, theirs, ours)


def test_a_prompt_pass_that_fails_on_the_demanded_size_runs_again_as_stock_with_the_same_draws() -> None:
    module, fast = primed()
    live(module, fast)
    torch.manual_seed(2)
    theirs = {"rows": module.prime(6)["rows"].clone()}
    torch.manual_seed(2)
    ours = fast.prime(6, RuntimeError("sizes do not match"))
    assert same_bits(theirs["rows"], ours["rows"])
    goes_on(module, fast, theirs, ours)


def test_a_result_that_is_no_state_of_the_regions_stays_the_callers_and_the_live_stream_whole() -> None:
    module, fast = primed()
    theirs, ours = live(module, fast)
    foreign = fast.prime(6, dtype=torch.float64)["rows"]
    kept = foreign.clone()
    goes_on(module, fast, theirs, ours)
    assert same_bits(foreign, kept)


def test_a_prompt_longer_than_declared_is_stocks() -> None:
    module, fast = primed()
    live(module, fast)
    torch.manual_seed(3)
    expected = module.prime(40)["rows"].clone()
    torch.manual_seed(3)
    assert same_bits(fast.prime(40)["rows"], expected)
