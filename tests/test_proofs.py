"""Keeping verdicts: only complete ones, only under their own key, and never half a file."""

from __future__ import annotations

import json
import logging
import os
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import fx

from cadence_fx import proofs as module
from cadence_fx import verdicts
from cadence_fx.proofs import Check, Mismatch, ProofKey, Proofs, UnaryOperator, Verdict, cache_folder, write_proofs
from cadence_fx.specialise import TensorMeta
from cadence_fx.verdicts import LAYOUTS

KEY = ProofKey(
    "NVIDIA Some GPU", "580.1", "2.13.0", "13.0", "triton 3.6.0", (("emulate_precision_casts", "true"), ("x", '"off"'))
)
EXP = UnaryOperator.make("aten.exp.default", "float16")
POW = UnaryOperator.make("aten.pow.Tensor_Scalar", "float32", 2)
CHECKS = tuple(Check("f(x)", layout) for layout in sorted(LAYOUTS))


def exact(operator: UnaryOperator = EXP, key: ProofKey = KEY) -> Verdict:
    return Verdict(operator, key, operator.domain, CHECKS, 0.5)


def different(operator: UnaryOperator = EXP) -> Verdict:
    found = Check("f(x)", "odd", nan=2, others=1, first=Mismatch("0x0001", "0x0002", "0x0003"))
    return replace(exact(operator), checks=(found, *(c for c in CHECKS if c.layout != "odd")))


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "not" / "there yet"


@pytest.fixture
def shipped(tmp_path: Path) -> Path:
    folder = tmp_path / "shipped"
    folder.mkdir()
    return folder


# ------------------------------------------------------------------------------------------ round trip
def test_what_was_added_is_there_in_the_next_process(cache: Path, shipped: Path) -> None:
    proofs = Proofs(KEY, cache, shipped)
    assert proofs.lookup(EXP) is None
    proofs.add(exact())
    proofs.add(different(POW))
    again = Proofs(KEY, cache, shipped)
    assert again.lookup(EXP) == exact()
    assert again.lookup(POW) == different(POW)
    assert len(again) == 2
    assert {verdict.exact for verdict in again} == {True, False}
    assert again.lookup(UnaryOperator.make("aten.pow.Tensor_Scalar", "float32", 2.0)) is None
    assert [path.name for path in cache.iterdir()] == [f"nvidia_some_gpu-{KEY.digest}.json"]


def test_what_two_processes_add_is_kept_of_both(cache: Path, shipped: Path) -> None:
    one, other = Proofs(KEY, cache, shipped), Proofs(KEY, cache, shipped)
    one.add(exact())
    other.add(exact(POW))
    assert len(Proofs(KEY, cache, shipped)) == 2


def test_a_node_is_proven_if_its_very_operator_is_exact(cache: Path, shipped: Path) -> None:
    proofs = Proofs(KEY, cache, shipped)
    proofs.add(exact(), different(POW))
    graph = fx.Graph()
    x = graph.placeholder("x")
    found = {}
    for name, dtype, target, *others in (
        ("exact", torch.float16, torch.ops.aten.exp.default),
        ("another dtype", torch.float32, torch.ops.aten.exp.default),
        ("different", torch.float32, torch.ops.aten.pow.Tensor_Scalar, 2),
        ("unknown", torch.float16, torch.ops.aten.sin.default),
        ("no function of one element", torch.float16, torch.ops.aten.cumsum.default, 0),
    ):
        node = graph.call_function(target, (x, *others))
        x.meta["val"] = node.meta["val"] = TensorMeta((3,), (1,), dtype, torch.device("cpu"))
        found[name] = proofs.proven(node)
    assert [name for name, proven in found.items() if proven] == ["exact"]


def test_a_later_verdict_replaces_an_earlier_one(cache: Path, shipped: Path) -> None:
    proofs = Proofs(KEY, cache, shipped)
    for verdict in (different(), exact()):
        proofs.add(verdict)
        assert proofs.lookup(EXP) == Proofs(KEY, cache, shipped).lookup(EXP) == verdict


@pytest.mark.parametrize("exact_is_shipped", [True, False])
def test_where_shipped_and_own_proofs_disagree_the_difference_counts(
    exact_is_shipped: bool, cache: Path, shipped: Path
) -> None:
    verdicts = [exact(), different()] if exact_is_shipped else [different(), exact()]
    write_proofs(shipped / "some.json", KEY, verdicts[:1])
    write_proofs(cache / "some.json", KEY, verdicts[1:])
    assert Proofs(KEY, cache, shipped).lookup(EXP) == different()


def test_the_cache_is_where_the_platform_keeps_caches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for value in ("", "relative/path"):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert cache_folder() == tmp_path / ".cache" / "cadence_fx" / "proofs"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert cache_folder() == tmp_path / "cache" / "cadence_fx" / "proofs"
    assert Proofs(KEY).path.parent == cache_folder()


def test_shipped_proofs_are_of_this_form() -> None:
    for path in module.SHIPPED.glob("*.json"):
        content = json.loads(path.read_text())
        key = ProofKey.from_dict(content["key"])
        assert len(module._read(path, key)) == len(content["verdicts"]) > 0


# ------------------------------------------------------------------------------------------ keys
@pytest.mark.parametrize(
    "change",
    [
        {"device": "NVIDIA Another GPU"},
        {"driver": "580.2"},
        {"torch_version": "2.13.1"},
        {"cuda_version": "13.1"},
        {"compiler": "triton 3.7.0"},
        {"settings": (("emulate_precision_casts", "false"), ("x", '"off"'))},
        {"settings": (("x", '"off"'),)},
        {"method": KEY.method + 1},
    ],
)
def test_a_proof_under_another_key_proves_nothing(
    change: dict[str, Any], cache: Path, shipped: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_proofs(shipped / "some.json", KEY, [exact()])
    write_proofs(cache / "some.json", KEY, [exact(POW)])
    assert len(Proofs(KEY, cache, shipped)) == 2
    elsewhere = replace(KEY, **change)
    other = Proofs(elsewhere, cache, shipped)
    assert (other.lookup(EXP), other.lookup(POW), len(other)) == (None, None, 0)
    assert not caplog.records  # files of other machines are nothing unusual
    with pytest.raises(ValueError, match=next(iter(change))):
        other.add(exact())
    assert Proofs(KEY, cache, shipped).path != other.path


def test_a_file_renamed_to_another_keys_name_proves_nothing(cache: Path, shipped: Path) -> None:
    other = Proofs(replace(KEY, driver="581"), cache, shipped)
    write_proofs(other.path, KEY, [exact()])
    assert Proofs(other.key, cache, shipped).lookup(EXP) is None


def test_the_key_of_this_process_is_plain_and_repeatable() -> None:
    key = ProofKey.current("cpu")
    assert ProofKey.from_dict(json.loads(json.dumps(key.to_dict()))) == key == ProofKey.current("cpu")
    assert (key.torch_version, key.driver) == (torch.__version__, "")
    assert torch.backends.cpu.get_cpu_capability() in key.device
    assert dict(key.settings)["cpp.enable_floating_point_contract_flag"] == '"off"'


def test_the_key_of_a_gpu_names_driver_and_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    # Stands in for what torch and Triton tell where there is a GPU.
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(torch._C, "_cuda_getDriverVersion", lambda: 13000, raising=False)
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__version__="3.6.0"))
    monkeypatch.delenv("TRITON_PTXAS_PATH", raising=False)
    monkeypatch.setattr(verdicts, "_triton", verdicts._triton.__wrapped__)  # not from its cache
    keys = []
    for driver in ("580.65", None):
        monkeypatch.setattr(verdicts, "driver_version", lambda driver=driver: driver)
        keys.append(ProofKey.current("cuda"))
    assert [(key.device, key.driver, key.compiler) for key in keys] == [
        ("NVIDIA H200", "580.65", "triton 3.6.0"),
        ("NVIDIA H200", "CUDA 13000", "triton 3.6.0"),
    ]
    assert "flush_denormal" not in dict(keys[0].settings)  # a mode of the CPU's threads


def test_settings_and_modes_that_change_bits_are_part_of_the_key() -> None:
    from torch._inductor import config

    key = ProofKey.current("cpu")
    with config.patch({"cpp.simdlen": 1}):
        assert ProofKey.current("cpu") != key
    if torch.set_flush_denormal(True):
        try:
            assert dict(ProofKey.current("cpu").settings)["flush_denormal"] == "true"
        finally:
            torch.set_flush_denormal(False)
    assert ProofKey.current("cpu") == key


# ------------------------------------------------------------------------------------------ what is not kept
@pytest.mark.parametrize(
    "verdict",
    [
        replace(exact(), inputs=EXP.domain - 1),
        replace(exact(POW), inputs=1 << 16),
        replace(exact(), error="CppCompileError: no compiler"),
        replace(exact(), checks=()),
        replace(exact(), checks=CHECKS[1:]),
    ],
)
def test_a_partial_or_failed_verdict_is_no_proof_and_is_not_kept(verdict: Verdict, cache: Path, shipped: Path) -> None:
    assert not verdict.exact
    proofs = Proofs(KEY, cache, shipped)
    with pytest.raises(ValueError, match="only complete verdicts are kept"):
        proofs.add(exact(POW), verdict)
    assert len(proofs) == 0
    assert not cache.exists()
    write_proofs(cache / "smuggled.json", KEY, [verdict])
    assert Proofs(KEY, cache, shipped).lookup(verdict.operator) is None


def _text(**changes: Any) -> str:
    return json.dumps({"format": module.FORMAT, "key": KEY.to_dict(), "verdicts": [exact().to_dict()], **changes})


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        "{}",
        _text()[:-20],
        _text(format="cadence_fx proofs 0"),
        _text(verdicts=None),
        _text(verdicts=[{}]),
        _text(verdicts=[exact().to_dict() | {"checks": [{"what": "f(x)"}]}]),
        _text(verdicts=[exact().to_dict() | {"operator": {"target": "aten.exp.default", "dtype": "float8"}}]),
        _text(verdicts=[different().to_dict() | {"checks": [{"what": "f", "layout": "odd", "nan": -1, "denormal": 1,
                                                             "others": 0, "first": None}]}]),
    ],
)  # fmt: skip
def test_a_corrupt_or_foreign_file_is_ignored_with_a_warning(
    text: str, cache: Path, shipped: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (shipped / "foreign.json").write_text(text)
    write_proofs(cache / "good.json", KEY, [exact(POW)])
    with caplog.at_level(logging.WARNING, "cadence_fx.proofs"):
        proofs = Proofs(KEY, cache, shipped)
    assert (proofs.lookup(EXP), proofs.lookup(POW)) == (None, exact(POW))
    (record,) = caplog.records
    assert "foreign.json is ignored" in record.getMessage()


def test_a_corrupt_file_of_our_own_is_replaced(cache: Path, shipped: Path) -> None:
    proofs = Proofs(KEY, cache, shipped)
    cache.mkdir(parents=True)
    proofs.path.write_bytes(b"\xff\xfe half a fi")
    proofs.add(exact())
    assert Proofs(KEY, cache, shipped).lookup(EXP) == exact()


# ------------------------------------------------------------------------------------------ writing
def test_a_write_that_fails_leaves_the_file_as_it_was(
    cache: Path, shipped: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proofs = Proofs(KEY, cache, shipped)
    proofs.add(exact())
    before = proofs.path.read_bytes()

    def full(handle: int) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space left"):
        proofs.add(exact(POW))
    assert [path.read_bytes() for path in cache.iterdir()] == [before]
    assert proofs.lookup(POW) == exact(POW)  # of use to this process all the same


def test_a_reader_never_sees_half_a_file(cache: Path, shipped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    proofs = Proofs(KEY, cache, shipped)
    proofs.add(exact())
    seen = []
    replace_file = os.replace

    def watched(source: str, target: Path) -> None:
        seen.append(len(Proofs(KEY, cache, shipped)))
        replace_file(source, target)
        seen.append(len(Proofs(KEY, cache, shipped)))

    monkeypatch.setattr(os, "replace", watched)
    proofs.add(exact(POW))
    assert seen == [1, 2]
