"""Small streaming modules with their contracts: every pattern of state that the library rewrites, in a few dimensions.

Each module is functional: ``forward(x, state) -> (y, new state)``. `Player` runs a module's compiled programs on the
contract's buffers, so that a test can compare bits with plain calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from cadence_fx.catalog import Signature, State, after, starts
from cadence_fx.compiler import Compiler
from cadence_fx.constants import ConstantPool
from cadence_fx.contract import Arg, Attr, Boundary, Call, Clock, Contract, Input, Region, Result
from cadence_fx.memory import Memory
from cadence_fx.pipeline import GraphPass, PassContext, PassResult, run_passes
from cadence_fx.program import Program
from cadence_fx.retention import START, KeepEnds, Window
from cadence_fx.specialise import FlatGraph, specialise
from cadence_fx.trace import Tracer

CPU = torch.device("cpu")
Rows = dict[str, torch.Tensor]
HEADS, HEAD, WIDTH = 2, 4, 8


def bits(tensor: torch.Tensor) -> bytes:
    """The raw bytes of a tensor's elements: -0.0 differs from 0.0, and a NaN equals itself."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and bits(a) == bits(b)


def split_heads(x: torch.Tensor) -> torch.Tensor:
    return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)


class Block(nn.Module):
    """Attention over new rows in front of cached ones, as the flow decoder has it."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.modulation = nn.Linear(WIDTH, 2 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, t: torch.Tensor, cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        shift, scale = self.modulation(F.silu(t)).chunk(2, dim=-1)
        q, k, v = map(split_heads, self.qkv(x * (1 + scale) + shift).chunk(3, dim=-1))
        k_old, v_old = cache.chunk(2, dim=3)
        torch.ones(x.shape[1], k.shape[2] + k_old.shape[2], dtype=torch.bool)  # a mask that nobody reads
        k, v = torch.cat([k, k_old], dim=2), torch.cat([v, v_old], dim=2)
        y = F.scaled_dot_product_attention(q, k, v)
        return x + self.out(y.transpose(1, 2).flatten(2)), torch.cat([k, v], dim=3)


class NewFirstSolver(nn.Module):
    """Two solver steps of one block; the state goes through a scratch buffer and is handed out as a view of it."""

    scratch: torch.Tensor

    def __init__(self, start: int = 6, tail: int = 4, steps: int = 2, limit: int = 64) -> None:
        super().__init__()
        self.block, self.start, self.tail, self.steps = Block(), start, tail, steps
        self.register_buffer("scratch", torch.zeros(steps, 1, HEADS, limit, 2 * HEAD), persistent=False)

    def initial(self) -> Rows:
        return {"kv": torch.randn(self.steps, 1, HEADS, self.start, 2 * HEAD)}

    def forward(self, x: torch.Tensor, state: Rows) -> tuple[torch.Tensor, Rows]:
        old = state["kv"]
        span = torch.linspace(0, 1, self.steps + 1)
        for step in range(self.steps):
            t = torch.cat([span[step : step + 1].mul(freq).cos() for freq in (1.0, 2.0)]).repeat(WIDTH // 2)
            t = t.to(x.device)  # made on the host in every call, as the vendor's frequencies are
            x, cache = self.block(x, t, old[step])
            self.scratch[step, :, :, : cache.shape[2], :] = cache
        kv = self.scratch[:, :, :, : old.shape[3] + x.shape[1], :]
        if kv.shape[3] > self.start + self.tail:
            kv = torch.cat([kv[:, :, :, : self.start], kv[:, :, :, -self.tail :]], dim=3)
        return x, {"kv": kv}


class OldFirstMatmul(nn.Module):
    """Cached rows first, attention by explicit products."""

    def __init__(self, start: int = 5, tail: int = 4) -> None:
        super().__init__()
        self.qkv, self.start, self.tail = nn.Linear(WIDTH, 3 * WIDTH), start, tail

    def initial(self) -> Rows:
        return {"kv": torch.randn(1, HEADS, self.start, 2 * HEAD)}

    def forward(self, x: torch.Tensor, state: Rows) -> tuple[torch.Tensor, Rows]:
        q, k, v = map(split_heads, self.qkv(x).chunk(3, dim=-1))
        k_old, v_old = torch.split(state["kv"], HEAD, dim=-1)
        k, v = torch.cat([k_old, k], dim=2), torch.cat([v_old, v], dim=2)
        y = torch.softmax(q @ k.transpose(-2, -1) / HEAD**0.5, dim=-1) @ v
        kv = torch.cat([k, v], dim=-1)
        if kv.shape[2] > self.start + self.tail:
            kv = torch.cat([kv[:, :, : self.start], kv[:, :, -self.tail :]], dim=2)
        return x + y.transpose(1, 2).flatten(2), {"kv": kv}


class CausalConv(nn.Module):
    """A convolution whose left context is state."""

    def __init__(self, kernel: int = 4) -> None:
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, kernel)
        self.left = kernel - 1

    def initial(self) -> Rows:
        return {"left": torch.randn(1, WIDTH, self.left)}

    def forward(self, x: torch.Tensor, state: Rows) -> tuple[torch.Tensor, Rows]:
        seen = torch.cat([state["left"], x.transpose(1, 2)], dim=2)
        return self.conv(seen).transpose(1, 2), {"left": seen[:, :, -self.left :]}


class Istft(nn.Module):
    """A vocoder head: a spectrum of the frames that it remembers and the new ones, to samples."""

    window: torch.Tensor

    def __init__(self, kept: int = 4) -> None:
        super().__init__()
        self.head, self.kept = nn.Linear(WIDTH, 2 * 9), kept
        self.register_buffer("window", torch.hann_window(16), persistent=False)

    def initial(self) -> Rows:
        return {"mel": torch.zeros(1, 0, WIDTH)}

    def forward(self, x: torch.Tensor, state: Rows) -> tuple[torch.Tensor, Rows]:
        seen = torch.cat([state["mel"], x], dim=1)
        real, imaginary = self.head(seen).transpose(1, 2).chunk(2, dim=1)
        y = torch.istft(torch.complex(real, imaginary), 16, 4, 16, window=self.window)
        return y, {"mel": seen[:, -self.kept :].clone()}


class Noisy(nn.Module):
    """Two draws, the second of which nobody reads: it still moves the generator."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def initial(self) -> Rows:
        return {"phase": torch.zeros(1, WIDTH)}

    def forward(self, x: torch.Tensor, state: Rows) -> tuple[torch.Tensor, Rows]:
        noise = torch.randn_like(x)
        torch.rand(3, x.shape[1])
        phase = state["phase"].unsqueeze(1) + x.cumsum(1)
        return self.linear(x + 0.1 * noise) + phase.sin(), {"phase": phase[:, -1]}


class KeepLast(nn.Module):
    """Nothing but a window of the newest ``kept`` rows, read by a difference."""

    def __init__(self, kept: int = 5) -> None:
        super().__init__()
        self.kept = kept

    def initial(self) -> Rows:
        return {"rows": torch.zeros(1, 0, WIDTH)}

    def forward(self, x: torch.Tensor, state: Rows) -> tuple[torch.Tensor, Rows]:
        seen = torch.cat([state["rows"], x], dim=1)
        return x - seen.mean(1, keepdim=True), {"rows": seen[:, -self.kept :]}


class FrozenHalves(nn.Module):
    """Two attention layers of different rate in one cache: the slow one is stored twice so that lengths agree.

    Once retention cuts the packed cache, the first half that the slow layer reads never changes again.
    """

    def __init__(self, start: int = 6, tail: int = 4) -> None:
        super().__init__()
        self.slow, self.fast = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.start, self.tail = start, tail

    def initial(self) -> Rows:
        slow = torch.randn(1, 1, HEADS, self.start // 2, 2 * HEAD)
        return {"kv": torch.cat([slow.repeat(1, 1, 1, 2, 1), torch.randn(1, 1, HEADS, self.start, 2 * HEAD)])}

    @staticmethod
    def attend(layer: nn.Module, x: torch.Tensor, cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v = map(split_heads, layer(x).chunk(3, dim=-1))
        k_old, v_old = torch.split(cache, HEAD, dim=-1)
        k, v = torch.cat([k_old, k], dim=2), torch.cat([v_old, v], dim=2)
        y = torch.softmax(q @ k.transpose(-2, -1), dim=-1) @ v
        return x + y.transpose(1, 2).flatten(2), torch.cat([k, v], dim=-1)

    def forward(self, x: torch.Tensor, state: Rows) -> tuple[torch.Tensor, Rows]:
        kv = state["kv"]
        x, slow = self.attend(self.slow, x, kv[0, :, :, : kv.shape[3] // 2])
        x, fast = self.attend(self.fast, x.repeat_interleave(2, dim=1), kv[1])
        kv = torch.stack([slow.repeat(1, 1, 2, 1), fast])
        if kv.shape[3] > self.start + self.tail:
            kv = torch.cat([kv[:, :, :, : self.start], kv[:, :, :, -self.tail :]], dim=3)
        return x, {"kv": kv}


class Function(nn.Module):
    """A module around one function ``f(module, x, state)``; tensors and modules in ``parts`` become its attributes."""

    def __init__(self, f: Callable[..., Any], shapes: dict[str, tuple[int, ...]], **parts: Any) -> None:
        super().__init__()
        self.f, self.shapes = f, shapes
        for name, part in parts.items():
            if isinstance(part, torch.Tensor):
                self.register_buffer(name, part, persistent=False)
            else:
                setattr(self, name, part)

    def initial(self) -> Rows:
        return {name: torch.randn(shape) for name, shape in self.shapes.items()}

    def forward(self, x: torch.Tensor, state: Rows) -> tuple[torch.Tensor, Rows]:
        result: tuple[torch.Tensor, Rows] = self.f(self, x, state)
        return result


# ---------------------------------------------------------------------------------------------- declarations
def function(
    f: Callable[..., Any],
    rows: dict[str, int],
    *regions: Region,
    chunks: Sequence[int] = (3,),
    flush: Sequence[int] = (),
    parts: dict[str, Any] | None = None,
    **declared: Any,
) -> Toy:
    """A toy of one function. ``rows``: region -> rows of ``[1, rows, WIDTH]`` at the start; fixed unless declared."""
    module = Function(f, {name: (1, n, WIDTH) for name, n in rows.items()}, **(parts or {}))
    module.eval().requires_grad_(False)
    given = {region.name for region in regions}
    fixed = [state(name, (1, n, WIDTH)) for name, n in rows.items() if name not in given]
    return Toy(module, declare((*fixed, *regions), chunks, flush, **declared))


def keep_ends(name: str = "a", start: int = 6, tail: int = 4, **declared: Any) -> Region:
    """A region of ``[1, rows, WIDTH]``, new elements first."""
    return state(name, (1, None, WIDTH), **{"order": "new_first", **_ends(start, tail), **declared})


def cut(k: torch.Tensor, head: int = 6, tail: int = 4) -> torch.Tensor:
    """What `keep_ends` declares, done by the module."""
    return torch.cat([k[:, :head], k[:, -tail:]], dim=1) if k.shape[1] > head + tail else k


def state(name: str, shape: tuple[int | None, ...], **declared: Any) -> Region:
    if None in shape:
        declared = {"dim": shape.index(None), "clock": "frame", **declared}
    return Region(name, shape, enters=Arg("state", name), leaves=Result(1, name), **declared)


def declare(
    regions: Sequence[Region], chunks: Sequence[int] = (3,), flush: Sequence[int] = (), **declared: Any
) -> Contract:
    """A contract for ``forward(x [1, frames, WIDTH], state)``; the first chunk size is the steady one."""
    calls = [
        Call(f"chunk[{n}]", {"frame": n}, {"x": (n,)}, steady=n not in flush and i == 0)
        for i, n in enumerate((*chunks, *flush))
    ]
    clocks = (Clock("frame", hz=50), Clock("step", extent=2))
    x = Input(Arg("x"), (1, None, WIDTH))
    return Contract("toy", clocks, tuple(regions), (x,), tuple(calls), **declared)


@dataclass(frozen=True)
class Toy:
    """A module with its contract."""

    module: Any
    contract: Contract

    @property
    def calls(self) -> tuple[str, ...]:
        return tuple(call.name for call in self.contract.calls)


def _ends(start: int, tail: int, **declared: Any) -> dict[str, Any]:
    return {"start": start, "retain": KeepEnds(START, tail), **declared}


def new_first(
    start: int = 6, tail: int = 4, chunks: Sequence[int] = (3,), flush: Sequence[int] = (1, 2), share: bool = True
) -> Toy:
    module = NewFirstSolver(start, tail)
    shape = (2, 1, HEADS, None, 2 * HEAD)
    scratch = Region("scratch", shape, enters=Attr("scratch"), mutability="scratch", lifetime="unit", dim=3,
                     clock="frame", shares="kv" if share else None, **_ends(start, tail))  # fmt: skip
    kv = state("kv", shape, order="new_first", fixed_clocks=((0, "step"),), **_ends(start, tail))
    return Toy(module, declare((kv, scratch), chunks, flush, boundaries=(Boundary("block.forward", "step"),)))


def old_first(start: int = 5, tail: int = 4, chunks: Sequence[int] = (3,), flush: Sequence[int] = (1, 2)) -> Toy:
    kv = state("kv", (1, HEADS, None, 2 * HEAD), order="old_first", **_ends(start, tail))
    return Toy(OldFirstMatmul(start, tail), declare((kv,), chunks, flush))


def causal_conv(chunks: Sequence[int] = (5, 1, 2)) -> Toy:
    return Toy(CausalConv(), declare((state("left", (1, WIDTH, 3)),), chunks))


def istft(chunks: Sequence[int] = (3, 6)) -> Toy:
    mel = state("mel", (1, None, WIDTH), retain=Window(4), order="old_first")
    return Toy(Istft(), declare((mel,), chunks))


def noisy() -> Toy:
    return Toy(Noisy(), declare((state("phase", (1, WIDTH)),)))


def keep_last(chunks: Sequence[int] = (2, 1, 5, 7)) -> Toy:
    rows = state("rows", (1, None, WIDTH), retain=Window(5), order="old_first")
    return Toy(KeepLast(), declare((rows,), chunks))


def frozen_halves(start: int = 6, tail: int = 4, chunks: Sequence[int] = (1, 2)) -> Toy:
    """The call takes token frames: the packed cache grows by two rows for each."""
    kv = state("kv", (2, 1, HEADS, None, 2 * HEAD), order="old_first", growth=2, **_ends(start, tail))
    return Toy(FrozenHalves(start, tail), declare((kv,), chunks))


TOYS: dict[str, Callable[..., Toy]] = {
    "new_first": new_first, "old_first": old_first, "causal_conv": causal_conv, "istft": istft, "noisy": noisy,
    "keep_last": keep_last, "frozen_halves": frozen_halves,
}  # fmt: skip


def build(name: str, seed: int = 0, **options: Any) -> Toy:
    """A toy with weights from a seed, so that tests do not depend on their order."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        toy = TOYS[name](**options)
    toy.module.eval().requires_grad_(False)
    return toy


# ---------------------------------------------------------------------------------------------- running
class Player:
    """Streams through a toy's compiled programs, on the contract's buffers."""

    def __init__(self, toy: Toy, **options: Any) -> None:
        self.toy = toy
        self.memory = Memory(toy.contract, CPU)
        self.compiler = Compiler(toy.module, toy.contract, self.memory, **options)
        self.programs: dict[Signature, Program] = {}
        self.state: State = starts(toy.contract)[0]

    def start(self, first: Rows) -> None:
        self.state = starts(self.toy.contract)[0]
        for name, tensor in self.memory.check(first).items():
            self.memory[name].adopt(tensor)

    def program(self, call: str) -> Program:
        signature = Signature(self.state, call)
        if signature not in self.programs:
            self.programs[signature] = self.compiler.compile(signature)
        return self.programs[signature]

    def __call__(self, call: str, x: torch.Tensor) -> tuple[torch.Tensor, Rows]:
        program = self.program(call)
        outputs = program.run(*[{"x": x}[str(place.keys[0])] for place in program.inputs])
        for link in program.links:
            self.memory[link.name].extent = link.new
        self.state = after(self.toy.contract, self.state, call)
        states = {name: buffer.view() for name, buffer in self.memory.buffers.items()}
        result: tuple[torch.Tensor, Rows] = program.result(outputs, states)
        return result


def draw(toy: Toy, call: str, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(1, toy.contract.call(call).sizes["x"][0], WIDTH, generator=generator)


def differences(toy: Toy, calls: Sequence[str], seed: int = 0, player: Player | None = None) -> Iterator[str]:
    """Where a stream through the programs differs from plain calls, in bits of output, state and generator."""
    generator = torch.Generator().manual_seed(seed)
    player = player or Player(toy)
    torch.manual_seed(seed)
    first = toy.module.initial()
    held = {name: tensor.clone() for name, tensor in first.items()}
    player.start(first)
    for number, call in enumerate(calls):
        x = draw(toy, call, generator)
        torch.manual_seed(number)
        with torch.no_grad():
            expected, held = toy.module(x.clone(), held)
        held = {name: tensor.clone() for name, tensor in held.items()}
        position = torch.get_rng_state()
        torch.manual_seed(number)
        player.program(call)  # compiling draws nothing
        found, states = player(call, x)
        if not same_bits(found, expected):
            yield f"output of chunk {number} ({call})"
        for name, tensor in held.items():
            if not same_bits(states[name], tensor):
                yield f"state {name} after chunk {number} ({call})"
        if not torch.equal(position, torch.get_rng_state()):
            yield f"generator after chunk {number} ({call})"


# ---------------------------------------------------------------------------------------------- single graphs
@dataclass
class Bench:
    """One signature's graph before any pass, and what running it takes."""

    toy: Toy
    compiler: Compiler
    flat: FlatGraph
    context: PassContext

    def fetch(self, flat: FlatGraph, target: str) -> torch.Tensor:
        return self.compiler.fetch(flat, target)

    def run_pass(self, *passes: GraphPass) -> PassResult:
        return run_passes(self.flat, self.context, passes)

    def execute(self, flat: FlatGraph, *inputs: torch.Tensor, seed: int = 0) -> list[torch.Tensor]:
        """Outputs of a graph; scratch and generator are as before each run, so that two graphs can be compared."""
        torch.manual_seed(seed)
        with torch.no_grad():
            return list(self.compiler.build(flat.copy()).forward(*inputs))


def bench(toy: Toy, call: str | None = None, state: State | None = None, **changed: Any) -> Bench:
    """The graph of a call (the steady one by default) in a state (the first by default)."""
    contract = toy.contract
    compiler = Compiler(toy.module, contract, Memory(contract, CPU))
    signature = Signature(state or starts(contract)[0], call or toy.calls[0])
    flat, places, _ = compiler.flat(signature)
    links = compiler.links(signature, flat, places)
    given: dict[str, Any] = {"constants": ConstantPool(), **changed}
    context = PassContext(given.pop("contract", contract), links, compiler.scratch, compiler.fetch, **given)
    return Bench(toy, compiler, flat, context)


def targets(flat: FlatGraph) -> list[str]:
    """Operators of a graph in order, by name without the overload."""
    return [str(n.target).removeprefix("aten.").split(".")[0] for n in flat.graph.nodes if n.op == "call_function"]


def flat_of(
    f: Callable[..., Any], a: torch.Tensor, b: torch.Tensor, attributes: dict[str, torch.Tensor] | None = None
) -> FlatGraph:
    """The graph of a function of two tensors, or of a module with these attributes and two tensors."""

    class Body(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, value in (attributes or {}).items():
                self.register_buffer(name, value)

        def forward(self, a: torch.Tensor, b: torch.Tensor) -> Any:
            return f(a, b) if attributes is None else f(self, a, b)

    tracer = Tracer(Body(), ())
    trace = tracer.trace({"a": a, "b": b}, {"a": set(), "b": set()})
    return specialise(tracer, trace, [a.shape, b.shape], [a.dtype, b.dtype], ["a", "b"])
