"""The stock fallback: the vendor's code on a twin whose large buffers exist only while it runs.

Whatever is not admitted runs here and gives stock's bits, because it is stock: same weights, same code, scratch buffers
of the vendor's own sizes made for the call and dropped after it. The prompt pass may use the state's own memory as
scratch where the contract says that a scratch region shares it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from cadence_fx.contract import Contract, Entry
from cadence_fx.generators import generator_states, restore_generators
from cadence_fx.live_state import HostCopy
from cadence_fx.memory import Memory, dtype_of
from cadence_fx.places import get_attr, set_attr
from cadence_fx.tables import shrink_tables

__all__ = ["Stock"]


class Stock:
    """Runs a twin of the module as stock.

    Args:
        twin: gets its scratch buffers taken away between calls and its tables cut to what is read.
    """

    def __init__(self, twin: torch.nn.Module, contract: Contract, memory: Memory) -> None:
        self.twin, self.memory = twin, memory
        shrink_tables(twin, contract, memory.device)
        self.scratch = contract.scratch
        for place, _ in self.scratch:
            get_attr(twin, place)  # names the path if the module lacks it
        self._drop()
        self._depth = 0
        if self.scratch:
            forward = type(twin).forward.__get__(twin) if "forward" not in twin.__dict__ else twin.forward
            # Users may call fast.stock(...) themselves.
            wrapper = lambda *args, **kwargs: self._inside(forward, args, kwargs)  # noqa: E731
            wrapper.cadence_stock = True  # type: ignore[attr-defined]
            twin.__dict__["forward"] = wrapper

    def _drop(self) -> None:
        for place, region in self.scratch:
            set_attr(self.twin, place, torch.empty(0, dtype=dtype_of(region.dtype), device=self.memory.device))

    @contextmanager
    def _buffers(self, demand: bool, own: bool = False) -> Iterator[None]:
        """Scratch for one call: at the vendor's sizes, or at the demanded ones, sharing the state's memory."""
        for place, region in self.scratch:
            if demand and not own:
                made = self.memory.scratch(region)
            else:
                shape = (
                    self.memory.scratch_shape(region)
                    if demand
                    else region.reserved or self.memory.scratch_shape(region)
                )
                made = torch.zeros(shape, dtype=dtype_of(region.dtype), device=self.memory.device)
            set_attr(self.twin, place, made)
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            self._drop()

    def _inside(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if self._depth:
            return function(*args, **kwargs)
        with self._buffers(demand=False):
            return function(*args, **kwargs)

    def run(self, function: Callable[..., Any], bound: dict[str, Any]) -> Any:
        """A call with bound arguments, as stock."""
        return function(**bound)

    def run_demand(self, bound: dict[str, Any]) -> Any:
        """A call within the declaration, on scratch of the demanded sizes that is not the state's memory."""
        with self._buffers(demand=True, own=True):
            return self.twin.forward(**bound)

    def run_entry(
        self, entry: Entry, args: tuple[Any, ...], kwargs: Mapping[str, Any], fits: Callable[[Any], bool]
    ) -> Any:
        """A method of the twin, as stock.

        Scratch may share the state's memory, which halves the peak of a prompt pass; state that is live there is kept
        on the host meanwhile. If that fails (a prompt longer than declared does not fit), or what comes out does not
        fit the regions, the state is put back, and the method runs again on the vendor's own sizes, generators rewound.
        """
        method = getattr(self.twin, entry.method)
        generators = generator_states(self.memory.device)
        live = HostCopy(self._shared() if self.memory.live else [])
        try:
            with self._buffers(demand=True):
                result = method(*args, **kwargs)
            if fits(result):
                return result
            del result  # it may show the state's memory
        except (RuntimeError, IndexError, AssertionError):
            pass  # stock says what is wrong, below
        except BaseException:
            live.put_back()
            raise
        live.put_back()
        restore_generators(self.memory.device, generators)
        with self._buffers(demand=False):
            return method(*args, **kwargs)

    def _shared(self) -> list[torch.Tensor]:
        """State whose memory is scratch of a prompt pass."""
        names = dict.fromkeys(region.shares for _, region in self.scratch if region.shares is not None)
        return [self.memory[name].tensor for name in names]
