"""Watching weights: hoisted constants and captured addresses are good only while nobody edits what they came from."""

from __future__ import annotations

from operator import attrgetter, getitem, is_
from typing import Any

import torch

__all__ = ["WeightWatch"]

_version = attrgetter("_version")
_address = torch.Tensor.data_ptr


class WeightWatch:
    """Notices edits in place (version counters), moves (addresses) and replacements (identity) of a module's tensors.

    A check makes a few passes over the tensors in C, about 0.2 microseconds for each.

    Args:
        module: whose tensors are watched.
        ignore: dotted paths of buffers that change without meaning, such as scratch.
    """

    def __init__(self, module: torch.nn.Module, ignore: frozenset[str] = frozenset()) -> None:
        self.names: list[str] = []
        self.owners: list[dict[str, Any]] = []
        self.keys: list[str] = []
        for prefix, owner in module.named_modules():
            for tensors in (owner._parameters, owner._buffers):
                for key in tensors:
                    name = f"{prefix}.{key}".lstrip(".")
                    if name not in ignore:
                        self.names.append(name)
                        self.owners.append(tensors)
                        self.keys.append(key)
        self._note()

    def _note(self) -> None:
        self.tensors: list[torch.Tensor | None] = [o.get(k) for o, k in zip(self.owners, self.keys, strict=True)]
        self.present = [t for t in self.tensors if t is not None]
        self.marks = self._marks()

    def edited(self) -> tuple[str, ...]:
        """Names of parameters and buffers that changed since the last call that said so; empty in the common case."""
        try:
            same = all(map(is_, map(getitem, self.owners, self.keys), self.tensors))
        except KeyError:
            same = False
        # The tensors that are watched are held, so that no other can get the identity of one of them.
        if same and self._marks() == self.marks:
            return ()
        before, known = self.tensors, dict(zip(map(id, self.present), zip(*self.marks, strict=True), strict=True))
        self._note()
        now = dict(zip(map(id, self.present), zip(*self.marks, strict=True), strict=True))
        return tuple(
            name
            for name, old, new in zip(self.names, before, self.tensors, strict=True)
            if old is not new or (old is not None and known[id(old)] != now[id(new)])
        )

    def _marks(self) -> tuple[list[int], list[int]]:
        return list(map(_version, self.present)), list(map(_address, self.present))

    def trainable(self) -> bool:
        """True if a tensor requires a gradient."""
        return any(t.requires_grad for t in self.present)
