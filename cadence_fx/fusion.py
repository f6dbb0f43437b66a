"""Fusing a program before it is captured: the pass, the compiled functions, and what there is to say about them."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from cadence_fx.autocast import under
from cadence_fx.changes import Change, Rejection
from cadence_fx.exact_ops import Proven, nothing_proven
from cadence_fx.fused_operator import FusedKernels, FusedOperator
from cadence_fx.generators import rewound
from cadence_fx.passes.fuse_pointwise import FusePointwise
from cadence_fx.program import Program
from cadence_fx.proofs import Proofs
from cadence_fx.specialise import FlatGraph

__all__ = ["Fused", "Fuser"]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Fused:
    """A program's graph with groups in place of operators.

    Attributes:
        operators, groups: operators that were fused, and kernels that took their place.
        functions: compiled functions that these kernels are calls of.
    """

    flat: FlatGraph
    changes: tuple[Change, ...]
    rejections: tuple[Rejection, ...]
    operators: int
    groups: int
    functions: int

    def summary(self) -> str:
        return f"{self.operators} pointwise operators in {self.groups} kernels of {self.functions} kinds"


@dataclass
class Fuser:
    """Fuses programs of one module; equal groups of all of them share a compiled function.

    Args:
        proven: which functions of one tensor have eager's bits when they are compiled; by default those that
            `cadence_fx.proofs` has for this machine, which are looked up when a program is first fused.
    """

    device: torch.device
    proven: Proven | None = None
    kernels: FusedKernels = field(default_factory=FusedKernels)

    @classmethod
    def of(cls, device: torch.device) -> Fuser | None:
        """None where nothing can be compiled: fusion is for GPUs with Triton."""
        if device.type != "cuda" or importlib.util.find_spec("triton") is None:
            return None
        return cls(device)

    def fuse(self, program: Program) -> Fused | None:
        """None if there is nothing to fuse. Groups that cannot be compiled are left alone; the log says why."""
        self.proven = _proofs(self.device) if self.proven is None else self.proven
        left: frozenset[str] = frozenset()
        while True:
            result = FusePointwise(self.proven, left).fuse(program.flat)
            nodes = [n for n in result.flat.graph.nodes if isinstance(n.target, FusedOperator)]
            if not nodes:
                return None
            # A compiler that compares kernels draws their inputs; what is captured runs without autocast.
            with rewound(self.device), under(None):
                failed = self.kernels.prepare(nodes, lambda target: getattr(program.module, target))
            if not failed:
                break
            for node, text in failed.items():
                log.warning("%s is not fused, for compiling it failed: %s", node, text)
            left |= {name for node in failed for name in node.target.names}  # type: ignore[union-attr]
        targets: Sequence[FusedOperator] = [n.target for n in nodes]
        return Fused(
            result.flat, result.changes, result.rejections, sum(len(t.targets) for t in targets), len(targets),
            len({id(t.function) for t in targets}),
        )  # fmt: skip


def _proofs(device: torch.device) -> Proven:
    try:
        return Proofs.on(device).proven
    except Exception as error:  # noqa: BLE001 - whatever keeps proofs from being found, without them less is fused
        log.warning("proofs of %s cannot be looked up: %s: %s", device, type(error).__name__, error)
        return nothing_proven
