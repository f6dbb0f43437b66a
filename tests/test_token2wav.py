"""The Token2Wav decoder on the vendor's own modules: small sizes through all that traffic does, released sizes once."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from cadence_fx.bits import first_difference
from cadence_fx.drop_in import transform
from cadence_fx.errors import CadenceError, ContractError
from cadence_fx.fused_operator import FusedKernels
from cadence_fx.fusion import Fuser
from cadence_fx.live_state import StartState
from cadence_fx.module import CadenceModule
from cadence_fx.schedule import schedule
from cadence_fx.scheduled_run import OneStream, run_scheduled
from cadence_fx.traffic import Step, clone_tree
from cadence_fx.verify import VerifyResult, compare, verify

try:
    importlib.metadata.version("stepaudio2-minicpmo")
except importlib.metadata.PackageNotFoundError:  # pragma: no cover
    pytest.skip("stepaudio2-minicpmo is not installed (pip install --no-deps)", allow_module_level=True)

from cadence_fx.adapters import token2wav
from tests.case_toys import aligned

pytestmark = [pytest.mark.vendor, pytest.mark.slow]

SHAPE: dict[str, Any] = {"depth": 2, "encoder_blocks": 1, "up_blocks": 1}
SMALL: dict[str, Any] = {**SHAPE, "n_timesteps": 2}
Voice = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def proven(result: VerifyResult) -> VerifyResult:
    """Every bit, state and generator equal, and outputs that can show a difference."""
    assert result.first_mismatch is None, result.first_mismatch
    assert result.ok, result.output
    assert 0.01 < result.output["mean_abs"] < 0.6
    data = json.loads(json.dumps(result.to_dict()))
    assert all(data[field] is True for field in ("bitwise_equal", "state_equal", "rng_equal", "self_agreement"))
    return result


# ---------------------------------------------------------------------------------------------- small sizes
def test_two_voices_flushes_a_last_chunk_a_turn_reset_and_a_rollback_are_exact() -> None:
    """Dossier traps 1 to 4, 13 to 16, 26, 27, 32; n = 2."""
    declared: dict[str, Any] = {"prompt_frames": (302, 250), "flush_tokens": (9, 14), "last_tokens": (11,)}
    options = {**SMALL, "vocoder_channels": 64, **declared}
    result = proven(verify("token2wav", chunks=18, options=options))
    assert result.stats["eager"] == {}
    names = {step.name for step in result.steps}
    assert names >= {"prime[302]", "prime[250]", "flush[9]", "flush[14]", "last[11]", "turn reset", "rollback"}
    assert result.bytes["ours_regions"] + result.bytes["ours_buffers"] < result.bytes["stock_buffers"] / 10


@pytest.mark.parametrize("chunk_tokens", [10])
def test_shorter_hops_and_a_single_solver_step_are_exact(chunk_tokens: int) -> None:
    """Lychee-FD's hops. Eleven chunks: the prompt's head is gone, the saturated state has moved often."""
    hop = {"n_timesteps": 1, "chunk_tokens": chunk_tokens, "last_tokens": (11,)}
    options = {**SHAPE, **hop, "vocoder_channels": 64}
    result = proven(verify("token2wav", chunks=11, options=options))
    # Flushes are not declared here: they run as stock, and so does what starts from an extent that is off the cadence.
    assert result.stats["eager"].keys() == {"signature not in the catalog"}
    assert result.stats["plan"] >= 4


def test_under_autocast_every_bit_is_stocks_and_no_weight_is_cast_in_a_call() -> None:
    """The flow in float16 and the vocoder in float32, through a flush, a rollback, a last chunk and a turn reset."""
    decoder = token2wav.build_random("cpu", 0, vocoder_channels=64, autocast="float16", **SMALL)
    declared = token2wav.contract(302, flush_tokens=(9,), last_tokens=(11,), autocast="float16", **SMALL)
    fast = transform(decoder, declared, backend="plan")
    torch.manual_seed(0)
    result = proven(compare(decoder, fast, declared, token2wav.script(decoder, declared, 0, 9)))
    assert (result.stats["eager"], result.stats["plan"]) == ({}, 9)
    assert {step.name for step in result.steps} >= {"flush[9]", "rollback", "last[11]", "turn reset"}
    for program in fast.programs.values():
        nodes = [n for n in program.flat.graph.nodes if n.op == "call_function"]
        casts = [n for n in nodes if n.target is torch.ops.aten._to_copy.default]
        assert casts
        weights = {t for t, path in program.flat.attributes.items() if "weight" in path or "bias" in path}
        assert not [n for n in casts if n.args[0].op == "get_attr" and n.args[0].target in weights]
        vocoder = [n for n in nodes if any(path == "hift.forward" for path, _ in n.meta.get("where", ()))]
        assert vocoder
        assert torch.float16 not in {getattr(n.meta["val"], "dtype", None) for n in vocoder}
        products = [n for n in nodes if n.target is torch.ops.aten.linear.default]
        matrices = [n.args[1] for n in products if n not in vocoder]
        assert {n.meta["val"].dtype for n in matrices} == {torch.float16}
        assert {n.op for n in matrices} == {"get_attr"}


@pytest.mark.parametrize("name", ["float32", "half"])
def test_an_autocast_dtype_that_the_decoder_does_not_know_is_refused(name: str) -> None:
    with pytest.raises(CadenceError, match=rf"autocast is '{name}'; expected 'float16', 'bfloat16' or None"):
        token2wav.contract(autocast=name)


# ---------------------------------------------------------------------------------------------- one small decoder
@pytest.fixture(scope="module")
def decoder() -> token2wav.Token2WavDecoder:
    return token2wav.build_random("cpu", 0, vocoder_channels=64, **SMALL)


@pytest.fixture(scope="module")
def voice() -> Voice:
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, 6561, (1, 151), generator=generator).int()
    return tokens, torch.randn(1, 302, 80, generator=generator), torch.randn(1, 192, generator=generator)


@pytest.fixture(scope="module")
def fast(decoder: token2wav.Token2WavDecoder) -> CadenceModule:
    return transform(decoder, token2wav.contract(302, last_tokens=(11,), **SMALL))


def tokens(count: int, batch: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(count)
    return torch.randint(0, 6561, (batch, count), generator=generator).int()


def stream(seed: int, voice: Voice, chunks: int) -> Iterator[Step]:
    yield Step("prime", lambda decoder, memory: memory.start(decoder.prime(*voice)))  # type: ignore[operator]
    generator = torch.Generator().manual_seed(seed)
    for _ in range(chunks):
        ids = torch.randint(0, 6561, (1, 28), generator=generator).int()
        yield Step("chunk", lambda decoder, memory, ids=ids: memory.call(decoder, ids, voice[2]), is_chunk=True)  # type: ignore[misc]


def test_an_append_ordered_contract_is_refused_before_the_first_chunk_by_region_and_offset(
    decoder: Any, voice: Voice
) -> None:
    """The declared order is compared row by row with the vendor's graph: no chunk runs under a wrong one."""
    right = token2wav.contract(302, last_tokens=(11,), **SMALL)
    solver = dataclasses.replace(right.region("estimator_att_cache"), order="old_first")
    regions = tuple(solver if r.name == solver.name else r for r in right.regions)
    fast = transform(decoder, dataclasses.replace(right, regions=regions))
    state = fast.prime(*voice)
    with pytest.raises(ContractError) as error:
        fast(torch.zeros(1, 28, dtype=torch.int32), voice[2], state)
    text = str(error.value)
    assert "'estimator_att_cache': row 0 of the new state is a new element" in text
    assert "order='old_first'" in text
    assert "says old row 0" in text
    assert "declare order='new_first'" in text
    assert fast.stats()["plan"] == fast.stats()["stock"] == 0


class AppendOrdered(token2wav.Token2WavDecoder):
    """What an append-ordered carry does: the new rows after the old ones, then the first P and the last 100."""

    def forward(self, tokens: Any, speaker: Any, state: dict[str, Any], last_chunk: bool = False) -> Any:
        before = state["estimator_att_cache"].shape[4]
        speech, new = super().forward(tokens, speaker, state, last_chunk)
        if before == 402:
            kept = new["estimator_att_cache"]
            new["estimator_att_cache"] = torch.cat([kept[..., 50:, :], kept[..., :50, :]], dim=4)
        return speech, new


def test_an_append_ordered_carry_is_flagged_at_chunk_three_by_region_and_index(decoder: Any, voice: Voice) -> None:
    """Two chunks agree with any order; a test that stops there proves nothing (dossier trap 1)."""
    appending = AppendOrdered(decoder.flow, decoder.hift, decoder.n_timesteps).eval()
    declared = token2wav.contract(302, last_tokens=(11,), **SMALL)
    carried = transform(appending, declared).seal()  # as stock: what is tried here is the checker
    result = compare(decoder, carried, declared, stream(2, voice, 4))
    found = result.first_mismatch
    assert found is not None
    assert (found["step"], found["kind"], found["where"]) == (3, "state", "state estimator_att_cache")
    assert len(found["index"]) == 6
    assert [step.equal_state for step in result.steps] == [True, True, True, False, False]


# ---------------------------------------------------------------------------------------------- input errors
@pytest.mark.parametrize(
    ("bad", "last"),
    [
        (tokens(3), False),
        (tokens(1), False),
        (tokens(0), False),
        (tokens(0), True),
        (tokens(28, batch=2), False),
        (tokens(28).float(), False),
        (tokens(28)[0], False),
    ],
    ids=["3", "1", "empty", "empty last", "batch 2", "float", "one dimension"],
)
def test_a_bad_chunk_does_what_stock_does_and_leaves_the_stream_whole(
    decoder: Any, fast: CadenceModule, voice: Voice, bad: torch.Tensor, last: bool
) -> None:
    """Nothing fresh, wrong batch, dtype or rank: the vendor's own exception, and the next chunk is exact."""
    torch.manual_seed(0)
    theirs, generator = decoder.prime(*voice), torch.get_rng_state()
    theirs = clone_tree(theirs)
    ours = fast.prime(*voice)
    before = clone_tree(ours)
    outcomes = list[Any]()
    for module, state in ((decoder, theirs), (fast, ours)):
        torch.set_rng_state(generator)
        try:
            outcomes.append(clone_tree(module(bad, voice[2], state, last)))
        except Exception as error:  # noqa: BLE001
            outcomes.append((type(error), str(error)))
    assert first_difference("outcome", outcomes[0], outcomes[1]) is None
    if isinstance(outcomes[0][0], torch.Tensor):
        return
    assert first_difference("state", before, ours) is None
    for module, state in ((decoder, theirs), (fast, ours)):
        torch.set_rng_state(generator)
        outcomes.append(clone_tree(module(tokens(28), voice[2], state)))
    assert first_difference("next chunk", outcomes[2][0], outcomes[3][0]) is None


def test_tokens_of_another_integer_type_run_as_stock(decoder: Any, fast: CadenceModule, voice: Voice) -> None:
    theirs, ours = clone_tree(decoder.prime(*voice)), fast.prime(*voice)
    results = []
    for module, state in ((decoder, theirs), (fast, ours)):
        torch.manual_seed(1)
        results.append(clone_tree(module(tokens(28).long(), voice[2], state)))
    assert first_difference("int64", results[0][0], results[1][0]) is None
    assert fast.stats()["eager"]["input 'tokens': dtype is torch.int64, declared torch.int32"] == 1


def test_a_prompt_longer_than_declared_does_what_stock_does(decoder: Any, fast: CadenceModule, voice: Voice) -> None:
    """860 frames leave no room in the vendor's 1000 rows: the prompt passes, a later chunk fails, as stock's does."""
    prompt = tokens(430), torch.randn(1, 860, 80, generator=torch.Generator().manual_seed(1)), voice[2]
    theirs, ours = decoder.prime(*prompt), fast.prime(*prompt)
    states, ends = [theirs, ours], list[Any]()
    for i, module in enumerate((decoder, fast)):
        torch.manual_seed(0)
        count = 0
        try:
            for _ in range(6):
                speech, states[i] = module(tokens(28), voice[2], clone_tree(states[i]))
                count += 1
            ends.append((count, None, speech))
        except Exception as error:  # noqa: BLE001
            ends.append((count, type(error), speech))
    assert ends[0][1] is not None
    assert first_difference("outcome", ends[0], ends[1]) is None
    ours = fast.prime(*voice)  # and a declared prompt is served again
    before = fast.stats()["plan"]
    fast(tokens(28), voice[2], ours)
    assert fast.stats()["plan"] == before + 1


def test_training_mode_is_refused_with_a_way_out(decoder: Any) -> None:
    declared = token2wav.contract(302, **SMALL)
    decoder.train()
    try:
        with pytest.raises(ContractError, match=r"training mode; call \.eval\(\) first"):
            transform(decoder, declared)
    finally:
        decoder.eval()


def test_the_vendors_oversized_buffers_are_not_held(decoder: Any, fast: CadenceModule) -> None:
    big = decoder.flow.decoder.att_cache_buffer.untyped_storage().data_ptr()
    held = {t.untyped_storage().data_ptr() for t in (*fast.stock.buffers(), *fast.compiler.traced.buffers())}
    assert big not in held
    assert fast.flow.decoder.att_cache_buffer.numel() == 0


# ---------------------------------------------------------------------------------------------- what importing does
IMPORT = """
import sys, torch
import torch._dynamo
config = {k: getattr(torch._dynamo.config, k) for k in ("suppress_errors", "cache_size_limit")}
before = set(sys.modules)
from cadence_fx.adapters import token2wav
token2wav._vendor()
heavy = sorted({"torchaudio", "transformers", "onnxruntime", "s3tokenizer"} & set(sys.modules))
assert not heavy, heavy
assert "stepaudio2" not in sys.modules or "stepaudio2" in before
assert config == {k: getattr(torch._dynamo.config, k) for k in config}
left = {m.partition(".")[0] for m in set(sys.modules) - before}
print(sorted(left & {"stepaudio2", "onnxruntime"}))
"""


def test_importing_the_decoder_needs_no_heavy_package_and_changes_no_setting() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


# ---------------------------------------------------------------------------------------------- what the weights give
def test_the_drawn_weights_give_voiced_and_unvoiced_frames_and_no_saturation(decoder: Any, voice: Voice) -> None:
    """Dossier traps 5 and 15."""
    pitches: list[torch.Tensor] = []
    hook = decoder.hift.f0_predictor.register_forward_hook(lambda module, args, out: pitches.append(out.detach()))
    try:
        state, speech = decoder.prime(*voice), []
        for i in range(3):
            torch.manual_seed(i)
            pcm, state = decoder(tokens(28), voice[2], state)
            speech.append(pcm)
    finally:
        hook.remove()
    voiced = (torch.cat([p.flatten() for p in pitches]) > 10).float().mean()
    assert 0.02 < float(voiced) < 0.98
    pcm = torch.cat(speech, -1)
    assert float((pcm.abs() >= 0.989).float().mean()) < 0.02
    assert pcm.unique().numel() > 10_000


# ---------------------------------------------------------------------------------------------- released sizes
MIB = 1 << 20


def test_the_released_decoder_is_exact_and_holds_a_fraction_of_the_memory() -> None:
    """Ten solver steps, sixteen blocks, a prompt of 302 frames, twelve chunks with all that the script does."""
    result = proven(verify("token2wav", chunks=12, options={"flush_tokens": (9, 14), "last_tokens": (11,)}))
    assert result.chunks == 12
    assert result.stats["eager"] == {}
    held = result.bytes
    assert held["stock_buffers"] >= 2129 * MIB
    assert held["ours_regions"] + held["ours_buffers"] <= 620 * MIB


def test_the_steady_chunk_is_exact_with_groups_of_operators_as_one(fast: CadenceModule) -> None:
    """Every function counts as proven, and each group runs its own operators: this is about the graph."""
    program = fast._compile(fast.steady_signature())
    fuser = Fuser(torch.device("cpu"), lambda node: True, FusedKernels(compile=lambda module, arguments: module))
    fused = fuser.fuse(program)
    assert fused is not None
    assert fused.groups < fused.operators / 3
    assert any("mul, add, cat" in change.where for change in fused.changes)
    drawn = fast.compiler.drawn(program.signature)
    inputs = [aligned(drawn[place]) if drawn[place].dtype == torch.int32 else drawn[place] for place in program.inputs]
    buffers = [b.tensor for b in fast.memory.buffers.values()]
    runs = []
    for flat in (program.flat, program.flat, fused.flat):
        StartState(buffers, []).start(0)
        torch.manual_seed(0)
        outputs = run_scheduled(flat, program.module, schedule(flat, 1), OneStream(), inputs)
        runs.append(clone_tree({"outputs": outputs, "state": buffers, "generator": torch.get_rng_state()}))
    assert first_difference("stock", runs[0], runs[1]) is None
    assert first_difference("fused", runs[0], runs[2]) is None
