"""G4, exact shapes, exact kernels, exact draws: what would be faster or simpler and has other bits."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from cadence_fx.bits import same_bits
from cadence_fx.contract import Arg, Call, Input
from cadence_fx.generators import generator_states
from cadence_fx.replay import Binding, Refusal
from cadence_fx.retention import Window
from cadence_fx.traffic import clone_tree
from tests.case_toys import Backend, Twins, contract, fixed
from tests.streams import WIDTH, drawn, window_region

WIDE = 1024
SHAPES = list(product((1, 2, 3, 5, 8, 9), (1, 2, 7, 16, 40)))


# ------------------------------------------------------------------------------------------- exact shapes
class Wide(nn.Module):
    """A large product, attention and a convolution, whose kernels depend on the whole shape."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.conv = nn.Linear(WIDE, WIDE), nn.Conv1d(WIDE, 64, 3, padding=2)
        self.to(torch.bfloat16)

    def start(self) -> dict[str, torch.Tensor]:
        return {"last": torch.zeros(1, dtype=torch.bfloat16)}

    def forward(self, x: torch.Tensor, state: Any) -> Any:
        h = torch.tanh(self.lin(x) * 0.05)
        q = h.unflatten(-1, (16, 64)).transpose(1, 2)
        h = F.scaled_dot_product_attention(q, q, q, is_causal=True).transpose(1, 2).flatten(2)
        return self.conv(h.transpose(1, 2))[..., : x.shape[1]], {"last": state["last"] + 1}


def wide(on: Backend, shapes: Sequence[tuple[int, int]]) -> Twins:
    calls = tuple(
        Call(f"chunk[{b}x{t}]", {"frame": t}, {"x": (b, t)}, steady=i == 0) for i, (b, t) in enumerate(shapes)
    )
    inputs = (Input(Arg("x"), (None, None, WIDE), "bfloat16"),)
    return Twins(Wide, contract((1,), fixed("last", 1, dtype="bfloat16"), inputs=inputs, calls=calls), on)


def batch(on: Backend, b: int, t: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * seed + 10 * b + t)
    return torch.randn(b, t, WIDE, generator=generator).to(on.device, torch.bfloat16)


def test_every_batch_and_length_has_the_bits_of_exactly_that_batch_and_length(on: Backend) -> None:
    """G4-05: thirty shapes, thirty programs; nothing is padded, and no shape is served by another's program."""
    twins = wide(on, SHAPES)
    for b, t in SHAPES:
        twins.step(batch(on, b, t))
    assert twins.served == twins.fast.stats()["programs"] == len(SHAPES)
    for b, t in ((4, 7), (1, 39), (10, 1)):
        twins.step(batch(on, b, t))
    assert twins.counted("signature not in the catalog") == 3


def test_a_padded_or_merged_call_would_have_other_bits(on: Backend) -> None:
    """G4-05: the control. It says nothing about the library: kernels of this device depend on the whole shape."""
    model = drawn(Wide()).to(on.device)
    state, padded, merged = {"last": torch.zeros((), device=on.device)}, 0, 0
    for b, t in SHAPES:
        x = batch(on, b, t)
        exact = model(x, state)[0]
        padded += not same_bits(exact, model(F.pad(x, (0, 0, 0, 48 - t)), state)[0][..., :t])
        merged += not same_bits(exact[:1], model(x[:1].contiguous(), state)[0])
    if not (padded or merged):
        pytest.skip("no kernel of this device gives other bits for a padded or merged batch")
    assert padded + merged > 0


def test_an_engine_never_takes_an_input_of_another_shape(captures: Backend) -> None:
    """G4-05: no bucket."""
    layer = nn.Linear(64, 64).to(captures.device)
    engine = captures.engine()
    binding = engine.capture("a", layer, captures.chunks([8], width=64))
    assert isinstance(binding, Binding)
    for length in (7, 9, 16):
        found = engine.replay(binding, captures.chunks([length], width=64))
        assert isinstance(found, str)
        assert found.startswith("input 0 has another form")
    assert engine.stats()["misses"] == {"input 0 has another form": 3}


def test_sessions_of_one_shape_are_not_merged(on: Backend) -> None:
    """G4-05: three sessions step one by one, each as its own stock does."""
    twins = wide(on, [(1, 7)])
    sessions = [(clone_tree(twins.theirs), clone_tree(twins.ours)) for _ in range(3)]
    for turn, i in product(range(3), range(3)):
        twins.theirs, twins.ours = clone_tree(sessions[i][0]), clone_tree(sessions[i][1])
        twins.step(batch(on, 1, 7, seed=3 * turn + i))
        sessions[i] = clone_tree(twins.theirs), clone_tree(twins.ours)
    assert twins.served == 9


# ------------------------------------------------------------------------------------------- exact kernels
CAPACITY = 512
LIVE = (1, 2, 63, 64, 65, 127, 128, 129, 255, 512)


def _rows(on: Backend, head: int, rows: int, seed: int) -> torch.Tensor:
    return on.chunks([rows], seed=seed, width=head, dtype=torch.bfloat16)[0][:, None].contiguous()


@pytest.mark.parametrize("head", [64, 128])
def test_attention_over_a_masked_capacity_is_captured_only_where_it_is_the_exact_slice(
    captures: Backend, head: int
) -> None:
    """G4-06: another computation than stock's over the live rows, so it has to prove itself, length by length."""
    engine = captures.engine()
    rejected = 0
    for live, queries in product(LIVE if captures.is_cuda else (2, 255), (1, 5)):
        k, q = _rows(captures, head, CAPACITY, 1), _rows(captures, head, queries, live)
        mask = (torch.arange(CAPACITY, device=captures.device) < live).expand(queries, -1)

        def exact(q: torch.Tensor, k: torch.Tensor = k, live: int = live) -> torch.Tensor:
            return F.scaled_dot_product_attention(q, k[:, :, :live], k[:, :, :live])

        def masked(q: torch.Tensor, k: torch.Tensor = k, mask: torch.Tensor = mask) -> torch.Tensor:
            return F.scaled_dot_product_attention(q, k, k, attn_mask=mask)

        equal = same_bits(exact(q), masked(q))
        found = engine.capture(("masked", live, queries), masked, [q], reference=exact)
        if not equal:
            assert isinstance(found, Refusal)
            assert found.code == "CX508"
            rejected += 1
        kept = engine.capture(("exact", live, queries), exact, [q])
        assert isinstance(kept, Binding), kept
        assert same_bits(exact(q), engine.replay(kept, [q]))
    assert rejected > 0


class Cache(nn.Module):
    """Attention of two heads over a cache that grows row by row."""

    def __init__(self, head: int = 64) -> None:
        super().__init__()
        self.head = head
        self.lin = nn.Linear(2 * head, 2 * head, dtype=torch.bfloat16)

    def start(self) -> dict[str, torch.Tensor]:
        return {"rows": torch.zeros(1, 0, 2 * self.head, dtype=torch.bfloat16)}

    def forward(self, x: torch.Tensor, state: Any) -> Any:
        rows = torch.cat([state["rows"], self.lin(x)], 1)
        q, k = (v.unflatten(-1, (2, -1)).transpose(1, 2) for v in (x, rows))
        y = F.scaled_dot_product_attention(q, k, k)
        return y.transpose(1, 2).flatten(2), {"rows": rows[:, -130:]}


def test_a_growing_cache_has_one_program_for_each_live_length(on: Backend) -> None:
    """G4-06: the plan of the kernel is that of the rows which are there, on both sides of every tile."""
    region = window_region(130, shape=(1, None, 128), dtype="bfloat16", retain=Window(130))
    inputs = (Input(Arg("x"), (1, None, 128), "bfloat16"),)
    declared = contract((63, 1), region, inputs=inputs)
    options = {"capture_after": 0} if on.captures else {}
    twins = Twins(Cache, declared, on, warm=None, **options)
    lengths = [63, 1, 1, 63, 1, 1, 1, 1]
    twins.steps(on.chunks(lengths, width=128, dtype=torch.bfloat16))
    assert twins.served == len(lengths)
    assert twins.fast.stats()["programs"] == 7
    assert twins.fast.stats()["stock"] == 0


@pytest.mark.gpu
def test_split_products_keep_their_bits_when_the_workspace_is_another(repeatable: None) -> None:
    """G4-06: few rows and a long sum ask the library for a workspace, which the capture has in its own pool."""
    on = Backend.of("cuda")
    layer, engine = nn.Linear(8192, 640, dtype=torch.bfloat16, device=on.device), on.engine()
    for rows in (1, 7, 50):
        (x,) = on.chunks([rows], seed=rows, width=8192, dtype=torch.bfloat16)
        binding = engine.capture(rows, layer, [x])
        assert isinstance(binding, Binding)
        torch._C._cuda_clearCublasWorkspaces()
        expected = layer(x)
        torch._C._cuda_clearCublasWorkspaces()
        assert same_bits(expected, engine.replay(binding, [x]))


# ------------------------------------------------------------------------------------------- exact draws
class Noise(nn.Module):
    """Draws in every step: from the default generator, or from one of its own."""

    def __init__(self, own: torch.Generator | None = None) -> None:
        super().__init__()
        self.lin, self.generator = nn.Linear(WIDTH, WIDTH), own

    def start(self) -> dict[str, torch.Tensor]:
        return {"last": torch.zeros(1, WIDTH)}

    def forward(self, x: torch.Tensor, state: Any) -> Any:
        own = self.generator
        noise = torch.randn_like(x) if own is None else torch.randn(x.shape, device=x.device, generator=own)
        y = self.lin(x) + noise + state["last"][:, None]
        return y, {"last": y[:, -1]}


# Each session has a copy of its state: the next step of another one overwrites the buffer.
COPIED = fixed("last", 1, WIDTH, value="copy")
ORDERS = {"in turn": [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3], "interleaved": [0, 1, 2, 3, 3, 1, 0, 2, 2, 0, 1, 3]}


def play(twins: Twins, order: Sequence[int], own_seeds: bool) -> dict[int, list[torch.Tensor]]:
    """Four sessions: with one generator between them, or each with the position that it left behind."""
    on, outputs = twins.on, {i: list[torch.Tensor]() for i in range(4)}
    twins.restart()
    state = {i: (clone_tree(twins.theirs), clone_tree(twins.ours)) for i in range(4)}
    torch.manual_seed(5)
    positions = dict.fromkeys(range(4), generator_states(on.device)[-1])
    for i in order:
        if own_seeds:
            _position(on, positions[i])
        twins.theirs, twins.ours = state[i]
        (x,) = on.chunks([3], seed=len(outputs[i]))
        outputs[i].append(twins.step(x))
        state[i], positions[i] = (twins.theirs, twins.ours), generator_states(on.device)[-1]
    return outputs


def _position(on: Backend, state: torch.Tensor) -> None:
    torch.cuda.set_rng_state(state, on.device) if on.is_cuda else torch.set_rng_state(state)


def test_sessions_draw_from_one_generator_in_the_order_of_their_steps(on: Backend) -> None:
    """G4-09: then the result depends on the order, and each order gives stock's bits."""
    twins = Twins(Noise, contract((3,), COPIED), on)
    found = {name: play(twins, order, own_seeds=False) for name, order in ORDERS.items()}
    assert twins.served == 24
    assert not same_bits(found["in turn"][3][0], found["interleaved"][3][0])
    assert not same_bits(found["in turn"][0][0], found["in turn"][1][0])


def test_sessions_with_generators_of_their_own_sound_alike_in_any_slot_and_order(on: Backend) -> None:
    """G4-09: what was captured for one session draws from the position of the session that it serves."""
    twins = Twins(Noise, contract((3,), COPIED), on)
    found = [outputs for order in ORDERS.values() for outputs in play(twins, order, own_seeds=True).values()]
    assert twins.served == 24
    assert all(same_bits(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))
    assert not same_bits(found[0][0], found[0][1])


def test_a_generator_that_the_module_keeps_is_drawn_from_as_stock_draws(on: Backend) -> None:
    """G4-09: tracing cannot see it, so such a step runs as stock."""
    twins = Twins(lambda: Noise(torch.Generator(on.device).manual_seed(3)), contract((3, 1), COPIED), on, warm=None)
    before = twins.fast.generator.get_state()
    twins.steps(on.chunks([3, 1, 3, 1]))
    assert twins.counted("not compiled: ") == 4
    assert torch.equal(twins.fast.generator.get_state(), twins.stock.generator.get_state())
    assert not torch.equal(before, twins.fast.generator.get_state())
