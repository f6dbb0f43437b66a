"""Does stock agree with itself? If not, which operator does not, so that the report can name it.

Some kernels add in an order that timing decides (cuDNN without its deterministic flag, long scans, atomics). Nothing
can be bit-equal to what is not equal to itself: such an operator is found by running the traced graph twice from the
same state and the same generator position and comparing every node's bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from cadence_fx.autocast import Unlowered
from cadence_fx.bits import bit_sum
from cadence_fx.effects import base_of, written
from cadence_fx.generators import rewound
from cadence_fx.specialise import FlatGraph, source_of

__all__ = ["Disagreement", "first_disagreement"]


@dataclass(frozen=True)
class Disagreement:
    """The first operator whose result differs between two runs on the same inputs."""

    node: str
    operator: str
    source: str

    def __str__(self) -> str:
        at = f" [{self.source}]" if self.source else ""
        return f"{self.operator} ({self.node}) does not agree with itself{at}"

    def to_dict(self) -> dict[str, str]:
        # No path of the machine: results are kept and compared.
        return {"node": self.node, "operator": self.operator, "source": "/".join(self.source.split("/")[-3:])}


class _Summed(Unlowered):
    """Runs a graph and keeps a sum over the bits of every result; values are freed as usual."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.sums: dict[str, torch.Tensor] = {}

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        # Views of attributes may show scratch that the call has yet to write.
        shown = n.op == "call_function" and base_of(n).op != "get_attr" and not written(n)
        if shown and isinstance(result, torch.Tensor):
            self.sums[n.name] = bit_sum(result)
        return result


def first_disagreement(
    flat: FlatGraph, module: fx.GraphModule, inputs: Sequence[Any], device: torch.device, runs: int = 3
) -> Disagreement | None:
    """Run a graph several times from the same start; the first node that differs, or None.

    Args:
        flat: the graph before it was rewritten, so that state enters as arguments and stays as it is.
        module: holds its attributes.
        inputs: of its placeholders, in order.
    """
    seen: dict[str, int] | None = None
    for _ in range(runs):
        summed = _Summed(module)
        with torch.no_grad(), rewound(device):
            summed.run(*inputs)
        found = {name: int(total) for name, total in summed.sums.items()}
        if seen is not None:
            name = next((name for name, total in seen.items() if found[name] != total), None)
            if name is not None:
                node = next(n for n in flat.graph.nodes if n.name == name)
                return Disagreement(name, str(node.target), source_of(node))
        seen = seen or found
    return None
