"""Verification: the same traffic played to stock and to us; raw bits of outputs, state and generators compared."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils._pytree as pytree

from cadence_fx.bits import Difference, digest, first_difference
from cadence_fx.catalog import signatures
from cadence_fx.contract import Arg, Contract
from cadence_fx.drop_in import transform
from cadence_fx.families import load
from cadence_fx.generators import generator_states, restore_generators
from cadence_fx.modes import pinned_kernels
from cadence_fx.module import CadenceModule
from cadence_fx.places import get_path
from cadence_fx.program import describe
from cadence_fx.traffic import SessionMemory, Step, clone_tree

__all__ = ["VerifyResult", "VerifyStep", "compare", "verify"]


@dataclass(frozen=True)
class VerifyStep:
    """What one step of the traffic gave: equal bits, seconds, and how we ran it ("replay", "plan" or "stock")."""

    index: int
    name: str
    equal_pcm: bool
    equal_state: bool
    equal_rng: bool
    seconds_stock: float
    seconds_ours: float
    how: str
    is_chunk: bool
    sha256: str


@dataclass
class VerifyResult:
    """Outcome of a run; `to_dict` is the JSON of ``cadence-fx verify``."""

    family: str
    device: str
    steps: list[VerifyStep] = field(default_factory=list)
    self_agreement: bool = True
    first_mismatch: dict[str, Any] | None = None
    stats: dict[str, Any] = field(default_factory=dict)
    catalog: int = 0
    bytes: dict[str, int] = field(default_factory=dict)
    output: dict[str, float] = field(default_factory=dict)
    module: CadenceModule | None = None
    flags: dict[str, Any] = field(default_factory=dict)
    kernel_lists: dict[str, Any] | None = None

    @property
    def chunks(self) -> int:
        return sum(s.is_chunk for s in self.steps)

    @property
    def ok(self) -> bool:
        """Every bit equal, and the outputs able to show a difference."""
        return bool(self.steps) and self.first_mismatch is None and self.self_agreement and not self.vacuous

    @property
    def vacuous(self) -> bool:
        """True if the outputs are constant or saturated, so that equal bits would prove little."""
        return self.output.get("distinct", 0) < 100 or self.output.get("clipped", 0.0) > 0.02

    def digest(self) -> str:
        """One SHA-256 over all chunks: two runs on two machines compare by this line."""
        return hashlib.sha256("".join(s.sha256 for s in self.steps).encode()).hexdigest()

    def to_dict(self) -> dict[str, Any]:
        return {
            "family": self.family,
            "device": self.device,
            "torch": torch.__version__,
            "chunks": self.chunks,
            "bitwise_equal": all(s.equal_pcm for s in self.steps),
            "state_equal": all(s.equal_state for s in self.steps),
            "rng_equal": all(s.equal_rng for s in self.steps),
            "self_agreement": self.self_agreement,
            "first_mismatch": self.first_mismatch,
            "replays": self.stats.get("replays", 0),
            "plan": self.stats.get("plan", 0),
            "eager": self.stats.get("eager", {}),
            "catalog": self.catalog,
            "bytes": self.bytes,
            "output": self.output,
            "sha256": self.digest(),
            "ledger": [{"name": s.name, "how": s.how, "sha256": s.sha256} for s in self.steps if s.is_chunk],
            "flags": self.flags,
            "kernel_lists": self.kernel_lists,
            "seconds": {
                "stock": sum(s.seconds_stock for s in self.steps if s.is_chunk),
                "ours": sum(s.seconds_ours for s in self.steps if s.is_chunk),
            },
        }


class _Clock:
    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __call__(self, action: Callable[[], Any]) -> tuple[Any, float]:
        self._wait()
        start = time.perf_counter()
        value = action()
        self._wait()
        return value, time.perf_counter() - start

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def compare(
    stock: torch.nn.Module,
    fast: CadenceModule,
    contract: Contract,
    steps: Iterable[Step],
    *,
    family: str = "",
    progress: Callable[[VerifyStep], None] | None = None,
    again: int = 1,
) -> VerifyResult:
    """Play steps to both modules in lockstep.

    Args:
        stock: the untouched module.
        fast: its transform.
        steps: traffic; an action runs once per module, generators rewound between.
        progress: called after each step.
        again: chunks for which stock is run twice first, to see that it agrees with itself.
    """
    device = fast.memory.device
    clock = _Clock(device)
    ours, theirs = SessionMemory.of(contract), SessionMemory.of(contract)
    result = VerifyResult(family or contract.name, str(device), module=fast)
    seen: list[torch.Tensor] = []
    for index, step in enumerate(steps):
        before = generator_states(device)
        if step.is_chunk and again > 0:
            again -= 1
            result.self_agreement &= _agrees_with_itself(stock, theirs, step, before, device)
        expected, seconds_stock = clock(lambda step=step: step.action(stock, theirs))  # type: ignore[misc]
        after = generator_states(device)
        expected, expected_state = clone_tree(expected), _regions(theirs.state, contract)
        # What the vendor returns may be its own buffer: keep what the next call of stock must see.
        restore_generators(device, before)
        counted = fast.stats()
        found, seconds_ours = clock(lambda step=step: step.action(fast, ours))  # type: ignore[misc]
        differences = {
            "pcm": first_difference("output", expected, found),
            "state": _state_difference(expected_state, ours.state, contract, fast),
            "rng": first_difference("generator", after, generator_states(device)),
        }
        restore_generators(device, after)
        if step.is_chunk:
            seen += [t.detach().float().cpu() for t in pytree.tree_leaves(found) if isinstance(t, torch.Tensor)]
        made = VerifyStep(
            index, step.name, differences["pcm"] is None, differences["state"] is None, differences["rng"] is None,
            seconds_stock, seconds_ours, _how(counted, fast.stats()), step.is_chunk, digest(found),
        )  # fmt: skip
        result.steps.append(made)
        _note_first(result, made, differences)
        if progress is not None:
            progress(made)
    result.stats, result.catalog = fast.stats(), len(signatures(contract))
    result.output = _describe(seen)
    result.bytes = _bytes(stock, fast, contract)
    return result


def _note_first(result: VerifyResult, step: VerifyStep, differences: dict[str, Difference | None]) -> None:
    found = next(((kind, d) for kind, d in differences.items() if d is not None), None)
    if result.first_mismatch is None and found is not None:
        kind, difference = found
        result.first_mismatch = {"step": step.index, "name": step.name, "kind": kind, **difference.to_dict()}


def _agrees_with_itself(
    stock: torch.nn.Module, memory: SessionMemory, step: Step, before: list[torch.Tensor], device: torch.device
) -> bool:
    """Run stock twice from clones of the same state."""
    kept, outputs = clone_tree(memory.state), []
    for _ in range(2):
        restore_generators(device, before)
        memory.state = clone_tree(kept)
        outputs.append((clone_tree(step.action(stock, memory)), clone_tree(memory.state)))
    memory.state = clone_tree(kept)
    restore_generators(device, before)
    return first_difference("stock", outputs[0], outputs[1]) is None


def _regions(state: Any, contract: Contract) -> dict[str, torch.Tensor]:
    """Clones of the region tensors of a session's state."""
    if state is None:
        return {}
    found = {}
    for region in contract.states:
        if isinstance(region.enters, Arg):
            found[region.name] = get_path(state, Arg(*region.enters.keys[1:])).clone()
    return found


def _state_difference(
    expected: dict[str, torch.Tensor], state: Any, contract: Contract, fast: CadenceModule
) -> Difference | None:
    found = _regions(state, contract)
    for name, tensor in expected.items():
        # Stock carries slots that nothing reads; ours has the demanded ones.
        a, b = fast.memory[name].fit(tensor), fast.memory[name].fit(found[name])
        if isinstance(a, str) or isinstance(b, str):
            a, b = tensor, found[name]
        difference = first_difference(f"state {name}", a, b)
        if difference is not None:
            return difference
    return None


def _how(before: dict[str, Any], after: dict[str, Any]) -> str:
    for key, how in (("replays", "replay"), ("plan", "plan"), ("stock", "stock")):
        if after[key] > before[key]:
            return how
    return "-"


def _describe(seen: list[torch.Tensor]) -> dict[str, float]:
    """Is the output able to show a difference: neither constant nor at its limits?

    ``clipped`` is the share of the magnitude that occurs most often: that of the limit, if there is one.
    """
    if not seen:
        return {}
    flat = torch.cat([t.reshape(-1) for t in seen])
    _, counts = flat.abs().unique(return_counts=True)
    return {
        "mean_abs": float(flat.abs().mean()),
        "peak": float(flat.abs().max()),
        "clipped": float(counts.max()) / flat.numel(),
        "distinct": int(flat.unique().numel()),
    }


def _bytes(stock: torch.nn.Module, fast: CadenceModule, contract: Contract) -> dict[str, int]:
    """Bytes held for state, workspace and the buffers that the contract names: stock's and ours."""
    from cadence_fx.places import get_attr

    def held(module: torch.nn.Module) -> int:
        named = [r.enters for r in contract.regions if not isinstance(r.enters, Arg) and r.enters is not None]
        tensors = [get_attr(module, place) for place in named]  # type: ignore[arg-type]
        return sum(t.untyped_storage().nbytes() for t in {t.untyped_storage().data_ptr(): t for t in tensors}.values())

    return {
        "stock_buffers": held(stock),
        "ours_regions": fast.memory.nbytes,
        "ours_buffers": held(fast.stock) + sum(t.nbytes for t in fast.compiler.stages.values()),
        "ours_constants": fast.compiler.constants.nbytes(fast.parameters()),
    }


def verify(
    target: str,
    *,
    device: str = "cpu",
    chunks: int = 12,
    seed: int = 0,
    options: dict[str, Any] | None = None,
    progress: Callable[[VerifyStep], None] | None = None,
) -> VerifyResult:
    """Build a family's decoder with drawn weights and compare it with its transform over a traffic script."""
    family = load(target, **(options or {}))
    decoder = family.build_random(device, seed)
    declared = family.contract()
    with ExitStack() as flags_put_back:
        fast = transform(decoder, declared)
        flags = (
            _flags(fast, lambda: flags_put_back.enter_context(pinned_kernels()))
            if fast.memory.device.type == "cuda"
            else {}
        )
        if fast.memory.device.type == "cuda":
            fast.warmup("steady")
        torch.manual_seed(seed)
        steps = family.script(decoder, declared, seed, chunks)
        result = compare(decoder, fast, declared, steps, family=target, progress=progress)
        result.flags, result.kernel_lists = flags, _kernel_lists(fast)
        return result


def _kernel_lists(fast: CadenceModule) -> dict[str, Any] | None:
    """For each captured class whether its graph holds the kernels that an uncaptured run launches."""
    found = {describe(signature): fast.kernel_difference(signature) for signature in fast.programs}
    listed = {name: difference for name, difference in found.items() if difference is not None}
    if not listed:
        return None
    return {
        "equal": not any(listed.values()),
        "classes": len(listed),
        "differences": {k: v for k, v in listed.items() if v},
    }


def _flags(fast: CadenceModule, pin: Callable[[], object]) -> dict[str, Any]:
    """Does stock agree with itself under the flags as they are? If not, name the operator and pin kernels."""
    found = fast.self_agreement()
    if found is None:
        return {"cudnn_deterministic": torch.backends.cudnn.deterministic, "disagreement": None}
    pin()
    return {
        "cudnn_deterministic": True,
        "disagreement": {"under": "default flags", **found.to_dict()},
        "after_pinning": None if (left := fast.self_agreement()) is None else left.to_dict(),
    }
