"""Rewrites and rejections as lines for people: what is alike is told once, with its places below it."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from cadence_fx.changes import Change, Rejection, short_source

__all__ = ["MAX_WIDTH", "class_lines", "rejection_lines", "rewrite_lines"]

MAX_WIDTH = 160
Item = TypeVar("Item")
Key = TypeVar("Key", bound=Hashable)


def rewrite_lines(changes: Sequence[Change]) -> Iterator[str]:
    """Rewrites by pass and kind; operators that share a reason and have no source line go on one line.

    ``eliminate_dead: removed 3: nothing reads it`` and below it ``2 x aten.add.Tensor, 1 x aten.mul.Tensor``.
    """
    for (pass_name, what), group in _grouped(changes, lambda change: (change.pass_name, change.what)):
        reasons = {change.why for change in group}
        common = f": {reasons.pop()}" if len(reasons) == 1 else ""
        yield f"{pass_name}: {what} {sum(change.count for change in group)}{common}"
        places = [(change.count, _place(change, with_reason=not common)) for change in group]
        if common and not any(change.source for change in group):
            yield from _wrapped(", ".join(f"{count} x {place}" for count, place in places))
        else:
            for count, place in places:
                yield from _wrapped(f"{count} x {place}")


def rejection_lines(rejections: Sequence[Rejection]) -> Iterator[str]:
    """Rejections by code and hints, so that a hint is read once."""
    for (code, title, pass_name, hints), group in _grouped(
        rejections, lambda left: (left.code, left.title, left.pass_name, left.hints)
    ):
        yield f"{code} {title} ({pass_name})" if title else f"{code} ({pass_name})"
        for left in group:
            at = f" [{short_source(left.source)}]" if left.source else ""
            yield from _wrapped(f"{left.node}: {left.explanation}{at}")
        for hint in hints:
            yield from _wrapped(f"hint: {hint}")


def class_lines(classes: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """What became of each compiled shape: operators before and after, and its capture or why there is none."""
    for row in classes:
        extents = "/".join(map(str, row["extents"].values()))
        at = f"{row['call']} at {extents}" if extents else str(row["call"])
        yield from _wrapped(
            f"{at}: {row['operators_before']} -> {row['operators_after']} operators{_capture(row['capture'])}"
        )


def _capture(row: Mapping[str, Any] | None) -> str:
    """The end of a shape's line; nothing where captures are off."""
    if row is None:
        return ""
    refused = "".join(f"; {left['reason']}: {left['detail']}" for left in row["refusals"])
    if not row["captured"]:
        return f", not captured{refused}"
    parts = [part for part in row["segments"] if part["captured"]]
    where = f" in {len(parts)} of {len(row['segments'])} segments" if row["segments"] else ""
    return f", captured{where} with {row['measured_bytes']:,} bytes{refused}"


def _place(change: Change, with_reason: bool) -> str:
    reason = f": {change.why}" if with_reason else ""
    at = f" [{short_source(change.source)}]" if change.source else ""
    return f"{change.where}{reason}{at}"


def _grouped(items: Iterable[Item], key: Callable[[Item], Key]) -> Iterator[tuple[Key, list[Item]]]:
    """Items by key, groups in the order of their first items."""
    groups: dict[Key, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    yield from groups.items()


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, MAX_WIDTH - 4, initial_indent="  ", subsequent_indent="      ", break_long_words=False)
