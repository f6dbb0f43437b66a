"""The transformed module as its callers see it: a drop-in, exact at every call, and every call accounted for."""

from __future__ import annotations

import copy
import gc
import inspect
import sys
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import cadence_fx
from cadence_fx.bits import first_difference, same_bits
from cadence_fx.contract import Contract, Entry, Result
from cadence_fx.drop_in import transform
from cadence_fx.errors import AdmissionError, ContractError
from cadence_fx.module import CadenceModule
from cadence_fx.traffic import clone_tree
from tests import streams, toys
from tests.streams import WIDTH, Pair, Stream, Workspace, chunks, contract, drawn, stream, workspace_contract

EMPTY = {"rows": torch.zeros(1, 0, WIDTH)}


def pair(module: nn.Module | None = None, declared: Contract | None = None) -> Pair:
    """A stream and its transform that share parameters and buffers."""
    made: Any = stream() if module is None else drawn(module)
    return Pair(made, contract() if declared is None else declared, made.start())


def apart(module: nn.Module | None = None, declared: Contract | None = None) -> Pair:
    """A stream and the transform of an equal one, for changes that both must get."""
    made: Any = stream() if module is None else drawn(module)
    declared = contract() if declared is None else declared
    return Pair(copy.deepcopy(made), declared, made.start(), transform(made, declared))


def settled(p: Pair) -> Pair:
    """Five calls later."""
    p.steps(chunks([2] * 5, seed=9))
    assert p.fast.stats()["plan"] == 5
    return p


def accounted(fast: CadenceModule) -> bool:
    found = fast.stats()
    return (
        found["calls"] == found["plan"] + found["replays"] + found["stock"]
        and sum(found["eager"].values()) == found["stock"]
    )


# ---------------------------------------------------------------------------------------------- drop-in
def test_the_transform_takes_the_arguments_that_the_module_takes() -> None:
    p = pair()
    (x,) = chunks([2])
    expected, _ = p.stock(x, p.theirs)
    for found, _ in (p.fast(x, p.ours), p.fast(x=x, state=clone_tree(p.ours)), p.fast(state=clone_tree(p.ours), x=x)):
        assert same_bits(expected, found)
    with pytest.raises(TypeError, match="missing a required argument: 'state'"):
        p.fast(x)


def test_state_dict_parameters_and_attributes_are_the_modules_own() -> None:
    m = stream()
    fast = transform(m, contract())
    assert list(fast.state_dict()) == list(m.state_dict())
    assert all(same_bits(a, b) for a, b in zip(fast.state_dict().values(), m.state_dict().values(), strict=True))
    assert dict(fast.named_parameters()).keys() == dict(m.named_parameters()).keys()
    assert all(a is b for a, b in zip(fast.parameters(), m.parameters(), strict=True))
    assert fast.window == m.window
    assert isinstance(fast.conv, nn.Conv1d)
    assert fast.start()["context"].shape == m.start()["context"].shape
    assert not fast.training


def _everything(module: nn.Module) -> dict[str, Any]:
    """All that a module's tree holds, tensors by identity and value."""
    found: dict[str, Any] = {}
    for prefix, m in module.named_modules():
        for name, value in m.__dict__.items():
            found[f"{prefix}/{name}"] = dict(value) if isinstance(value, dict) else value
    return found


def test_the_input_module_is_left_as_it_was() -> None:
    """G2-02: nothing of the user's module changes, neither when it is traced nor when it is served."""
    m = drawn(Workspace())
    m.mix.register_forward_hook(lambda *args: None)
    before, values = _everything(m), clone_tree(m.state_dict())
    fast = transform(m, workspace_contract())
    state = EMPTY
    for x in chunks([2] * 9):
        _, state = fast(x, state=state)
    after = _everything(m)
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert after[name] is value or after[name] == value, name
    assert first_difference("state_dict", values, m.state_dict()) is None
    assert not any(type(t).__name__ == "FakeTensor" for t in (*m.buffers(), *m.parameters()))
    assert torch.count_nonzero(m.big) == 0


class NoneFirst(Stream):
    cache: torch.Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", None)
        self.hist: dict[str, Any] = {}
        self.n = 0

    def forward(self, x: torch.Tensor, state: streams.State) -> tuple[torch.Tensor, streams.State]:
        y, new = super().forward(x, state)
        self.cache = torch.zeros(1, 1, WIDTH) if self.cache is None else self.cache
        y = y + self.cache
        self.cache, self.n, self.hist["last"] = y[:, -1:], self.n + 1, x.shape
        return y, new


def test_state_that_nobody_declared_runs_as_stock_and_leaks_nothing() -> None:
    """G2-02, G1-12: attributes that forward writes are refused by name; the user's module stays as it was."""
    p = apart(NoneFirst())
    p.steps(chunks([2] * 3))
    assert p.fast.n == p.stock.n == 3
    assert p.fast.hist == p.stock.hist
    p.both(lambda m: setattr(m, "cache", None))
    p.steps(chunks([2] * 3, seed=5))
    assert p.counted("not compiled: a call changes the attribute") == 6
    assert accounted(p.fast)


def test_tracing_leaves_no_fake_tensor_in_a_module_with_undeclared_state() -> None:
    """G2-02."""
    m = drawn(NoneFirst())
    fast = transform(m, contract())
    fast(chunks([2])[0], m.start())
    assert (m.cache, m.hist, m.n) == (None, {}, 0)


def test_the_oversized_buffers_go_with_the_module_that_brought_them() -> None:
    m = drawn(Workspace())
    big, declared = weakref.ref(m.big), workspace_contract()
    fast = transform(m, declared)
    _, state = fast(chunks([2])[0], state=EMPTY)
    assert big() is not None
    del m
    gc.collect()
    assert big() is None
    assert fast.big.numel() == 0
    fast(chunks([2])[0], state=state)


def test_scratch_that_is_attended_over_stays_exact() -> None:
    m = drawn(Workspace())
    p = Pair(m, workspace_contract(), EMPTY)
    p.steps(chunks([2] * 12))
    assert p.fast.stats()["plan"] == 12


def test_a_module_in_training_mode_is_refused() -> None:
    with pytest.raises(ContractError, match="training mode"):
        transform(stream().train(), contract())
    with pytest.raises(ContractError, match=r"takes an nn\.Module, not a str"):
        transform("stream", contract())  # type: ignore[arg-type]


def test_hooks_of_the_module_itself_run_once_for_each_call() -> None:
    m = stream()
    seen: list[int] = []

    def doubled(module: Any, args: Any, out: Any) -> Any:
        seen.append(1)
        return out[0] * 2, out[1]

    m.register_forward_hook(doubled)
    p = Pair(m, contract(), m.start())
    p.step(chunks([2])[0])
    assert len(seen) == 2  # one of stock, one of ours
    with cadence_fx.eager():
        p.step(chunks([2])[0])
    assert len(seen) == 4


# ---------------------------------------------------------------------------------------------- admission
class Noted(Stream):
    def forward(self, x: torch.Tensor, state: streams.State, note: str = "") -> tuple[torch.Tensor, streams.State]:
        return super().forward(x, state)


def _eager_context(p: Pair, x: torch.Tensor) -> None:
    with cadence_fx.eager():
        p.step(x)


def _training(p: Pair, x: torch.Tensor) -> None:
    p.both(lambda m: m.train())
    p.step(x)
    p.both(lambda m: m.eval())


def _precision(p: Pair, x: torch.Tensor) -> None:
    torch.set_float32_matmul_precision("medium")
    try:
        p.step(x)
    finally:
        torch.set_float32_matmul_precision("highest")


def _autocast(p: Pair, x: torch.Tensor) -> None:
    with torch.autocast("cpu", torch.bfloat16, enabled=True):
        expected, _ = p.stock(x, clone_tree(p.theirs))
        found, _ = p.fast(x, clone_tree(p.ours))
    assert same_bits(expected, found)


def _undeclared_length(p: Pair, x: torch.Tensor) -> None:
    p.step(chunks([3])[0])


def _gradient(p: Pair, x: torch.Tensor) -> None:
    p.step(x.clone().requires_grad_())
    p.theirs, p.ours = ({k: v.detach() for k, v in s.items()} for s in (p.theirs, p.ours))


REASONS = {
    "training mode": _training,
    "eager()": _eager_context,
    "mode changed: cuda_matmul_fp32 ieee -> tf32, mkldnn_matmul_fp32 ieee -> bf16": _precision,
    "mode changed: autocast False -> True": _autocast,
    "signature not in the catalog": _undeclared_length,
    "input 'x': it requires a gradient": _gradient,
}


@pytest.mark.parametrize("reason", REASONS)
def test_what_is_not_admitted_runs_as_stock_once_and_is_counted_by_reason(reason: str) -> None:
    """G3-03, G1-25, G4-03: exact under the changed condition, one count, admitted again afterwards."""
    p = settled(apart())
    (x,) = chunks([2], seed=4)
    REASONS[reason](p, x)
    assert p.counted(reason) == 1, p.fast.stats()
    p.theirs, p.ours = clone_tree(p.theirs), p.ours
    if reason.startswith("mode changed: autocast"):
        return  # state of another dtype was the caller's; the stream went on from clones
    if reason != "signature not in the catalog":
        p.steps(chunks([2] * 4, seed=6))
        assert p.fast.stats()["plan"] == 9
    assert accounted(p.fast)


@pytest.mark.parametrize(
    ("x", "text"),
    [
        (torch.zeros(1, 2, WIDTH, dtype=torch.float64), "input 'x': dtype is torch.float64"),
        (torch.zeros(1, 2, WIDTH + 1), r"input 'x': shape is \[1, 2, 9\]"),
        (torch.zeros(2, WIDTH), r"input 'x': shape is \[2, 8\]"),
        (None, "input 'x': it is a NoneType"),
    ],
)
def test_a_wrong_input_fails_as_stock_fails_and_leaves_the_state_whole(x: torch.Tensor, text: str) -> None:
    p = settled(pair())
    before = clone_tree(p.ours)
    with pytest.raises(Exception) as theirs:  # noqa: PT011
        p.stock(x, clone_tree(p.theirs))
    with pytest.raises(theirs.type):
        p.fast(x, p.ours)
    assert first_difference("state", before, p.ours) is None
    p.steps(chunks([2] * 2))
    assert p.fast.stats()["plan"] == 7


def test_a_batch_of_two_runs_as_stock() -> None:
    p = pair()
    p.theirs, p.ours = p.stock.start(2), p.stock.start(2)
    for x in chunks([2, 2]):
        p.step(x.expand(2, -1, -1).contiguous())
    assert p.fast.stats()["stock"] == 2
    assert accounted(p.fast)


def test_nothing_is_compiled_after_seal() -> None:
    p = pair()
    p.fast.warmup()
    compiled = p.fast.stats()["compiled"]
    p.fast.seal()
    p.steps(chunks([2] * 8))
    assert p.fast.stats()["compiled"] == compiled
    p = pair()
    p.fast.seal()
    p.steps(chunks([2] * 3))
    assert p.counted("not compiled before seal()") == 3


def test_strict_mode_raises_the_reason_and_leaves_the_state() -> None:
    """G3-03: a mode that fails hard."""
    p = pair()
    p.fast.warmup("all").seal(strict=True)
    p.steps(chunks([2] * 3))
    with pytest.raises(AdmissionError, match=r"strict mode: .*signature not in the catalog"):
        p.fast(chunks([3])[0], p.ours)
    p.steps(chunks([2] * 8, seed=2))
    assert p.fast.stats()["stock"] == 0


def test_warm_up_compiles_the_whole_catalog_before_the_first_call() -> None:
    """G3-18: zero traces in declared traffic."""
    p = pair()
    seen: list[tuple[int, int, str]] = []
    p.fast.warmup("all", progress=lambda *args: seen.append(args))
    compiled = p.fast.stats()["compiled"]
    assert [s[0] for s in seen] == list(range(1, compiled + 1))
    p.steps(chunks([2] * 20))
    assert p.fast.stats()["compiled"] == compiled
    with pytest.raises(ContractError, match="'steady' or 'all'"):
        p.fast.warmup("most")


# ---------------------------------------------------------------------------------------------- whose state
def test_a_stale_state_is_an_error_and_the_live_state_stays() -> None:
    p = settled(pair())
    stale = p.ours
    p.step(chunks([2])[0])
    live = clone_tree(p.ours)
    with pytest.raises(AdmissionError, match="has been overwritten since"):
        p.fast(chunks([2])[0], stale)
    assert first_difference("state", live, p.ours) is None
    p.steps(chunks([2] * 2, seed=3))


def test_a_fresh_view_of_the_live_state_is_the_live_state() -> None:
    p = settled(pair())
    adopted = p.fast.stats()["adopted"]
    p.ours = {k: v[:] for k, v in p.ours.items()}
    p.step(chunks([2])[0])
    assert p.fast.stats()["adopted"] == adopted


def test_clones_are_adopted_and_counted() -> None:
    p = settled(pair())
    adopted = p.fast.stats()["adopted"]
    p.ours = clone_tree(p.ours)
    p.step(chunks([2])[0])
    assert p.fast.stats()["adopted"] == adopted + 2
    assert p.fast.stats()["stock"] == 0


def test_one_old_state_serves_several_branches() -> None:
    """G2-07: the caller's tensors are never written, whatever was called with them."""
    p = settled(pair())
    old, x1, x2 = clone_tree(p.ours), *chunks([2, 2], seed=8)
    kept = clone_tree((old, x1, x2))
    y1, _ = p.fast(x1, old)
    y2, _ = p.fast(x2, old)
    y3, after = p.fast(x1, old)
    assert same_bits(y1, y3)
    assert same_bits(y2, p.stock(x2, old)[0])
    assert first_difference("caller's", kept, (old, x1, x2)) is None
    p.theirs, p.ours = p.stock(x1, old)[1], after
    del old
    p.steps(chunks([2] * 3, seed=3))


class Everything(Stream):
    def forward(self, x: torch.Tensor, state: streams.State) -> Any:
        y, new = super().forward(x, state)
        return (y, x, state["rows"], state["rows"][:, :1], new["context"] * 1), new


def test_an_input_and_the_old_state_may_be_returned() -> None:
    """G2-07: what a call returns of the state that it got is the old state, whatever the call makes of it."""
    p = pair(Everything())
    outputs = []
    for x in chunks([2] * 9):
        found: Any = p.step(x)
        outputs.append((found, clone_tree(found)))
        assert found[1] is x
    assert p.fast.stats()["plan"] == 9
    for given, kept in outputs:
        assert first_difference("kept output", kept, given) is None


def test_returned_tensors_belong_to_the_caller() -> None:
    """G1-20: outputs are never written again, and what a caller writes into them reaches no state."""
    p, outputs = pair(), []
    for x in chunks([2] * 20):
        found = p.step(x)
        outputs.append((found, found.clone()))
    for found, kept in outputs:
        assert same_bits(found, kept)
    y = p.step(chunks([2])[0])
    y.mul_(0)
    p.steps(chunks([2] * 3))
    y = p.step(chunks([2])[0])
    p.step(y)  # an output as the next input


# ---------------------------------------------------------------------------------------------- failures
def _fail(program: Any, at: float) -> None:
    """Make a program raise at a part of the operators that compute; after them it only commits."""
    nodes = [n for n in program.module.graph.nodes if n.op == "call_function"]
    nodes = nodes[: [n.target for n in nodes].index(torch.ops.aten.copy_.default)]

    class Interpreter(torch.fx.Interpreter):
        def run_node(self, n: torch.fx.Node) -> Any:
            if n is nodes[int(at * len(nodes))]:
                raise MemoryError("injected")
            return super().run_node(n)

    object.__setattr__(program, "run", Interpreter(program.module).run)


@pytest.mark.parametrize("at", [0.0, 0.5, 0.9, 0.99])
def test_a_call_that_fails_half_way_changes_nothing_and_can_be_tried_again(at: float) -> None:
    """G3-15: a step is all or nothing."""
    p = settled(pair())
    p.steps(chunks([2] * 4))
    program = next(reversed(p.fast.programs.values()))
    run, before, generator = program.run, clone_tree(p.ours), torch.get_rng_state()
    _fail(program, at)
    with pytest.raises(MemoryError):
        p.fast(chunks([2])[0], p.ours)
    assert first_difference("state", before, p.ours) is None
    assert torch.equal(generator, torch.get_rng_state())
    program.run = run
    p.steps(chunks([2] * 4, seed=2))
    assert p.fast.stats()["stock"] == 0


# ---------------------------------------------------------------------------------------------- edits
def _copied(m: Any) -> None:
    m.out.weight.copy_(m.out.weight * 1.5)


def _buffer_copied(m: Any) -> None:
    m.shift.mul_(1.5)


def _loaded(m: Any) -> None:
    m.load_state_dict({k: v * 1.25 for k, v in m.state_dict().items()})


def _assigned(m: Any) -> None:
    m.load_state_dict({k: v * 1.25 for k, v in m.state_dict().items()}, assign=True)


def _replaced(m: Any) -> None:
    m.out.weight = nn.Parameter(m.out.weight * 1.5, requires_grad=False)


def _data(m: Any) -> None:
    m.out.weight.data = m.out.weight.data * 1.5


def _buffer_replaced(m: Any) -> None:
    m.shift = m.shift * 1.5


def _half_done(m: Any) -> None:
    m.rows.weight.copy_(m.rows.weight * 2)
    try:
        raise ValueError("the loader fails before the second layer")
    except ValueError:
        pass


def _moved_and_poisoned(m: Any) -> None:
    old = m.conv.weight.data
    m.conv.weight.data = old * 1.5
    old.fill_(float("nan"))


@pytest.mark.parametrize(
    "edit",
    [_copied, _buffer_copied, _loaded, _assigned, _replaced, _data, _buffer_replaced, _half_done, _moved_and_poisoned],
    ids=lambda f: f.__name__.strip("_"),
)
def test_weights_and_buffers_that_were_edited_are_the_ones_that_are_used(edit: Any) -> None:
    """G1-24 a, b, c, e, f: never a stale value, and the stream stays admitted."""
    p = settled(apart())
    p.both(edit)
    p.steps(chunks([2] * 3))
    assert p.fast.stats()["weights edited"] == 1
    assert p.fast.stats()["stock"] == 0


def test_an_edit_through_data_is_followed_where_the_weight_is_read_and_needs_refresh_where_it_was_folded() -> None:
    """G1-24 a: ``.data`` leaves no trace in the parameter; a fold of it has to be named outdated."""
    p = settled(apart())
    p.both(lambda m: m.out.weight.data.copy_(m.out.weight * 1.5))
    p.steps(chunks([2] * 2))
    p.both(lambda m: m.shift.data.mul_(2))
    p.fast.refresh()
    p.steps(chunks([2] * 2))
    assert p.fast.stats()["stock"] == 0


def test_an_edit_before_the_first_call_counts() -> None:
    p = apart(Settings())
    p.both(_buffer_replaced)
    p.both(lambda m: setattr(m, "temperature", 0.9))
    p.steps(chunks([2] * 3))
    assert p.fast.stats()["stock"] == 0


def _submodule(m: Any) -> None:
    m.out = copy.deepcopy(m.rows)


def _hook(m: Any) -> None:
    m.out.register_forward_hook(lambda module, args, out: out * 2)


def _part_in_training(m: Any) -> None:
    m.conv.train()


@pytest.mark.parametrize("edit", [_submodule, _hook], ids=["submodule", "hook"])
def test_a_submodule_or_hook_that_was_exchanged_runs_as_stock_until_the_next_warm_up(edit: Any) -> None:
    """G1-24 d."""
    p = settled(apart())
    p.both(edit)
    p.steps(chunks([2] * 3))
    assert p.counted("module changed: ") == 3
    p.fast.warmup()
    p.steps(chunks([2] * 3))
    assert p.counted("module changed: ") == 3
    assert accounted(p.fast)


TABLE = [0.1, 0.2]


class Settings(Stream):
    offset = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.temperature, self.cfg, self.gains, self.unread = 0.7, {"scale": 2.0}, [1.0, 0.5], 3
        self.nested = {"deep": {"gain": 0.25}}

    def forward(self, x: torch.Tensor, state: streams.State) -> tuple[torch.Tensor, streams.State]:
        y, new = super().forward(x, state)
        y = y * torch.tensor(self.temperature) * self.cfg["scale"] + sum(self.gains) + self.offset
        total = torch.zeros(1)
        total += y.sum()  # a constant that is written starts anew in each call
        return y * self.nested["deep"]["gain"] + total, new


EDITS: dict[str, Any] = {
    "temperature": lambda m, sign: setattr(m, "temperature", 0.7 + 0.1 * sign),
    "cfg['scale']": lambda m, sign: m.cfg.update(scale=2.0 + sign),
    "gains": lambda m, sign: m.gains.append(1.0) if sign else m.gains.pop(),
    "nested['deep']['gain']": lambda m, sign: m.nested["deep"].update(gain=0.25 + sign),
    "offset": lambda m, sign: setattr(m, "offset", 2.0) if sign else delattr(m, "offset"),
}


@pytest.mark.parametrize("name", EDITS)
def test_a_python_value_that_was_read_is_guarded(name: str) -> None:
    """G2-04: changed, calls run as stock; changed back, they are admitted; after a warm-up it is the new constant."""
    p = settled(apart(Settings()))
    p.both(lambda m: EDITS[name](m, 1))
    p.step(chunks([2])[0])
    assert p.counted("module changed: ") == 1
    p.both(lambda m: EDITS[name](m, 0))
    p.step(chunks([2])[0])
    assert p.counted("module changed: ") == 1, p.fast.stats()
    p.both(lambda m: EDITS[name](m, 1))
    p.fast.warmup()
    p.steps(chunks([2] * 3))
    assert p.counted("module changed: ") == 1
    assert accounted(p.fast)


def test_a_boundary_that_is_a_submodules_own_forward_is_no_change_of_the_module() -> None:
    """The tracer puts boundaries in front of callables of its twin; calling ``self.block(...)`` reads ``forward``."""
    toy = toys.build("new_first")
    fast = transform(toy.module, toy.contract, backend="plan").warmup().seal()
    fast(torch.randn(1, 3, toys.WIDTH), toy.module.initial())
    assert (fast.stats()["plan"], fast.stats()["eager"]) == (1, {})


def test_a_value_that_no_trace_read_is_not_guarded() -> None:
    p = settled(apart(Settings()))
    p.both(lambda m: setattr(m, "unread", 4))
    p.step(chunks([2])[0])
    assert p.fast.stats()["stock"] == 0


def test_zero_and_minus_zero_are_different_values() -> None:
    """G2-04: equal in Python, other bits."""
    p = settled(apart(Settings()))
    p.both(lambda m: setattr(m, "offset", 0.0))
    p.fast.warmup()
    p.step(chunks([2])[0])
    stock = p.fast.stats()["stock"]
    p.both(lambda m: setattr(m, "offset", -0.0))
    p.step(chunks([2])[0])
    assert p.fast.stats()["stock"] == stock + 1


class Deep(Stream):
    def __init__(self) -> None:
        super().__init__()
        self.many = nn.Sequential(*[nn.Sequential(nn.LayerNorm(WIDTH), nn.Dropout(0.1)) for _ in range(200)])

    def forward(self, x: torch.Tensor, state: streams.State) -> tuple[torch.Tensor, streams.State]:
        return super().forward(self.many(x), state)


def test_guarding_six_hundred_modules_runs_no_python_for_each_of_them() -> None:
    """The check stands before every call: a few passes over flat lists in C, however many modules there are."""
    p = pair(Deep())
    p.step(chunks([2])[0])
    watch, calls = p.fast.compiler.watch, list[str]()
    sys.setprofile(lambda frame, event, _: calls.append(frame.f_code.co_name) if event == "call" else None)
    try:
        found = watch.changed()
    finally:
        sys.setprofile(None)
    assert found is None
    assert len(watch.expected) > 600
    assert len(calls) < 20, calls


class Counting(Stream):
    def __init__(self) -> None:
        super().__init__()
        self.pos = 0

    def forward(self, x: torch.Tensor, state: streams.State) -> tuple[torch.Tensor, streams.State]:
        y, new = super().forward(x, state)
        self.pos += x.shape[1]
        return y * (1 + 0.01 * self.pos), new


def test_a_position_that_forward_counts_in_python_is_never_frozen() -> None:
    """G1-12: the call runs as stock, by name, and user code reads the right position."""
    p = apart(Counting())
    p.steps(chunks([2] * 20))
    assert p.fast.pos == p.stock.pos == 40
    assert p.counted("not compiled: a call changes the attribute 'pos'") == 20
    assert p.fast.stats()["compiled"] == 0


# ---------------------------------------------------------------------------------------------- lengths
def test_every_declared_length_is_served_and_the_context_stays_as_stock_has_it() -> None:
    """G3-10: chunks shorter and longer than the context, from one frame to forty."""
    lengths = [1, 1, 1, 2, 40, 1, 3, 1, 1, 7, 1]
    m = stream(window=12, kernel=7)
    p = Pair(m, contract((1, 2, 3, 7, 40)), m.start())
    p.steps(chunks(lengths))
    assert p.fast.stats()["plan"] == len(lengths)
    p = Pair(m, contract((1,)), m.start())
    p.steps(chunks([1] * 16))
    assert p.fast.stats()["stock"] == 0


class Empty(Stream):
    """Attention over the old rows and the new ones, without a convolution that needs samples."""

    def forward(self, x: torch.Tensor, state: streams.State) -> tuple[torch.Tensor, streams.State]:
        rows = torch.cat([state["rows"], self.rows(x)], 1)
        return torch.softmax(x @ rows.transpose(1, 2), -1) @ rows, {"rows": rows[:, -self.window :]}


@pytest.mark.parametrize("order", [(0, 1, 5), (0, 5, 1), (1, 0, 5), (1, 5, 0), (5, 0, 1), (5, 1, 0)])
def test_states_of_no_row_and_one_row_and_chunks_of_one_row_are_exact_in_any_order(order: tuple[int, ...]) -> None:
    """G2-01, G2-11: sizes 0 and 1 are special to tracing."""
    m: Any = drawn(Empty())
    declared = contract((1, 2, 5), context=None)
    fast = transform(m, declared)
    for seen in order:
        for length in (1, 2):
            p = Pair(m, declared, EMPTY, fast)
            p.steps(chunks([n for n in (seen,) if n]))
            p.steps(chunks([length] * 2))
    assert fast.stats()["stock"] == 0


def test_a_chunk_without_rows_runs_as_stock() -> None:
    """G2-11: a clock advances by at least one tick, so an empty flush is never in a catalog."""
    m: Any = drawn(Empty())
    p = Pair(m, contract((1, 2), context=None), EMPTY)
    p.steps([torch.zeros(1, 0, WIDTH)])
    p.steps(chunks([2]))
    p.steps([torch.zeros(1, 0, WIDTH)])
    p.steps(chunks([2]))
    assert p.counted("signature not in the catalog") == 2
    assert p.fast.stats()["plan"] == 2


class Branching(Stream):
    def forward(self, x: torch.Tensor, state: streams.State) -> tuple[torch.Tensor, streams.State]:
        y, new = super().forward(x, state)
        length = x.shape[1]
        if length > 16:
            y = y[:, -16:]
        return y.mean(1) * (torch.ones(length) / length).sum() + length % 3, new


def test_a_trace_serves_only_the_shapes_that_take_its_branches() -> None:
    """G2-01."""
    p = pair(Branching(), contract((8, 16, 17, 40, 1, 5)))
    p.steps(chunks([8, 16, 17, 40, 1, 8, 5]))
    assert p.fast.stats()["plan"] == 7


class Trimmed(Stream):
    """An upsampling decoder that returns five samples less than it makes."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ConvTranspose1d(WIDTH, 1, 8, 8)

    def forward(self, x: torch.Tensor, state: streams.State) -> tuple[torch.Tensor, streams.State]:
        y, new = super().forward(x, state)
        return self.up(y.transpose(1, 2))[..., :-5], new


def test_the_output_is_as_long_as_stocks() -> None:
    """G3-04: 8 T - 5 samples and never 8 T."""
    p = pair(Trimmed(), contract((4, 8, 1, 2, 3)))
    for x in chunks([4, 4, 8, 8, 8, 1, 3, 2, 1]):
        assert p.step(x).shape[-1] == 8 * x.shape[1] - 5
    assert p.fast.stats()["stock"] == 0


@pytest.mark.slow
@pytest.mark.parametrize(("length", "window", "steps"), [(2, 24, 5000), (5, 24, 500)])
def test_a_full_window_stays_exact_for_thousands_of_steps(length: int, window: int, steps: int) -> None:
    """G3-13: growth, the first truncation, and every hundredth step after; the programs stop growing."""
    m = stream(window=window)
    fast = transform(m, contract((length,), window=window))
    theirs = ours = m.start()
    generator = torch.Generator().manual_seed(3)
    programs = set()
    with torch.no_grad():
        for step in range(steps):
            x = torch.randn(1, length, WIDTH, generator=generator)
            expected, theirs = m(x, theirs)
            found, ours = fast(x, ours)
            if step < 25 or step % 100 == 0:
                assert first_difference(f"step {step}", (expected, theirs), (found, ours)) is None
                programs.add(fast.stats()["programs"])
    assert max(programs) <= -(-window // length) + 1
    assert fast.stats()["stock"] == 0


# ---------------------------------------------------------------------------------------------- module features
class Normed(Stream):
    def __init__(self) -> None:
        super().__init__()
        with pytest.warns(FutureWarning):
            self.conv = torch.nn.utils.weight_norm(self.conv)
        self.out = torch.nn.utils.parametrizations.weight_norm(self.out)


def test_weight_norm_of_both_spellings_is_hoisted_and_follows_edits() -> None:
    """G2-12: no deepcopy is needed, the folded weight is the computed one, an edit of g in place is seen."""
    p = settled(pair(Normed()))
    hoisted = sum(c.count for c in p.fast.report.rewrites if c.what == "hoisted")
    assert hoisted >= 2
    p.stock.conv.weight_g.mul_(1.5)
    p.step(chunks([2])[0])
    p.stock.out.parametrizations.weight.original0.mul_(0.5)
    p.step(chunks([2])[0])
    assert p.fast.stats()["weights edited"] == 2
    assert p.fast.stats()["stock"] == 0


class Einops(Stream):
    def __init__(self) -> None:
        super().__init__()
        layers = pytest.importorskip("einops.layers.torch")
        self.fold = layers.Rearrange("b (t p) d -> b t (p d)", p=2)

    def forward(self, x: torch.Tensor, state: streams.State) -> Any:
        import einops

        y, new = super().forward(x, state)
        wide = einops.rearrange(y, "b (t p) d -> b t (p d)", p=2) + self.fold(x)
        many = einops.repeat(state["context"][..., 0], "b c -> b c t", t=x.shape[1])
        packed, shapes = einops.pack([x, y], "b * d")
        return (wide, many, einops.reduce(y, "b t d -> b d", "mean"), einops.unpack(packed, shapes, "b * d")[1]), new


def test_einops_is_traced_through_and_its_caches_stay_clean() -> None:
    """G2-13."""
    einops = pytest.importorskip("einops")
    p = pair(Einops(), contract((4, 6, 8)))
    p.steps(chunks([4, 6, 8, 4, 6, 8]))
    assert p.fast.stats()["plan"] == 6
    x = torch.randn(1, 6, WIDTH)
    assert torch.equal(einops.rearrange(x, "b (t p) d -> b t (p d)", p=2), x.reshape(1, 3, 2 * WIDTH))


class Noisy(Stream):
    def forward(self, x: torch.Tensor, state: streams.State) -> tuple[torch.Tensor, streams.State]:
        y, new = super().forward(x, state)
        torch.rand(2, 3)  # discarded, and still a draw
        return y + torch.randn_like(y) * 0.1 + torch.rand(1), new


def test_a_seed_set_between_calls_gives_stocks_draws_and_stocks_generator() -> None:
    """G1-05: noise is drawn from the generator as it is at the call, and leaves it as stock does."""
    p = pair(Noisy())
    for seed in (0, 1, 0, 12345):
        for x in chunks([2] * 2):
            torch.manual_seed(seed)
            expected, p.theirs = p.stock(x, p.theirs)
            after = torch.get_rng_state()
            torch.manual_seed(seed)
            found, p.ours = p.fast(x, p.ours)
            p.check(expected, found)
            assert torch.equal(after, torch.get_rng_state())
    assert p.fast.stats()["stock"] == 0


# ---------------------------------------------------------------------------------------------- entries
class Primed(Stream):
    def prime(self, rows: int) -> streams.State:
        state = self.start()
        return {**state, "rows": torch.ones(1, rows, WIDTH) * 0.5}


def test_an_entry_makes_state_that_the_next_call_finds_in_place() -> None:
    m: Any = drawn(Primed())
    entries = (Entry("prime", (("rows", Result("rows")), ("context", Result("context")))),)
    p = Pair(m, contract(entries=entries), m.start())
    p.theirs, p.ours = m.prime(4), p.fast.prime(4)
    p.steps(chunks([2] * 5))
    stats = p.fast.stats()
    assert (stats["prime"], stats["adopted"], stats["stock"]) == (1, 0, 0)
    with pytest.raises(ContractError, match="no such method"):
        transform(stream(), contract(entries=entries))


def test_stats_and_report_are_plain_values() -> None:
    p = settled(pair())
    stats = p.fast.stats()
    assert all(type(v) in (int, dict) for v in stats.values())
    report = p.fast.report
    assert len(report.classes) == stats["programs"]
    assert str(report)
    assert inspect.signature(p.fast.forward).parameters
