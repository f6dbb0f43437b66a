"""Raw bits: digests."""

from __future__ import annotations

import torch

from cadence_fx.bits import CHUNK, digest, pieces


def test_a_digest_does_not_depend_on_layout_or_on_the_pieces_it_is_made_of() -> None:
    dense = torch.randn(3, 5, 2 * CHUNK // 4 // 15, generator=torch.Generator().manual_seed(0))
    spread = torch.empty(dense.shape[::-1]).permute(2, 1, 0).copy_(dense)
    assert not spread.is_contiguous()
    assert len(list(pieces(spread))) > 1
    assert digest(spread) == digest(dense)
    other = dense.clone()
    other[-1, -1, -1] = -other[-1, -1, -1]
    assert digest(other) != digest(dense)
