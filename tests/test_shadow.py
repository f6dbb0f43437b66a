"""The shadow audit: stock's concatenations beside every retention."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cadence_fx.drop_in import transform
from cadence_fx.errors import VerificationError
from cadence_fx.module import CadenceModule
from tests.streams import chunks, contract, drawn, stream


def started() -> tuple[Any, CadenceModule]:
    module = drawn(stream())
    return module, transform(module, contract((2, 3)))


def test_every_retention_is_compared_and_nothing_is_disturbed() -> None:
    module, fast = started()
    a, b = module.start(), module.start()
    with fast.shadow() as audit:
        for x in chunks([2, 3, 2, 2, 3, 2, 2, 2]):
            with torch.no_grad():
                expected, a = module(x, a)
            found, b = fast(x, b)
            assert torch.equal(expected, found)
            assert all(torch.equal(a[k], b[k]) for k in a)
    assert audit.differences == []
    assert set(audit.compared) == {"rows", "context"}
    assert all(count == 8 for count in audit.compared.values())
    assert fast.stats()["audited"] == 8


@pytest.mark.parametrize("raises", [True, False])
def test_a_row_that_is_kept_in_the_wrong_place_is_named_by_region_call_and_index(raises: bool) -> None:
    _, fast = started()
    state = drawn(stream()).start()
    inputs = chunks([2, 2, 2])
    _, state = fast(inputs[0], state)
    _, state = fast(inputs[1], state)

    def wrong(program: Any, given: Any, run: Any = fast._execute) -> Any:
        outputs = run(program, given)
        rows = fast.memory["rows"]
        rows.tensor[0, rows.offset(program.links[0].new)].mul_(1.5)  # a position that was frozen at capture, say
        return outputs

    object.__setattr__(fast, "_execute", wrong)
    with fast.shadow(raises=raises) as audit:
        if raises:
            with pytest.raises(VerificationError, match=r"region 'rows'.* at \[0, 0, 0\].*stock has .*found"):
                fast(inputs[2], state)
        else:
            fast(inputs[2], state)
    assert len(audit.differences) == 1


def test_generators_are_where_stock_leaves_them_after_an_audited_call() -> None:
    module, fast = started()
    position = torch.get_rng_state()
    with fast.shadow():
        fast(chunks([2])[0], module.start())
    assert torch.equal(position, torch.get_rng_state())
