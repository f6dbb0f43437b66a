"""Debug mode: every pass is run against its input."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

from cadence_fx.catalog import signatures
from cadence_fx.compiler import Compiler
from cadence_fx.drop_in import transform
from cadence_fx.errors import VerificationError
from cadence_fx.memory import Memory
from cadence_fx.passes import DEFAULT_PASSES
from cadence_fx.pipeline import PassContext, PassResult
from cadence_fx.specialise import FlatGraph
from tests import toys
from tests.streams import contract, drawn, stream


@dataclass(frozen=True)
class Nudge:
    """A pass that gets one number slightly wrong."""

    target: str = "aten.tanh.default"
    name: ClassVar[str] = "nudge"
    after: ClassVar[tuple[str, ...]] = ("hoist_constants",)

    def requires(self, flat: FlatGraph, context: PassContext) -> str | None:
        return None

    def call(self, flat: FlatGraph, context: PassContext) -> PassResult:
        node = next(n for n in flat.graph.nodes if str(n.target) == self.target)
        with flat.graph.inserting_after(node):
            wrong = flat.graph.call_function(torch.ops.aten.mul.Tensor, (node, 1.0000001))
        wrong.meta.update(node.meta)
        node.replace_all_uses_with(wrong, delete_user_cb=lambda user: user is not wrong)
        return PassResult(flat)

    def ensures(self, flat: FlatGraph, context: PassContext) -> str | None:
        return None


@pytest.mark.parametrize("name", ["new_first", "old_first", "frozen_halves", "noisy", "istft", "keep_last"])
def test_all_passes_keep_every_bit_of_every_toy(name: str) -> None:
    toy = toys.build(name)
    memory = Memory(toy.contract, torch.device("cpu"))
    compiler = Compiler(toy.module, toy.contract, memory, debug=True)
    for signature in signatures(toy.contract)[:4]:
        position = torch.get_rng_state()
        compiler.compile(signature)
        assert torch.equal(position, torch.get_rng_state())


def test_a_pass_that_changes_one_bit_is_named_with_the_first_difference() -> None:
    declared = contract((2,))
    compiler = Compiler(
        drawn(stream()), declared, Memory(declared, torch.device("cpu")), passes=(*DEFAULT_PASSES, Nudge()), debug=True
    )
    with pytest.raises(VerificationError, match=r"pass 'nudge' changes bits of .*outputs"):
        compiler.compile(signatures(declared)[0])


def test_debug_mode_leaves_live_state_as_it_was() -> None:
    module = drawn(stream())
    fast = transform(module, contract((2, 3)), debug=True)
    state = module.start()
    _, state = fast(torch.randn(1, 2, 8), state)
    before = {k: v.clone() for k, v in state.items()}
    fast.warmup("all")
    assert all(torch.equal(before[k], state[k]) for k in before)
