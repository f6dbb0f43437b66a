"""Captures of compiled functions: the engine, the state and the graphs of a transform, with a compiler's kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self

import torch

from cadence_fx.captures import Captures, ClassRow
from cadence_fx.catalog import Signature
from cadence_fx.compiled_segments import Compile, CompiledSegments
from cadence_fx.errors import CadenceError
from cadence_fx.generators import rewound
from cadence_fx.graph_backend import GraphBackend
from cadence_fx.module import CadenceModule
from cadence_fx.partition import Partition, partition
from cadence_fx.program import Program
from cadence_fx.refusal import CAPTURE_FAILED, Refusal
from cadence_fx.variants import Variant

__all__ = ["CompiledCaptures"]


@dataclass
class CompiledCaptures(Captures):
    """One graph a call, of the segments that `CompiledSegments` compiles: the boundaries' calls, step by step.

    A capture is certified against the same functions run without a graph, so the certificate says that the graph is
    what the compiler made, and nothing about stock.
    """

    compiled: CompiledSegments = field(kw_only=True)
    runs: dict[Signature, Callable[..., Any]] = field(default_factory=dict)

    @classmethod
    def instead_of(cls, fast: CadenceModule, compile: Compile, backend: GraphBackend | None = None) -> Self:
        """Put captures of compiled functions in the place of a transform's own, before it has captured anything."""
        made = cls(
            fast.contract, fast.compiler, fast.memory, fast._stock, streams=1, backend=backend,
            compiled=CompiledSegments(compile),
        )  # fmt: skip
        fast.__dict__["_captures"] = made
        return made

    def reference(self, program: Program) -> Callable[..., Any]:
        return self.runs[program.signature]

    def variants(self, program: Program) -> list[Variant]:
        """The compiled run. Everything is compiled here: a capture can hold no compilation, and tuning draws."""
        if self.memory.live:
            raise CadenceError("compiled captures are made before the first state: compiling overwrites state")
        attributes = {t: self.compiler.fetch(program.flat, t) for t in program.flat.attributes}
        run = partial(self.compiled.run, partition(program.flat, "step", attributes))
        with rewound(self.memory.device), torch.no_grad():
            run(self.examples(program))
        self.runs[program.signature] = lambda *inputs: run(inputs)
        return [Variant("compiled", self.runs[program.signature])]

    def _capture_parts(self, program: Program, parts: Partition) -> ClassRow:
        reasons = "; ".join(dict.fromkeys(s.reason for s in parts.segments if not s.capturable))
        return ClassRow(program.signature, None, (Refusal(CAPTURE_FAILED, "no single graph", reasons),))
