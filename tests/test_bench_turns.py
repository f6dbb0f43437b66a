"""Benchmarks on one machine take turns."""

from __future__ import annotations

import threading
from pathlib import Path

from cadence_fx.bench_turns import measuring, preparing


def test_nobody_measures_while_others_prepare_or_prepares_while_another_measures(tmp_path: Path) -> None:
    place, order, ready = tmp_path / "lock", list[str](), threading.Event()

    def other() -> None:
        ready.set()
        with measuring(place):
            order.append("measured")
        with preparing(place):
            order.append("prepared again")

    thread = threading.Thread(target=other)
    with preparing(place), preparing(place):  # two that prepare hold nobody up but those that measure
        thread.start()
        ready.wait()
        thread.join(0.1)
        order.append("prepared")
    thread.join()
    assert order == ["prepared", "measured", "prepared again"]
    with measuring(place):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join(0.1)
        assert len(order) == 3
    thread.join()
    assert len(order) == 5
