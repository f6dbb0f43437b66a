"""The report: what follows from a contract, and what was rewritten, refused and captured for it.

`cadence_fx.explain` fills the first part from the contract alone; transforming a module adds the rest with
`dataclasses.replace`. A report is a value: ``str()`` is for people, `Report.to_dict` for programs.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from fractions import Fraction

from cadence_fx.catalog import CaptureBytes, ClassBytes
from cadence_fx.changes import Change, Rejection
from cadence_fx.contract import Arg, Attr, Clock, Result
from cadence_fx.extents import RegionExtents

__all__ = ["Report"]

MAX_ROWS = 12  # rows of the catalog in the text; `to_dict` has them all


@dataclass(frozen=True)
class Report:
    """What is known about a module under its contract. Sizes are in bytes, extents in elements.

    Args:
        family: name of the contract.
        regions: extents, widths, verdicts and bytes of each region.
        catalog: one row for each reachable signature.
        clocks: the declared clocks.
        state_bytes: envelopes of all state and scratch regions.
        reserved_bytes: what stock reserves for the same regions.
        predicted_bytes: what the captures will hold, the paper's equation 6.
        rewrites: changes that passes made.
        rejections: what passes left alone, and why.
        classes: one object for each captured class, filled by the runtime.
        notes: further sentences for the reader.
        schema_version: version of `to_dict`.
    """

    family: str
    regions: tuple[RegionExtents, ...]
    catalog: tuple[ClassBytes, ...]
    clocks: tuple[Clock, ...]
    state_bytes: int
    reserved_bytes: int
    predicted_bytes: CaptureBytes
    rewrites: tuple[Change, ...] = ()
    rejections: tuple[Rejection, ...] = ()
    classes: tuple[Mapping[str, object], ...] = ()
    notes: tuple[str, ...] = ()
    schema_version: int = 1

    @property
    def rho(self) -> float | None:
        """Over-reservation of all regions together; None if they hold nothing."""
        return self.reserved_bytes / self.state_bytes if self.state_bytes else None

    def to_dict(self) -> dict[str, object]:
        """The report as JSON-safe values."""
        plain: dict[str, object] = {field.name: _plain(getattr(self, field.name)) for field in fields(self)}
        return {"schema_version": plain.pop("schema_version"), **plain, "rho": self.rho}

    def to_json(self, indent: int | None = 2) -> str:
        """`to_dict` as text."""
        return json.dumps(self.to_dict(), indent=indent, allow_nan=False)

    def __str__(self) -> str:
        parts = [f"cadence_fx report: {self.family}", self._clock_text(), self._region_text(), self._byte_text()]
        parts += [self._catalog_text(), self._pass_text(), self._class_text()]
        parts.append(_section("notes", self.notes))
        return "\n\n".join(part for part in parts if part)

    def _clock_text(self) -> str:
        return _table("clocks", ("clock", "rate"), [(clock.name, _rate(clock)) for clock in self.clocks])

    def _region_text(self) -> str:
        header = ("region", "clock", "W", "s", "K", "verdict", "attended", "envelope", "bytes", "stock", "rho")
        rows = [
            (
                r.region, r.clock or "-", _cell(r.window), _cell(r.stride), _cell(r.width), r.verdict,
                _span(r.attended), _cell(r.envelope), _cell(r.bytes), _cell(r.reserved_bytes),
                "-" if r.rho is None else f"{r.rho:.2f}",
            )
            for r in self.regions
        ]  # fmt: skip
        reasons = [f"{r.region}: {r.verdict}, {r.reason}" for r in self.regions]
        return "\n\n".join(filter(None, (_table("regions", header, rows), _section("verdicts", reasons))))

    def _byte_text(self) -> str:
        predicted, rho = self.predicted_bytes, "" if self.rho is None else f", {self.rho:.2f}x less than stock"
        rows = [
            ("state, sized to demand", f"{self.state_bytes:,} B{rho}"),
            ("state, as stock reserves", f"{self.reserved_bytes:,} B"),
            ("captures, static inputs", f"{predicted.staged_total:,} B in {len(predicted.classes)} classes"),
            ("captures, fixed envelopes", f"{predicted.frozen_total:,} B (part of the state above)"),
        ]
        return _table("bytes", (), rows)

    def _catalog_text(self) -> str:
        rows = [
            (c.call, str(c.variant), ", ".join(f"{k}={v}" for k, v in c.extents) or "-", f"{c.staged_bytes:,}")
            for c in self.catalog
        ]
        title = f"catalog ({len(rows)} signature{'' if len(rows) == 1 else 's'})"
        text = _table(title, ("call", "variant", "extents", "staged bytes"), rows[:MAX_ROWS])
        return f"{text}\n  ... and {len(rows) - MAX_ROWS} more" if len(rows) > MAX_ROWS else text

    def _pass_text(self) -> str:
        made = _section(f"rewrites ({sum(c.count for c in self.rewrites)})", map(str, self.rewrites))
        left = _section(f"left alone ({len(self.rejections)})", map(str, self.rejections))
        return "\n\n".join(filter(None, (made, left)))

    def _class_text(self) -> str:
        rows = (", ".join(f"{key}={value}" for key, value in row.items()) for row in self.classes)
        return _section(f"captured classes ({len(self.classes)})", rows)


# ---------------------------------------------------------------------------------------------- text
def _rate(clock: Clock) -> str:
    parts = [f"{clock.hz:g} Hz"] if clock.hz is not None else []
    parts += [f"{clock.ratio} per {clock.of}"] if clock.of else []
    parts += [f"{clock.extent} per call"] if clock.extent else []
    parts += [" x ".join(clock.product)] if clock.product else []
    return ", ".join(parts) or "-"


def _cell(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def _span(extents: Sequence[int]) -> str:
    """A few extents in full, many as a range."""
    if len(extents) <= 6:
        return "/".join(map(str, extents)) or "-"
    return f"{extents[0]}..{extents[-1]} ({len(extents)})"


def _section(title: str, lines: Iterable[str]) -> str:
    body = [line.replace("\n", "\n    ") for line in lines]
    return "\n".join([title, *(f"  {line}" for line in body)]) if body else ""


def _table(title: str, header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """Aligned columns; numbers to the right, text to the left."""
    if not rows:
        return ""
    columns = list(zip(*rows, strict=True))
    heads = header or ("",) * len(columns)
    widths = [max(map(len, (head, *column))) for head, column in zip(heads, columns, strict=True)]
    numeric = [all(c.replace(",", "").replace(".", "").isdigit() or c == "-" for c in column) for column in columns]
    lines = [
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, numeric, strict=True)
        ).rstrip()
        for row in ([header] if header else []) + list(rows)
    ]
    return _section(title, lines)


def _plain(value: object) -> object:
    """``value`` in the types that JSON has."""
    convert = getattr(value, "to_dict", None)
    if convert is not None:
        return convert()
    if is_dataclass(value) and not isinstance(value, (type, Arg, Attr, Result)):  # places read better as text
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return str(value) if not isinstance(value, Fraction) or value.denominator != 1 else int(value)
