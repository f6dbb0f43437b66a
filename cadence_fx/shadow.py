"""The shadow audit: stock's own concatenations evaluated beside every in-place retention, and compared in every bit.

A declaration that is wrong in a way that shapes do not show (an order, which end is kept) agrees for a few calls and
then diverges. Under ``with fast.shadow():`` each admitted call also runs the graph as traced, without the writeback
pass, from clones of the same state and the same generator position; the new state of every region is compared element
by element.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from cadence_fx.bits import first_difference
from cadence_fx.catalog import Signature
from cadence_fx.errors import VerificationError
from cadence_fx.generators import rewound
from cadence_fx.program import Program, describe

if TYPE_CHECKING:
    from cadence_fx.inspection import Inspection

__all__ = ["ShadowAudit"]


@dataclass
class ShadowAudit:
    """An audit under way.

    Attributes:
        raises: raise at the first difference (it is always counted).
        compared: region -> retentions compared.
        differences: what differed, as text.
    """

    fast: Inspection
    raises: bool = True
    compared: Counter[str] = field(default_factory=Counter)
    differences: list[str] = field(default_factory=list)
    _graphs: dict[Signature, tuple[fx.GraphModule, list[str]]] = field(default_factory=dict)
    _spare: dict[str, torch.Tensor] = field(default_factory=dict)

    def expected(
        self, program: Program, inputs: Sequence[Any], state: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """New state by region as the traced concatenations give it; live state and generators stay as they are."""
        graph, names = self._graph(program.signature)
        given = dict(zip(("_".join(map(str, p.keys)) for p in program.inputs), inputs, strict=True))
        given |= {link.input: state[link.name].clone() for link in program.links}
        with torch.no_grad(), rewound(self.fast.memory.device):
            results = graph(*(given[name] for name in names))
        return {link.name: results[link.output] for link in program.links if link.output is not None}

    def check(self, program: Program, expected: Mapping[str, torch.Tensor], call: int) -> None:
        """Compare the regions with what was expected.

        Raises:
            VerificationError: they differ and `raises` is set; names region, call, offset and both values.
        """
        for name, tensor in expected.items():
            self.compared[name] += 1
            difference = first_difference(f"region {name!r}", tensor, self.fast.memory[name].view())
            if difference is not None:
                text = f"shadow audit, call {call}, {describe(program.signature)}: {difference}"
                self.differences.append(text)
                if self.raises:
                    raise VerificationError(
                        f"{text}; the contract's order and retain say where rows rest: compare them with the module's"
                    )

    def _graph(self, signature: Signature) -> tuple[fx.GraphModule, list[str]]:
        if signature not in self._graphs:
            compiler = self.fast.compiler
            flat, _, _ = compiler.flat(signature)
            names = [n.name for n in flat.graph.nodes if n.op == "placeholder"]
            # The audit's graphs write vendor scratch; it goes when the audit ends.
            spare, compiler.spare = compiler.spare, self._spare
            try:
                self._graphs[signature] = compiler.build(flat), names
            finally:
                compiler.spare = spare
        return self._graphs[signature]
