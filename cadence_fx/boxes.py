"""Boxes of integers: the geometry that segments and moves share.

A box is (start, size), one entry per dimension. A box without dimensions holds one element.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import TypeAlias

__all__ = ["Box", "Ints", "overlap", "overlapping_pairs", "put"]

Ints: TypeAlias = tuple[int, ...]
Box: TypeAlias = tuple[Ints, Ints]


def put(values: Ints, dim: int, value: int) -> Ints:
    """The tuple with one entry replaced."""
    return (*values[:dim], value, *values[dim + 1 :])


def overlap(a: Box, b: Box) -> bool:
    """Whether two boxes, neither of them empty, share an element."""
    return all(s < t + m and t < s + n for s, n, t, m in zip(*a, *b, strict=True))


def overlapping_pairs(left: Sequence[Box], right: Sequence[Box]) -> Iterator[tuple[int, int]]:
    """Index pairs (i, j) with ``left[i]`` and ``right[j]`` sharing an element, ordered by i.

    Boxes of one tensor are mostly cut along one dimension, so candidates are looked up by their start there: about
    n log n instead of every pair.
    """
    if not left or not right:
        return
    dims = range(len(right[0][0]))
    # The dimension with the most different starts separates best.
    pivot = max(dims, key=lambda d: len({start[d] for start, _ in right}), default=None)
    if pivot is None:
        yield from ((i, j) for i in range(len(left)) for j in range(len(right)))
        return
    order = sorted(range(len(right)), key=lambda j: right[j][0][pivot])
    starts = [right[j][0][pivot] for j in order]
    longest = max(size[pivot] for _, size in right)
    for i, box in enumerate(left):
        lo = box[0][pivot]
        first, last = bisect_left(starts, lo - longest + 1), bisect_left(starts, lo + box[1][pivot])
        yield from ((i, j) for j in order[first:last] if overlap(box, right[j]))
