from __future__ import annotations

import json
from dataclasses import FrozenInstanceError, replace

import pytest

from cadence_fx import catalog
from cadence_fx.changes import CODES, Change, Rejection, register
from cadence_fx.errors import CadenceError
from cadence_fx.explain import explain
from cadence_fx.report import Report
from cadence_fx.retention import KeepAll
from tests.decoder import alone, full, line, solver_kv


# ---------------------------------------------------------------------------------------------- explain
def test_explaining_a_contract_needs_no_module():
    report = explain(None, full())
    assert isinstance(report, Report)
    assert report.family == "token2wav"
    assert [r.region for r in report.regions] == [r.name for r in full().regions]
    assert len(report.catalog) == 87
    assert report.notes == ()


def test_the_report_totals_leave_constants_out_and_count_shared_scratch_once():
    report = explain(None, full())
    bytes_of = {r.region: r.bytes or 0 for r in report.regions}
    assert bytes_of["workspace"] == 0
    assert report.state_bytes == sum(bytes_of.values()) == 600_309_760 + 4_194_304 + 18_759_680 + 20_480 + 2 * 122_880
    assert report.reserved_bytes - report.state_bytes == 2 * 2_097_152_000 - 600_309_760
    assert report.rho == pytest.approx(report.reserved_bytes / report.state_bytes)


def test_owned_state_is_not_staged_in_the_prediction():
    report = explain(None, full())
    assert report.predicted_bytes.frozen_total == report.state_bytes
    assert {row.staged_bytes for row in report.catalog if row.call == "chunk"} == {28 * 4 + 192 * 4}


def test_a_catalog_beyond_max_graphs_is_noted():
    (note,) = explain(None, full(max_graphs=50)).notes
    assert note.startswith("the catalog has 87 signatures, more than max_graphs = 50")


def test_a_contract_without_calls_says_why_its_catalog_is_empty():
    report = explain(None, alone(solver_kv(strides=(50,))))
    assert report.catalog == ()
    assert report.notes[-1].startswith("no calls are declared, so the catalog is empty")


def test_unknown_bytes_are_noted_and_in_no_total():
    report = explain(None, alone(line(KeepAll(), 0, strides=(1,), reserved=(4698,))))
    assert report.notes[0] == "line: the bytes are unknown and in no total"
    assert (report.state_bytes, report.reserved_bytes, report.rho) == (0, 0, None)


def test_a_catalog_without_end_is_noted_and_the_rest_still_holds(monkeypatch):
    monkeypatch.setattr(catalog, "MAX_STATES", 2)
    report = explain(None, full())
    assert report.catalog == ()
    assert "calls reach more than 2 states" in report.notes[0]
    assert report.regions[0].width == 3


# ---------------------------------------------------------------------------------------------- text and JSON
def test_the_text_report_has_aligned_columns_and_the_numbers_of_the_decoder():
    text = str(explain(None, full()))
    header, row = (line for line in text.splitlines() if line.startswith(("  region ", "  solver_kv ")))
    for title, cell in (("clock", "mel_frame"), ("verdict", "capture"), ("attended", "302/352/402")):
        assert header.index(title) == row.index(cell)
    for title, cell in (("bytes", "600,309,760"), ("stock", "2,097,152,000"), ("rho", "3.49"), ("envelope", "458")):
        assert header.index(title) + len(title) == row.index(cell) + len(cell)
    assert "catalog (87 signatures)" in text
    assert "  ... and 75 more" in text
    assert max(map(len, text.splitlines())) <= 120
    assert all(line == line.rstrip() for line in text.splitlines())


def test_the_text_report_shows_what_the_runtime_adds():
    change = Change("hoist_constants", "hoisted", "linear_3", "constant clock", count=160)
    rejection = Rejection("CX901", "ring_writeback", "cat_7", "two users", hints=("return one view",), source="m.py:3")
    report = replace(
        explain(None, full()),
        rewrites=(change,),
        rejections=(rejection,),
        classes=({"call": "chunk", "bytes": 12},),
        notes=("captured on demand",),
    )
    text = str(report)
    assert "rewrites (160)\n  hoist_constants: hoisted linear_3 (160x): constant clock" in text
    assert "left alone (1)\n  CX901: ring_writeback left cat_7 alone: two users [m.py:3]" in text
    assert "hint: return one view" in text
    assert "captured classes (1)\n  call=chunk, bytes=12" in text
    assert "notes\n  captured on demand" in text


def test_many_extents_are_shown_as_a_range():
    text = str(explain(None, alone(solver_kv(strides=(2,)))))
    assert "302..402 (51)" in text


def test_the_report_converts_to_json_and_carries_its_schema_version():
    report = replace(
        explain(None, full()),
        rewrites=(Change("p", "w", "n", "y"),),
        rejections=(Rejection("CX901", "p", "n", "e"),),
        classes=({"extents": (302, 352), "place": full().inputs[0].place},),
    )
    plain = json.loads(report.to_json())
    assert next(iter(plain)) == "schema_version"
    assert plain["schema_version"] == 1
    assert plain["regions"][0]["envelope"] == 458
    assert len(plain["catalog"]) == 87
    assert plain["catalog"][0]["extents"]["solver_kv"] == 302
    assert plain["clocks"][1]["ratio"] == 2
    assert plain["rewrites"] == [{"pass_name": "p", "what": "w", "where": "n", "why": "y", "source": "", "count": 1}]
    assert plain["rejections"][0]["hints"] == []
    assert plain["classes"] == [{"extents": [302, 352], "place": "arg['token']"}]
    assert plain["predicted_bytes"]["total"] == report.predicted_bytes.total


def test_a_report_is_frozen():
    with pytest.raises(FrozenInstanceError):
        explain(None, full()).family = "x"  # type: ignore[misc]


# ---------------------------------------------------------------------------------------------- changes
@pytest.fixture
def registry(monkeypatch):
    """Codes as they are, put back after the test."""
    saved = dict(CODES)
    yield CODES
    CODES.clear()
    CODES.update(saved)


def test_a_code_is_registered_once_and_gives_rejections_their_title(registry):
    assert register("CX999", "state is read after it is written") == "CX999"
    rejection = Rejection("CX999", "ring_writeback", "cat", "expected one user, found two")
    assert rejection.title == "state is read after it is written"
    assert str(rejection).startswith("CX999 state is read after it is written: ring_writeback left cat alone: expected")
    with pytest.raises(CadenceError, match="code CX999 is taken by 'state is read after it is written'; pick a free"):
        register("CX999", "state is read after it is written")


@pytest.mark.parametrize("code", ["CX12", "cx123", "CX1234", "XX123"])
def test_a_code_of_another_form_is_refused(registry, code):
    with pytest.raises(CadenceError, match=f"code is '{code}'; codes look like CX103"):
        register(code, "title")
    assert code not in registry


def test_a_code_without_a_title_is_refused(registry):
    with pytest.raises(CadenceError, match="code CX998 has an empty title"):
        register("CX998", " ")


def test_changes_and_rejections_are_values():
    assert Change("p", "w", "n", "y") == Change("p", "w", "n", "y")
    rejection = Rejection("CX901", "p", "n", "e", hints=["a"])  # type: ignore[arg-type]
    assert rejection.hints == ("a",)
    assert len({rejection, Rejection("CX901", "p", "n", "e", hints=("a",))}) == 1
    assert str(Change("p", "w", "n", "y", source="m.py:1")) == "p: w n: y [m.py:1]"
