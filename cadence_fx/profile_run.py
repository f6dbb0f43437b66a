"""Profiles a family: one steady chunk of stock and one of ours, on the same device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cadence_fx.bench_plot import PRODUCT, STOCK
from cadence_fx.bench_turns import measuring, preparing
from cadence_fx.catalog import settling
from cadence_fx.contract import Contract
from cadence_fx.device_trace import Timeline, timeline_of
from cadence_fx.drop_in import transform
from cadence_fx.errors import CadenceError
from cadence_fx.families import Family, load
from cadence_fx.modes import pinned_kernels
from cadence_fx.module import CadenceModule
from cadence_fx.profile import Profile, profile_of
from cadence_fx.program import Program
from cadence_fx.roofline import Roofline
from cadence_fx.traffic import SessionMemory

__all__ = ["draw_timelines", "profile_family"]

_LANES = 16  # streams that a picture shows, those with most work


def profile_family(
    target: str, *, device: str, seed: int = 0, options: Mapping[str, Any] | None = None
) -> tuple[Profile, dict[str, Any]]:
    """The profile of a family's steady chunk, and the JSON of ``cadence-fx bench --profile``.

    cuDNN's deterministic kernels are pinned meanwhile, as in the benchmark.

    Raises:
        CadenceError: there is no such family, or the steady chunk was not captured; says why.
    """
    on = torch.device(device)
    with pinned_kernels():
        family = load(target, **(options or {}))
        contract = family.contract()
        decoder = family.build_random(device, seed)
        with preparing():
            steady = _captured(transform(decoder, contract))
        with measuring():
            roofline = Roofline.of(on)
            with torch.no_grad():
                stock = _stock_chunk(decoder, family, contract, seed)
            profile = profile_of(*steady, roofline)
        profile = Profile(profile.operators, profile.critical, profile.replay, stock)
    found = {
        "family": target,
        "device": torch.cuda.get_device_name(on),
        "torch": torch.__version__,
        "bytes_per_second": roofline.bytes_per_second,
        "flops_per_second": roofline.flops_per_second,
        **profile.to_dict(),
    }
    return profile, found


def _stock_chunk(decoder: nn.Module, family: Family, contract: Contract, seed: int) -> Timeline:
    """What the device does in the last of enough chunks that the shapes repeat."""
    memory = SessionMemory.of(contract)
    steps = list(family.stream(decoder, contract, seed, settling(contract) + 3))
    for step in steps[:-1]:
        step.action(decoder, memory)
    return timeline_of(lambda: steps[-1].action(decoder, memory), next(decoder.parameters()).device)


def _captured(fast: CadenceModule) -> tuple[Program, list[Any], Callable[[], Any]]:
    """The program of the steady chunk, its inputs, and a replay of it."""
    signature = fast.steady_signature()
    with torch.no_grad():
        program = fast._compile(signature)
    captures = fast._captures
    if captures is None:
        raise CadenceError("profiles need captures, and this device has none")
    row = captures.capture(program)
    inputs = captures.examples(program)
    if row.binding is None:
        raise CadenceError(f"the steady chunk was not captured: {'; '.join(map(str, row.refusals)) or 'it is cut'}")
    binding, engine = row.binding, captures.engine
    if row.fused is not None:
        program = replace(program, flat=row.fused.flat)
    return program, inputs, lambda: engine.replay(binding, inputs)


def draw_timelines(profile: Profile, path: Path | str) -> None:
    """Draw when kernels ran, stock above ours: one line for each stream, the same scale of time."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown = [(n, t) for n, t in (("stock", profile.stock), ("ours", profile.replay)) if t is not None and t.kernels]
    if not shown:
        raise CadenceError("there is no timeline to draw: nothing ran on a device")
    figure = Figure(figsize=(12, 1.6 + 1.9 * len(shown)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(shown), 1, sharex=True, squeeze=False)[:, 0]
    for axis, (name, timeline) in zip(axes, shown, strict=True):
        start = timeline.kernels[0].start
        by_stream: dict[int, list[tuple[float, float]]] = {}
        for kernel in timeline.kernels:
            by_stream.setdefault(kernel.stream, []).append(((kernel.start - start) / 1e3, kernel.duration / 1e3))
        lanes = sorted(by_stream.values(), key=lambda spans: -sum(length for _, length in spans))[:_LANES]
        for lane, spans in enumerate(lanes):
            axis.broken_barh(spans, (lane - 0.4, 0.8), color=STOCK if name == "stock" else PRODUCT, linewidth=0)
        axis.set_yticks([])
        axis.set_ylim(len(lanes) - 0.5, -0.5)
        text = f"{name}: {len(timeline.kernels):,} kernels in {timeline.span_ms:.1f} ms, busy {timeline.busy_ms:.1f} ms"
        hidden = len(by_stream) - len(lanes)
        axis.set_title(text + (f" ({hidden} more streams not drawn)" if hidden else ""), fontsize=10, loc="left")
    axes[-1].set_xlabel("ms since the first kernel; one row for each stream of the device")
    figure.savefig(path, dpi=150)
