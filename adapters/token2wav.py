"""Token2Wav of stepaudio2-minicpmo 0.1.1, the decoder of MiniCPM-o 4.5 and Lychee-FD.

`Token2WavDecoder` is the vendor's per-chunk path (``Token2wav.stream``: flow, retention, vocoder, cross-fade) on the
vendor's own modules, with state passed in and out instead of kept in attributes and without file and audio input.
`contract` is its declaration. Only the vendor's submodules are imported: torch, numpy, scipy and einops suffice.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.machinery
import importlib.metadata
import importlib.util
import math
import sys
import types
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from cadence_fx.adapters.token2wav_traffic import LOOKAHEAD, script, stream
from cadence_fx.contract import (
    Arg,
    Attr,
    Bound,
    Boundary,
    Call,
    Clock,
    Contract,
    Entry,
    Input,
    RandomStream,
    Region,
    Result,
    Scalar,
)  # fmt: skip
from cadence_fx.errors import CadenceError
from cadence_fx.retention import START, KeepEnds, Window

__all__ = ["Token2WavDecoder", "build_random", "contract", "script", "stream"]

DISTRIBUTION, VERSIONS = "stepaudio2-minicpmo", ("0.1.1",)
SILENCE = 4218  # the vendor's padding token
KEPT_FRAMES, HOP = 100, 480  # solver frames kept beside the prompt; samples per mel frame
VOCODER_FRAMES = 8  # mel frames that the vocoder sees again
LIMIT_FRAMES = 1000  # rows of the vendor's solver buffer: it refuses anything longer
STATE = ("conformer_cnn_cache", "conformer_att_cache", "estimator_cnn_cache", "estimator_att_cache")


class Token2WavDecoder(torch.nn.Module):
    """One chunk of tokens to PCM.

    Args:
        flow: the vendor's ``CausalMaskedDiffWithXvec``.
        hift: the vendor's ``HiFTGenerator``.
        n_timesteps: steps of the flow matching solver, 1 to 16.
        autocast: dtype of ``torch.autocast`` around the flow, in the prompt pass too; its weights stay float32. None
            runs without. The vocoder runs in float32 either way, as in the vendor's float16 mode.
    """

    speech_window: torch.Tensor

    def __init__(self, flow: Any, hift: Any, n_timesteps: int = 10, autocast: torch.dtype | None = None) -> None:
        super().__init__()
        import numpy

        self.flow, self.hift, self.n_timesteps, self.autocast = flow, hift, n_timesteps, autocast
        window = torch.from_numpy(numpy.hamming(2 * VOCODER_FRAMES * HOP))  # float64, as the vendor has it
        self.register_buffer("speech_window", window, persistent=False)

    def _flow(self, run: Any, device: torch.device, *args: Any, **kwargs: Any) -> Any:
        """A method of the flow, under autocast if that was asked for."""
        if self.autocast is None:
            return run(*args, **kwargs)
        with torch.autocast(device.type, dtype=self.autocast):
            return run(*args, **kwargs)

    def _carried(self, cache: dict[str, Any]) -> dict[str, Any]:
        """The flow's state, of the same dtypes on every device.

        Under autocast a layer norm gives float32 on a GPU and the lower precision on the CPU, and the encoder's
        convolution state is what one gave. Float32 holds both.
        """
        if self.autocast is None:
            return dict(cache)
        return {**cache, "conformer_cnn_cache": cache["conformer_cnn_cache"].float()}

    @torch.no_grad()
    def prime(self, prompt_tokens: torch.Tensor, prompt_mel: torch.Tensor, speaker: torch.Tensor) -> dict[str, Any]:
        """State after the prompt of a voice.

        Args:
            prompt_tokens: int32 [1, t].
            prompt_mel: float32 [1, 2 t, 80].
            speaker: float32 [1, 192].
        """
        silence = torch.full((1, LOOKAHEAD), SILENCE, dtype=prompt_tokens.dtype, device=prompt_tokens.device)
        tokens = torch.cat([prompt_tokens, silence], dim=1)
        setup, n = self.flow.setup_cache, self.n_timesteps
        state = self._carried(self._flow(setup, tokens.device, tokens, prompt_mel, speaker, n_timesteps=n))
        state["mel"] = prompt_mel.new_zeros(1, prompt_mel.shape[2], 0)
        state["source"] = prompt_mel.new_zeros(1, 1, 0)
        state["speech"] = prompt_mel.new_zeros(1, 0)
        state["prompt_frames"] = prompt_mel.shape[1]
        return state

    @torch.no_grad()
    def forward(
        self, tokens: torch.Tensor, speaker: torch.Tensor, state: dict[str, Any], last_chunk: bool = False
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """PCM of one chunk and the state after it.

        Args:
            tokens: int32 [1, t], three of them look-ahead unless ``last_chunk``.
            speaker: float32 [1, 192].
            state: of `prime` or of the call before.
            last_chunk: pad the look-ahead and return the whole tail.

        Returns:
            float32 [1, samples] within +-0.99, and the new state.
        """
        prompt = state["prompt_frames"]
        old, n = {k: state[k] for k in STATE}, self.n_timesteps
        mel, cache = self._flow(
            self.flow.inference_chunk, tokens.device, token=tokens, spk=speaker, cache=old, last_chunk=last_chunk,
            n_timesteps=n,
        )  # fmt: skip
        new = self._carried(cache)
        for name, dim in (("estimator_att_cache", 4), ("conformer_att_cache", 3)):
            if new[name].shape[dim] > prompt + KEPT_FRAMES:
                frames = new[name].shape[dim]
                head, tail = new[name].narrow(dim, 0, prompt), new[name].narrow(dim, frames - KEPT_FRAMES, KEPT_FRAMES)
                new[name] = torch.cat([head, tail], dim=dim)
        seen = torch.cat([state["mel"], mel if self.autocast is None else mel.float()], dim=2)
        speech, source = self.hift(seen, state["source"])
        if state["speech"].shape[-1] > 0:
            speech = self._fade(speech, state["speech"])
        kept = VOCODER_FRAMES * HOP
        new["mel"] = seen[..., -VOCODER_FRAMES:].clone()
        new["source"] = source[:, :, -kept:].clone()
        new["speech"] = speech[:, -kept:].clone()
        new["prompt_frames"] = prompt
        return (speech if last_chunk else speech[:, :-kept]), new

    def _fade(self, speech: torch.Tensor, tail: torch.Tensor) -> torch.Tensor:
        half = self.speech_window.shape[0] // 2
        speech = speech.clone()
        speech[..., :half] = (
            speech[..., :half] * self.speech_window[:half] + tail[..., -half:] * self.speech_window[half:]
        )
        return speech


# ---------------------------------------------------------------------------------------------- declaration
def contract(
    prompt_frames: int | Sequence[int] = 302,
    chunk_tokens: int = 25,
    n_timesteps: int = 10,
    *,
    flush_tokens: Sequence[int] = (),
    last_tokens: Sequence[int] | None = None,
    depth: int = 16,
    encoder_blocks: int = 6,
    up_blocks: int = 4,
    autocast: str | None = None,
    max_graphs: int = 128,
) -> Contract:
    """The declaration of `Token2WavDecoder`.

    Args:
        prompt_frames: mel frames of the voice's prompt (twice its tokens); several voices: several lengths.
        chunk_tokens: fresh tokens of a steady chunk (25; Lychee-FD: 25, 12 or 10).
        n_timesteps: solver steps.
        flush_tokens: fresh tokens of chunks that are cut short inside a turn.
        last_tokens: tokens of last chunks; 1 to chunk_tokens + 3 by default.
        depth, encoder_blocks, up_blocks: of the module, 16, 6 and 4 as released.
        autocast: name of the module's autocast dtype, "float16" or "bfloat16". The encoder's keys and values are then
            carried in it; all other state is float32 as without, since the solver's buffers are.

    Raises:
        CadenceError: ``autocast`` is another name.
    """
    lower = _autocast_dtype(autocast)
    prompts = (prompt_frames,) if isinstance(prompt_frames, int) else tuple(prompt_frames)
    last = tuple(range(1, chunk_tokens + LOOKAHEAD + 1)) if last_tokens is None else tuple(last_tokens)
    n, blocks = n_timesteps, encoder_blocks + up_blocks

    def state(name: str, shape: tuple[int | None, ...], **declared: Any) -> Region:
        return Region(name, shape, enters=Arg("state", name), leaves=Result(1, name), **declared)

    def frames(name: str, shape: tuple[int | None, ...], **declared: Any) -> Region:
        keep = KeepEnds(START, KEPT_FRAMES)
        return state(name, shape, dim=shape.index(None), clock="mel_frame", start=prompts, retain=keep, **declared)

    def scratch(
        path: str, shape: tuple[int | None, ...], reserved: tuple[int, ...], shares: str | None = None
    ) -> Region:
        growing: dict[str, Any] = {}
        if None in shape:
            keep = KeepEnds(START, KEPT_FRAMES)
            growing = {"dim": shape.index(None), "clock": "mel_frame", "start": prompts, "retain": keep}
        return Region(path, shape, enters=Attr(path), mutability="scratch", lifetime="unit", reserved=reserved,
                      shares=shares, **growing)  # fmt: skip

    def table(path: str, shape: tuple[int, ...], reserved: tuple[int, ...], anchor: Any) -> Region:
        return Region(
            path, shape, enters=Attr(path), mutability="constant", lifetime="process", reserved=reserved, anchor=anchor
        )

    def samples(name: str, shape: tuple[int | None, ...]) -> Region:
        return state(name, shape, dim=shape.index(None), clock="sample", retain=Window(VOCODER_FRAMES * HOP))

    def call(name: str, fresh: int, seen: int, **declared: Any) -> Call:
        return Call(name, {"token": fresh}, {"tokens": (seen,)}, **declared)

    cfm, dit, encoder = "flow.decoder", "flow.decoder.estimator", "flow.encoder"
    more, end = ((Arg("last_chunk"), False),), ((Arg("last_chunk"), True),)
    step = ((0, "solver_step"),)
    positions = (1, 2 * LIMIT_FRAMES - 1, 512), (1, 9999, 512), "centre"
    return Contract(
        "token2wav",
        clocks=(
            Clock("token", hz=25),
            Clock("mel_frame", of="token", ratio=2),
            Clock("sample", of="mel_frame", ratio=HOP),
            Clock("solver_step", extent=n),
        ),
        regions=(
            frames("estimator_att_cache", (n, depth, 2, 8, None, 128), fixed_clocks=step, order="new_first",
                   reserved=(16, depth, 2, 8, LIMIT_FRAMES, 128)),
            state("estimator_cnn_cache", (n, depth, 2, 1024, 2), fixed_clocks=step, reserved=(16, depth, 2, 1024, 2)),
            frames("conformer_att_cache", (blocks, 1, 8, None, 128), order="old_first",
                   dtype="float32" if lower is None else str(autocast)),
            state("conformer_cnn_cache", (1, 512, 6)),
            state("mel", (1, 80, None), dim=2, clock="mel_frame", retain=Window(VOCODER_FRAMES), order="old_first"),
            samples("source", (1, 1, None)),
            samples("speech", (1, None)),
            scratch(f"{cfm}.att_cache_buffer", (n, depth, 2, 8, None, 128), (16, depth, 2, 8, LIMIT_FRAMES, 128),
                    "estimator_att_cache"),
            scratch(f"{cfm}.cnn_cache_buffer", (n, depth, 2, 1024, 2), (16, depth, 2, 1024, 2), "estimator_cnn_cache"),
            scratch(f"{dit}.att_cache_buffer", (depth, 2, 8, None, 128), (depth, 2, 8, LIMIT_FRAMES, 128)),
            scratch(f"{dit}.cnn_cache_buffer", (depth, 2, 1024, 2), (depth, 2, 1024, 2)),
            table(f"{cfm}.rand_noise", (1, 80, LIMIT_FRAMES), (1, 80, 30000), "start"),
            table(f"{encoder}.embed.pos_enc.pe", *positions),
            table(f"{encoder}.up_embed.pos_enc.pe", *positions),
        ),
        inputs=(Input(Arg("tokens"), (1, None), "int32", high=6561), Input(Arg("speaker"), (1, 192))),
        calls=(
            call("chunk", chunk_tokens, chunk_tokens + LOOKAHEAD, scalars=more, steady=True),
            *(call(f"flush[{t}]", t, t + LOOKAHEAD, scalars=more) for t in flush_tokens),
            *(call(f"last[{t}]", t, t, scalars=end, ends="turn") for t in last),
        ),
        scalars=(Scalar(Arg("state", "prompt_frames"), prompts),),
        entries=(Entry("prime", tuple((k, Result(k)) for k in (*STATE, "mel", "source", "speech"))),),
        boundaries=(
            Boundary(f"{encoder}.forward_chunk"),
            Boundary(f"{dit}.forward_chunk", "solver_step"),
            Boundary("hift.forward"),
        ),
        admit=(Bound("mel_frame", 2 * (chunk_tokens + LOOKAHEAD)),),
        random=(RandomStream("device", "chunk"),),
        max_graphs=max_graphs,
        max_constant_bytes=(256 if lower is None else 512) << 20,  # casts of all the flow's weights are 230 MiB
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------- the vendor's modules
def build_random(
    device: str | torch.device = "cpu",
    seed: int = 0,
    *,
    depth: int = 16,
    n_timesteps: int = 10,
    encoder_blocks: int = 6,
    up_blocks: int = 4,
    vocoder_channels: int = 512,
    autocast: str | None = None,
) -> Token2WavDecoder:
    """The vendor's modules at released (or smaller) sizes with weights drawn so that every part shows in the output.

    Fresh modules would prove nothing: modulations and final layers start at zero, the vocoder stays unvoiced, and large
    weights saturate its clamp (dossier traps 5 and 15).

    Args:
        autocast: name of a dtype for `Token2WavDecoder`, "float16" or "bfloat16"; weights are float32 all the same.

    Raises:
        CadenceError: ``autocast`` is another name, or the vendor's package is missing or of another version.
    """
    lower = _autocast_dtype(autocast)
    flow_module, cfm_module, dit_module, encoder_module, hift_module = _vendor()
    torch.manual_seed(seed)  # the solver's noise table is drawn by the constructor
    encoder = encoder_module.UpsampleConformerEncoderV2(
        input_size=512, output_size=512, input_layer="linear", pre_lookahead_len=LOOKAHEAD, num_blocks=encoder_blocks,
        num_up_blocks=up_blocks, up_stride=2, up_scale_factor=2, attention_heads=8, pos_enc_layer_type="rel_pos_espnet",
        selfattention_layer_type="rel_selfattn", key_bias=True, linear_units=2048, dropout_rate=0.1,
        positional_dropout_rate=0.1, attention_dropout_rate=0.1, normalize_before=True,
    )  # fmt: skip
    dit = dit_module.DiT(320, 80, mlp_ratio=4.0, depth=depth, num_heads=8, head_dim=64, hidden_size=512)
    cfm = cfm_module.CausalConditionalCFM(dit, inference_cfg_rate=0.7)
    if depth != 16:  # the vendor's buffers are hard-coded to 16 blocks
        for owner in (cfm, dit):
            for name in ("att_cache_buffer", "cnn_cache_buffer"):
                old = getattr(owner, name)
                shape = [depth if d == old.dim() - (5 if "att" in name else 4) else s for d, s in enumerate(old.shape)]
                owner.register_buffer(name, torch.zeros(shape), persistent=False)
    flow = flow_module.CausalMaskedDiffWithXvec(512, 80, 192, "mel", 6561, encoder, cfm)
    hift = hift_module.HiFTGenerator(base_channels=vocoder_channels)
    generator = torch.Generator().manual_seed(seed + 1)
    for module in (flow, hift):
        for name, parameter in module.named_parameters():
            parameter.data.copy_(_drawn(name, parameter, generator))
            parameter.requires_grad_(False)
    # PCM well inside the vocoder's clamp, pitch on both sides of its voicing threshold of 10 Hz.
    hift.conv_post.parametrizations.weight.original0.data.mul_(0.002)
    hift.conv_post.bias.data[:9] -= 4.0
    hift.f0_predictor.classifier.weight.data.mul_(20.0)
    hift.f0_predictor.classifier.bias.data.fill_(30.0)
    return Token2WavDecoder(flow, hift, n_timesteps, lower).to(device).eval()


def _autocast_dtype(name: str | None) -> torch.dtype | None:
    found = {None: None, "float16": torch.float16, "bfloat16": torch.bfloat16}
    if name not in found:
        raise CadenceError(f"autocast is {name!r}; expected 'float16', 'bfloat16' or None")
    return found[name]


def _drawn(name: str, parameter: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """A draw that keeps activations near unit scale."""
    scale = 1 / math.sqrt(parameter[0].numel()) if parameter.dim() > 1 else 0.05
    value = torch.randn(parameter.shape, generator=generator) * scale
    if name.endswith("alpha") or "original0" in name:
        return value.abs() + (1.0 if name.endswith("alpha") else 0.5)
    return value + 1.0 if name.endswith("weight") and parameter.dim() == 1 else value


def _vendor() -> list[Any]:
    """The vendor's submodules, without running its package's ``__init__`` (it wants torchaudio and transformers)."""
    try:
        version = importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        version = None
    if version not in VERSIONS:
        found = f"version {version} is installed" if version else "it is not installed"
        raise CadenceError(
            f"token2wav is proven on {DISTRIBUTION} {', '.join(VERSIONS)}, and {found}: "
            f"pip install --no-deps {DISTRIBUTION}=={VERSIONS[-1]}"
        )
    names = (
        "cosyvoice2.flow.flow", "cosyvoice2.flow.flow_matching", "cosyvoice2.flow.decoder_dit",
        "cosyvoice2.transformer.upsample_encoder_v2", "flashcosyvoice.modules.hifigan",
    )  # fmt: skip
    with _bare_package():
        return [importlib.import_module(f"stepaudio2.{name}") for name in names]


@contextlib.contextmanager
def _bare_package() -> Iterator[None]:
    """For the time of an import: an empty ``stepaudio2`` package and, where it is missing, an empty ``onnxruntime``.

    Importing the encoder also changes two global settings of torch.compile; they are put back.
    """
    import torch._dynamo

    config: Any = torch._dynamo.config
    saved = {key: getattr(config, key) for key in ("suppress_errors", "cache_size_limit")}
    placed = []
    if "stepaudio2" not in sys.modules:
        spec = importlib.util.find_spec("stepaudio2")
        assert spec is not None
        assert spec.submodule_search_locations is not None
        package = types.ModuleType("stepaudio2")
        package.__path__ = list(spec.submodule_search_locations)
        package.__spec__ = importlib.machinery.ModuleSpec("stepaudio2", None, is_package=True)
        placed.append(package)
    if importlib.util.find_spec("onnxruntime") is None:
        missing = types.ModuleType("onnxruntime")  # imported by the vendor and never used here
        missing.__spec__ = importlib.machinery.ModuleSpec("onnxruntime", None)
        placed.append(missing)
    sys.modules.update({module.__name__: module for module in placed})
    try:
        yield
    finally:
        for module in placed:
            sys.modules.pop(module.__name__, None)
        for key, value in saved.items():
            setattr(config, key, value)
