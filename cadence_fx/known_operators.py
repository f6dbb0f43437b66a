"""Names for the unary operators that decoders are made of: what is proven where nobody asks for others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from cadence_fx.errors import suggest
from cadence_fx.unary import DTYPES, UnaryOperator

__all__ = ["KNOWN", "known_operators"]

_Call = tuple[str, tuple[Any, ...], dict[str, Any]]


def _plain(*names: str) -> dict[str, _Call]:
    return {name: (f"aten.{name}.default", (), {}) for name in names}


KNOWN: Mapping[str, _Call] = {
    **_plain("exp", "cos", "sin", "sqrt", "log"),
    "pow_2": ("aten.pow.Tensor_Scalar", (2,), {}),
    "remainder_1": ("aten.remainder.Scalar", (1,), {}),
    **_plain("silu"),
    "leaky_relu_0.1": ("aten.leaky_relu.default", (0.1,), {}),
    "leaky_relu_0.01": ("aten.leaky_relu.default", (0.01,), {}),
    "clamp_0.99": ("aten.clamp.default", (-0.99, 0.99), {}),
    **_plain("tanh", "rsqrt", "log1p", "elu", "floor", "sigmoid", "reciprocal", "gelu"),
    "gelu_tanh": ("aten.gelu.default", (), {"approximate": "tanh"}),
    **_plain("mish", "erf", "softplus"),
    "pow_1.5": ("aten.pow.Tensor_Scalar", (1.5,), {}),
    **_plain("atan", "neg", "abs", "relu", "exp2", "expm1"),
}


def known_operators(names: Iterable[str] | None, dtypes: Iterable[str]) -> list[UnaryOperator]:
    """The operators of these names, or all, in each dtype.

    Raises:
        ValueError: a name or a dtype is not known; the text says which and what is near.
    """
    chosen = list(KNOWN) if names is None else list(names)
    wanted = list(dtypes)
    for found, known, what in ((chosen, KNOWN, "operator"), (wanted, DTYPES, "dtype")):
        for name in found:
            if name not in known:
                raise ValueError(f"no {what} is called {name!r}{suggest(name, known)}; known are {', '.join(known)}")
    made = []
    for dtype in wanted:
        for name in chosen:
            target, args, kwargs = KNOWN[name]
            made.append(UnaryOperator.make(target, dtype, *args, **kwargs))
    return made
