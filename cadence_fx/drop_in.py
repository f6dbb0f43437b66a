"""`transform`: a user's module and its contract in, the module that is called in its place out."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from cadence_fx.contract import Contract
from cadence_fx.errors import ContractError
from cadence_fx.module import CadenceModule
from cadence_fx.partition import Granularity

__all__ = ["transform"]


def transform(
    module: torch.nn.Module,
    contract: Contract,
    *,
    skip: Sequence[str] = (),
    device: torch.device | str | None = None,
    backend: str = "auto",
    streams: int = 6,
    granularity: Granularity = "chunk",
    capture_after: int | None = None,
    edits: bool = True,
    debug: bool = False,
) -> CadenceModule:
    """A drop-in for ``module`` that runs from contract-owned state, bit for bit as stock.

    The module is not changed: the result shares its weights and holds no reference to its oversized buffers. Signatures
    of the catalog are traced, rewritten and compiled by `CadenceModule.warmup` or on first use.

    Args:
        module: in eval mode.
        contract: its declaration.
        skip: names of passes to leave out.
        device: of the state; the parameters' by default. On another device than the parameters' the result has copies
            of the weights there: a module on the host whose oversized buffers never reach the GPU.
        backend: "cuda" captures one graph per signature in `CadenceModule.warmup`, "plan" runs the rewritten graph
            operator by operator, "auto" is "cuda" where the state is on a GPU and CADENCE_CAPTURE is not 0.
        streams: streams that a capture may use for independent branches.
        granularity: of captures: "chunk", "callable" or "step", see `cadence_fx.partition`.
        capture_after: capture a declared signature that `CadenceModule.warmup` left out once it was met this often; by
            default nothing is captured during traffic.
        edits: edit recorded graphs so that kernels wait for less, see `cadence_fx.graph_edits`.
        debug: after each pass, run its result against its input and compare every bit (VerificationError if not equal).

    Raises:
        ContractError: the module is in training mode, or lacks something that the contract names.
    """
    if not isinstance(module, torch.nn.Module):
        raise ContractError(f"transform takes an nn.Module, not a {type(module).__name__}")
    if module.training:
        raise ContractError(f"{type(module).__name__} is in training mode; call .eval() first")
    for entry in contract.entries:
        if not callable(getattr(module, entry.method, None)):
            raise ContractError(f"entry {entry.method!r}: {type(module).__name__} has no such method")
    where = (
        torch.device(device)
        if device is not None
        else next((p.device for p in module.parameters()), torch.device("cpu"))
    )
    if backend not in ("auto", "cuda", "plan"):
        raise ContractError(f"transform: backend is {backend!r}; expected 'auto', 'cuda' or 'plan'")
    if backend == "cuda" and where.type != "cuda":
        raise ContractError(f"transform: backend 'cuda' needs the state on a GPU, it is on {where}; use 'plan'")
    if backend == "auto":
        captured = where.type == "cuda" and os.environ.get("CADENCE_CAPTURE", "1") != "0"
        backend = "cuda" if captured else "plan"
    where = torch.empty(0, device=where).device  # with its index, as tensors name it
    fast = CadenceModule(module, contract, where, frozenset(skip), backend, streams)
    fast.compiler.debug = debug
    if fast._captures is not None:
        fast._captures.granularity, fast._captures.capture_after = granularity, capture_after
        fast._captures.edits = edits
    return fast
