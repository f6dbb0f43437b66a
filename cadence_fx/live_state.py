"""What a capture must not disturb: live state and generators. Where it is kept meanwhile, and how it comes back.

What is put back is kept on the host, so that the device's peak does not grow by a copy of the state.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from cadence_fx.bits import CHUNK, Difference, first_difference, pieces, same_bits
from cadence_fx.graph_backend import GraphBackend
from cadence_fx.staging import like, writable

__all__ = ["FLOATS", "Generators", "HostCopy", "StartState", "randomised", "release_pinned"]

FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128})


def _on_host(piece: torch.Tensor) -> torch.Tensor:
    """A copy on the host; of device memory in pinned memory, which copies back and forth many times faster."""
    if not piece.is_cuda:
        return piece.clone()
    try:
        copy = torch.empty(piece.shape, dtype=piece.dtype, pin_memory=True)
    except RuntimeError:  # the host grants no more
        copy = torch.empty(piece.shape, dtype=piece.dtype)
    return copy.copy_(piece)


def release_pinned() -> None:
    """Give pinned memory back that copies have left in torch's cache: a few times the size of the state."""
    release = getattr(torch._C, "_host_emptyCache", None)
    if torch.cuda.is_initialized() and release is not None:
        release()


class HostCopy:
    """The content of tensors, kept on the host in pieces."""

    def __init__(self, tensors: Sequence[torch.Tensor], limit: int = CHUNK) -> None:
        self.tensors, self.limit = tuple(tensors), limit
        self.kept = [[_on_host(piece.detach()) for piece in pieces(t, limit)] for t in self.tensors]

    def put_back(self) -> None:
        for tensor, kept in zip(self.tensors, self.kept, strict=True):
            for piece, saved in zip(pieces(tensor, self.limit), kept, strict=True):
                piece.copy_(saved)

    def difference(self) -> Difference | None:
        """The first bit that is not as it was kept."""
        for i, (tensor, kept) in enumerate(zip(self.tensors, self.kept, strict=True)):
            for j, (piece, saved) in enumerate(zip(pieces(tensor, self.limit), kept, strict=True)):
                if not same_bits(piece, saved):
                    name = f"buffer {i}" if len(kept) == 1 else f"buffer {i} (part {j} of {len(kept)})"
                    return first_difference(name, saved, piece.cpu())
        return None


def _fill(tensor: torch.Tensor, generator: torch.Generator) -> None:
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    tensor.uniform_(-1, 1, generator=generator)


class StartState:
    """The state that every run of a certificate starts from.

    Live state (``preserve``) is the start of the first round and is put back at the end. Floating-point buffers that
    nobody has written yet hold random values: zeros prove little. Integers may be indices and always keep their values.
    """

    def __init__(self, aliased: Sequence[torch.Tensor], preserve: Sequence[torch.Tensor]) -> None:
        owned = {id(t) for t in preserve}
        self.live = HostCopy(preserve)
        self.indices = HostCopy([t for t in aliased if id(t) not in owned and t.dtype not in FLOATS])
        self.free = [t for t in aliased if id(t) not in owned and t.dtype in FLOATS]
        self.floats = [t for t in preserve if t.dtype in FLOATS]

    def start(self, round_: int) -> None:
        """Write the start state of a round."""
        self._fill(self.free, round_)
        self.put_back()
        if round_:
            self._fill(self.floats, round_)

    def _fill(self, tensors: Sequence[torch.Tensor], seed: int) -> None:
        for i, tensor in enumerate(tensors):
            _fill(tensor, torch.Generator(tensor.device).manual_seed(1000 * seed + i))

    def put_back(self) -> None:
        self.live.put_back()
        self.indices.put_back()


def randomised(inputs: Sequence[Any], staged: Sequence[bool], seed: int, shift: int | None = None) -> list[Any]:
    """Inputs with other values in every floating-point tensor that is staged.

    Integers and plain values stay, since they may be indices; resident inputs are state and filled as such.
    """
    found: list[Any] = []
    for i, value in enumerate(inputs):
        if staged[i] and value.dtype in FLOATS:
            value = like(value, shift)
            _fill(writable(value), torch.Generator(value.device).manual_seed(77_000 + 1000 * seed + i))
        found.append(value)
    return found


class Generators:
    """Positions of all generators, watched while something runs and put back where that something moved them.

    What no run moves is never written, so that other threads may draw meanwhile. Another thread's draw looks like one
    of ours, hence a run counts as drawing only if every run of it moved the generator.
    """

    def __init__(self, backend: GraphBackend) -> None:
        self.backend = backend
        self.host, self.device = _host_position(), backend.position()
        self.moved: dict[str, tuple[bool, bool]] = {}

    def watch(self, label: str, run: Callable[[], Any]) -> Any:
        """Run and note for ``label`` whether host and device generators have moved."""
        host, device = _host_position(), self.backend.position()
        try:
            return run()
        finally:
            now = (not _same_host(host, _host_position()), not torch.equal(device, self.backend.position()))
            before = self.moved.get(label, (True, True))
            self.moved[label] = (before[0] and now[0], before[1] and now[1])

    @property
    def host_moves(self) -> bool:
        return any(host for host, _ in self.moved.values())

    @property
    def device_moves(self) -> bool:
        return any(device for _, device in self.moved.values())

    def rewind(self, round_: int = 0) -> None:
        """The device's generator to the start of a round; each round has its own seed."""
        if self.device_moves and round_:
            self.backend.seed(9001 + round_)
        elif self.device_moves:
            self.backend.set_position(self.device)

    def restore(self) -> None:
        self.rewind()
        if self.host_moves:
            torch.set_rng_state(self.host[0])
            random.setstate(self.host[1])
            if self.host[2] is not None:
                sys.modules["numpy.random"].set_state(self.host[2])


def _host_position() -> tuple[torch.Tensor, Any, Any]:
    numpy = sys.modules.get("numpy.random")
    return torch.get_rng_state(), random.getstate(), None if numpy is None else numpy.get_state()


def _same_host(a: tuple[torch.Tensor, Any, Any], b: tuple[torch.Tensor, Any, Any]) -> bool:
    # Text: numpy's state holds an array. One that was first imported in between has not been drawn from by torch code.
    same = a[2] is None or [str(list(v)) if hasattr(v, "tolist") else v for v in a[2]] == [
        str(list(v)) if hasattr(v, "tolist") else v for v in b[2]
    ]
    return torch.equal(a[0], b[0]) and a[1] == b[1] and same
