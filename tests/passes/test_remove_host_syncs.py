"""RemoveHostSyncs: istft as its own operators, and a reason for everything that still waits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from cadence_fx.catalog import signatures
from cadence_fx.changes import CODES
from cadence_fx.constants import ConstantPool
from cadence_fx.effects import is_sync
from cadence_fx.passes import Normalise, RemoveHostSyncs
from cadence_fx.pipeline import PassContext, PassResult
from cadence_fx.specialise import FlatGraph
from tests.toys import Player, bench, build, declare, flat_of, same_bits, targets

aten = torch.ops.aten
REAL, IMAGINARY = torch.randn(2, 9, 20), torch.randn(2, 9, 20)
HANN = torch.hann_window(16)


def context() -> PassContext:
    def fetch(flat: FlatGraph, target: str) -> torch.Tensor:
        return flat.constants.get(target, HANN)

    return PassContext(declare(()), (), frozenset(), fetch, ConstantPool())


def transformed(
    f: Callable[..., Any], real: torch.Tensor = REAL, imaginary: torch.Tensor = IMAGINARY
) -> tuple[FlatGraph, PassResult]:
    flat = flat_of(f, real, imaginary, attributes={"window": HANN})
    return flat, RemoveHostSyncs().call(flat, context())


def run(flat: FlatGraph, *inputs: torch.Tensor) -> list[torch.Tensor]:
    holder = torch.nn.Module()
    holder.register_buffer("window", HANN)
    for name, value in flat.constants.items():
        holder.register_buffer(name, value)
    result: list[torch.Tensor] = list(fx.GraphModule(holder, flat.graph)(*inputs))
    return result


@pytest.mark.parametrize("frames", [3, 20])
@pytest.mark.parametrize(("options", "window"), [
    ({}, None), ({"center": False}, torch.hamming_window(16)), ({"normalized": True}, None), ({"win_length": 16}, None),
    ({"hop_length": 8}, torch.hamming_window(16)),
], ids=["plain", "not centred", "normalized", "win", "hop"])  # fmt: skip
def test_the_expansion_has_the_bits_of_istft(options: dict[str, Any], window: Any, frames: int) -> None:
    real, imaginary = REAL[..., :frames].contiguous(), IMAGINARY[..., :frames].contiguous()
    given = {"hop_length": 4, **options}

    def f(m: Any, a: torch.Tensor, b: torch.Tensor) -> Any:
        return (torch.istft(torch.complex(a, b), 16, window=m.window if window is None else window, **given),)

    flat, result = transformed(f, real, imaginary)
    assert [c.what for c in result.changes] == ["expanded"]
    assert not any(is_sync(n) for n in flat.graph.nodes)
    expected = torch.istft(torch.complex(real, imaginary), 16, window=HANN if window is None else window, **given)
    assert same_bits(run(flat, real, imaginary)[0], expected)


def test_the_expansion_is_the_docstrings() -> None:
    flat, _ = transformed(lambda m, a, b: (torch.istft(torch.complex(a, b), 16, 4, 16, m.window),))
    assert targets(flat) == [
        "complex", "transpose", "_fft_c2r", "view", "mul", "unfold_backward", "pow", "expand", "unfold_backward",
        "slice", "slice", "div",
    ]  # fmt: skip
    at = {str(n.target).split(".")[1]: n for n in flat.graph.nodes if n.op == "call_function"}
    assert str(at["div"].meta["val"]) == "float32[2, 76]"
    assert at["_fft_c2r"].args[1:] == ([2], 2, 16)


def test_metadata_of_the_expansion_is_real() -> None:
    flat, _ = transformed(lambda m, a, b: (torch.istft(torch.complex(a, b), 16, 4, 16, m.window),))
    checked = 0

    class Check(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            nonlocal checked
            value = super().run_node(n)
            if n.op == "call_function":
                assert (tuple(value.shape), value.dtype) == (n.meta["val"].shape, n.meta["val"].dtype), n
                checked += 1
            return value

    holder = torch.nn.Module()
    holder.register_buffer("window", HANN)
    Check(fx.GraphModule(holder, flat.graph)).run(REAL, IMAGINARY)
    assert checked == 12


def test_cx301_an_operator_that_waits_is_left_with_a_hint() -> None:
    flat = flat_of(lambda m, a, b: (a + b,), REAL, IMAGINARY, attributes={})
    with flat.graph.inserting_before(flat.output):
        flat.graph.call_function(aten.nonzero.default, (next(iter(flat.graph.nodes)),))
    result = RemoveHostSyncs().call(flat, context())
    (rejection,) = result.rejections
    assert rejection.code == "CX301"
    assert "aten.nonzero.default synchronises" in str(rejection)
    assert "hint: it stays, and a capture region ends there" in str(rejection)
    assert not result.modified


@pytest.mark.parametrize(("options", "text"), [
    ({"length": 60}, "length is 60, expected one of (None,)"),
    ({"hop_length": None}, "hop_length is None and win_length None; expected a hop and win_length equal to n_fft 16"),
    ({"win_length": 12}, "hop_length is 4 and win_length 12"),
], ids=["length", "hop", "win"])  # fmt: skip
def test_cx302_arguments_without_a_form_here_are_named(options: dict[str, Any], text: str) -> None:
    def f(m: Any, a: torch.Tensor, b: torch.Tensor) -> Any:
        window = m.window[:12] if options.get("win_length") else m.window
        return (torch.istft(torch.complex(a, b), 16, window=window, **{"hop_length": 4, **options}),)

    flat, result = transformed(f)
    (rejection,) = result.rejections
    assert rejection.code == "CX302"
    assert text in rejection.explanation
    assert rejection.source.endswith(" in f")
    assert "istft" in targets(flat)


def test_cx302_a_spectrum_without_a_batch_is_left() -> None:
    _flat, result = transformed(lambda m, a, b: (torch.istft(torch.complex(a, b)[0], 16, 4, 16, m.window),))
    assert [(r.code, r.explanation) for r in result.rejections] == [
        ("CX302", "the spectrum is not of shape [batch, bins, frames]")
    ]


def test_cx303_a_window_that_depends_on_the_call_is_left() -> None:
    def f(m: Any, a: torch.Tensor, b: torch.Tensor) -> Any:
        return (torch.istft(torch.complex(a, b), 16, 4, 16, m.window + a[0, 0, :16].abs()),)

    _, result = transformed(f)
    (rejection,) = result.rejections
    assert rejection.code == "CX303"
    assert "the window add depends on the call" in rejection.explanation


def test_cx304_an_envelope_that_fails_its_check_is_left_for_stock_to_refuse() -> None:
    def f(m: Any, a: torch.Tensor, b: torch.Tensor) -> Any:
        return (torch.istft(torch.complex(a, b), 16, 4, 16, m.window * 0),)

    flat, result = transformed(f)
    (rejection,) = result.rejections
    assert rejection.code == "CX304"
    assert rejection.explanation == "its smallest element is 0.0, the bound is 1e-11"
    with pytest.raises(RuntimeError, match="window overlap add min"):
        run(flat, REAL, IMAGINARY)


def test_every_code_has_its_text() -> None:
    assert {"CX301", "CX302", "CX303", "CX304"} <= set(CODES)


def test_a_second_run_changes_nothing() -> None:
    at = bench(build("istft"))
    assert at.run_pass(Normalise(), RemoveHostSyncs()).modified
    text = str(at.flat.graph)
    assert not at.run_pass(RemoveHostSyncs()).modified
    assert str(at.flat.graph) == text


def test_no_program_of_the_vocoder_waits() -> None:
    player = Player(build("istft"))
    for signature in signatures(player.toy.contract):
        assert not any(is_sync(n) for n in player.compiler.compile(signature).flat.graph.nodes)
