"""The pool of hoisted constants: each computed once, by stock's own operators, and shared by all signatures."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

import torch

__all__ = ["ConstantPool"]


@dataclass
class ConstantPool:
    """Values by structural identity: two nodes with the same operator and the same arguments are one constant.

    Attributes:
        values: identity -> value.
        depends: identity -> dotted paths of the attributes that it was computed from: an edit of one outdates it.
    """

    values: dict[int, torch.Tensor] = field(default_factory=dict)
    depends: dict[int, frozenset[str]] = field(default_factory=dict)
    _ids: dict[Hashable, int] = field(default_factory=dict)

    def identity(self, key: Hashable) -> int:
        """A small integer for a structure; equal structures get equal integers."""
        return self._ids.setdefault(key, len(self._ids))

    def put(self, identity: int, value: torch.Tensor, depends: frozenset[str]) -> None:
        self.values[identity] = value
        self.depends[identity] = depends

    def nbytes(self, shared: Iterable[torch.Tensor] = ()) -> int:
        """Bytes of memory that the values own; storage shared with ``shared`` (the module's own) is not counted."""
        seen = {t.untyped_storage().data_ptr() for t in shared}
        total = 0
        for value in self.values.values():
            storage = value.untyped_storage()
            if storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                total += storage.nbytes()
        return total

    def clear(self) -> None:
        """Forget all values, for instance after weights were edited."""
        self.values.clear()
        self.depends.clear()
