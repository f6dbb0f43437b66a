"""Tracing by regime: what a trace covers, what it says where it does not, and what it never touches."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import nn

from cadence_fx.catalog import Signature, signatures
from cadence_fx.contract import Boundary
from cadence_fx.errors import TraceError
from cadence_fx.trace import Tracer
from cadence_fx.twin import make_twin
from tests.toys import TOYS, WIDTH, Player, Rows, build, cut, differences, function, keep_ends


def traced(module: nn.Module, boundaries: tuple[str, ...] = (), *, dynamic: bool = True, **args: Any) -> Any:
    vary = {name: {1} if dynamic else set() for name in args}
    return Tracer(make_twin(module), boundaries).trace(args, vary)


class Branch(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[1] > 8:
            return x[:, -8:] * 2
        return x + 1


FLOAT = [torch.float32]


def test_a_trace_covers_the_extents_that_take_the_same_branch() -> None:
    trace = traced(Branch(), x=torch.zeros(1, 5))
    assert all(isinstance(trace.bind([(1, n)], FLOAT), dict) for n in (2, 5, 8))
    assert isinstance(trace.bind([(1, 9)], FLOAT), str)


def test_a_guard_that_fails_is_named_with_its_line() -> None:
    reason = traced(Branch(), x=torch.zeros(1, 12)).bind([(1, 3)], FLOAT)
    line = Branch.forward.__code__.co_firstlineno + 1
    assert "the guard" in reason
    assert "does not hold" in reason
    assert f"{__file__}:{line} in forward" in reason


class Flat(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + y


@pytest.mark.parametrize(("shapes", "dtypes", "reason"), [
    ([(1, 4), (1, 4)], [torch.float64, torch.float32], "input 0 is torch.float64, the trace has torch.float32"),
    ([(1, 4, 1), (1, 4)], FLOAT * 2, "input 0 has 3 dimensions, the trace has 2"),
    ([(2, 4), (1, 4)], FLOAT * 2, "dimension 0 of input 0 is 2, the trace has 1"),
    ([(1, 4), (1, 5)], FLOAT * 2, "dimension 1 of input 1 is 5, expected 4 as elsewhere"),
])  # fmt: skip
def test_an_input_that_does_not_fit_is_named(shapes: Any, dtypes: Any, reason: str) -> None:
    trace = traced(Flat(), x=torch.zeros(1, 5), y=torch.zeros(1, 5))
    assert trace.bind(shapes, dtypes) == reason


def test_a_branch_on_a_length_gives_two_traces() -> None:
    player = Player(build("old_first", chunks=(3,), flush=(2,)))
    for signature in signatures(player.toy.contract):
        player.compiler.compile(signature)
    (found,) = player.compiler.traces.values()
    assert len(found) == 2


# ---------------------------------------------------------------------------------------------- boundaries
def test_a_boundary_is_traced_once_for_all_steps() -> None:
    player = Player(build("new_first", chunks=(3,), flush=()))
    for signature in signatures(player.toy.contract):
        player.compiler.compile(signature)
    (site,) = player.compiler.tracer.sites
    assert site.path == "block.forward"
    assert len(site.traces) == 1


class Truncates(nn.Module):
    def keep(self, k: torch.Tensor) -> torch.Tensor:
        return cut(k)


def inside_a_boundary(m: Any, x: torch.Tensor, s: Rows) -> Any:
    k = m.inner.keep(torch.cat([x, s["a"]], 1))
    return x + k.mean(1, keepdim=True) * k.shape[1], {"a": k}


def test_a_branch_inside_a_boundary_binds_the_caller() -> None:
    toy = function(inside_a_boundary, {"a": 6}, keep_ends(), flush=(1, 2), parts={"inner": Truncates()},
                   boundaries=(Boundary("inner.keep"),))  # fmt: skip
    player = Player(toy)
    assert list(differences(toy, [toy.calls[i % 3] for i in range(9)], player=player)) == []
    (found,) = player.compiler.traces.values()
    assert len(found) >= 2
    assert len(player.compiler.tracer.sites[0].traces) >= 2


class Odd(nn.Module):
    weight: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.randn(WIDTH))

    def plain_results(self, x: torch.Tensor, double: bool = False) -> Any:
        return (x * 2, None, 3) if double else (x * self.weight, x, None)

    def depends_on_strides(self, x: torch.Tensor) -> torch.Tensor:
        return x.contiguous().view(1, -1) * 2

    def takes_a_number(self, x: torch.Tensor, n: int) -> torch.Tensor:
        return x * n

    def returns_a_number(self, x: torch.Tensor) -> Any:
        return x * 2, x.shape[1]

    def outer(self, x: torch.Tensor) -> torch.Tensor:
        return self.depends_on_strides(x).view(x.shape) + x

    def writes(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        out.mul_(2)
        return x


def with_boundaries(f: Any, *names: str, rows: int = 8) -> Any:
    boundaries = tuple(Boundary(f"inner.{name}") for name in names)
    return function(f, {"a": rows}, chunks=(3, 4), parts={"inner": Odd()}, boundaries=boundaries)


def plain_results(m: Any, x: torch.Tensor, s: Rows) -> Any:
    a, b, nothing = m.inner.plain_results(x)
    c, also_nothing, three = m.inner.plain_results(x, double=True)
    assert nothing is None
    assert also_nothing is None
    return a + b * three + c, {"a": s["a"] * 1}


def other_strides(m: Any, x: torch.Tensor, s: Rows) -> Any:
    y, z = m.inner.depends_on_strides(s["a"]), m.inner.depends_on_strides(s["a"].transpose(1, 2))
    return x + y[:, :WIDTH] + 3 * z[:, :WIDTH], {"a": s["a"] * 1}


def nested(m: Any, x: torch.Tensor, s: Rows) -> Any:
    return m.inner.outer(x) + m.inner.depends_on_strides(x).view(x.shape), {"a": s["a"] * 1}


def written_argument(m: Any, x: torch.Tensor, s: Rows) -> Any:
    y = x * 1
    return m.inner.writes(x, y) + y, {"a": s["a"] * 1}


@pytest.mark.parametrize(("f", "names"), [
    (plain_results, ("plain_results",)), (other_strides, ("depends_on_strides",)),
    (nested, ("outer", "depends_on_strides")), (written_argument, ("writes",)),
], ids=lambda v: getattr(v, "__name__", ""))  # fmt: skip
def test_boundaries_keep_the_bits(f: Any, names: tuple[str, ...]) -> None:
    toy = with_boundaries(f, *names)
    assert list(differences(toy, [toy.calls[i % 2] for i in range(8)])) == []


def test_a_boundary_cannot_take_a_symbolic_number() -> None:
    def f(m: Any, x: torch.Tensor, s: Rows) -> Any:
        return m.inner.takes_a_number(x, x.shape[1]), {"a": s["a"] * 1}

    with pytest.raises(TraceError, match=r"'inner.takes_a_number' takes the symbolic number .* further in or out"):
        Player(with_boundaries(f, "takes_a_number")).program("chunk[3]")


def test_a_boundary_cannot_return_a_symbolic_number() -> None:
    def f(m: Any, x: torch.Tensor, s: Rows) -> Any:
        y, n = m.inner.returns_a_number(x)
        return y * n, {"a": s["a"] * 1}

    with pytest.raises(TraceError, match=r"boundary 'inner.returns_a_number' returns the symbolic number"):
        Player(with_boundaries(f, "returns_a_number")).program("chunk[3]")


# ---------------------------------------------------------------------------------------------- failures
class DataDependent(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.sum() > 0 else x


class Quits(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError("half a frame")


@pytest.mark.parametrize(
    ("module", "cause"), [(DataDependent(), "data-dependent"), (Quits(), "ZeroDivisionError: half a")]
)
def test_a_module_that_cannot_be_traced_says_why(module: nn.Module, cause: str) -> None:
    with pytest.raises(TraceError) as caught:
        traced(module, x=torch.zeros(1, 5))
    text = str(caught.value)
    assert text.startswith(f"{type(module).__name__} cannot be traced: ")
    assert cause in text.lower() or cause in text
    assert caught.value.__cause__ is not None


# ---------------------------------------------------------------------------------------------- the user's module
def everything(module: nn.Module) -> dict[str, Any]:
    """What tracing could change: attributes by identity, tensors by version, hooks and modes of every submodule."""
    found: dict[str, Any] = {}
    for path, part in module.named_modules():
        for name, value in part.__dict__.items():
            inner = value.items() if isinstance(value, dict) else ()
            found[f"{path}.{name}"] = (id(value), repr(value) if isinstance(value, (dict, list)) else value,
                                       [(k, id(v)) for k, v in inner])  # fmt: skip
    found["state"] = {k: (id(v), v._version, v.clone()) for k, v in module.state_dict(keep_vars=True).items()}
    return found


class Fills(nn.Module):
    """Fills a cache on its first call, counts its calls and remembers a shape."""

    cache: torch.Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", None)
        self.history: dict[str, Any] = {}
        self.calls = 0
        self.linear = nn.Linear(6, 6)
        self.linear.register_forward_hook(lambda m, args, out: out + 0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.cache is None:
            self.cache = x.new_zeros(1, 4, 6)
        y = torch.cat([self.cache, x], -1)
        self.cache = y[..., -6:]
        self.calls += 1
        self.history["last"] = x.shape
        return self.linear(y[..., -6:])


def test_a_module_that_fills_its_own_cache_is_left_as_it_was() -> None:
    module = Fills()
    before = everything(module)
    with contextlib.suppress(TraceError):  # such a module may be refused, never changed
        traced(module, x=torch.zeros(1, 4, 6), dynamic=False)
    assert str(everything(module)) == str(before)
    assert module.cache is None
    assert module.calls == 0
    assert module.history == {}


@pytest.mark.parametrize("name", list(TOYS))
def test_compiling_changes_nothing_of_the_module(name: str) -> None:
    toy = build(name)
    toy.module.register_forward_hook(lambda m, args, out: None)
    before, position = everything(toy.module), torch.get_rng_state()
    player = Player(toy)
    player.compiler.compile(Signature(player.state, toy.calls[0]))
    assert str(everything(toy.module)) == str(before)
    assert torch.equal(torch.get_rng_state(), position)
