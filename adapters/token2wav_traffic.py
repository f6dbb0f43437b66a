"""Traffic of Token2Wav: a script that reaches what is hard, and the plain cadence that benchmarks play."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from cadence_fx.contract import Contract
from cadence_fx.traffic import SessionMemory, Step

__all__ = ["LOOKAHEAD", "script", "stream"]

LOOKAHEAD = 3  # tokens that a call sees ahead


class _Drawn:
    """Voices and tokens drawn from one seed, as steps. Everything lies on the decoder's device before a step runs."""

    def __init__(self, decoder: torch.nn.Module, declared: Contract, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.device = next(decoder.parameters()).device
        self.prompts = declared.region("estimator_att_cache").starts
        self.steady = declared.call("chunk").sizes["tokens"][0]
        self.voices = [(self.tokens(p // 2), self.floats(1, p, 80), self.floats(1, 192)) for p in self.prompts]

    def tokens(self, count: int) -> torch.Tensor:
        return torch.randint(0, 6561, (1, count), generator=self.generator).int().to(self.device)

    def floats(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator).to(self.device)

    def prime(self, voice: int) -> Step:
        def start(decoder: Any, memory: SessionMemory) -> None:
            memory.start(decoder.prime(*self.voices[voice]))

        return Step(f"prime[{self.prompts[voice]}]", start)

    def chunk(self, voice: int, name: str = "chunk", tokens: int | None = None, last: bool = False) -> Step:
        ids, speaker = self.tokens(self.steady if tokens is None else tokens), self.voices[voice][2]
        return Step(name, lambda decoder, memory: memory.call(decoder, ids, speaker, last_chunk=last), is_chunk=True)


def stream(decoder: torch.nn.Module, declared: Contract, seed: int = 0, chunks: int = 12) -> Iterator[Step]:
    """The regular cadence of the first voice: its prompt, then ``chunks`` steady chunks of fresh tokens."""
    drawn = _Drawn(decoder, declared, seed)
    yield drawn.prime(0)
    for _ in range(chunks):
        yield drawn.chunk(0)


def script(decoder: torch.nn.Module, declared: Contract, seed: int = 0, chunks: int = 12) -> Iterator[Step]:
    """Traffic that reaches what is hard: start, steady state, flushes, last chunk, turn reset, rollback, two voices.

    Yields:
        Steps for `cadence_fx.verify`: ``chunks`` of them are chunks.
    """
    drawn = _Drawn(decoder, declared, seed)
    steady = drawn.steady
    shorter = [c.sizes["tokens"][0] for c in declared.calls if c.name.startswith("flush")] or [steady // 2, steady - 4]
    snapshot = Step("snapshot", lambda decoder, memory: memory.snapshot("mark"))
    rollback = Step("rollback", lambda decoder, memory: memory.restore("mark"))
    new_turn = Step("turn reset", lambda decoder, memory: memory.restore("turn"))
    done = 0
    while done < chunks:
        voice = (done // 12) % len(drawn.prompts)
        turn: list[Step] = [drawn.prime(voice), Step("keep prompt", lambda decoder, memory: memory.snapshot("turn"))]
        turn += [drawn.chunk(voice) for _ in range(4)]
        turn += [drawn.chunk(voice, f"flush[{t - LOOKAHEAD}]", t) for t in shorter[:2]]
        turn += [snapshot, drawn.chunk(voice), rollback, drawn.chunk(voice)]
        turn += [drawn.chunk(voice, "last[11]", 11, last=True), new_turn]
        turn += [drawn.chunk(voice) for _ in range(3)]
        for step in turn:
            if step.is_chunk and done >= chunks:
                break
            done += step.is_chunk
            yield step
