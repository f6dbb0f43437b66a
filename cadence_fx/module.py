"""The module that `cadence_fx.transform` returns: called exactly as the user's, served from contract-owned state.

A call is admitted if its signature is in the catalog, its state is the state that the last call left (or a tensor that
can be adopted by one copy) and nothing that changes bits has changed. Everything else runs as stock would, on a twin of
the module, and is counted by reason.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from cadence_fx.autocast import nested
from cadence_fx.captures import Captures
from cadence_fx.catalog import Signature, signatures
from cadence_fx.compiler import CALL_HOOKS, Compiler
from cadence_fx.contract import Arg, Contract, Entry
from cadence_fx.errors import AdmissionError, ContractError, TraceError
from cadence_fx.inspection import Inspection
from cadence_fx.live_state import release_pinned
from cadence_fx.memory import Memory
from cadence_fx.modes import AUTOCAST_CACHE, ambient_modes, changed_modes
from cadence_fx.pipeline import PassError
from cadence_fx.places import bind, get_path, set_path
from cadence_fx.program import Program, describe
from cadence_fx.signature_table import SignatureTable
from cadence_fx.stock import Stock
from cadence_fx.twin import make_twin, relocate
from cadence_fx.weights import WeightWatch

__all__ = ["CadenceModule", "eager"]

STATE_HOOKS = (
    "_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
)  # fmt: skip

# Autocast keeps casts of them until the outermost region ends, edits or not, and nobody can see where that is.
_CACHED_CASTS = "autocast caches weights that require a gradient: requires_grad_(False) or cache_enabled=False"
_eager: ContextVar[bool] = ContextVar("cadence_fx_eager", default=False)
Progress = Callable[[int, int, str], None]


@contextmanager
def eager() -> Iterator[None]:
    """Within this context every call runs as stock (counted as 'eager()'); state stays where it is."""
    token = _eager.set(True)
    try:
        yield
    finally:
        _eager.reset(token)


class CadenceModule(Inspection):
    """See `cadence_fx.transform`. Parameters, buffers and submodules are those of the fallback twin, `stock`."""

    stock: torch.nn.Module
    _stock: Stock
    _captures: Captures | None
    _programs: dict[Signature, Program]
    _refused: dict[Signature, str]
    _table: SignatureTable
    _weights: WeightWatch
    _modes: tuple[Any, ...]

    def __init__(
        self,
        module: torch.nn.Module,
        contract: Contract,
        device: torch.device,
        skip: frozenset[str],
        backend: str,
        streams: int,
    ) -> None:
        super().__init__()
        twin = make_twin(module)
        relocate(twin, device, frozenset(place.path for place, _ in contract.scratch))
        calls = inspect.signature(module.forward)
        memory = Memory(contract, device)
        compiler = Compiler(twin, contract, memory, calls, skip=skip)
        stock = Stock(twin, contract, memory)
        # The same dicts as the twin's: state_dict, parameters(), .to() and attribute access see one module.
        for name in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", *STATE_HOOKS, *CALL_HOOKS):
            self.__dict__[name] = twin.__dict__[name]
        self.training = module.training
        hidden = self.__dict__
        hidden["stock"] = twin
        hidden["contract"], hidden["compiler"], hidden["memory"] = contract, compiler, memory
        hidden["_stock"] = stock
        hidden["_captures"] = Captures(contract, compiler, memory, stock, streams) if backend == "cuda" else None
        hidden["_programs"] = dict[Signature, Program]()
        hidden["_lock"] = threading.RLock()
        hidden["_counts"], hidden["_reasons"], hidden["_misses"] = Counter[str](), Counter[str](), Counter[str]()
        hidden["_calls"] = calls
        hidden["_table"] = SignatureTable(contract, compiler)
        hidden["_modes"] = ambient_modes(memory.device.type)
        hidden["_weights"] = WeightWatch(twin, compiler.scratch)
        hidden["_refused"] = dict[Signature, str]()
        hidden["_sealed"], hidden["_strict"], hidden["_audit"] = False, False, None
        hidden["disagreement"] = None
        for entry in contract.entries:
            hidden[entry.method] = functools.partial(self._entry, entry)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["stock"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Attributes are the twin's, so that stock runs see what a user sets."""
        if name == "training":
            object.__setattr__(self, name, value)
        setattr(self.__dict__["stock"], name, value) if "stock" in self.__dict__ else super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self.__dict__["stock"], name)

    # ------------------------------------------------------------------------------------------- calls
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            self._counts["calls"] += 1
            bound = bind(self._calls, args, kwargs)
            found = self._admit(bound)
            if isinstance(found, str):
                return self._as_stock(bound, found)
            program, state = found
            return self._run(program, bound, state)

    def _admit(self, bound: dict[str, Any]) -> tuple[Program, dict[str, torch.Tensor]] | str:
        """The program for a call and its state tensors, or the reason why it runs as stock. Nothing is written."""
        state = self._state(bound)
        if _eager.get():
            return "eager()"
        if self.training:
            return "training mode"
        if isinstance(state, str):
            return state
        signature = self._table.lookup(bound, state)
        if isinstance(signature, str):
            return signature
        reason = self._changed()
        if reason is not None:
            return reason
        program: Program | str = self._programs.get(signature) or self._late(signature)
        if isinstance(program, str):
            return program
        if program.lowered and nested() and self._weights.trainable():
            return _CACHED_CASTS
        for name in program.mutates:
            # What is adopted is a copy: the caller's tensor, and whatever shares its memory, must see the write.
            if not self.memory[name].is_resident(state[name]):
                return f"state {name!r} is written in place and is still the caller's"
        return program, state

    def _changed(self) -> str | None:
        """Why programs cannot be used under the modes, attributes and weights of this moment, or None."""
        modes = ambient_modes(self.memory.device.type)
        if not self._programs:
            self.__dict__["_modes"] = modes  # programs are made under the modes of the first
        if modes != self._modes:
            return f"mode changed: {changed_modes(self._modes, modes)}"
        if modes[AUTOCAST_CACHE] and self._weights.trainable():
            return _CACHED_CASTS
        changed = self.compiler.watch.changed()
        if changed:
            if self._refused and not self._programs:
                return next(iter(self._refused.values()))
            if self._programs or self._sealed:
                return f"module changed: {changed}"
            self._restart()
        edited = self._weights.edited()
        if edited:
            self._outdated(edited)
        return None

    def _late(self, signature: Signature) -> Program | str:
        """The program of a signature that no warm-up has compiled, or the reason why there is none."""
        if self._sealed:
            return "not compiled before seal()"
        if signature not in self._refused:
            try:
                program = self._compile(signature)
                # What this trace was the first to read may have been edited before.
                changed = self.compiler.watch.changed()
                return f"module changed: {changed}" if changed else program
            except (TraceError, PassError) as error:
                self._refused[signature] = f"not compiled: {error}"
        return str(self._refused[signature])

    def _state(self, bound: dict[str, Any]) -> dict[str, torch.Tensor] | str:
        """State tensors by region, cut to the demanded shape.

        Raises:
            AdmissionError: a tensor's memory is a region's, but its content is gone.
        """
        tensors: dict[str, torch.Tensor] = {}
        for region in self.contract.states:
            if not isinstance(region.enters, Arg):
                continue
            try:
                tensor = get_path(bound, region.enters)
            except (KeyError, IndexError, TypeError):
                return f"no state at {region.enters}"
            if not isinstance(tensor, torch.Tensor):
                return f"state {region.name!r} is {type(tensor).__name__}"
            fitted = self.memory[region.name].fit(tensor)
            if isinstance(fitted, str):
                return f"state {region.name!r}: {fitted}"
            self.memory.require_current(region.name, tensor)
            tensors[region.name] = fitted
        return tensors

    def _run(self, program: Program, bound: dict[str, Any], state: dict[str, torch.Tensor]) -> Any:
        inputs = [get_path(bound, place) for place in program.inputs]
        self._adopt(state)
        audit = self._audit
        expected = None if audit is None else audit.expected(program, inputs, state)
        outputs = self._execute(program, inputs)
        for link in program.links:
            self.memory[link.name].extent = link.new if link.dim is not None else 0
        if audit is not None and expected is not None:
            audit.check(program, expected, self._counts["calls"])
            self._counts["audited"] += 1
        return program.result(outputs, self.memory.hand_out())

    def _execute(self, program: Program, inputs: list[Any]) -> Any:
        """A replay where there is one, else the program itself: the same operators, launched one by one."""
        captures = self._captures
        found: Any = "capture off"
        if captures is not None:
            found = captures.run(program, inputs, may_capture=not self._sealed)
            if not isinstance(found, str):
                self._counts["replays"] += 1
                return found
            self._misses[found] += 1
        with torch.no_grad():
            found = program.run(*inputs)
        self._counts["plan"] += 1
        return found

    def _adopt(self, state: dict[str, torch.Tensor]) -> None:
        """Bring foreign state into the regions by one copy each; resident state costs nothing."""
        for name, tensor in state.items():
            buffer = self.memory[name]
            if not buffer.is_resident(tensor):
                buffer.adopt(tensor)
                self._counts["adopted"] += 1

    def _as_stock(self, bound: dict[str, Any], reason: str) -> Any:
        if self._strict:
            raise AdmissionError(f"strict mode: this call would run as stock: {reason}")
        self._counts["stock"] += 1
        self._reasons[reason] += 1
        result = self._stock.run(self.stock.forward, bound)
        return self._take_over(result, {r.name: r.leaves for r in self.contract.states})

    def _take_over(self, result: Any, leaves: dict[str, Any]) -> Any:
        """Adopt the state that a stock run returned, if all of it fits, and hand out views instead."""
        found = self._fitted(result, leaves)
        if found is None:
            return result  # foreign to the contract: it stays the caller's
        for name, tensor in found.items():
            self.memory[name].adopt(tensor)
        for name, view in self.memory.hand_out().items():
            if leaves.get(name) is not None:
                result = set_path(result, leaves[name], view)
        return result

    def _fitted(self, result: Any, leaves: dict[str, Any]) -> dict[str, torch.Tensor] | None:
        """The state tensors in a result, cut to the demanded shapes; None if one of them is no state of its region."""
        found: dict[str, torch.Tensor] = {}
        for name, place in leaves.items():
            if place is None:
                continue
            tensor = get_path(result, place)
            fitted = self.memory[name].fit(tensor) if isinstance(tensor, torch.Tensor) else "no tensor"
            if isinstance(fitted, str):
                return None
            found[name] = fitted
        return found

    def _entry(self, entry: Entry, *args: Any, **kwargs: Any) -> Any:
        """Run a method that makes state (the prompt pass) as stock, and take its state over."""
        with self._lock:
            self._counts[entry.method] += 1
            leaves = dict(entry.leaves)
            fits = lambda result: self._fitted(result, leaves) is not None  # noqa: E731
            return self._take_over(self._stock.run_entry(entry, args, kwargs, fits), leaves)

    # ------------------------------------------------------------------------------------------- programs
    def _compile(self, signature: Signature) -> Program:
        if not self.compiler.traces:
            self.compiler.restart()  # nothing has been read yet, so nothing has been watched
        program = self.compiler.compile(signature)
        self._programs[signature] = program
        self._counts["compiled"] += 1
        return program

    def _outdated(self, edited: Sequence[str]) -> None:
        """Weights were edited: forget the constants and programs that came from them."""
        self._counts["weights edited"] += 1
        self.compiler.refresh()
        self._forget()

    def _forget(self) -> None:
        self._programs.clear()
        if self._captures is not None:
            self._captures.retire()

    def _restart(self) -> None:
        """Attributes, submodules or hooks were changed: trace the module as it is now."""
        self._counts["restarted"] += 1
        self.compiler.restart()
        self._forget()
        self._refused.clear()
        self.__dict__["_weights"] = WeightWatch(self.stock, self.compiler.scratch)

    def warmup(self, which: str = "steady", progress: Progress | None = None) -> CadenceModule:
        """Compile signatures before traffic.

        Args:
            which: "steady" for the regular cadence, "all" for the whole catalog.
            progress: called with (done, total, signature) after each.
        """
        if which not in ("steady", "all"):
            raise ContractError(f"warmup: which is {which!r}; expected 'steady' or 'all'")
        wanted = signatures(self.contract, steady_only=which == "steady")
        # Largest first: later graphs then find their memory in the pool.
        wanted = tuple(sorted(wanted, key=lambda s: sum(e for _, e in s.state.extents), reverse=True))
        with self._lock:
            if not self._programs:
                self.__dict__["_modes"] = ambient_modes(self.memory.device.type)
            if self.compiler.watch.changed():
                self._restart()
            self._compile_all(wanted, progress)
            if self.compiler.watch.changed():  # a trace was the first to read what had been edited
                self._restart()
                self._compile_all(wanted, None)
        return self

    def _compile_all(self, wanted: Sequence[Signature], progress: Progress | None) -> None:
        edited = self._weights.edited()
        if edited:
            self._outdated(edited)
        if self._captures is not None:
            self._captures.plan(wanted)
        for i, signature in enumerate(wanted):
            program = self._programs.get(signature) or self._compile(signature)
            if self._captures is not None:
                self._captures.capture(program)
            if progress is not None:
                progress(i + 1, len(wanted), describe(signature))
        release_pinned()  # certificates are behind us
        if self._captures is not None and self.disagreement is None and self._captures.stock_differs:
            self.__dict__["disagreement"] = self.self_agreement(self._captures.stock_differs[0])

    def refresh(self) -> CadenceModule:
        """Forget what was computed from weights, and compile again on the next calls.

        Edits are noticed by themselves, but for those through ``parameter.data``, which leave no trace there.
        """
        with self._lock:
            self._outdated(("refresh()",))
            self._refused.clear()
        return self

    def seal(self, strict: bool = False) -> CadenceModule:
        """Compile nothing any more; with ``strict``, a call that would run as stock raises AdmissionError instead."""
        self.__dict__["_sealed"], self.__dict__["_strict"] = True, strict
        return self

    # ------------------------------------------------------------------------------------------- reports
    def stats(self) -> dict[str, Any]:
        """Counters since the start: calls, how they ran, stock runs by reason, bytes. Plain values."""
        with self._lock:
            counts = {k: self._counts.get(k, 0) for k in ("calls", "replays", "plan", "stock", "adopted", "compiled")}
            extra = {k: v for k, v in self._counts.items() if k not in counts}
            return {
                **counts, **extra, "eager": dict(self._reasons), "programs": len(self._programs),
                "misses": dict(self._misses), "state_bytes": self.memory.nbytes,
                "constant_bytes": self.compiler.constants.nbytes(self.parameters()),
            }  # fmt: skip

    @property
    def programs(self) -> dict[Signature, Program]:
        return dict(self._programs)
