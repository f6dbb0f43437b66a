"""Token2Wav's own CUDA graphs, made to fire: a control for the benchmark.

The vendor's decoder can capture its solver step at three chunk widths, none of which a stream ever has, and nothing
calls the capture. `vendor_graph` calls it with the widths of the contract's traffic. Everything else is the vendor's:
one graph for each width, keys and values padded to a fixed capacity behind a mask, and the whole state of a step copied
into each replay.
"""

from __future__ import annotations

import contextlib
import io
import types
from collections.abc import Callable, Sequence
from typing import Any

from cadence_fx.contract import Contract
from cadence_fx.errors import CadenceError
from cadence_fx.extents import region_extents

__all__ = ["CAPACITIES", "WIDTHS", "capacity", "rebucketed", "vendor_graph", "widths"]

WIDTHS = (30, 48, 96)  # mel frames of a chunk, as the vendor picked them
CAPACITIES = (500, 1000)  # frames of state that a graph pads to: for the smaller widths, and for the largest


def widths(contract: Contract) -> tuple[int, ...]:
    """Mel frames of the calls inside a turn. Last chunks, of which every length occurs, stay without graphs."""
    calls = [call for call in contract.calls if call.ends is None]
    return tuple(sorted({int(contract.elapsed("mel_frame", call.ticks)) for call in calls}))


def capacity(contract: Contract) -> int:
    """The smaller of the vendor's two capacities that holds the state of every call."""
    longest = max(region_extents(contract, contract.region("estimator_att_cache")).attended_all)
    for frames in CAPACITIES:
        if longest <= frames:
            return frames
    raise CadenceError(f"the state reaches {longest} frames, the vendor's graphs hold {CAPACITIES[-1]}")


def rebucketed(capture: types.FunctionType, sizes: Sequence[int], frames: int) -> Callable[..., Any]:
    """The vendor's capture method with other numbers in it: that is what re-picking its buckets means.

    Raises:
        CadenceError: the method does not hold the numbers of the version that this was written for.
    """
    code = capture.__code__
    missing = [value for value in (WIDTHS, *CAPACITIES) if value not in code.co_consts]
    if missing:
        raise CadenceError(f"{capture.__qualname__} holds no {missing[0]}: this is another version of the vendor's")
    other: dict[Any, Any] = {WIDTHS: tuple(sizes), **dict.fromkeys(CAPACITIES, frames)}
    constants = tuple(other.get(value, value) if isinstance(value, (int, tuple)) else value for value in code.co_consts)
    return types.FunctionType(
        code.replace(co_consts=constants), capture.__globals__, capture.__name__, capture.__defaults__,
        capture.__closure__,
    )  # fmt: skip


def vendor_graph(decoder: Any, contract: Contract) -> None:
    """Capture the solver step at the contract's widths, and let the vendor's code replay it. ``decoder`` is changed.

    Raises:
        CadenceError: the state outgrows the vendor's graphs, or the module is of another depth than they are for.
    """
    estimator = decoder.flow.decoder.estimator
    depth, buffers = len(estimator.blocks), 16
    if depth != buffers:
        raise CadenceError(f"the vendor's graphs are for {buffers} blocks, the estimator has {depth}")
    name = "_init_cuda_graph_chunk"
    capture = rebucketed(getattr(type(estimator), name), widths(contract), capacity(contract))
    estimator.__dict__[name] = types.MethodType(capture, estimator)
    with contextlib.redirect_stdout(io.StringIO()):  # it prints that it has succeeded
        decoder.flow.scatter_cuda_graph(True)
