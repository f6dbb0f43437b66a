"""A picture of the cells: time of a chunk and peak of memory, side by side. Needs the ``viz`` extra."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cadence_fx.errors import CadenceError

__all__ = ["draw", "require_matplotlib"]

STOCK, PRODUCT, OTHER = "#7f7f7f", "#d95f02", "#5b8db8"
ROW_INCHES = 0.42


def require_matplotlib() -> None:
    """Checked before a long run.

    Raises:
        CadenceError: matplotlib is not installed.
    """
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError:
        raise CadenceError("--plot needs matplotlib: pip install 'cadence-fx[viz]'") from None


def draw(found: Mapping[str, Any], path: Path | str) -> None:
    """Draw a benchmark's JSON to a file; its suffix selects the format.

    Bars are medians; a tick marks the 95th percentile. Hatched bars are cells whose bits are not stock's. Cells that
    could not be measured are named, without a bar. Where no memory was counted, as on a CPU, there are times only.
    """
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    cells = list(found["cells"].items())
    with_memory = any(cell["peak_mib"] is not None for _, cell in cells)
    figure = Figure(figsize=(11 if with_memory else 7.5, 1.4 + ROW_INCHES * len(cells)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, 2 if with_memory else 1, sharey=True, squeeze=False)[0]
    _bars(axes[0], cells, "p50_ms", "time of a chunk in ms: median, tick at the 95th percentile", "{:,.1f}", found)
    if with_memory:
        _bars(axes[1], cells, "peak_mib", "allocator's peak of the process in MiB", "{:,.0f}", found)
    axes[0].set_yticks(range(len(cells)), [f"{name.rpartition(':')[2]}: {cell['title']}" for name, cell in cells])
    axes[0].invert_yaxis()
    figure.suptitle(_title(found), fontsize=10)
    figure.savefig(path, dpi=150)


def _bars(axis: Any, cells: list[tuple[str, Any]], key: str, label: str, number: str, found: Mapping[str, Any]) -> None:
    stock = found["cells"]["B0"][key]
    top = max((cell["p95_ms"] if key == "p50_ms" else cell[key] or 0) or 0 for _, cell in cells)
    for row, (name, cell) in enumerate(cells):
        value = cell[key]
        if value is None:
            axis.text(0, row, " not measured", va="center", fontsize=8, color=STOCK, style="italic")
            continue
        differs = cell["bits_equal"] is False
        colour = STOCK if name.startswith("B0") else PRODUCT if name.startswith("ours") else OTHER
        axis.barh(row, value, color=colour, height=0.66, hatch="////" if differs else None, edgecolor="white")
        if key == "p50_ms":
            axis.plot([cell["p95_ms"]] * 2, [row - 0.33, row + 0.33], color="black", linewidth=1)
        text = number.format(value)
        if stock and name != "B0":
            text += f"  ({stock / value:.2f}x)" if key == "p50_ms" else f"  ({value / stock:.0%})"
        if differs:
            text += "  bits differ"
        axis.text(max(value, cell["p95_ms"] if key == "p50_ms" else 0) + 0.01 * top, row, text, va="center", fontsize=8)
    axis.set_xlim(0, 1.32 * top if top else 1)  # room for the longest label
    axis.set_xlabel(label, fontsize=9)
    axis.tick_params(labelsize=9)
    axis.tick_params(axis="y", length=0)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)


def _title(found: Mapping[str, Any]) -> str:
    """What was measured, on what: ``token2wav (n_timesteps=5) on NVIDIA H200, torch 2.11.0; 4 blocks of 40 chunks``."""
    options = ", ".join(f"{name}={value}" for name, value in found["options"].items())
    under = f" under autocast to {found['autocast']}" if found["autocast"] else ""
    environment = found["environment"]
    where = f"{environment.get('device')}, torch {environment.get('torch')}"
    blocks = f"{found['blocks']} blocks of {found['chunks']} chunks"
    return f"{found['target']}{f' ({options})' if options else ''}{under} on {where}; {blocks}; hatched: bits differ"
