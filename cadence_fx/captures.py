"""Programs bound to captured graphs: what is captured for a signature, how it is certified, and how a call runs.

The engine (`cadence_fx.replay`) knows callables and tensors; this is where a program, the contract's buffers and
stock meet it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils._pytree as pytree

from cadence_fx.catalog import Signature
from cadence_fx.compiler import Compiler, Program, describe
from cadence_fx.contract import Arg, Contract, Result
from cadence_fx.graph_backend import GraphBackend
from cadence_fx.memory import Memory, dtype_of
from cadence_fx.places import get_path, set_path
from cadence_fx.refusal import Refusal
from cadence_fx.replay import Binding, ExactShapeReplay
from cadence_fx.schedule import CudaStreams, run_scheduled, schedule
from cadence_fx.stock import Stock

__all__ = ["Captures", "ClassRow"]


@dataclass(frozen=True)
class ClassRow:
    """What became of one signature: captured and certified with its bytes, or refused with the reason."""

    signature: Signature
    binding: Binding | None
    refusals: tuple[Refusal, ...]
    schedule: str = ""

    def to_dict(self) -> dict[str, Any]:
        found = self.binding
        return {
            "call": self.signature.call,
            "variant": self.signature.state.variant,
            "extents": dict(self.signature.state.extents),
            "captured": found is not None,
            "certified": found is not None,
            "schedule": self.schedule,
            "predicted_bytes": found.predicted_bytes if found else 0,
            "measured_bytes": found.measured_bytes if found else 0,
            "seconds": round(found.seconds, 3) if found else 0.0,
            "refusals": [r.to_dict() for r in self.refusals],
        }


@dataclass
class Captures:
    """Captured graphs of a module's programs.

    Args:
        streams: side streams for independent branches; 1 captures a chain.
    """

    contract: Contract
    compiler: Compiler
    memory: Memory
    stock: Stock
    streams: int = 4
    backend: GraphBackend | None = None
    rows: dict[Signature, ClassRow] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.engine = ExactShapeReplay(
            self.memory.device,
            backend=self.backend,
            max_graphs=self.contract.max_graphs,
            max_bytes=self.contract.max_bytes,
        )

    # ------------------------------------------------------------------------------------------- capture
    def capture(self, program: Program) -> ClassRow:
        """Capture and certify a program: on side streams first, as a chain if that is refused for its bits."""
        if program.signature in self.rows:
            return self.rows[program.signature]
        refusals: list[Refusal] = []
        row = ClassRow(program.signature, None, ())
        for label, run in self._variants(program):
            found = self.engine.capture(
                (program.signature, label),
                run,
                self.examples(program),
                aliased=self._aliased(),
                preserve=[b.tensor for b in self.memory.buffers.values()] if self.memory.live else (),
                reference=self.reference(program),
                compared=self._compared(program),
            )
            if isinstance(found, Binding):
                row = ClassRow(program.signature, found, tuple(refusals), label)
                break
            refusals.append(found)
            row = ClassRow(program.signature, None, tuple(refusals))
        self.rows[program.signature] = row
        return row

    def _variants(self, program: Program) -> list[tuple[str, Callable[..., Any]]]:
        chain = ("chain", program.run)
        if self.streams < 2 or self.memory.device.type != "cuda":
            return [chain]
        planned = schedule(program.flat, self.streams)
        streams = CudaStreams(self.memory.device)

        def run(*inputs: Any) -> tuple[Any, ...]:
            return run_scheduled(program.flat, program.module, planned, streams, inputs)

        return [(planned.summary(), run), chain]

    def _aliased(self) -> list[torch.Tensor]:
        return [*(b.tensor for b in self.memory.buffers.values()), *self.compiler.stages.values()]

    def _compared(self, program: Program) -> list[torch.Tensor]:
        """The live rows as they are after the call; other rows of a buffer hold nothing that anybody reads."""
        return [self.memory[link.name].view(link.new) for link in program.links]

    def examples(self, program: Program) -> list[Any]:
        """Inputs drawn for the capture: integers below the declared bound, floats around zero."""
        generator = torch.Generator().manual_seed(0)
        call = self.contract.call(program.signature.call)
        by_place = {item.place: item for item in self.contract.inputs}
        found: list[Any] = []
        for place in program.inputs:
            item = by_place[place]
            sizes = iter(call.sizes.get(item.name, ()))
            shape = [next(sizes) if size is None else size for size in item.shape]
            dtype = dtype_of(item.dtype)
            if dtype.is_floating_point:
                value = torch.randn(shape, generator=generator).to(dtype)
            else:
                value = torch.randint(0, item.high or 2, shape, generator=generator).to(dtype)
            found.append(value.to(self.memory.device))
        return found

    def reference(self, program: Program) -> Callable[..., Any]:
        """Stock on the same buffers: reads the state that lies there, leaves its new state there, returns the rest."""
        owned = set(program.state_at.values())

        def run(*inputs: Any) -> tuple[Any, ...]:
            bound, _ = self.compiler.arguments(program.signature)
            for place, value in zip(program.inputs, inputs, strict=True):
                bound = set_path(bound, place, value)
            for link in program.links:
                enters = self.contract.region(link.name).enters
                if isinstance(enters, Arg):
                    bound = set_path(bound, enters, self.memory[link.name].view(link.old))
            result = self.stock.run_demand(bound)
            for link in program.links:
                leaves = self.contract.region(link.name).leaves
                if isinstance(leaves, Result):
                    fitted = self.memory[link.name].fit(get_path(result, leaves))
                    assert isinstance(fitted, torch.Tensor), fitted
                    self.memory[link.name].view(link.new).copy_(fitted)
            return tuple(v for i, v in enumerate(pytree.tree_leaves(result)) if i not in owned)

        return run

    # ------------------------------------------------------------------------------------------- calls
    def run(self, program: Program, inputs: Sequence[Any]) -> Any:
        """Outputs of a replay; a str, the reason, if the program has none or it is not admitted."""
        row = self.rows.get(program.signature)
        if row is None:
            return "not captured"
        if row.binding is None:
            return f"capture refused: {row.refusals[-1].reason}" if row.refusals else "capture refused"
        return self.engine.replay(row.binding, inputs)

    def retire(self) -> None:
        """Drop all graphs at once: they share a pool, and none may leave it alone."""
        self.engine.retire()
        self.rows.clear()

    def describe(self) -> list[str]:
        """One line per signature, for people."""
        lines = []
        for signature, row in self.rows.items():
            if row.binding is not None:
                mib = row.binding.measured_bytes / 2**20
                lines.append(
                    f"{describe(signature)}: captured and certified in {row.binding.seconds:.2f} s, {mib:.0f} MiB"
                )
            else:
                lines.append(f"{describe(signature)}: {'; '.join(map(str, row.refusals))}")
        return lines
