"""Whole streams of the toys: compiled programs against plain calls, bit by bit."""

from __future__ import annotations

import pytest

from cadence_fx.catalog import signatures
from tests.toys import TOYS, Player, build, differences


@pytest.mark.parametrize("name", list(TOYS))
def test_every_signature_of_the_catalog_compiles(name: str) -> None:
    toy = build(name)
    player = Player(toy)
    for signature in signatures(toy.contract):
        assert player.compiler.compile(signature).nodes_after > 0


@pytest.mark.parametrize("name", list(TOYS))
def test_a_stream_has_the_bits_of_plain_calls(name: str) -> None:
    toy = build(name)
    calls = [toy.calls[i % len(toy.calls)] if i % 3 else toy.calls[0] for i in range(12)]
    assert list(differences(toy, calls)) == []
