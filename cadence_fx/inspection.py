"""Looking at a transformed module: its report, its graphs, the shadow audit, and whether stock agrees with itself."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from cadence_fx.agreement import Disagreement, first_disagreement
from cadence_fx.captures import Captures
from cadence_fx.catalog import Signature, signatures
from cadence_fx.compiler import Compiler
from cadence_fx.contract import Contract
from cadence_fx.memory import Memory
from cadence_fx.program import Program
from cadence_fx.shadow import ShadowAudit

__all__ = ["Inspection"]


class Inspection(torch.nn.Module):
    """The part of a transformed module that serves no calls."""

    contract: Contract
    compiler: Compiler
    memory: Memory
    _lock: threading.RLock
    _audit: ShadowAudit | None
    _captures: Captures | None
    _programs: dict[Signature, Program]
    disagreement: Disagreement | None
    """The operator in which stock differed from itself, found when a capture met such an operator."""

    @property
    def report(self) -> Any:
        """Frozen account of regions, rewrites, rejections and programs; see `cadence_fx.report.Report`."""
        from cadence_fx.explain import report_of

        return report_of(self)

    def steady_signature(self) -> Signature:
        """The regular call with the longest state: where a stream spends its life."""
        return max(signatures(self.contract, steady_only=True), key=lambda s: sum(e for _, e in s.state.extents))

    @property
    def graphs(self) -> dict[str, torch.fx.GraphModule]:
        """The steady signature's graph "before" and "after:<pass>" for each pass; compiled anew for this."""
        from cadence_fx.dump import record

        with self._lock:
            stages = record(self.compiler, self.steady_signature())
            with self.compiler.spare_kept():
                return {n if n == "before" else f"after:{n}": self.compiler.build(flat) for n, flat in stages.items()}

    def self_agreement(self, signature: Signature | None = None) -> Disagreement | None:
        """The first operator of the traced graph that does not agree with itself under the present flags, or None.

        Runs the steady call (or the given signature) several times on drawn inputs and on the state as it lies there;
        live state and generators are as before afterwards.
        """
        chosen = signature or self.steady_signature()
        with self._lock, self.compiler.spare_kept():
            flat, places, _ = self.compiler.flat(chosen)
            drawn = self.compiler.drawn(chosen)
            module = self.compiler.build(flat)
            try:
                return first_disagreement(flat, module, [drawn[place] for place in places], self.memory.device)
            finally:
                module.__dict__.clear()  # its scratch is as large as the state, and graph modules die late

    def kernel_difference(self, signature: Signature | None = None) -> dict[str, tuple[int, int]] | None:
        """Kernels that the graph of the steady call (or of the given signature) holds more or less often than an
        uncaptured run of the same program launches: name to both counts, empty if the lists agree.

        None without a captured graph, or where torch's build has no ``cuda.bindings`` to read graphs with.
        """
        with self._lock:
            program = self._programs.get(signature or self.steady_signature())
            return None if self._captures is None or program is None else self._captures.kernel_difference(program)

    @contextmanager
    def shadow(self, raises: bool = True) -> Iterator[ShadowAudit]:
        """Within this context stock's concatenations run beside every retention and are compared; see `ShadowAudit`."""
        audit = ShadowAudit(self, raises)
        self.__dict__["_audit"] = audit
        try:
            yield audit
        finally:
            self.__dict__["_audit"] = None
