"""``cadence-fx prove``: what it proves, shows and keeps."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import fx

from cadence_fx import cli, cli_prove
from cadence_fx.known_operators import KNOWN
from cadence_fx.proofs import ProofKey, Proofs, UnaryOperator, Verdict
from cadence_fx.proving import prove
from cadence_fx.specialise import TensorMeta
from tests.streams import WIDTH, Stream, contract

Capture = pytest.CaptureFixture[str]
aten = torch.ops.aten


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "cadence_fx" / "proofs"


@pytest.fixture
def proven(monkeypatch: pytest.MonkeyPatch) -> list[UnaryOperator]:
    """Eager in the compiler's place, but for the sigmoid of zero; the operators that were proven."""
    asked: list[UnaryOperator] = []

    def quick(operator: UnaryOperator, device: str, **settings: Any) -> Verdict:
        asked.append(operator)

        def compile(module: fx.GraphModule, arguments: Sequence[Any]) -> Callable[..., Any]:
            def run(x: torch.Tensor) -> Any:
                found = module(x.contiguous())
                return [y + (x == 0) for y in found] if "sigmoid" in operator.target else found

            return run

        limit = settings.pop("limit")
        verdict = prove(operator, device, limit=limit and 1 << 10, chunk=1 << 10, compile=compile, **settings)
        # Eager on strided memory is the CPU's own affair.
        return replace(verdict, checks=tuple(c if c.layout != "eager strided" else replace(
            c, nan=0, denormal=0, others=0, first=None) for c in verdict.checks))  # fmt: skip

    monkeypatch.setattr(cli_prove, "prove", quick)
    return asked


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as exit:
        cli.main(["prove", *arguments])
    assert isinstance(exit.value.code, int)
    return exit.value.code


def rows(printed: str) -> list[list[str]]:
    return [line.split(maxsplit=3) for line in printed.splitlines() if line.startswith("aten.")]


def test_real_proofs_are_shown_and_kept(capsys: Capture, cache: Path) -> None:
    assert run("--operators", "neg", "--dtype", "float16", "--device", "cpu", "--json") == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert list(found) == ["command", "key", "file", "verdicts"]
    (verdict,) = found["verdicts"]
    neg = UnaryOperator.make("aten.neg.default", "float16")
    assert UnaryOperator(**verdict["operator"]) == neg
    assert verdict["inputs"] == 1 << 16
    assert rows(captured.err)[0][:2] == ["aten.neg.default", "float16"]
    assert Path(found["file"]).parent == cache
    kept = Proofs(ProofKey.current("cpu")).lookup(neg)
    assert kept is not None
    assert kept.exact == verdict["exact"]


def test_the_table_tells_what_is_exact_and_what_differs(proven: list[UnaryOperator], capsys: Capture) -> None:
    assert run("--operators", "exp, pow_2,sigmoid", "--dtype", "float16,bfloat16", "--device", "cpu") == 0
    printed = capsys.readouterr().out
    table = rows(printed)
    assert [row[:2] for row in table[:3]] == [
        ["aten.exp.default", "float16"],
        ["aten.pow.Tensor_Scalar(exponent=2)", "float16"],
        ["aten.sigmoid.default", "float16"],
    ]
    assert [row[3] for row in table[:2]] == ["exact", "exact"]
    assert table[2][3].startswith("f(x) contiguous: 2 other inputs differ; first 0x0000: eager 0x3800, compiled 0x3e00")
    assert printed.splitlines()[-2] == "4 of 6 are exact on every input"


def test_what_is_known_is_not_proven_again_unless_asked(proven: list[UnaryOperator], capsys: Capture) -> None:
    for more, times in (((), 1), ((), 1), (("--all",), 2)):
        assert run("--operators", "exp", "--dtype", "float16", "--device", "cpu", *more) == 0
        assert len(proven) == times
    assert [row[2] for row in rows(capsys.readouterr().out)].count("kept") == 1


def test_float32_on_a_cpu_is_looked_at_and_not_kept(proven: list[UnaryOperator], capsys: Capture) -> None:
    assert run("--operators", "exp", "--dtype", "float32", "--device", "cpu") == 0
    printed = capsys.readouterr().out
    assert rows(printed)[0][3] == "no proof: equal on 1,024 of 4,294,967,296 inputs"
    assert "0 of 1 are exact on every input; 1 were not compared on every input, which proves nothing" in printed
    assert len(Proofs(ProofKey.current("cpu"))) == 0


def test_by_default_all_known_operators_are_proven_in_16_bits_on_a_cpu(
    proven: list[UnaryOperator], capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli_prove, "prove", lambda operator, *_, key, **__: Verdict(operator, key, 0, (), error="off"))
    assert run("--device", "cpu") == 0
    printed = capsys.readouterr().out
    assert len(rows(printed)) == 2 * len(KNOWN)
    assert [printed.count(f" {dtype} ") for dtype in ("float32", "bfloat16", "float16")] == [0, len(KNOWN), len(KNOWN)]


def test_the_operators_of_a_graph_are_each_named_once() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    y = graph.call_function(aten.exp.default, (graph.call_function(aten.exp.default, (x,)),))
    z = graph.call_function(aten.add.Tensor, (y, graph.call_function(aten.leaky_relu.default, (y, 0.1))))
    graph.output((z,))
    for node in graph.nodes:
        node.meta["val"] = TensorMeta((3,), (1,), torch.float32, torch.device("cpu"))
    fast = SimpleNamespace(programs={i: SimpleNamespace(flat=SimpleNamespace(graph=graph)) for i in range(2)})
    found = cli_prove.graph_operators(fast, None)
    assert [str(operator) for operator in found] == ["aten.exp.default", "aten.leaky_relu.default(negative_slope=0.1)"]
    assert cli_prove.graph_operators(fast, "float16, bfloat16") == []


def target() -> Any:
    """A stream with a tanh in each call, and an exp that is hoisted out of them."""
    stream = Stream().eval()
    return stream, contract((2, 3)), [{"x": torch.randn(1, 2, WIDTH), "state": stream.start()}]


def test_a_target_proves_the_operators_of_its_graphs(proven: list[UnaryOperator], capsys: Capture) -> None:
    assert run(f"{__name__}:target", "--device", "cpu") == 0
    assert [str(operator) for operator in proven] == ["aten.tanh.default"]
    assert [row[:2] for row in rows(capsys.readouterr().out)] == [["aten.tanh.default", "float32"]]


def test_a_cache_that_cannot_be_written_is_told_before_the_work(
    proven: list[UnaryOperator], cache: Path, capsys: Capture
) -> None:
    cache.parent.parent.mkdir(exist_ok=True)
    cache.parent.write_text("a file where the folder should be")
    assert run("--operators", "exp", "--device", "cpu") == 1
    assert "cadence-fx: the proofs cannot be kept: " in capsys.readouterr().err
    assert not proven
