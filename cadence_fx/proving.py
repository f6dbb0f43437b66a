"""Comparing a compiled unary operator with eager on every input there is.

Why bits found here hold inside a larger fused kernel, too. With the settings of `compile_exact` each operator of a
graph stays an operation of its own: nothing is contracted or reassociated, every result is rounded to its dtype before
it is used again, and Inductor lowers an operator to the same expression whatever stands beside it. So within any
kernel the operator gets the bits that eager's would get and computes the same function of these. That is an argument
about a compiler, so it is tested as well: the operator is also compiled between products and sums
(`UnaryOperator.embedded`), where a contraction with a neighbour or a missing rounding gives other bits than eager's
chain; alone at lengths that vectors divide and do not divide; and on strided memory. Eager itself is run on strided
and on dense memory, because a CPU's eager kernels use other code for each: where their bits differ, the operator is no
function of its input alone.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from cadence_fx.bits import INTEGER, integers
from cadence_fx.exact_compile import Compile, compile_exact
from cadence_fx.unary import UnaryOperator
from cadence_fx.verdicts import Check, Mismatch, ProofKey, Verdict

__all__ = ["Compile", "prove"]

# Inputs at a time: on a GPU large enough that launching costs little, and less than 2 GiB with all that is beside them.
_CHUNK = {"cuda": 1 << 25, "cpu": 1 << 18}
# An odd length at which all inputs (on a CPU) or some of every kind meet the code for what is left over of a vector or
# a block. Of float32, whose inputs are too many for it, the ends of all chunks do.
_ODD = {"cuda": 1023, "cpu": 15}
_MANTISSA = {"float32": 23, "bfloat16": 7, "float16": 10}


def prove(
    operator: UnaryOperator,
    device: torch.device | str,
    *,
    limit: int | None = None,
    chunk: int | None = None,
    compile: Compile = compile_exact,
    key: ProofKey | None = None,
) -> Verdict:
    """Compare eager with the compiled operator on all 2^16 or 2^32 inputs, NaN payloads and denormals included.

    On a CPU 2^32 inputs in every check take hours; ``limit`` looks at fewer and gives a verdict that proves nothing.

    Args:
        operator: what is compared.
        device: where; a CPU or a CUDA device.
        limit: number of inputs, spread evenly over all; all of them by default.
        chunk: inputs at a time, a power of two; by default what the device takes well.
        compile: instead of `compile_exact`; for tests that show what is caught.
        key: the circumstances, if they are known already; `ProofKey.current` by default.

    Returns:
        The verdict. Compiling or running that fails is one as well, with the error's text.
    """
    device = _indexed(torch.device(device))
    began = time.perf_counter()
    key = ProofKey.current(device) if key is None else key
    inputs = _Inputs(operator, device, min(limit or operator.domain, operator.domain), chunk or _CHUNK[device.type])
    checks: list[Check] = []
    error = ""
    here: AbstractContextManager[Any] = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
    with here, torch.no_grad(), torch.autocast(device.type, enabled=False):
        try:
            for compare in (_alone, _odd, _embedded, _strided):
                checks += compare(operator, inputs, compile)
        except Exception as problem:  # noqa: BLE001 - a compiler's errors are of many classes, and none is a proof
            error = f"{type(problem).__name__}: {str(problem).strip()}".splitlines()[0]
    return Verdict(operator, key, inputs.total, tuple(checks), time.perf_counter() - began, error)


def _indexed(device: torch.device) -> torch.device:
    """With a number: code that is compiled for ``cuda`` would name the device that is current then."""
    if str(device) == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return device


# ---------------------------------------------------------------------------------------------- the comparisons
def _alone(operator: UnaryOperator, inputs: _Inputs, compile: Compile) -> list[Check]:
    return _plain(operator, inputs, compile, "contiguous", inputs.chunk)


def _odd(operator: UnaryOperator, inputs: _Inputs, compile: Compile) -> list[Check]:
    """Alone where the ends of vectors and blocks are."""
    return _plain(operator, inputs, compile, "odd", inputs.odd)


def _plain(operator: UnaryOperator, inputs: _Inputs, compile: Compile, layout: str, length: int) -> list[Check]:
    module = operator.alone()
    compiled = compile(module, [inputs.at(0, length)])
    tally = _Tally(operator, "f(x)", layout)
    for first in inputs.starts(length):
        x = inputs.at(first, length)
        _compare([tally], x, module(x), compiled(x), inputs.total - first)
    return [tally.check()]


def _embedded(operator: UnaryOperator, inputs: _Inputs, compile: Compile) -> list[Check]:
    """In one kernel with neighbours, at a length of whole vectors and blocks."""
    (names, module), length = operator.embedded(), inputs.chunk
    compiled = compile(module, [inputs.at(0, length)])
    tallies = [_Tally(operator, name, "contiguous") for name in names]
    for first in inputs.starts(length):
        x = inputs.at(first, length)
        _compare(tallies, x, module(x), compiled(x), inputs.total - first)
    return [tally.check() for tally in tallies]


def _strided(operator: UnaryOperator, inputs: _Inputs, compile: Compile) -> list[Check]:
    """Eager on dense memory is what both eager and compiled on strided memory must agree with."""
    module, length = operator.alone(), inputs.chunk
    compiled = compile(module, [_spread(inputs.at(0, length))])
    ours, eager = _Tally(operator, "f(x)", "strided"), _Tally(operator, "f(x)", "eager strided")
    for first in inputs.starts(length):
        x = inputs.at(first, length)
        apart, expected, left = _spread(x), module(x), inputs.total - first
        _compare([ours], x, expected, compiled(apart), left)
        _compare([eager], x, expected, module(apart), left)
    return [ours.check(), eager.check()]


def _spread(x: torch.Tensor) -> torch.Tensor:
    """The same elements, every second of a buffer. Moved as integers, which no copy rounds or quiets."""
    integer = INTEGER[x.dtype.itemsize]
    buffer = torch.zeros(2 * x.numel(), dtype=integer, device=x.device)
    buffer[::2] = x.view(integer)
    return buffer.view(x.dtype)[::2]


# ---------------------------------------------------------------------------------------------- inputs
class _Inputs:
    """All bit patterns of a dtype in chunks, in ascending order, or ``total`` of them that are spread evenly."""

    def __init__(self, operator: UnaryOperator, device: torch.device, total: int, chunk: int) -> None:
        self.dtype, self.bits, self.total = operator.torch_dtype, operator.bits, total
        self.chunk = min(chunk, operator.domain)
        self.odd = self.chunk - 1 if operator.bits == 32 else min(self.chunk - 1, _ODD[device.type])
        # An odd step visits no pattern twice, so that a partial run meets all exponents and all ends of mantissas.
        self.step = 1 if total == operator.domain else operator.domain // total | 1
        self.ramp = torch.arange(self.chunk, device=device, dtype=torch.int64)

    def starts(self, length: int) -> Iterator[int]:
        return iter(range(0, self.total, length))

    def at(self, first: int, length: int) -> torch.Tensor:
        """``length`` inputs from number ``first`` on, dense; past the end they begin again."""
        patterns = (self.ramp[:length] + first) * self.step
        # Kept within the range of the signed integer: a conversion that overflows is not defined.
        half = 1 << (self.bits - 1)
        wrapped = torch.remainder(patterns + half, 2 * half) - half
        return wrapped.to(INTEGER[self.dtype.itemsize]).view(self.dtype)


# ---------------------------------------------------------------------------------------------- comparing
@dataclass
class _Tally:
    """Counts of one check while it runs."""

    operator: UnaryOperator
    what: str
    layout: str
    counts: Counter[str] = field(default_factory=Counter)  # by the class of the input, as `Check` names them
    first: Mismatch | None = None

    def count(self, x: torch.Tensor, expected: torch.Tensor, found: torch.Tensor) -> None:
        """Arguments: raw bits of input, eager's result and the other result, of one length."""
        differs = expected != found
        if not bool(differs.any()):
            return
        if self.first is None:
            at = int(differs.nonzero()[0])
            self.first = Mismatch(*(self.hex(int(bits[at])) for bits in (x, expected, found)))
        mantissa = (1 << _MANTISSA[self.operator.dtype]) - 1
        exponent = (1 << (self.operator.bits - 1)) - 1 - mantissa
        some = (x & mantissa) != 0
        nan, denormal = some & ((x & exponent) == exponent), some & ((x & exponent) == 0)
        for name, kind in (("nan", nan), ("denormal", denormal), ("others", ~(nan | denormal))):
            self.counts[name] += int((differs & kind).sum())

    def hex(self, bits: int) -> str:
        return f"0x{bits % self.operator.domain:0{self.operator.bits // 4}x}"

    def check(self) -> Check:
        return Check(self.what, self.layout, **self.counts, first=self.first)


def _compare(
    tallies: Sequence[_Tally],
    x: torch.Tensor,
    expected: Sequence[torch.Tensor],
    found: Sequence[torch.Tensor],
    left: int,
) -> None:
    """Counts into each tally the differences of one result, among the first ``left`` elements.

    Raises:
        TypeError: a result is not of the input's dtype and shape.
    """
    for name, results in (("eager", expected), ("compiled", found)):
        forms = {(result.dtype, tuple(result.shape)) for result in results}
        if len(results) != len(tallies) or forms != {(x.dtype, tuple(x.shape))}:
            raise TypeError(f"{name} gives {len(results)} results of {forms} for {x.dtype}{list(x.shape)}")
    for tally, ours, theirs in zip(tallies, expected, found, strict=True):
        tally.count(*(integers(tensor)[:left] for tensor in (x, ours, theirs)))
