"""The cells of the benchmark: stock, the state rule and replay apart and together, and the product."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from cadence_fx.bench_cell import Cell, CellUnavailable
from cadence_fx.bench_replay_only import replay_only
from cadence_fx.drop_in import transform
from cadence_fx.errors import CadenceError, suggest
from cadence_fx.families import Family
from cadence_fx.memory import dtype_of
from cadence_fx.module import CadenceModule, eager
from cadence_fx.partition import Granularity
from cadence_fx.passes import EliminateDead, HoistConstants, Normalise, RemoveHostSyncs, RingWriteback
from cadence_fx.pipeline import GraphPass
from cadence_fx.places import set_attr
from cadence_fx.stock import Stock

__all__ = ["CELLS", "PLAIN_PASSES", "all_cells", "find_cell"]

# What a capture needs to be one graph on state at fixed addresses, and nothing that makes it faster.
PLAIN_PASSES: tuple[GraphPass, ...] = (
    Normalise(),
    RemoveHostSyncs(),
    HoistConstants(host_only=True),
    RingWriteback(in_place=False),
    EliminateDead(),
)


def _stock(family: Family, device: str, seed: int) -> nn.Module:
    return family.build_random(device, seed)


def _transformed(family: Family, device: str, seed: int, **settings: Any) -> CadenceModule:
    """The decoder's transform; the decoder itself is gone when this returns."""
    fast = transform(family.build_random(device, seed), family.contract(), **settings)
    gc.collect()  # modules hold themselves in cycles
    return fast


# ---------------------------------------------------------------------------------------------- state alone
class _Workspace(Stock):
    """Stock whose scratch is allocated once, at the demanded sizes, beside the state."""

    def _drop(self) -> None:
        if not hasattr(self, "kept"):
            self.kept = [
                torch.zeros(self.memory.scratch_shape(region), dtype=dtype_of(region.dtype), device=self.memory.device)
                for _, region in self.scratch
            ]
        for (place, _), kept in zip(self.scratch, self.kept, strict=True):
            set_attr(self.twin, place, kept)

    @contextmanager
    def _buffers(self, demand: bool, own: bool = False) -> Iterator[None]:
        yield


def _state_alone(family: Family, device: str, seed: int) -> nn.Module:
    """The vendor's code, launched operator by operator, on state and scratch of the demanded sizes."""
    fast = _transformed(family, device, seed, backend="plan")
    fast.stock.__dict__.pop("forward", None)  # the fallback's wrapper, which makes scratch of the vendor's sizes
    fast.__dict__["_stock"] = _Workspace(fast.stock, fast.contract, fast.memory)
    served = fast.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        with eager():
            return served(*args, **kwargs)

    fast.__dict__["forward"] = forward
    return fast


# ---------------------------------------------------------------------------------------------- both
def _captured(family: Family, device: str, seed: int, granularity: Granularity) -> nn.Module:
    """The vendor's operators, captured as they are, on state at fixed addresses."""
    if torch.device(device).type != "cuda":
        raise CellUnavailable("captures need a CUDA device")
    fast = _transformed(family, device, seed, streams=1, granularity=granularity)
    fast.compiler.passes = PLAIN_PASSES
    fast._captures.fuser = None  # type: ignore[union-attr]
    return fast.warmup().seal()


def _from_host(family: Family, device: str, seed: int) -> nn.Module:
    """The product of a decoder that was built on the host: the device never holds the vendor's buffers."""
    fast = transform(family.build_random("cpu", seed), family.contract(), device=device)
    gc.collect()
    return fast.warmup().seal()


def _product(family: Family, device: str, seed: int, **settings: Any) -> nn.Module:
    return _transformed(family, device, seed, **settings).warmup().seal()


CELLS: Mapping[str, Cell] = {
    cell.name: cell
    for cell in (
        Cell("B0", "stock, as it ships", _stock),
        Cell("B0b", "stock in another process", _stock),
        Cell("S", "state rule alone", _state_alone),
        Cell("R", "replay alone, by solver step", partial(replay_only, granularity="step")),
        Cell("Rc", "replay alone, by chunk", partial(replay_only, granularity="chunk")),
        Cell("SR", "state rule and replay, by solver step", partial(_captured, granularity="step")),
        Cell("SRc", "state rule and replay, by chunk", partial(_captured, granularity="chunk")),
        Cell("ours_chain", "cadence_fx on one stream", partial(_product, streams=1, skip=("fuse_pointwise",))),
        Cell("ours_host", "cadence_fx of a decoder built on the host", _from_host),
        Cell("ours_unfused", "cadence_fx before fusion", partial(_product, skip=("fuse_pointwise",))),
        Cell("ours", "cadence_fx", _product),
    )
}


def all_cells() -> dict[str, Cell]:
    """The cells above and, where this version has them, the controls."""
    try:
        controls: Any = importlib.import_module("cadence_fx.bench_controls")
    except ModuleNotFoundError as error:
        if error.name != "cadence_fx.bench_controls":
            raise
        return dict(CELLS)
    return {**CELLS, **controls.CONTROLS}


def find_cell(name: str) -> Cell:
    """The cell of that name; ``package.module:attribute`` names one of your own.

    Raises:
        CadenceError: there is none.
    """
    if ":" in name:
        module, _, attribute = name.partition(":")
        found = getattr(importlib.import_module(module), attribute, None)
        if isinstance(found, Cell):
            return found
        raise CadenceError(f"{name} is no Cell")
    cells = all_cells()
    if name not in cells:
        raise CadenceError(f"no cell is called {name!r}{suggest(name, cells)}; cells are {', '.join(cells)}")
    return cells[name]
