"""Contract-owned state: one buffer per region, sized to its envelope, at an address that never changes.

Where the elements of a region rest follows from its order. New elements of an old-first region are appended, so the
state rests at the low end; new elements of a new-first region go in front, so it rests at the high end, and the rows
before it are free for them. Either way a call writes its new rows beside the live ones, reads both as one view, and
truncation moves only what does not already lie where it belongs. The live rows stay whole until the call commits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from cadence_fx.contract import Contract, Region
from cadence_fx.errors import AdmissionError, ContractError
from cadence_fx.extents import region_extents
from cadence_fx.moves import block_copies

__all__ = ["Memory", "RegionBuffer", "dtype_of"]


def dtype_of(name: str) -> torch.dtype:
    """The torch dtype of that name."""
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype)
    return found


def _bounded(region: Region, envelope: int | None) -> int:
    """The envelope of a region that grows, 0 for one of fixed shape."""
    if region.dim is None:
        return 0
    if envelope is None:
        raise ContractError(
            f"Region {region.name!r}: its envelope is not bounded, so no buffer can hold it; give it a retention rule"
        )
    return envelope


@dataclass
class RegionBuffer:
    """The buffer of one region.

    Attributes:
        tensor: contiguous, ``region.shape`` with the envelope at the growing dimension.
        extent: elements of the growing dimension that are live; None before the first state is there.
        epoch: counts changes of the content; a view handed out in an earlier epoch shows something else now.
    """

    region: Region
    envelope: int
    tensor: torch.Tensor
    extent: int | None = None
    epoch: int = 0

    @classmethod
    def allocate(cls, region: Region, envelope: int, device: torch.device) -> RegionBuffer:
        shape = [envelope if size is None else size for size in region.shape]
        where = torch.device("cpu") if region.placement == "host" else device
        return cls(region, envelope, torch.zeros(shape, dtype=dtype_of(region.dtype), device=where))

    def offset(self, extent: int) -> int:
        """First live row when ``extent`` rows are live."""
        return self.envelope - extent if self.region.order == "new_first" else 0

    def view(self, extent: int | None = None) -> torch.Tensor:
        """The live rows as a view (shape and content as stock's state tensor; strides as the buffer's)."""
        if self.region.dim is None:
            return self.tensor.view(self.tensor.shape)
        rows = self.extent if extent is None else extent
        if rows is None:
            raise AdmissionError(f"region {self.region.name!r} holds no state yet: prime it first")
        return self.tensor.narrow(self.region.dim, self.offset(rows), rows)

    def example(self, extent: int) -> torch.Tensor:
        """A contiguous tensor of a state's shape over the buffer's own memory: for tracing, which looks at no values.

        A view's strides are no function of its extent, so tracing would fix them; a contiguous tensor's are.
        """
        shape = list(self.tensor.shape)
        if self.region.dim is not None:
            shape[self.region.dim] = extent
        strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
        # Not a view of the buffer for autograd's books, which tracing reads.
        return self.tensor.new_empty(0).set_(self.tensor.untyped_storage(), 0, shape, strides)

    def fit(self, tensor: torch.Tensor) -> torch.Tensor | str:
        """``tensor`` cut to the demanded sizes of the fixed dimensions, or why it is no state of this region."""
        region = self.region
        if tensor.dtype != self.tensor.dtype:
            return f"dtype is {tensor.dtype}, expected {self.tensor.dtype}"
        if tensor.device != self.tensor.device:
            return f"device is {tensor.device}, expected {self.tensor.device}"
        if tensor.dim() != len(region.shape):
            return f"it has {tensor.dim()} dimensions, expected {len(region.shape)}"
        reserved = region.reserved or region.shape
        for dim, (size, found) in enumerate(zip(region.shape, tensor.shape, strict=True)):
            if size is None:
                if found > self.envelope:
                    return f"dimension {dim} is {found}, the envelope is {self.envelope}"
            elif found == reserved[dim] != size:
                tensor = tensor.narrow(dim, 0, size)
            elif found != size:
                return f"dimension {dim} is {found}, expected {size}"
        return tensor

    def is_resident(self, tensor: torch.Tensor) -> bool:
        """True if ``tensor`` is the live view itself: address, shape and strides."""
        if self.extent is None:
            return False
        live = self.view()
        return tensor.data_ptr() == live.data_ptr() and tensor.shape == live.shape and tensor.stride() == live.stride()

    def adopt(self, tensor: torch.Tensor) -> None:
        """Copy a state tensor (already fitted) into the buffer; it may be a view of this buffer itself."""
        dim = self.region.dim
        extent = tensor.shape[dim] if dim is not None else 0
        target = self.tensor if dim is None else self.tensor.narrow(dim, self.offset(extent), extent)
        if tensor.untyped_storage().data_ptr() != self.tensor.untyped_storage().data_ptr():
            target.copy_(tensor)
        elif tensor.data_ptr() != target.data_ptr() or tensor.stride() != target.stride():
            self._shift(tensor, extent)
        self.extent = extent
        self.epoch += 1

    def _shift(self, tensor: torch.Tensor, extent: int) -> None:
        """Move rows inside the buffer; a copy between overlapping views is undefined, so it goes in blocks."""
        dim = self.region.dim
        if dim is None or tensor.stride() != self.tensor.stride():
            self.tensor.copy_(tensor.clone()) if dim is None else self.view(extent).copy_(tensor.clone())
            return
        source = (tensor.storage_offset() - self.tensor.storage_offset()) // self.tensor.stride(dim)
        for dst, src, length in block_copies(self.offset(extent), source, extent):
            self.tensor.narrow(dim, dst, length).copy_(self.tensor.narrow(dim, src, length))

    @property
    def nbytes(self) -> int:
        return self.tensor.numel() * self.tensor.element_size()


class Memory:
    """All region buffers of a contract on one device. Owned by the contract: calls and sessions share them."""

    def __init__(self, contract: Contract, device: torch.device) -> None:
        self.contract, self.device = contract, device
        extents = {region.name: region_extents(contract, region) for region in contract.states}
        self.buffers: dict[str, RegionBuffer] = {
            region.name: RegionBuffer.allocate(region, _bounded(region, extents[region.name].envelope), device)
            for region in contract.states
        }
        self.live = False  # True once a state has been handed out

    def hand_out(self) -> dict[str, torch.Tensor]:
        """Views of the live state for the caller, marked with the epoch in which their content is true."""
        self.live = True
        views: dict[str, torch.Tensor] = {}
        for name, buffer in self.buffers.items():
            buffer.epoch += 1
            view = buffer.view() if buffer.region.value == "alias" else buffer.view().clone()
            view._cadence_epoch = buffer.epoch  # type: ignore[attr-defined]
            views[name] = view
        return views

    def require_current(self, name: str, tensor: torch.Tensor) -> None:
        """Refuse a tensor that shows a region's memory but not its live state.

        Raises:
            AdmissionError: a later call has overwritten what the tensor held.
        """
        buffer = self.buffers[name]
        if tensor.untyped_storage().data_ptr() != buffer.tensor.untyped_storage().data_ptr() or tensor.numel() == 0:
            return
        if getattr(tensor, "_cadence_epoch", buffer.epoch) == buffer.epoch and buffer.is_resident(tensor):
            return
        raise AdmissionError(
            f"state {name!r} was handed out by an earlier call and has been overwritten since; pass the newest state, "
            "or clone a state before the next call to come back to it"
        )

    def __getitem__(self, name: str) -> RegionBuffer:
        return self.buffers[name]

    @property
    def nbytes(self) -> int:
        """Bytes of all region buffers."""
        return sum(buffer.nbytes for buffer in self.buffers.values())

    def extents(self) -> dict[str, int | None]:
        return {name: buffer.extent for name, buffer in self.buffers.items()}

    def scratch(self, region: Region) -> torch.Tensor:
        """Memory for a scratch region at its demanded shape: the buffer of the state that it shares, or zeros."""
        if region.shares is not None:
            return self.buffers[region.shares].tensor
        shape = self.scratch_shape(region)
        return torch.zeros(shape, dtype=dtype_of(region.dtype), device=self.device)

    def scratch_shape(self, region: Region) -> tuple[int, ...]:
        """The demanded shape of a scratch region: the envelope of its clock's widest state at the open dimension."""
        if all(size is not None for size in region.shape):
            return tuple(size for size in region.shape if size is not None)
        envelope = _bounded(region, region_extents(self.contract, region).envelope)
        return tuple(envelope if size is None else size for size in region.shape)

    def check(self, tensors: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Every region's state tensor, fitted; nothing is written.

        Raises:
            ContractError: a tensor cannot be a state of its region.
        """
        fitted: dict[str, torch.Tensor] = {}
        for name, tensor in tensors.items():
            found = (
                self.buffers[name].fit(tensor)
                if isinstance(tensor, torch.Tensor)
                else f"it is a {type(tensor).__name__}"
            )
            if isinstance(found, str):
                raise ContractError(f"state {name!r}: {found}; pass the state that the last call or prime() returned")
            fitted[name] = found
        return fitted
