"""The model of the caching allocator: how it cuts, reuses and merges, and what a graph's capture will take."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cadence_fx.footprint import MIB, Pool, pool_bytes, workspace_bytes
from cadence_fx.graph_edits import Constant, Converted
from cadence_fx.schedule import schedule
from tests.test_scheduled_run import layers, program

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("sizes", "reserved"),
    [
        ([1], 2 * MIB),  # a small segment
        ([MIB, MIB], 2 * MIB),  # which both share
        ([MIB, MIB, 1], 4 * MIB),
        ([MIB + 1], 20 * MIB),  # a large one
        ([8 * MIB, 8 * MIB], 20 * MIB),
        ([10 * MIB], 10 * MIB),  # its own, rounded to 2 MiB
        ([11 * MIB - 5], 12 * MIB),
    ],
)
def test_segments_are_those_of_the_caching_allocator(sizes: list[int], reserved: int) -> None:
    pool = Pool()
    for size in sizes:
        pool.allocate(size, 0)
    assert pool.reserved == reserved


def test_what_a_stream_freed_serves_that_stream_alone() -> None:
    pool = Pool()
    pool.release(pool.allocate(5 * MIB, 0))
    pool.allocate(5 * MIB, 0)
    assert pool.reserved == 20 * MIB
    pool.allocate(5 * MIB, 1)
    assert pool.reserved == 40 * MIB


def test_free_neighbours_become_one_block() -> None:
    pool = Pool()
    blocks = [pool.allocate(6 * MIB, 0) for _ in range(3)]
    for i in (0, 2, 1):
        pool.release(blocks[i])
    pool.allocate(18 * MIB, 0)
    assert pool.reserved == 20 * MIB


@given(st.lists(st.tuples(st.integers(1, 30 * MIB), st.integers(0, 2), st.booleans()), max_size=60))
def test_no_byte_is_handed_out_twice_and_all_come_back(requests: list[tuple[int, int, bool]]) -> None:
    pool, held = Pool(), list[tuple[int, int, int, int]]()
    for size, stream, keep in requests:
        block = pool.allocate(size, stream)
        assert block[1] >= size
        spans = [(s, b, b + n) for _, n, s, b in [*held, block]]
        for i, (segment, start, end) in enumerate(spans):
            assert all(segment != s or end <= b or e <= start for s, b, e in spans[i + 1 :])
        if keep:
            held.append(block)
        else:
            pool.release(block)
    for block in held:
        pool.release(block)
    free = sum(size for blocks in pool.free.values() for size, _, _ in blocks.blocks)
    assert free == pool.reserved


def test_a_second_capture_of_the_same_graph_takes_what_it_keeps_and_no_more() -> None:
    found, _, _ = program()
    planned, pool = schedule(found.flat, 3), Pool()
    first = pool_bytes(found.flat, planned, pool)
    assert first >= 2 * MIB
    assert pool_bytes(found.flat, planned, pool) <= first // 2


def test_the_workspace_is_made_once_for_a_pool() -> None:
    pool = Pool()
    assert pool_bytes(layers(), None, pool, 32 * MIB) >= 32 * MIB
    assert pool_bytes(layers(), None, pool, 32 * MIB) < 32 * MIB


@pytest.mark.parametrize(
    ("asked", "expected"), [(":4096:2:16:8", 8 * MIB + 128 * 1024), (":16:8", 128 * 1024), ("nonsense", 8519680)]
)
def test_the_workspace_is_as_large_as_torch_is_asked_to_make_it(
    monkeypatch: pytest.MonkeyPatch, asked: str, expected: int
) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", asked)
    assert workspace_bytes(CPU) == expected


def test_conversions_are_expected_within_their_limit_and_once() -> None:
    from collections import Counter

    often, seldom = Constant(1 << 40, 1000), Constant(1 << 41, 1000)
    uses = Counter({often: 10, seldom: 2})
    assert Converted(limit=10_000).expected(uses) == 2 * 1256
    assert Converted(limit=2000).expected(uses) == 1256
    known = Converted(limit=10_000, memory={(often.address, "kernel"): torch.zeros(1256, dtype=torch.uint8)})
    assert known.expected(uses) == 1256
