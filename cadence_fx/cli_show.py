"""What the command line prints: aligned tables, progress lines and JSON, from plain result objects."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cadence_fx.changes import Change, Rejection, short_source
from cadence_fx.cli_notes import MAX_WIDTH, class_lines, rejection_lines, rewrite_lines

__all__ = ["Report", "Show", "VerifyResult", "VerifyStep"]

Value = object


class VerifyStep(Protocol):
    """One compared call, as `cadence_fx.verify` hands it to its progress callback."""

    # Properties, so that a frozen dataclass is one too.
    @property
    def index(self) -> int: ...
    @property
    def name(self) -> str: ...
    @property
    def equal_pcm(self) -> bool: ...
    @property
    def equal_state(self) -> bool: ...
    @property
    def equal_rng(self) -> bool: ...
    @property
    def seconds_stock(self) -> float: ...
    @property
    def seconds_ours(self) -> float: ...
    @property
    def how(self) -> str: ...


class VerifyResult(Protocol):
    """What `cadence_fx.verify.verify` returns."""

    @property
    def ok(self) -> bool:
        """Every bit equal, and the output able to show a difference."""

    def to_dict(self) -> dict[str, Any]:
        """The fields that ``verify --json`` prints."""


class Report(Protocol):
    """What `cadence_fx.explain.explain` returns."""

    @property
    def regions(self) -> Sequence[Any]:
        """One row a region."""

    @property
    def state_bytes(self) -> int:
        """Bytes of all state and scratch regions, constants apart."""

    @property
    def reserved_bytes(self) -> int:
        """What stock reserves for these."""

    @property
    def catalog(self) -> Sequence[Any]:
        """One row a reachable signature, with the predicted bytes of its static inputs."""

    @property
    def classes(self) -> Sequence[Mapping[str, Any]]:
        """One row a compiled signature."""

    @property
    def rewrites(self) -> Sequence[Change]:
        """What was rewritten."""

    @property
    def rejections(self) -> Sequence[Rejection]:
        """What was left alone and why."""

    def to_dict(self) -> dict[str, Any]:
        """The fields that ``explain --json`` prints."""


REGION_COLUMNS: Mapping[str, str] = {
    "region": "region",
    "clock": "clock",
    "W": "window",
    "s": "stride",
    "K": "width",
    "verdict": "verdict",
    "attended": "attended",
    "envelope": "envelope",
    "bytes": "bytes",
    "stock bytes": "reserved_bytes",
    "rho": "rho",
    "reason": "reason",
}
MAX_CATALOG = 12  # signatures that a listing spells out
NUMBERS = frozenset({"W", "s", "K", "attended", "envelope", "bytes", "stock bytes", "rho"})


class Show:
    """Prints for people on standard output, or on standard error when JSON takes standard output.

    Args:
        json_to: None, "-" for standard output, or a file.
    """

    def __init__(self, json_to: str | None) -> None:
        self.json_to = json_to
        self.console = Console(stderr=json_to == "-", highlight=False, soft_wrap=True)

    def line(self, text: str = "") -> None:
        self.console.print(escape(text))

    def heading(self, text: str) -> None:
        self.console.print(f"\n[bold]{escape(text)}[/bold]")

    def json(self, content: object) -> None:
        """Writes ``content`` where ``--json`` says, or nowhere."""
        if self.json_to is None:
            return
        text = json.dumps(content, indent=2)
        if self.json_to == "-":
            print(text)
        else:
            Path(self.json_to).write_text(text + "\n", encoding="utf-8")

    # -------------------------------------------------------------------------------------- tables
    def table(self, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
        """A rich table on a terminal that is wide enough, aligned text elsewhere."""
        cells = [list(row) for row in rows]
        if self.fits(columns, cells):
            grid = Table(show_edge=False, pad_edge=False)
            for column in columns:
                grid.add_column(escape(column), justify="right" if column in NUMBERS else "left")
            for row in cells:
                grid.add_row(*map(escape, row))
            self.console.print(grid, soft_wrap=False)
            return
        widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
        for row in (list(columns), *cells):
            aligned = (
                cell.rjust(width) if column in NUMBERS else cell.ljust(width)
                for column, cell, width in zip(columns, row, widths, strict=True)
            )
            self.line("  ".join(aligned).rstrip())

    def fits(self, columns: Sequence[str], cells: Sequence[Sequence[str]]) -> bool:
        """True on a terminal that holds the table without breaking a cell."""
        widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
        return self.console.is_terminal and sum(widths) + 3 * len(widths) <= self.console.width

    def regions(self, report: Report) -> None:
        """The region table; where it would be too wide with the reasons, these follow it."""
        columns = [name for name in REGION_COLUMNS if name != "reason" or any(row.reason for row in report.regions)]
        cells = [[cell(name, getattr(row, REGION_COLUMNS[name])) for name in columns] for row in report.regions]
        widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
        narrow = self.fits(columns, cells) if self.console.is_terminal else sum(widths) + 2 * len(widths) <= MAX_WIDTH
        if columns[-1] != "reason" or narrow:
            self.table(columns, cells)
            return
        self.table(columns[:-1], [row[:-1] for row in cells])
        self.line()
        for reason in dict.fromkeys(row.reason for row in report.regions if row.reason):
            names = [row.region for row in report.regions if row.reason == reason]
            self.line(f"  {', '.join(names)}: {reason}")

    def state_bytes(self, report: Report) -> None:
        """Bytes that stock reserves for state against those that the contract's buffers take."""
        ours, stock = report.state_bytes, report.reserved_bytes
        ratio = f", {stock / ours:.2f} times as much" if ours else ""
        self.line(f"state and scratch: {ours:,} bytes in the contract's buffers; stock reserves {stock:,}{ratio}")

    def catalog(self, report: Report) -> None:
        """Every signature that the declared traffic reaches, with the predicted bytes of its static inputs."""
        rows = report.catalog
        lines = [
            f"{row.call:12}  start {row.variant}  {size(row.staged_bytes):>9} of static inputs  at "
            + ", ".join(f"{name}={extent}" for name, extent in row.extents)
            for row in rows[:MAX_CATALOG]
        ]
        if len(rows) > MAX_CATALOG:
            lines.append(f"... and {len(rows) - MAX_CATALOG} more; explain --json lists all")
        self.notes("catalog, signatures that the declared traffic reaches", lines, len(rows))

    def notes(self, title: str, lines: Iterable[str], count: int) -> None:
        """A titled list and how many things it tells of."""
        self.heading(f"{title}: {count or 'none'}")
        for line in lines:
            self.line(f"  {line}")

    def report(self, report: Report, traced: bool = True) -> None:
        """Regions and state bytes; rewrites and rejections too if the module was traced."""
        self.regions(report)
        self.line()
        self.state_bytes(report)
        self.catalog(report)
        if not traced:
            return
        if report.classes:
            names = "/".join(report.classes[0]["extents"]) or "no growing state"
            self.notes(f"shapes compiled, by extents of {names}", class_lines(report.classes), len(report.classes))
        self.notes("rewrites made", rewrite_lines(report.rewrites), sum(change.count for change in report.rewrites))
        self.notes("rewrites declined", rejection_lines(report.rejections), len(report.rejections))

    # -------------------------------------------------------------------------------------- verification
    def step(self, step: VerifyStep) -> None:
        """One line a call: what is equal, how it was served, and the time of both."""
        parts = (("pcm", step.equal_pcm), ("state", step.equal_state), ("generator", step.equal_rng))
        verdicts = "  ".join(f"{name} {'equal' if equal else 'DIFFERENT'}" for name, equal in parts)
        times = f"stock {step.seconds_stock:.3f} s, ours {step.seconds_ours:.3f} s"
        style = "green" if step.equal_pcm and step.equal_state and step.equal_rng else "bold red"
        self.console.print(
            f"{step.index:>4}  {escape(step.name):<12}  {step.how:<6}  {verdicts}  ({times})", style=style
        )

    def verdict(self, result: VerifyResult) -> None:
        """The summary of a verification."""
        found = result.to_dict()
        self.line()
        chunks = f"{found['chunks']} chunks of {found['family']} on {found['device']}, torch {found['torch']}"
        if result.ok:
            self.console.print(f"equal to stock in every bit: {escape(chunks)}", style="green")
        else:
            for line in failure(found, chunks):
                self.console.print(escape(line), style="bold red")
        eager = found["eager"]
        reasons = "".join(f"\n  {count} x {reason}" for reason, count in eager.items())
        served = f"replayed {found['replays']}, run from the plan {found['plan']}, run as stock {sum(eager.values())}"
        self.line(f"{served}{reasons}")
        if apart := (found.get("flags") or {}).get("disagreement"):
            at = f"{apart['operator']} [{short_source(apart['source'])}]"
            self.line(
                f"stock does not agree with itself under {apart['under']}: {at}; cuDNN's deterministic kernels are used"
            )
        self.line(f"one SHA-256 over all chunks: {found['sha256']}")


def failure(found: Mapping[str, Any], chunks: str) -> list[str]:
    """Why a verification failed: another bit, a stock that differs from itself, or an output that shows nothing."""
    if found["first_mismatch"]:
        where = found["first_mismatch"]
        at = f"{where['where']} at {where['index']}" if where["index"] else where["where"]
        values = f"stock has {where['expected']}, found {where['found']} ({where['count']} elements differ)"
        lines = [f"NOT equal to stock: {chunks}"]
        lines.append(f"first mismatch: step {where['step']} ({where['name']}), {at}: {values}")
    else:
        lines = [f"equal, but proves nothing: {chunks}"]
    if not found["self_agreement"]:
        lines.append("stock does not agree with itself here: its kernels are not deterministic under these flags")
    elif not found["first_mismatch"]:
        distinct, clipped = found["output"].get("distinct", 0), found["output"].get("clipped", 0.0)
        limits = f"{distinct} distinct values, {clipped:.1%} at the limits".replace("%", " %")
        lines.append(f"the output is constant or saturated: {limits}")
    return lines


# ------------------------------------------------------------------------------------------ cells
def cell(column: str, value: Value) -> str:
    """The text of one value."""
    match value:
        case None:
            return "-"
        case int() if "bytes" in column:
            return size(value)
        case float():
            return f"{value:.2f}"
        case list() | tuple():
            return extents(value)
    return str(value)


def size(count: int) -> str:
    """Bytes with a binary unit: ``18.0 MiB``."""
    amount, units = float(count), ["KiB", "MiB", "GiB"]
    if count < 1024:
        return f"{count} B"
    while amount >= 1024 and units:
        amount, unit = amount / 1024, units.pop(0)
    return f"{amount:.1f} {unit}"


def extents(values: Sequence[object]) -> str:
    """Up to four extents in full, more by their ends and number."""
    if len(values) > 4:
        return f"{values[0]}..{values[-1]} ({len(values)})"
    return ", ".join(map(str, values)) or "-"
