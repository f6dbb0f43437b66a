"""Traffic scripts: what a server does to a decoder, written once and played to stock and to us."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils._pytree as pytree

from cadence_fx.contract import Arg, Contract, Result
from cadence_fx.generators import generator_states, restore_generators
from cadence_fx.places import get_path, set_path

__all__ = ["SessionMemory", "Step", "clone_tree"]


def clone_tree(value: Any) -> Any:
    """A structure with every tensor cloned."""
    return pytree.tree_map(lambda v: v.clone() if isinstance(v, torch.Tensor) else v, value)


@dataclass
class SessionMemory:
    """What a server keeps for one session between calls: the state, and clones of it taken at marks.

    ``state`` is whatever the contract's first state argument is, a dict or a tensor.
    """

    argument: str
    result: Result
    state: Any = None
    marks: dict[str, tuple[Any, Any]] = field(default_factory=dict)

    @classmethod
    def of(cls, contract: Contract) -> SessionMemory:
        """Where the contract's state enters and leaves: the argument and the part of the result that hold it."""
        region = next(r for r in contract.states if isinstance(r.enters, Arg) and isinstance(r.leaves, Result))
        assert isinstance(region.enters, Arg)
        assert isinstance(region.leaves, Result)
        below = len(region.enters.keys) - 1
        keys = region.leaves.keys[: len(region.leaves.keys) - below]
        return cls(str(region.enters.keys[0]), Result(*keys))

    def start(self, state: Any) -> Any:
        self.state = state
        return None

    def call(self, decoder: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Call the decoder with the session's state; its result without the state, which is kept."""
        out = decoder(*args, **{self.argument: self.state}, **kwargs)
        self.state = get_path(out, self.result)
        return set_path(out, self.result, None)

    def snapshot(self, mark: str) -> None:
        self.marks[mark] = (clone_tree(self.state), generator_states(_device()))

    def restore(self, mark: str) -> None:
        """The state as a clone of the mark: another address than before, as servers do it. Generators go back too."""
        state, generators = self.marks[mark]
        self.state = clone_tree(state)
        restore_generators(_device(), generators)


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_initialized() else "cpu")


@dataclass(frozen=True)
class Step:
    """One thing that a server does: an action on a decoder and a session; what it returns is compared."""

    name: str
    action: Callable[[torch.nn.Module, SessionMemory], Any]
    is_chunk: bool = False
