"""Debug mode: after each pass, its result is run against its input and every bit is compared.

Both graphs run on drawn inputs from the same content of the contract's buffers and the same generator position. Live
state and generators are as before afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from cadence_fx.bits import first_difference
from cadence_fx.catalog import Signature
from cadence_fx.contract import Arg
from cadence_fx.errors import VerificationError
from cadence_fx.generators import generator_states, restore_generators
from cadence_fx.pipeline import RegionLink
from cadence_fx.specialise import FlatGraph
from cadence_fx.traffic import clone_tree

if TYPE_CHECKING:
    from cadence_fx.compiler import Compiler

__all__ = ["PassCheck"]


@dataclass
class PassCheck:
    """Compares a signature's graph with what it was before each pass.

    Args:
        compiler: gives values of attributes and drawn inputs.
        places: of the graph's placeholders, by name.
    """

    compiler: Compiler
    signature: Signature
    places: Mapping[str, Arg]
    links: Sequence[RegionLink]
    checked: list[str] = field(default_factory=list)

    def __call__(self, name: str, before: FlatGraph, after: FlatGraph) -> None:
        """Run both graphs.

        Raises:
            VerificationError: they differ; names the pass, the value and the first differing index.
        """
        difference = first_difference("", self._observe(before), self._observe(after))
        if difference is not None:
            raise VerificationError(f"pass {name!r} changes bits of {self.signature.call!r}: {difference}")
        self.checked.append(name)

    def _observe(self, flat: FlatGraph) -> dict[str, Any]:
        """Outputs, new state by region and generator positions of one run."""
        memory = self.compiler.memory
        kept = {name: buffer.tensor.clone() for name, buffer in memory.buffers.items()}
        start = generator_states(memory.device)
        try:
            self._fill()
            drawn = self.compiler.drawn(self.signature)
            names = [n.name for n in flat.graph.nodes if n.op == "placeholder"]
            with torch.no_grad(), self.compiler.spare_kept():
                module = self.compiler.build(flat.copy())  # a graph knows the module that was made of it
                results = list(module(*[drawn[self.places[name]] for name in names]))
                module.__dict__.clear()
            owned = {link.output: link for link in self.links if link.output is not None}
            functional = any(link.input in names for link in self.links)
            states = {
                link.name: results[index] if functional else memory[link.name].view(link.new)
                for index, link in owned.items()
            }
            others = [v for i, v in enumerate(results) if i not in owned] if functional else results
            found = {"outputs": others, "states": states, "generators": generator_states(memory.device)}
            return dict(clone_tree(found))
        finally:
            for name, tensor in kept.items():
                memory[name].tensor.copy_(tensor)
            restore_generators(memory.device, start)

    def _fill(self) -> None:
        """The same random content of every floating-point region for both graphs."""
        for i, buffer in enumerate(self.compiler.memory.buffers.values()):
            if buffer.tensor.is_floating_point():
                generator = torch.Generator(buffer.tensor.device).manual_seed(i)
                buffer.tensor.uniform_(-1, 1, generator=generator)
