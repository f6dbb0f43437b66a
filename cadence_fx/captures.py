"""Programs bound to captured graphs: what is captured for a signature, how it is certified, and how a call runs.

The engine (`cadence_fx.replay`) knows callables and tensors; this is where a program, the contract's buffers and
stock meet it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils._pytree as pytree

from cadence_fx.budget import within_budget
from cadence_fx.catalog import Signature, State, predicted_bytes
from cadence_fx.certify import Certificate, certify
from cadence_fx.compiler import Compiler
from cadence_fx.contract import Arg, Contract, Result
from cadence_fx.device_trace import launch_counts
from cadence_fx.footprint import Pool
from cadence_fx.fusion import Fused, Fuser
from cadence_fx.graph_backend import GraphBackend
from cadence_fx.graph_edits import Converted, EditCounts
from cadence_fx.library_plans import uses_plans
from cadence_fx.live_state import Generators, StartState
from cadence_fx.memory import Memory
from cadence_fx.modes import pinned_kernels
from cadence_fx.partition import Granularity, Partition, Segment, partition
from cadence_fx.passes.fuse_pointwise import FusePointwise
from cadence_fx.places import get_path, set_path
from cadence_fx.program import Program, describe
from cadence_fx.refusal import NOT_REPEATABLE, Refusal
from cadence_fx.replay import Binding, ExactShapeReplay
from cadence_fx.scheduled_run import CudaStreams
from cadence_fx.staging import copy_of
from cadence_fx.stock import Stock
from cadence_fx.variants import Variant, variants

__all__ = ["AS_STOCK", "PINNED", "Captures", "ClassRow"]

AS_STOCK = "stock's bits under the flags of warm-up"
PINNED = (
    "stock's bits under torch.backends.cudnn.deterministic = True; under the flags of warm-up stock differs from itself"
)


@dataclass(frozen=True)
class ClassRow:
    """What became of one signature: captured and certified with its bytes, or refused with the reason.

    Attributes:
        binding: of the whole program; None if it is refused or cut into segments.
        parts: its segments where one graph cannot hold it; ``bindings`` has those that are captured.
        refusals: in the order in which captures were tried.
        schedule: how operators are spread over streams.
        guarantee: whose bits a replay gives.
        edits: what was changed in the recorded graph.
        predicted: bytes that the capture was to take, see `cadence_fx.footprint`; of one graph only.
        fused: pointwise operators that the graph has in fewer kernels.
        run: what was captured, as a function; of one graph only.
    """

    signature: Signature
    binding: Binding | None = None
    refusals: tuple[Refusal, ...] = ()
    schedule: str = ""
    parts: Partition | None = None
    bindings: Mapping[str, Binding] = field(default_factory=dict)
    guarantee: str = AS_STOCK
    edits: EditCounts | None = None
    predicted: int = 0
    fused: Fused | None = None
    run: Callable[..., Any] | None = None

    @property
    def captured(self) -> bool:
        return self.binding is not None or bool(self.bindings)

    @property
    def all_bindings(self) -> list[Binding]:
        return [self.binding] if self.binding is not None else list(self.bindings.values())

    def to_dict(self) -> dict[str, Any]:
        segments = () if self.parts is None else self.parts.segments
        return {
            "call": self.signature.call,
            "variant": self.signature.state.variant,
            "extents": dict(self.signature.state.extents),
            "captured": self.captured,
            "schedule": self.schedule,
            "edits": None if self.edits is None else self.edits.summary(),
            "fused": None if self.fused is None else self.fused.summary(),
            "guarantee": self.guarantee if self.captured else "runs as the plan",
            "segments": [
                {"name": s.name, "captured": s.name in self.bindings, "reason": s.reason, "operators": len(s.nodes)}
                for s in segments
            ],
            "predicted_bytes": self.predicted or sum(b.predicted_bytes for b in self.all_bindings),
            "measured_bytes": sum(b.measured_bytes for b in self.all_bindings),
            "seconds": round(sum(b.seconds for b in self.all_bindings), 3),
            "refusals": [r.to_dict() for r in self.refusals],
        }


@dataclass
class Captures:
    """Captured graphs of a module's programs.

    Args:
        streams: side streams for independent branches; 1 captures a chain.
        edits: edit recorded graphs, see `cadence_fx.graph_edits`; with several streams only.
        capture_after: capture a signature during traffic once it was met this often; None for never.
        granularity: "chunk" for one graph a call where that is possible, "callable" or "step" to cut at boundaries.
    """

    contract: Contract
    compiler: Compiler
    memory: Memory
    stock: Stock
    streams: int = 6
    backend: GraphBackend | None = None
    granularity: Granularity = "chunk"
    capture_after: int | None = None
    edits: bool = True
    rows: dict[Signature, ClassRow] = field(default_factory=dict)
    met: Counter[Signature] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.engine = ExactShapeReplay(
            self.memory.device,
            backend=self.backend,
            max_graphs=self.contract.max_graphs,
            max_bytes=self.contract.max_bytes,
        )
        # The same side streams for every capture: memory that one graph has freed on a stream serves the next graph's
        # work on that stream only, and the matrix library keeps a workspace for each stream that it has seen.
        self.side_streams = CudaStreams(self.memory.device)
        self.converted, self.pool = Converted(), Pool()
        self.fuser = None if FusePointwise.name in self.compiler.skip else Fuser.of(self.memory.device)

    # ------------------------------------------------------------------------------------------- capture
    def plan(self, wanted: Sequence[Signature]) -> None:
        """Refuse, before anything is captured, what the contract's budget has no room for."""
        states = frozenset(region.name for region in self.contract.states)
        rows = predicted_bytes(self.contract, states).classes
        nbytes = {Signature(State(row.variant, row.extents), row.call): row.staged_bytes for row in rows}
        captured = [signature for signature, row in self.rows.items() if row.captured]
        everything = tuple(dict.fromkeys((*captured, *wanted)))
        for signature, refusal in within_budget(self.contract, everything, nbytes).items():
            self.rows.setdefault(signature, ClassRow(signature, None, (refusal,)))

    def capture(self, program: Program) -> ClassRow:
        """Capture and certify a program: on side streams first, as a chain if that is refused for its bits."""
        if program.signature in self.rows:
            return self.rows[program.signature]
        attributes = {t: self.compiler.fetch(program.flat, t) for t in program.flat.attributes}
        parts = partition(program.flat, self.granularity, attributes)
        if len(parts.segments) == 1 and parts.segments[0].capturable:
            row = self._capture_whole(program)
        else:
            row = self._capture_parts(program, parts)
        self.rows[program.signature] = row
        return row

    def _capture_whole(self, program: Program) -> ClassRow:
        refusals: list[Refusal] = []
        found = self._first(program, refusals)
        if found is None and refusals and refusals[-1].code == NOT_REPEATABLE and self._can_pin():
            # Nothing can equal what does not equal itself: certify what stock gives under deterministic kernels.
            with pinned_kernels():
                found = self._first(program, refusals, PINNED)
        if found is None:
            return ClassRow(program.signature, None, tuple(refusals))
        binding, variant, guarantee = found
        self.pool = variant.pool
        return ClassRow(
            program.signature, binding, tuple(refusals), variant.label, guarantee=guarantee, edits=variant.counts,
            predicted=variant.predicted + binding.predicted_bytes, fused=variant.fused, run=variant.run,
        )  # fmt: skip

    def _first(
        self, program: Program, refusals: list[Refusal], guarantee: str = AS_STOCK
    ) -> tuple[Binding, Variant, str] | None:
        """The first variant that is certified under the flags of this moment; stock's own disagreement ends it."""
        for variant in self.variants(program):
            key = (program.signature, variant.label, variant.edit is not None, guarantee)
            found = self._bind(
                key, variant.run, self.examples(program), self.reference(program), uses_plans(program.flat.graph.nodes),
                program, variant.edit,
            )  # fmt: skip
            if isinstance(found, Binding):
                return found, variant, guarantee
            refusals.append(found)
            if found.code == NOT_REPEATABLE:
                return None
        return None

    def variants(self, program: Program) -> Iterable[Variant]:
        """Ways to run a program under capture, the fastest first."""
        return variants(program, self.side_streams, self.streams, self.edits, self.converted, self.pool, self.fuser)

    def _can_pin(self) -> bool:
        return not torch.backends.cudnn.deterministic

    def _bind(
        self, key: Any, run: Callable[..., Any], inputs: Sequence[Any], reference: Any, plans: bool,
        program: Program | None = None, edit: Callable[[int], int] | None = None,
    ) -> Binding | Refusal:  # fmt: skip
        return self.engine.capture(
            key,
            run,
            inputs,
            aliased=self._aliased(),
            preserve=self._live(),
            reference=reference,
            compared=None if program is None else self._compared(program),
            edit=edit,
            first=None if program is None else program.run,
            plans=plans,
        )

    def _live(self) -> list[torch.Tensor]:
        return [b.tensor for b in self.memory.buffers.values()] if self.memory.live else []

    def _capture_parts(self, program: Program, parts: Partition) -> ClassRow:
        """Capture the segments that a graph can hold; the whole is certified against stock, eager segments included."""
        bindings: dict[str, Binding] = {}
        refusals: list[Refusal] = []

        def record(segment: Segment, values: Sequence[Any]) -> Sequence[Any]:
            if segment.capturable:
                plans = uses_plans(segment.module.graph.nodes)
                found = self._bind((program.signature, segment.name), segment.module, values, None, plans)
                if isinstance(found, Binding):
                    bindings[segment.name] = found
                else:
                    refusals.append(found)
            results: Sequence[Any] = segment.module(*values)
            return results

        start, generators = StartState(self._aliased(), self._live()), Generators(self.engine.backend)
        with torch.no_grad(), self.engine.backend.active():
            try:
                start.start(0)
                generators.watch("probe", lambda: parts.run(self.examples(program), record))
                row = ClassRow(program.signature, None, tuple(refusals), "", parts, bindings)
                proof = certify(
                    self.engine.backend, lambda *given: self._run_parts(row, given), self.reference(program),
                    self.examples(program), [True] * len(program.inputs), self._compared(program), start, generators,
                )  # fmt: skip
            finally:
                start.put_back()
                generators.restore()
        return row if isinstance(proof, Certificate) else ClassRow(program.signature, None, (*refusals, proof))

    def _run_parts(self, row: ClassRow, inputs: Sequence[Any]) -> tuple[Any, ...]:
        def runner(segment: Segment, values: Sequence[Any]) -> Sequence[Any]:
            binding = row.bindings.get(segment.name)
            found: Any = "eager segment" if binding is None else self.engine.replay(binding, values)
            return segment.module(*values) if isinstance(found, str) else found  # type: ignore[no-any-return]

        assert row.parts is not None
        return row.parts.run(inputs, runner, copy_outputs=True)

    def _aliased(self) -> list[torch.Tensor]:
        return [*(b.tensor for b in self.memory.buffers.values()), *self.compiler.stages.values()]

    def _compared(self, program: Program) -> list[torch.Tensor]:
        """The live rows as they are after the call; other rows of a buffer hold nothing that anybody reads."""
        return [self.memory[link.name].view(link.new) for link in program.links]

    def examples(self, program: Program) -> list[Any]:
        """Inputs drawn for the capture."""
        drawn = self.compiler.drawn(program.signature)
        return [drawn[place] for place in program.inputs]

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
            result = self._parted(program, self.stock.run_demand(bound))
            for link in program.links:
                leaves = self.contract.region(link.name).leaves
                if isinstance(leaves, Result):
                    fitted = self.memory[link.name].fit(get_path(result, leaves))
                    assert isinstance(fitted, torch.Tensor), fitted
                    self.memory[link.name].view(link.new).copy_(fitted)
            return tuple(v for i, v in enumerate(pytree.tree_leaves(result)) if i not in owned)

        return run

    def _parted(self, program: Program, result: Any) -> Any:
        """A result that the writing of the new state leaves alone: what lies in the buffers is copied out of them.

        A state that already lies where it belongs stays: it may be large, and writing it changes nothing.
        """
        memory = {b.tensor.untyped_storage().data_ptr() for b in self.memory.buffers.values()}
        in_place = {
            (program.state_at[link.name], self.memory[link.name].view(link.new).data_ptr())
            for link in program.links
            if link.name in program.state_at and link.dim is None
        }
        leaves, spec = pytree.tree_flatten(result)
        for i, v in enumerate(leaves):
            inside = isinstance(v, torch.Tensor) and v.untyped_storage().data_ptr() in memory
            if inside and (i, v.data_ptr()) not in in_place:
                leaves[i] = copy_of(v)
        return pytree.tree_unflatten(leaves, spec)

    # ------------------------------------------------------------------------------------------- calls
    def run(self, program: Program, inputs: Sequence[Any], may_capture: bool = False) -> Any:
        """Outputs of a replay; a str, the reason, if the program has none or it is not admitted."""
        row = self.rows.get(program.signature)
        if row is None:
            self.met[program.signature] += 1
            wanted = self.capture_after is not None and self.met[program.signature] > self.capture_after
            if not (wanted and may_capture) or self.engine.backend.is_capturing():
                return "not captured"
            row = self.capture(program)
        if row.binding is not None:
            return self.engine.replay(row.binding, inputs)
        if not row.bindings:
            return f"capture refused: {row.refusals[-1].reason}" if row.refusals else "nothing to capture"
        if self.engine.backend.is_capturing():
            return "outer capture"
        with torch.no_grad():
            return self._run_parts(row, inputs)

    # ------------------------------------------------------------------------------------------- inspection
    @property
    def stock_differs(self) -> list[Signature]:
        """Signatures whose certificate failed because stock did not agree with itself."""
        return [s for s, row in self.rows.items() if any(r.code == NOT_REPEATABLE for r in row.refusals)]

    def kernel_difference(self, program: Program) -> dict[str, tuple[int, int]] | None:
        """Kernels that a replay launches more or less often than what was captured does outside of a graph.

        Live state and generators are as before afterwards.

        Returns:
            Name to (in the graph, in the run), empty if they agree; None if there is no graph or it cannot be read.
        """
        row = self.rows.get(program.signature)
        recorded = None if row is None or row.binding is None else self.engine.launches(row.binding)
        if recorded is None:
            return None
        recorded_run = program.run if row is None or row.run is None else row.run
        start, generators = StartState(self._aliased(), self._live()), Generators(self.engine.backend)
        inputs = self.examples(program)
        with torch.no_grad(), self.engine.backend.active():
            try:
                start.start(0)
                run = lambda: recorded_run(*inputs)  # noqa: E731
                launched = generators.watch("probe", lambda: launch_counts(run, self.memory.device))
            finally:
                start.put_back()
                generators.restore()
        if row is not None and row.edits is not None:
            recorded = recorded + row.edits.removed
        names = recorded.keys() | launched.keys()
        return {n: (recorded[n], launched[n]) for n in sorted(names) if recorded[n] != launched[n]}

    def retire(self) -> None:
        """Drop all graphs at once: they share a pool, and none may leave it alone."""
        self.engine.retire()
        self.rows.clear()
        self.converted, self.pool = Converted(), Pool()

    def describe(self) -> list[str]:
        """One line per signature, for people."""
        lines = []
        for signature, row in self.rows.items():
            if row.binding is not None:
                mib = row.binding.measured_bytes / 2**20
                lines.append(
                    f"{describe(signature)}: captured and certified in {row.binding.seconds:.2f} s, {mib:.0f} MiB, "
                    f"{row.guarantee}"
                )
            else:
                lines.append(f"{describe(signature)}: {'; '.join(map(str, row.refusals))}")
        return lines
