"""Proofs on a real device: all inputs of each dtype, and the compiler's own settings must not pass for exact ones."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from cadence_fx.exact_compile import compile_exact
from cadence_fx.proofs import ProofKey, Proofs, UnaryOperator, prove

pytest.importorskip("triton")
pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("target", ["aten.exp.default", "aten.sqrt.default"])
def test_an_exact_operator_is_proven_on_every_float32_and_kept(target: str, tmp_path: Path) -> None:
    operator = UnaryOperator.make(target, "float32")
    verdict = prove(operator, "cuda")
    assert verdict.complete, verdict.error
    assert verdict.exact, str(verdict)
    Proofs(ProofKey.current("cuda"), tmp_path).add(verdict)
    assert Proofs.on("cuda", tmp_path).lookup(operator) == verdict


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("target", ["aten.exp.default", "aten.relu.default"])
def test_every_16_bit_input_that_is_not_nan_agrees(target: str, dtype: str) -> None:
    verdict = prove(UnaryOperator.make(target, dtype), "cuda")
    assert verdict.complete, verdict.error
    assert sum(check.denormal + check.others for check in verdict.checks) == 0, str(verdict)


def test_the_key_names_the_device_and_what_made_the_code() -> None:
    key = ProofKey.current("cuda")
    assert key.device
    assert key.driver
    assert key.compiler.startswith("triton ")
    assert key.cuda_version


def test_contraction_as_the_compiler_does_it_by_default_is_refused() -> None:
    default = partial(compile_exact, settings={"fallback_random": True})
    operator = UnaryOperator.make("aten.mul.Tensor", "float32", 1.7)
    assert prove(operator, "cuda").exact
    verdict = prove(operator, "cuda", compile=default)
    assert verdict.complete, verdict.error
    assert not verdict.exact_contiguous
    differing = {check.what: check.differing for check in verdict.checks if check.layout == "contiguous"}
    assert differing["f(x)"] == 0  # alone there is nothing to contract with
    assert differing["f(x) + b"] > 0


def test_memory_is_given_back_and_the_peak_is_modest() -> None:
    import torch

    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    prove(UnaryOperator.make("aten.neg.default", "float32"), "cuda", limit=1 << 26)
    assert torch.cuda.memory_allocated() - before < 1 << 20
    assert torch.cuda.max_memory_allocated() - before < 3 << 30
