"""What ``cadence-fx bench`` shows: a progress bar while it runs, then a table of cells and their ratios."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from cadence_fx.cli_show import Show

if TYPE_CHECKING:
    from cadence_fx.bench import Event

__all__ = ["bench_progress", "show_bench", "show_profile"]

COLUMNS = (
    "cell", "p50 ms", "p95 ms", "device ms", "vs B0", "peak MiB", "of B0", "serving MiB", "bits", "ran",
    "prepared in s", "what it is",
)  # fmt: skip


class _Bar:
    """One bar over all cells: a unit for each that is ready and one for each of its blocks."""

    def __init__(self, show: Show, bar: Progress, cells: int, blocks: int) -> None:
        self.show, self.bar = show, bar
        self.left = dict[str, int]()  # units of each cell
        self.units = 1 + blocks
        self.task = bar.add_task("starting", total=cells * self.units)

    def __call__(self, event: Event) -> None:
        self.bar.update(self.task, description=f"{event.what} {event.cell}")
        left = self.left.setdefault(event.cell, self.units)
        done = {"ready": 1, "block": 1, "failed": left}.get(event.what, 0)  # of one that failed nothing more comes
        self.left[event.cell] = left - done
        self.bar.advance(self.task, done)
        if event.what == "failed":
            self.show.line(f"{event.cell}: {event.text}")


@contextmanager
def bench_progress(show: Show, cells: int, blocks: int) -> Iterator[_Bar]:
    """A progress bar on the console that `show` prints to."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=show.console) as bar:
        yield _Bar(show, bar, cells, blocks)


def show_bench(show: Show, found: dict[str, Any]) -> None:
    """The table, why cells failed or differ, and the ratios with their intervals."""
    cells, ratios = found["cells"], found["ratios"]
    show.table(COLUMNS, [_row(name, cell, ratios) for name, cell in cells.items()])
    show.line()
    for name, cell in cells.items():
        if cell["error"]:
            show.line(f"{name}: {cell['error'].splitlines()[0]}")
        for text in cell["differences"]:
            show.line(f"{name} differs from B0 in {text}")
    for name, ratio in ratios.items():
        show.line(f"{name}: {ratio_text(ratio)}")


def ratio_text(ratio: dict[str, Any] | None, digits: int = 3) -> str:
    """A ratio with its interval: ``3.214 [3.190, 3.238]``."""
    if ratio is None:
        return "-"
    text = f"{ratio['ratio']:.{digits}f}"
    if ratio.get("low") is None:
        return text
    return f"{text} [{ratio['low']:.{digits}f}, {ratio['high']:.{digits}f}]"


def _row(name: str, cell: dict[str, Any], ratios: dict[str, Any]) -> list[str]:
    bits = {True: "equal", False: "DIFFERENT", None: "-"}[cell["bits_equal"]]
    return [
        name,
        _number(cell["p50_ms"]),
        _number(cell["p95_ms"]),
        _number(cell["device_p50_ms"]),
        ratio_text(ratios.get(f"p50 B0/{name}"), 2),
        _number(cell["peak_mib"], 0),
        ratio_text(ratios.get(f"peak {name}/B0"), 2),
        _number(cell["serving_peak_mib"], 0),
        bits,
        ", ".join(f"{count} {name}" for name, count in cell["ran"].items() if count) or "-",
        _number(cell["prepare_seconds"], 0),
        cell["title"],
    ]


def _number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def show_profile(show: Show, found: dict[str, Any]) -> None:
    """Timelines of stock and ours, the parts with their slack, and what takes most of the time."""
    runs = [(name, found[key]) for name, key in (("stock", "stock"), ("ours", "replay")) if found[key] is not None]
    columns = ("run", "kernels", "span ms", "busy ms", "idle ms", "sum ms")
    show.table(
        columns,
        [(name, f"{run['kernels']:,}", *(f"{run[key]:.2f}" for key in ("span_ms", "busy_ms", "idle_ms", "sum_ms")))
         for name, run in runs],
    )  # fmt: skip
    show.heading("parts of our chunk, operators one after the other")
    show.table(
        ("part", "operators", "kernels", "ms", "on the critical path", "roofline ms", "gamma"),
        [(p["part"], f"{p['operators']:,}", f"{p['kernels']:,}", f"{p['chain_ms']:.2f}", f"{p['critical_ms']:.2f}",
          f"{p['bound_ms']:.2f}", "-" if p["gamma"] is None else f"{p['gamma']:.1f}") for p in found["parts"]],
    )  # fmt: skip
    times = found["times_critical"]
    show.line()
    show.line(
        f"critical path: {found['critical_ms']:.2f} ms in {found['critical_operators']:,} operators"
        + ("" if times is None else f"; a replay takes {times:.2f} times as long")
    )
    show.heading("operators and kernels that take most")
    rows = [("operator", *row) for row in found["by_target"][:8]] + [("kernel", *row) for row in found["by_kernel"][:8]]
    show.table(("", "name", "launched", "ms"), [(k, n[:90], f"{c:,}", f"{ms:.2f}") for k, n, c, ms in rows])
