"""The benchmark's controls: what else makes such a decoder faster, each done as a user of it would.

torch.compile on the contract's boundaries, the vendor's own CUDA graphs where it has some, and compiled kernels in this
library's captures. A control that fails is a result: `CellUnavailable` carries the first line of the real error.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

from cadence_fx.bench_cell import Cell, CellUnavailable
from cadence_fx.catalog import reachable
from cadence_fx.compiled_captures import CompiledCaptures
from cadence_fx.compiled_segments import Compile, inductor
from cadence_fx.contract import Boundary, Contract
from cadence_fx.drop_in import transform
from cadence_fx.errors import CadenceError
from cadence_fx.families import FAMILIES, Family
from cadence_fx.places import method, owner_of
from cadence_fx.traffic import SessionMemory

__all__ = ["CONTROLS", "compile_boundaries", "compiled_in_engine", "failure", "play"]

RECOMPILES = 128  # of one function: prompts and the extents of a stream each take some; the default of 8 is too few
ROUNDS = 3  # CUDA graphs of torch.compile: a call compiles, the next one records, and only the third replays

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]
VendorGraph = Callable[[nn.Module, Contract], None]


# ---------------------------------------------------------------------------------------------- failures and warm-up
def failure(error: BaseException) -> str:
    """The first line of what really went wrong: compilers wrap errors in their own."""
    inner = getattr(error, "inner_exception", None)
    if isinstance(inner, BaseException):
        return failure(inner)
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    if first and isinstance(error, CadenceError):
        return first  # this library's texts need no name
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


@contextmanager
def _or_unavailable(what: str) -> Iterator[None]:
    """Any error inside is the cell's result; ``what`` says where it came from."""
    try:
        yield
    except CellUnavailable:
        raise  # names its place
    except Exception as error:
        raise CellUnavailable(f"{what}: {failure(error)}") from error


def play(family: Family, decoder: nn.Module, contract: Contract, seed: int, rounds: int = 1) -> None:
    """Steady traffic from the start until every extent has come twice, ``rounds`` times."""
    states = len(reachable(contract, steady_only=True)) // contract.variants
    traffic = getattr(family, "stream", family.script)  # the steady part alone, where a family has it
    memory = SessionMemory.of(contract)
    for _ in range(rounds):
        for step in traffic(decoder, contract, seed, max(4, states + 1)):
            step.action(decoder, memory)


def _needs_cuda(device: str, what: str) -> None:
    if torch.device(device).type != "cuda":
        raise CellUnavailable(f"{what} need a CUDA device")


# ---------------------------------------------------------------------------------------------- torch.compile
class _BoundaryFailed(CellUnavailable):
    """A compiled callable raised."""

    def __init__(self, path: str, reason: str) -> None:
        self.path, self.reason = path, reason
        super().__init__(f"{path}: {reason}")


def compile_boundaries(decoder: nn.Module, paths: Sequence[str], wrap: Wrap) -> None:
    """Replace callables of a decoder, which then calls the replacements instead of its own.

    Args:
        decoder: changed.
        paths: of the callables.
        wrap: the original (a bound method) -> what is called in its place.
    """
    for path in paths:
        owner, name = owner_of(decoder, path)
        # In the instance: other modules of the class keep their method.
        owner.__dict__[name] = _named(path, wrap(method(decoder, path)))


def _named(path: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except _BoundaryFailed:
            raise  # of a callable inside this one
        except Exception as error:
            raise _BoundaryFailed(path, failure(error)) from error

    return call


def _returning_copies(function: Callable[..., Any]) -> Callable[..., Any]:
    """What torch's CUDA graphs ask of whoever keeps a result: the next replay overwrites it, and state is kept."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return pytree.tree_map_only(torch.Tensor, torch.clone, function(*args, **kwargs))

    return call


def _begin_step_at_each_call(decoder: nn.Module, contract: Contract) -> None:
    """Tell torch's CUDA graphs where a call begins, as their documentation asks: outputs of the last one may go."""
    mark: Callable[[], None] = torch.compiler.cudagraph_mark_step_begin
    decoder.register_forward_pre_hook(lambda module, args: mark())

    def marked(entry: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(entry)
        def call(*args: Any, **kwargs: Any) -> Any:
            mark()
            return entry(*args, **kwargs)

        return call

    for entry in contract.entries:
        decoder.__dict__[entry.method] = marked(method(decoder, entry.method))


def _compiled(
    family: Family, device: str, seed: int, *, mode: str, wanted: Callable[[Boundary], bool] = lambda _: True
) -> nn.Module:
    """Stock with ``torch.compile`` around the wanted boundaries, and nothing else done.

    A callable that cannot be compiled, or whose compiled form raises during warm-up, is left as stock, as a user would
    leave it; ``stats()`` of the result names it with the reason. With none left there is no cell.
    """
    import torch._dynamo.config as dynamo

    contract = family.contract()
    paths = [boundary.path for boundary in contract.boundaries if wanted(boundary)]
    if not paths:
        raise CellUnavailable(f"{family.name} declares no such callable")
    decoder, left = family.build_random(device, seed), dict[str, str]()
    graphs = not mode.endswith("no-cudagraphs")

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        compiled = torch.compile(original, mode=mode)
        return _returning_copies(compiled) if graphs else compiled

    compile_boundaries(decoder, paths, wrap)
    if graphs:
        _begin_step_at_each_call(decoder, contract)
    decoder.__dict__["stats"] = lambda: {"left_as_stock": dict(left)}
    with dynamo.patch(recompile_limit=RECOMPILES):
        while True:
            try:
                with _or_unavailable("between compiled callables"):
                    play(family, decoder, contract, seed, ROUNDS)
                return decoder
            except _BoundaryFailed as error:
                left[error.path] = error.reason
                owner, name = owner_of(decoder, error.path)
                del owner.__dict__[name]
            if len(left) == len(paths):
                raise CellUnavailable("; ".join(f"{path}: {reason}" for path, reason in left.items()))


def _loops(boundary: Boundary) -> bool:
    return boundary.clock is not None


def _once_a_call(boundary: Boundary) -> bool:
    return boundary.clock is None


# ---------------------------------------------------------------------------------------------- the vendor's graphs
def _vendor_graph(family: Family, device: str, seed: int) -> nn.Module:
    """Stock with the vendor's own CUDA graphs turned on by the family's adapter."""
    turn_on = _vendor_graph_of(family)
    if turn_on is None:
        raise CellUnavailable(f"{family.name}: the adapter knows no CUDA graphs of the vendor")
    _needs_cuda(device, "the vendor's graphs")
    contract, decoder = family.contract(), family.build_random(device, seed)
    with _or_unavailable("the vendor's graphs"):
        turn_on(decoder, contract)
        play(family, decoder, contract, seed)
    return decoder


def _vendor_graph_of(family: Family) -> VendorGraph | None:
    """``vendor_graph`` of the module ``<adapter>_controls``, if the family has one."""
    name = f"{FAMILIES.get(family.name, '')}_controls"
    if family.name not in FAMILIES or importlib.util.find_spec(name) is None:
        return None
    return getattr(importlib.import_module(name), "vendor_graph", None)


# ---------------------------------------------------------------------------------------------- compiled captures
def compiled_in_engine(family: Family, device: str, seed: int, *, compile: Compile = inductor) -> nn.Module:
    """The transform, with compiled functions captured in place of the plan's operators.

    State rule, constants, exact shapes and one graph a call are this library's; the kernels are the compiler's. What is
    captured is certified against the same compiled functions launched one by one: stock's bits are not to be had.
    """
    _needs_cuda(device, "captures")
    fast = transform(family.build_random(device, seed), family.contract(), backend="cuda", streams=1)
    captures = CompiledCaptures.instead_of(fast, compile)
    with _or_unavailable("compiled captures"):
        fast.warmup("steady")
    for signature, row in captures.rows.items():
        if not row.captured:
            raise CellUnavailable(f"call {signature.call!r}: {'; '.join(map(str, row.refusals)).splitlines()[0]}")
    return fast.seal()


# ---------------------------------------------------------------------------------------------- the cells
def _torch_compile(name: str, title: str, **settings: Any) -> Cell:
    return Cell(name, title, functools.partial(_compiled, **settings))


_MODE = "reduce-overhead"
CONTROLS: Mapping[str, Cell] = {
    cell.name: cell
    for cell in (
        _torch_compile("compile_reduce_overhead", f"torch.compile, {_MODE}, on every boundary", mode=_MODE),
        _torch_compile(
            "compile_reduce_overhead_loop", f"torch.compile, {_MODE}, on the solver's step", mode=_MODE, wanted=_loops
        ),
        _torch_compile(
            "compile_reduce_overhead_rest", f"torch.compile, {_MODE}, beside the loop", mode=_MODE, wanted=_once_a_call
        ),
        _torch_compile(
            "compile_max_autotune", "torch.compile, max-autotune, no graphs", mode="max-autotune-no-cudagraphs"
        ),
        _torch_compile("compile_max_autotune_graphs", "torch.compile, max-autotune", mode="max-autotune"),
        Cell("vendor_graph", "the vendor's CUDA graphs, buckets at the live sizes", _vendor_graph),
        Cell("compiler_in_engine", "Inductor's kernels, by boundary, in one capture a chunk", compiled_in_engine),
    )
}
