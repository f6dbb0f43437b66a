"""What the budget has no room for is refused before the first capture, and the refusal names the axis to narrow."""

from __future__ import annotations

import dataclasses

from cadence_fx.budget import axes, within_budget
from cadence_fx.catalog import Signature, signatures
from cadence_fx.refusal import BYTE_LIMIT, GRAPH_LIMIT, Refusal
from tests.streams import contract
from tests.test_captures import captured, play

WANTED = signatures(contract((2, 3)))


def refused(**limits: int | None) -> dict[Signature, Refusal]:
    """What a budget refuses of the whole catalog, each class taking 100 bytes."""
    declared = dataclasses.replace(contract((2, 3)), **limits)  # type: ignore[arg-type]
    return within_budget(declared, WANTED, dict.fromkeys(WANTED, 100))


def test_everything_fits_into_a_large_budget() -> None:
    assert refused(max_graphs=1000, max_bytes=None) == {}


def test_the_regular_cadence_gets_the_room_first() -> None:
    declared = contract((2, 3))
    steady = {c.name for c in declared.calls if c.steady}
    wanted = sorted(signatures(declared), key=lambda s: s.call in steady)  # the others first
    room = sum(s.call in steady for s in wanted)
    limits = dataclasses.replace(declared, max_graphs=room)
    assert {s.call for s in wanted if s not in within_budget(limits, wanted, {})} == steady


def test_a_refusal_names_the_widest_axis_its_values_and_the_way_out() -> None:
    refusal = next(iter(refused(max_graphs=2).values()))
    widest = axes(WANTED)[0]
    assert refusal.code == GRAPH_LIMIT
    assert f"the widest axis is {len(widest.values)} of {widest.name} ({widest.values[0]}" in refusal.detail
    assert widest.remedy in refusal.detail


def test_bytes_are_counted_before_anything_is_captured() -> None:
    found = refused(max_bytes=250)
    assert len(found) == len(WANTED) - 2
    refusal = next(iter(found.values()))
    assert refusal.code == BYTE_LIMIT
    assert "250" in refusal.detail
    assert "needs 100" in refusal.detail


def test_what_does_not_fit_is_never_captured_and_runs_bit_for_bit_and_counted() -> None:
    """G1-22: the bound is visible in the report with the shapes that were refused."""
    module, fast, backend = captured()
    captures = fast._captures
    assert captures is not None
    captures.contract = dataclasses.replace(fast.contract, max_graphs=2)
    fast.warmup("all").seal()
    assert backend.log.count("capture") == 2
    left = [row for row in captures.rows.values() if not row.captured]
    assert len(left) == len(captures.rows) - 2 > 0
    assert all(row.refusals[0].code == GRAPH_LIMIT for row in left)
    assert play(module, fast, [2, 3, 2, 2, 3, 3, 2, 2])
    stats = fast.stats()
    assert stats["plan"] == stats["misses"]["capture refused: graph limit"] > 0
