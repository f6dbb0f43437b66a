"""Contracts that several tests share, with the numbers of the released decoders."""

from __future__ import annotations

from typing import Any

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
)
from cadence_fx.retention import START, KeepEnds, Retention, Window

FRAME = "mel_frame"
KEEP = KeepEnds(START, 100)


def alone(region: Region, **changes: Any) -> Contract:
    """A contract with one region on a frame clock and no calls."""
    return Contract("alone", (Clock(FRAME, hz=50), Clock("solver_step", extent=10)), (region,), **changes)


def line(retain: Retention, start: int | tuple[int, ...], **changes: Any) -> Region:
    """A float32 vector that grows with the frame clock."""
    return Region("line", (None,), dim=0, clock=FRAME, start=start, retain=retain, **changes)


def solver_kv(**changes: Any) -> Region:
    """The attention state of the flow decoder: ten solver steps, 16 blocks, CFG pair, 8 heads, K and V."""
    given: dict[str, Any] = {
        "shape": (10, 16, 2, 8, None, 128),
        "dim": 4,
        "clock": FRAME,
        "start": 302,
        "order": "new_first",
        "retain": KEEP,
        "reserved": (16, 16, 2, 8, 1000, 128),
        "enters": Arg("cache", "estimator_att_cache"),
        "leaves": Result(1, "estimator_att_cache"),
    }
    return Region("solver_kv", **(given | changes))


def chunk(**changes: Any) -> Call:
    """25 fresh tokens of the 28 that the call sees."""
    return Call("chunk", {"token": 25}, {"token": (28,)}, steady=True, **changes)


def last(tokens: int) -> Call:
    """The last chunk of a turn."""
    return Call(f"last[{tokens}]", {"token": tokens}, {"token": (tokens,)}, ends="turn")


def flush(frames: int) -> Call:
    """A forced flush inside a turn; the call sees three tokens of look-ahead."""
    return Call(f"flush[{frames}]", {FRAME: frames}, {"token": (frames // 2 + 3,)})


def full(**changes: Any) -> Contract:
    """The shared decoder: every region, every last length, one voice."""
    on_samples: dict[str, Any] = {"clock": "sample", "retain": Window(3840), "order": "old_first"}
    given: dict[str, Any] = {
        "clocks": (
            Clock("token", hz=25),
            Clock(FRAME, of="token", ratio=2),
            Clock("sample", of=FRAME, ratio=480),
            Clock("solver_step", extent=10),
        ),
        "regions": (
            solver_kv(fixed_clocks=((0, "solver_step"),)),
            Region("solver_cnn", (16, 16, 2, 1024, 2), enters=Arg("cache", "cnn"), leaves=Result(1, "cnn")),
            Region(
                "conformer_kv",
                (10, 1, 8, None, 128),
                dim=3,
                clock=FRAME,
                start=302,
                order="old_first",
                retain=KEEP,
                enters=Arg("cache", "conformer_att_cache"),
                leaves=Result(1, "conformer_att_cache"),
            ),
            Region("mel", (1, 80, None), dim=2, clock=FRAME, retain=Window(8), order="old_first", enters=Arg("mel")),
            Region("source", (1, 1, None), dim=2, enters=Arg("source"), **on_samples),
            Region("speech", (1, None), dim=1, enters=Arg("speech"), **on_samples),
            Region(
                "workspace",
                (16, 16, 2, 8, 1000, 128),
                mutability="scratch",
                lifetime="unit",
                shares="solver_kv",
                enters=Attr("decoder.att_cache_buffer"),
            ),
        ),
        "inputs": (Input(Arg("token"), (1, None), "int32", high=6561), Input(Arg("spk"), (1, 192))),
        "calls": (chunk(), *(last(tokens) for tokens in range(1, 29))),
        "scalars": (Scalar(Arg("prompt_frames"), (302,)),),
        "entries": (Entry("prime", (("solver_kv", Result("estimator_att_cache")),)),),
        "boundaries": (Boundary("decoder.estimator", "solver_step"),),
        "admit": (Bound(FRAME, 56),),
        "random": (RandomStream("device", "chunk"),),
        "constants": ("decoder.rand_noise",),
    }
    return Contract("token2wav", **(given | changes))
