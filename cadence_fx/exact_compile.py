"""Compiling a graph of pointwise operators so that each operator keeps its own rounding, as eager rounds it.

The compiler is Inductor, with its settings for eager's numbers: no contraction of a product and a sum into one
operation, results of low precision rounded after each operator, division rounded to nearest, denormals kept. What these
settings are called differs from version to version; those that a version lacks are left out, which is why operators are
admitted by proof and not by name (`cadence_fx.proofs`).
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

__all__ = ["EXACT", "Compile", "compile_exact", "exact_settings", "inductor_entry"]

# A graph without attributes and example arguments -> a function of these arguments.
Compile = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]

# How operators round; that Inductor rewrites none into others; and that it starts nothing for so little work.
EXACT: dict[str, Any] = {
    "emulate_precision_casts": True,
    "emulate_divison_rounding": True,  # the spelling of torch before 2.12
    "eager_numerics.division_rounding": True,
    "eager_numerics.use_pytorch_libdevice": True,
    "eager_numerics.disable_ftz": True,
    "fallback_random": True,
    "pattern_matcher": False,
    "joint_graph_constant_folding": False,
    "triton.cudagraphs": False,
    "compile_threads": 1,  # kernels are small: a pool of compiling processes takes longer to start than they do
    "cpp.enable_floating_point_contract_flag": "off",
    "cpp.enable_unsafe_math_opt_flag": False,
}


@functools.cache
def exact_settings() -> dict[str, Any]:
    """Those of `EXACT` that this version of torch has."""
    from torch._inductor import config

    known = set(config.get_config_copy())
    return {name: value for name, value in EXACT.items() if name in known}


def inductor_entry() -> Callable[..., Any]:
    """``compile_fx``, imported quietly: it imports modules of torch that warn of being deprecated."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from torch._inductor.compile_fx import compile_fx
    return compile_fx


def compile_exact(
    module: fx.GraphModule, arguments: Sequence[Any], settings: dict[str, Any] | None = None
) -> Callable[..., Any]:
    """Compile for exactly these shapes, strides and dtypes. Nothing of the process's configuration stays changed.

    Args:
        module: a graph without attributes; it may write its arguments in place.
        arguments: examples, of which only the form matters.
        settings: instead of `exact_settings`; for tests that show what these are for.

    Returns:
        A function of such arguments that returns a list or tuple, as the graph does.
    """
    from torch._inductor import config

    chosen = exact_settings() if settings is None else settings
    with torch.no_grad(), config.patch(chosen):
        compiled: Any = inductor_entry()(module, list(arguments), config_patches=chosen)
    return compiled  # type: ignore[no-any-return]
