"""Exhaustive comparison: what is exact is called so, and every way to be wrong is found and counted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import fx

from cadence_fx.exact_compile import compile_exact, exact_settings
from cadence_fx.proving import prove
from cadence_fx.unary import UnaryOperator
from cadence_fx.verdicts import LAYOUTS, ProofKey, Verdict

KEY = ProofKey("a device", "", "2", "", "a compiler", ())
EXP = UnaryOperator.make("aten.exp.default", "float16")
Run = Callable[..., Any]
# What differs from eager's result, given input and result as integers: eager's with other bits where it must be wrong.
Wrong = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

INTEGER = {2: torch.int16, 4: torch.int32}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(INTEGER[tensor.dtype.itemsize])


def eager(module: fx.GraphModule, arguments: Sequence[Any]) -> Run:
    """A compiler that is right on dense memory."""
    return lambda x: module(x.contiguous())


def wrong(where: Callable[[torch.Tensor], torch.Tensor], results: int = 1) -> Any:
    """A compiler whose results have another last bit where ``where(x)`` says, in graphs of so many results."""

    def compile(module: fx.GraphModule, arguments: Sequence[Any]) -> Run:
        def run(x: torch.Tensor) -> list[torch.Tensor]:
            found = module(x.contiguous())
            if len(found) != results:
                return list(found)
            return [(bits(y) ^ where(x).to(bits(y).dtype)).view(y.dtype) for y in found]

        return run

    return compile


def is_denormal(x: torch.Tensor) -> torch.Tensor:
    return (x != 0) & (x.abs() < torch.finfo(x.dtype).tiny)


def is_one(x: torch.Tensor) -> torch.Tensor:
    return x == 1


def counts(verdict: Verdict, layout: str) -> tuple[int, int, int]:
    check = next(c for c in verdict.checks if c.layout == layout)
    return check.nan, check.denormal, check.others


# ------------------------------------------------------------------------------------------ exact
@pytest.mark.parametrize("name", ["exp", "sqrt", "floor"])
def test_an_operator_that_is_exact_is_proven_on_all_65536_inputs(name: str) -> None:
    if torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        pytest.skip("known to be exact as compiled for AVX2 and AVX-512")
    verdict = prove(UnaryOperator.make(f"aten.{name}.default", "float16"), "cpu")
    assert verdict.exact, str(verdict)
    assert verdict.inputs == 1 << 16
    assert {check.layout for check in verdict.checks} == LAYOUTS
    assert str(verdict) == "exact"


@pytest.mark.parametrize("name", ["neg", "abs", "relu"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_input_is_met_once_and_every_value_that_is_not_nan_agrees(name: str, dtype: str) -> None:
    verdict = prove(UnaryOperator.make(f"aten.{name}.default", dtype), "cpu")
    assert verdict.complete
    assert sum(c.denormal + c.others for c in verdict.checks) == 0, str(verdict)  # NaN payloads depend on the CPU


@pytest.mark.parametrize("chunk", [1 << 16, 1 << 12, 1 << 9])
def test_the_inputs_are_all_bit_patterns_whatever_the_chunk(chunk: int) -> None:
    seen = torch.zeros(1 << 16, dtype=torch.int64)
    compiled = wrong(lambda x: torch.ones_like(x, dtype=torch.bool))

    def compile(module: fx.GraphModule, arguments: Sequence[Any]) -> Run:
        results: Any = module.graph.output_node().args[0]
        alone = len(results) == 1
        assert arguments[0].numel() in (chunk, 15)
        run = compiled(module, arguments)

        def counted(x: torch.Tensor) -> Any:
            if x.numel() == chunk and x.is_contiguous() and alone:
                seen.index_add_(0, bits(x).long() % (1 << 16), torch.ones(x.numel(), dtype=torch.int64))
            return run(x)

        return counted

    verdict = prove(EXP, "cpu", compile=compile, chunk=chunk, key=KEY)
    assert (seen == 1).all()
    nan, denormal = 2 * 1023, 2 * 1023
    for layout in ("contiguous", "odd", "strided"):
        assert counts(verdict, layout) == (nan, denormal, (1 << 16) - nan - denormal)  # all, each counted once


def test_nothing_of_the_process_stays_changed() -> None:
    from torch._inductor import config

    before = config.get_config_copy()
    with torch.autocast("cpu", torch.bfloat16):
        prove(EXP, "cpu", limit=1 << 8)
        assert torch.is_autocast_enabled("cpu")
    assert torch.is_grad_enabled()
    assert config.get_config_copy() == before


# ------------------------------------------------------------------------------------------ what must be caught
def test_contraction_with_a_neighbour_is_caught() -> None:
    if torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        pytest.skip("the CPU is not known to multiply and add in one instruction")
    contracting = exact_settings() | {"cpp.enable_floating_point_contract_flag": "fast"}
    operator = UnaryOperator.make("aten.mul.Tensor", "float32", 1.7)
    found = {}
    for name, settings in (("exact", None), ("contracting", contracting)):
        verdict = prove(operator, "cpu", limit=1 << 14, compile=partial(compile_exact, settings=settings), key=KEY)
        found[name] = {check.what: check.differing for check in verdict.checks}
    assert set(found["exact"].values()) == {0}
    assert found["contracting"]["f(x)"] == 0  # alone there is nothing to contract with
    assert found["contracting"]["f(x) + b"] > 0


def test_a_result_that_is_not_rounded_to_its_dtype_is_caught() -> None:
    wide = partial(compile_exact, settings=exact_settings() | {"emulate_precision_casts": False})
    verdict = prove(EXP, "cpu", compile=wide, key=KEY)
    assert not verdict.exact
    assert not verdict.exact_contiguous
    failure = verdict.first_failure
    assert failure is not None
    assert failure.others > 0


def test_a_difference_in_nan_payloads_only_is_counted_as_that() -> None:
    verdict = prove(EXP, "cpu", compile=wrong(torch.isnan), key=KEY)
    assert counts(verdict, "odd") == (2 * 1023, 0, 0)
    assert not verdict.exact


def test_a_difference_on_denormals_only_is_counted_as_that() -> None:
    # As flushing them to zero would: the function of zero where the function of the denormal is due.
    def compile(module: fx.GraphModule, arguments: Sequence[Any]) -> Run:
        return lambda x: module(torch.where(is_denormal(x), torch.zeros_like(x), x).contiguous())

    verdict = prove(UnaryOperator.make("aten.mul.Tensor", "bfloat16", 2.0), "cpu", compile=compile, key=KEY)
    assert counts(verdict, "odd") == (0, 2 * 127, 0)
    first = verdict.checks[0].first
    assert first is not None
    assert (first.input, first.eager, first.compiled) == ("0x0001", "0x0002", "0x0000")


def test_one_other_input_is_found_and_told_in_hex() -> None:
    verdict = prove(EXP, "cpu", compile=wrong(is_one), key=KEY)
    assert counts(verdict, "odd") == (0, 0, 1)
    assert str(verdict) == "f(x) contiguous: 1 other inputs differ; first 0x3c00: eager 0x4170, compiled 0x4171"


def test_signed_zeros_are_different_bits() -> None:
    def compile(module: fx.GraphModule, arguments: Sequence[Any]) -> Run:
        return lambda x: [y + 0.0 for y in module(x.contiguous())]  # -0 + 0 is +0

    verdict = prove(UnaryOperator.make("aten.floor.default", "float16"), "cpu", compile=compile, key=KEY)
    first = verdict.checks[0].first
    assert first is not None
    assert (first.input, first.eager, first.compiled) == ("0x8000", "0x8000", "0x0000")


def test_a_difference_in_the_chain_only_is_caught() -> None:
    verdict = prove(EXP, "cpu", compile=wrong(is_one, results=3), key=KEY)
    assert counts(verdict, "odd") == (0, 0, 0)
    assert not verdict.exact_contiguous


def test_a_wrong_end_of_a_vector_is_caught() -> None:
    def compile(module: fx.GraphModule, arguments: Sequence[Any]) -> Run:
        def run(x: torch.Tensor) -> list[torch.Tensor]:
            found = [y.clone() for y in module(x.contiguous())]
            whole = x.numel() // 8 * 8
            for y in found:
                y[whole:] += 1
            return found

        return run

    verdict = prove(EXP, "cpu", compile=compile, key=KEY)
    assert [check.layout for check in verdict.checks if check.differing] == ["odd"]
    assert not verdict.exact_contiguous


def test_strided_memory_counts_too_but_apart() -> None:
    def compile(module: fx.GraphModule, arguments: Sequence[Any]) -> Run:
        right, other = eager(module, arguments), wrong(is_one)(module, arguments)
        return lambda x: right(x) if x.is_contiguous() else other(x)

    verdict = prove(EXP, "cpu", compile=compile, key=KEY)
    assert counts(verdict, "strided") == (0, 0, 1)
    assert (verdict.exact, verdict.exact_contiguous) == (False, True)
    assert str(verdict).startswith("exact where dense; f(x) strided: 1 other")


@pytest.mark.parametrize(
    ("compile", "text"),
    [
        (lambda module, arguments: lambda x: [y.double() for y in module(x)], "TypeError: compiled gives 1 results"),
        (lambda module, arguments: lambda x: [y[1:] for y in module(x)], "TypeError: compiled gives 1 results"),
        (lambda module, arguments: lambda x: (), "TypeError: compiled gives 0 results"),
        (lambda module, arguments: 1 / 0, "ZeroDivisionError: division by zero"),
    ],
)
def test_what_cannot_be_compared_proves_nothing(compile: Any, text: str) -> None:
    verdict = prove(EXP, "cpu", compile=compile, key=KEY)
    assert verdict.error.startswith(text)
    assert not verdict.complete
    assert not verdict.exact


# ------------------------------------------------------------------------------------------ partial
@pytest.mark.parametrize("limit", [1, 1000, (1 << 16) - 1])
def test_a_part_of_the_inputs_is_no_proof(limit: int) -> None:
    verdict = prove(EXP, "cpu", limit=limit, compile=eager, key=KEY)
    assert verdict.inputs == limit
    assert not any(check.differing for check in verdict.checks if check.layout != "eager strided")
    assert not verdict.complete
    assert not verdict.exact
    assert not verdict.exact_contiguous
    assert "no proof" in str(verdict)


def test_a_limit_that_leaves_nothing_out_is_none() -> None:
    assert prove(EXP, "cpu", limit=1 << 20, compile=eager, key=KEY).complete


def test_a_part_of_float32_meets_every_class_of_inputs() -> None:
    operator = UnaryOperator.make("aten.mul.Tensor", "float32", 2.0)
    everywhere = wrong(lambda x: torch.ones_like(x, dtype=torch.bool))
    verdict = prove(operator, "cpu", limit=1 << 16, chunk=1 << 12, compile=everywhere, key=KEY)
    nan, denormal, others = counts(verdict, "odd")
    assert nan + denormal + others == 1 << 16
    assert 200 < nan < 1000
    assert 200 < denormal < 1000
