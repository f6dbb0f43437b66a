"""G2, hazards of tracing: what a trace could freeze, share or leave behind, on every backend and bit for bit."""

from __future__ import annotations

import copy
from itertools import permutations
from typing import Any

import pytest
import torch
from torch import nn

from cadence_fx.bits import first_difference, same_bits
from cadence_fx.errors import TraceError
from cadence_fx.traffic import clone_tree
from tests.case_toys import ON_ALL, Backend, Twins, contract, fixed
from tests.streams import WIDTH, window_region

LAST = fixed("last", 1, WIDTH)
ROWS = window_region(5)


class Linear(nn.Module):
    """One layer, and its last output as state."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)

    def start(self) -> dict[str, torch.Tensor]:
        return {"last": torch.zeros(1, WIDTH)}


# ------------------------------------------------------------------------------------------- shapes
class Branches(Linear):
    """Branches on a length, writes it as a literal, and broadcasts over it."""

    def forward(self, x: torch.Tensor, state: Any) -> Any:
        length = x.shape[1]
        y = self.lin(x) + state["last"][:, None]
        if length > 16:
            y = y[:, -16:]
        w = torch.ones(length, device=x.device) / length
        return y.mean(1) * w.sum() + (length % 3), {"last": y[:, -1]}


@pytest.mark.parametrize("order", [(8, 16, 17, 40, 1, 5), (1, 5, 40, 17, 16, 8)], ids=["from 8", "from 1"])
def test_a_trace_serves_only_lengths_that_take_its_branches(on: Backend, order: tuple[int, ...]) -> None:
    """G2-01: whichever length is traced first."""
    twins = Twins(Branches, contract(order, LAST), on)
    twins.steps(on.chunks([*order, 8]))
    assert twins.served == 7
    assert sum(map(len, twins.fast.compiler.traces.values())) <= len(order)


class Growing(nn.Module):
    """Attention over all rows so far, from none on."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)

    def start(self, batch: int = 1) -> dict[str, torch.Tensor]:
        return {"rows": torch.zeros(batch, 0, WIDTH)}

    def forward(self, x: torch.Tensor, state: Any) -> Any:
        kv = torch.cat([state["rows"], self.lin(x)], 1)
        return (x @ kv.transpose(1, 2)).softmax(-1) @ kv, {"rows": kv[:, -5:]}


@pytest.mark.parametrize("order", list(permutations((0, 1, 5))), ids=str)
def test_states_of_no_row_one_row_and_five_are_exact_whichever_is_traced_first(
    on: Backend, order: tuple[int, ...]
) -> None:
    """G2-11: sizes 0 and 1 are no others to tracing than their neighbours."""
    twins = Twins(Growing, contract((1, 2, 5), ROWS), on, warm=None, **({"capture_after": 0} if on.captures else {}))
    for rows in order:
        for length in (1, 2):
            twins.restart()
            twins.steps(on.chunks([n for n in (rows,) if n]))
            twins.step(*on.chunks([length]))
    stats = twins.fast.stats()
    assert stats["stock"] == 0
    assert twins.served == stats["calls"]


def test_steps_without_rows_and_other_batches_run_as_stock(on: Backend) -> None:
    """G2-11: attention over no key at all is stock's, whatever that is."""
    twins = Twins(Growing, contract((1, 2), ROWS), on)
    twins.steps([*on.chunks([0]), *on.chunks([2]), *on.chunks([0])])
    assert (twins.counted("signature not in the catalog"), twins.served) == (2, 1)
    twins.theirs, twins.ours = ({k: v.to(on.device) for k, v in twins.stock.start(2).items()} for _ in range(2))
    for x in on.chunks([1, 2]):
        twins.step(torch.cat([x, x * 2]))
    assert twins.fast.stats()["stock"] == 4
    assert twins.accounted


# ------------------------------------------------------------------------------------------- the user's module
class NoneFirst(nn.Module):
    """A cache that is None until the first call, a log and a counter."""

    cache: torch.Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.n, self.hist = nn.Linear(WIDTH, WIDTH), 0, dict[str, Any]()
        self.register_buffer("cache", None)

    def start(self) -> dict[str, torch.Tensor]:
        return {"last": torch.zeros(1, WIDTH)}

    def forward(self, x: torch.Tensor, state: Any) -> Any:
        if self.cache is None:
            self.cache = x.new_zeros(1, 4, WIDTH)
        y = torch.cat([self.cache, self.lin(x)], 1)
        self.cache, self.n, self.hist["last"] = y[:, -4:], self.n + 1, x.shape
        return y, {"last": y[:, -1]}


class CacheAsArgument(NoneFirst):
    """The same cache as a caller's, who may have none yet."""

    def start(self) -> dict[str, torch.Tensor]:
        return {}

    def forward(self, x: torch.Tensor, state: Any) -> Any:
        cache = state.get("cache")
        y = torch.cat([x.new_zeros(1, 4, WIDTH) if cache is None else cache, self.lin(x)], 1)
        return y, {"cache": y[:, -4:]}


def _everything(module: nn.Module) -> dict[str, Any]:
    return {f"{path}/{k}": copy.copy(v) for path, m in module.named_modules() for k, v in vars(m).items()}


def test_tracing_leaves_nothing_in_the_users_module_and_both_branches_are_exact(on: Backend) -> None:
    """G2-02: state that nobody declared is refused by name; three chunks, a reset, three chunks."""
    twins = Twins(NoneFirst, contract((2,), LAST), on, warm=None)
    before = _everything(twins.mine)
    with pytest.raises(TraceError, match="a call changes the attribute"):
        twins.fast.warmup()
    for _ in range(2):
        twins.steps(on.chunks([2] * 3))
        twins.both(lambda m: setattr(m, "cache", None))
    assert twins.counted("not compiled: a call changes the attribute") == 6
    assert (twins.fast.n, twins.fast.hist) == (twins.stock.n, twins.stock.hist) == (6, {"last": (1, 2, WIDTH)})
    assert _everything(twins.mine).keys() == before.keys()
    assert all(v is before[k] or v == before[k] for k, v in _everything(twins.mine).items())
    assert (twins.mine.cache, twins.mine.n, twins.mine.hist) == (None, 0, {})


def test_a_cache_that_is_none_in_the_first_call_is_served_from_the_second_on(on: Backend) -> None:
    """G2-02: a call without state has no signature; what it returns is adopted."""
    twins = Twins(CacheAsArgument, contract((2,), fixed("cache", 1, 4, WIDTH)), on)
    for _ in range(2):
        twins.restart()
        twins.steps(on.chunks([2] * 3))
    assert (twins.counted("no state at arg['state']['cache']"), twins.served) == (2, 4)


# ------------------------------------------------------------------------------------------- values
TABLE = [0.1, 0.2]
NUMBER = 1.5


def scaled(x: torch.Tensor) -> torch.Tensor:
    return x * NUMBER


class Settings(Linear):
    """Numbers from an attribute, a dict, a global list and a global that a helper reads."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature, self.cfg = 0.7, {"scale": 2.0}

    def forward(self, x: torch.Tensor, state: Any) -> Any:
        y = self.lin(x) * torch.tensor(self.temperature, device=x.device) * self.cfg["scale"]
        total = torch.zeros(1, device=x.device)
        total += y.sum()
        counter = torch.tensor([0.5], device=x.device)
        counter.add_(total)
        return scaled(y) + torch.tensor(TABLE, device=x.device).sum() + counter, {"last": y[:, -1]}


def _number(value: float) -> None:
    global NUMBER
    NUMBER = value


SETTINGS: dict[str, tuple[Any, Any]] = {
    "temperature": (lambda m: setattr(m, "temperature", 0.9), lambda m: setattr(m, "temperature", 0.7)),
    "cfg['scale']": (lambda m: m.cfg.update(scale=3.0), lambda m: m.cfg.update(scale=2.0)),
    f"{__name__}.TABLE[0]": (lambda m: TABLE.__setitem__(0, 0.4), lambda m: TABLE.__setitem__(0, 0.1)),
    f"{__name__}.NUMBER": (lambda m: _number(2.5), lambda m: _number(1.5)),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_python_value_is_guarded_wherever_it_was_read(on: Backend, name: str) -> None:
    """G2-04: edited, edited back, edited and traced again."""
    edit, back = SETTINGS[name]
    twins = Twins(Settings, contract((2,), LAST), on)
    (x,) = on.chunks([2])
    try:
        first = twins.step(x)
        twins.both(edit)
        assert not same_bits(first, twins.step(x))
        assert twins.counted(f"module changed: {name}") == 1
        twins.both(back)
        twins.step(x)
        twins.both(edit)
        twins.fast.warmup("all")
        twins.steps([x, x])
    finally:
        twins.both(back)
    assert (twins.served, twins.fast.stats()["stock"]) == (4, 1)


# ------------------------------------------------------------------------------------------- memory
class Views(Linear):
    """Two halves of one tensor and the end of one of them, all of them attributes, two of them written."""

    def __init__(self, buffers: bool, device: torch.device) -> None:
        super().__init__()
        big = torch.zeros(2, 1, 32, WIDTH, device=device)  # made there, since moving them parts them
        views = {"big": big, "k": big[0], "v": big[1], "tail": big[0, :, -4:]}
        for name, view in views.items():
            self.register_buffer(name, view) if buffers else setattr(self, name, view)

    def forward(self, x: torch.Tensor, state: Any) -> Any:
        big, k, v, tail = (getattr(self, name) for name in ("big", "k", "v", "tail"))
        k.copy_(torch.roll(k, -x.shape[1], 1))
        k[:, -x.shape[1] :] = x
        v.add_(tail.mean())
        y = self.lin(x) + big.sum() + tail.sum()
        return y, {"last": y[:, -1]}


@pytest.mark.parametrize("buffers", [True, False], ids=["buffers", "attributes"])
def test_attributes_that_share_memory_and_are_written_run_as_stock(on: Backend, buffers: bool) -> None:
    """G2-06: a write through one shows in the others, so none of them is a constant."""
    twins = Twins(lambda: Views(buffers, on.device), contract((2, 3), LAST), on, warm=None)
    with pytest.raises(TraceError, match="'k' in place"):
        twins.fast.warmup()
    for x in on.chunks([2, 3] * 10):
        twins.step(x)
        for name in ("big", "k", "v", "tail"):
            assert first_difference(name, getattr(twins.stock, name), getattr(twins.fast, name)) is None
    assert twins.counted("not compiled: a call writes ") == 20


class Shifted(nn.Module):
    """Writes one of two states in place, by a copy of a tensor over itself."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)

    def start(self) -> dict[str, torch.Tensor]:
        memory = torch.arange(8.0 * WIDTH).view(1, 8, WIDTH).cos()
        return {"a": memory[:, :7], "b": memory[:, 1:]}

    def forward(self, x: torch.Tensor, state: Any) -> Any:
        a, b = state["a"], state["b"]
        a[:, :-2] = a[:, 2:].clone()
        a[:, -2:] = self.lin(x)
        return x + b.sum(), {"a": a * 1, "b": b * 0.5}


@ON_ALL
def test_states_that_share_memory_see_each_others_writes(on: Backend) -> None:
    """G2-06: the caller passes ``a`` and ``a`` moved by one; a copy of each would lose that."""
    twins = Twins(Shifted, contract((2,), fixed("a", 1, 7, WIDTH), fixed("b", 1, 7, WIDTH)), on)
    for _ in range(3):
        for session in ("theirs", "ours"):
            memory = torch.arange(8.0 * WIDTH, device=on.device).view(1, 8, WIDTH).cos()
            setattr(twins, session, {"a": memory[:, :7], "b": memory[:, 1:]})
        given = twins.theirs, twins.ours
        twins.steps(on.chunks([2] * 3))
        assert first_difference("the caller's", *given) is None
    assert twins.counted("state 'a' is written in place") == 3
    assert twins.served == 6


def test_a_state_that_a_call_writes_can_be_branched_from_as_in_stock(on: Backend) -> None:
    """G2-06, G2-07: the second branch starts from what the first one left in the caller's tensor."""
    twins = Twins(Shifted, contract((2,), fixed("a", 1, 7, WIDTH), fixed("b", 1, 7, WIDTH)), on)
    theirs, ours = clone_tree(twins.theirs), clone_tree(twins.ours)
    for x in on.chunks([2] * 3):
        twins.theirs, twins.ours = theirs, ours
        twins.step(x)
        assert first_difference("the caller's", theirs, ours) is None


class Everything(Linear):
    """Returns its input, its old state, a view of that, and its new state twice."""

    def start(self) -> dict[str, torch.Tensor]:
        return {"cache": torch.zeros(1, 2, WIDTH)}

    def forward(self, x: torch.Tensor, state: Any) -> Any:
        cache = state["cache"]
        new = torch.cat([cache[:, 1:], self.lin(x)[:, :1]], 1)
        return (x, cache, new, cache[:, :1], new.sum()), {"cache": new}


CACHE = fixed("cache", 1, 2, WIDTH)


@ON_ALL
def test_inputs_and_states_that_are_returned_keep_their_values_for_ever(on: Backend) -> None:
    """G2-07: a returned old state is the old one, whatever later calls write to the buffer that held it."""
    twins = Twins(Everything, contract((2,), CACHE), on)
    kept = []
    for x in on.chunks([2] * 6):
        found: Any = twins.step(x)
        kept.append((found, clone_tree(found)))
    assert twins.served == 6
    assert all(first_difference("kept", then, now) is None for now, then in kept)


def test_one_old_state_serves_many_branches_and_stays_the_callers(on: Backend) -> None:
    """G2-07: branching, a state that the caller frees, and one tensor as input and as state."""
    twins = Twins(Everything, contract((2,), CACHE), on)
    twins.steps(on.chunks([2] * 3))
    old = clone_tree(twins.ours)
    before = clone_tree(old)
    x1, x2 = on.chunks([2, 2], seed=5)
    seen = []
    for x in (x1, x2, x1):
        twins.theirs, twins.ours = clone_tree(old), old
        seen.append(twins.step(x))
    assert first_difference("branches", seen[0], seen[2]) is None
    assert first_difference("the caller's", before, old) is None
    del old, seen
    twins.steps(on.chunks([2]))
    both = x1.clone()
    expected, found = twins.stock(both, {"cache": both}), twins.fast(both, {"cache": both})
    assert first_difference("one tensor for both", expected, found) is None
    assert same_bits(both, x1)
    assert twins.fast.stats()["stock"] == 0
