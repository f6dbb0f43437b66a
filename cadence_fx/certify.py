"""The certificate of a replay: outputs, state and generator positions equal stock's, bit for bit.

Stock runs first against itself. Only where it agrees is a replay compared with it, from the same state, inputs and
generator position: on the caller's example, then on other values of the same shapes under another seed, several replays
each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree

from cadence_fx.bits import Difference, first_difference
from cadence_fx.graph_backend import GraphBackend
from cadence_fx.live_state import FLOATS, Generators, HostCopy, StartState, randomised
from cadence_fx.refusal import DIFFERENT_BITS, DIFFERENT_POSITION, NOT_REPEATABLE, Refusal
from cadence_fx.staging import SAFE_ALIGNMENT, copy_of, twin_of

__all__ = ["Certificate", "certify"]

SUSPICION = 6  # more runs of stock against itself before a replay is blamed


@dataclass
class _Observed:
    outputs: Any
    inputs: list[Any]  # as the run left them
    state: HostCopy | None
    position: torch.Tensor


@dataclass
class _Trial:
    """Everything that one certificate needs."""

    backend: GraphBackend
    start: StartState
    generators: Generators
    compared: Sequence[torch.Tensor]
    staged: Sequence[bool]

    def observe(self, label: str, run: Callable[..., Any], inputs: Sequence[Any], round_: int, keep: bool) -> _Observed:
        self.start.start(round_)
        self.generators.rewind(round_)
        # Copies: a run may write its arguments, and the caller's are not ours to change.
        given = [twin_of(v) if staged else v for v, staged in zip(inputs, self.staged, strict=True)]
        outputs = self.generators.watch(label, lambda: run(*given))
        outputs = pytree.tree_map(lambda v: copy_of(v) if isinstance(v, torch.Tensor) else v, outputs)
        self.backend.synchronize()
        left = [v for v, staged in zip(given, self.staged, strict=True) if staged]
        return _Observed(outputs, left, HostCopy(self.compared) if keep else None, self.backend.position())

    def compare(self, expected: _Observed, found: _Observed) -> Difference | None:
        assert expected.state is not None
        difference = first_difference("output", expected.outputs, found.outputs) or expected.state.difference()
        difference = difference or first_difference("input", expected.inputs, found.inputs)
        if difference is None and self.generators.device_moves:
            difference = first_difference("generator position", expected.position, found.position)
        return difference

    def stock_differs(
        self, expected: _Observed, reference: Callable[..., Any], inputs: Sequence[Any], round_: int, runs: int
    ) -> Difference | None:
        for _ in range(runs):
            difference = self.compare(expected, self.observe("stock", reference, inputs, round_, keep=False))
            if difference is not None:
                return difference
        return None

    def blame(
        self, difference: Difference, expected: _Observed, reference: Callable[..., Any], inputs: Sequence[Any],
        round_: int, replay: int,
    ) -> Refusal:  # fmt: skip
        """The refusal for a replay that differs, unless stock differs from itself after all, only more rarely."""
        own = self.stock_differs(expected, reference, inputs, round_, SUSPICION)
        if own is not None:
            return Refusal(NOT_REPEATABLE, "stock not reproducible", f"two runs of stock: {own}", own)
        where = "the example" if round_ == 0 else f"random inputs, seed {round_}"
        is_position = difference.where.startswith("generator position")
        code, reason = (DIFFERENT_POSITION, "generator position") if is_position else (DIFFERENT_BITS, "other bits")
        return Refusal(code, reason, f"replay {replay} on {where}: {difference}", difference)


@dataclass(frozen=True)
class Certificate:
    """A replay gave stock's bits. ``any_alignment``: at whatever multiple of `SAFE_ALIGNMENT` its inputs lie."""

    any_alignment: bool


def certify(
    backend: GraphBackend,
    replay: Callable[..., Any],
    reference: Callable[..., Any],
    inputs: Sequence[Any],
    staged: Sequence[bool],
    compared: Sequence[torch.Tensor],
    start: StartState,
    generators: Generators,
    rounds: int = 2,
    replays: int = 2,
) -> Certificate | Refusal:
    """Compare replays with stock; the first refusal, or the certificate if every bit agrees.

    Args:
        backend: of the replay.
        replay: takes ``inputs``, works on the aliased buffers and returns outputs of one structure.
        reference: stock; the same.
        inputs: the example.
        staged: which inputs are copied in, so may have other values and addresses.
        compared: buffers, or views of them, that hold the state after a run.
        start: state that each run starts from.
        generators: their positions, watched.
        rounds: the first on ``inputs``, the others on random values of the same shapes, each under its own seed.
        replays: of each round.
    """
    trial = _Trial(backend, start, generators, compared, staged)
    for round_ in range(rounds):
        given = randomised(inputs, staged, round_) if round_ else list(inputs)
        expected = trial.observe("stock", reference, given, round_, keep=True)
        difference = trial.stock_differs(expected, reference, given, round_, runs=1)
        if difference is not None:
            return Refusal(NOT_REPEATABLE, "stock not reproducible", f"two runs of stock: {difference}", difference)
        for i in range(replays):
            difference = trial.compare(expected, trial.observe("replay", replay, given, round_, keep=False))
            if difference is not None:
                return trial.blame(difference, expected, reference, given, round_, i + 1)
    moved = [v for i, v in enumerate(inputs) if staged[i] and v.dtype in FLOATS]
    # Both ends of the range: addresses that suit every kernel, and the worst that any kernel must cope with. Some of
    # stock's kernels fault at addresses below, and a fault is the end of the process.
    for shift in (0, SAFE_ALIGNMENT) if moved else ():
        given = randomised(inputs, staged, rounds - 1, shift)
        if trial.compare(expected, trial.observe("stock", reference, given, rounds - 1, keep=False)) is not None:
            return Certificate(any_alignment=False)
    return Certificate(any_alignment=True)
