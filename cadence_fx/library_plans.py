"""Plans of cuFFT: objects of a cache of torch's that a captured transform needs and cannot hold.

A captured transform launches kernels, and reads tables, that belong to its plan. The plan lies in
``torch.backends.cuda.cufft_plan_cache``; when it leaves that cache (`clear()`, a lower `max_size`, or plans for other
sizes that push it out) it is destroyed, and a replay would launch what is no longer there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import fx

__all__ = ["FULL", "PlanWatch", "uses_plans"]

FULL = -1  # plans: the cache holds no more, so that a plan may go at any time


def uses_plans(nodes: Iterable[fx.Node]) -> bool:
    """True if one of the operators is a Fourier transform."""
    targets = (str(node.target) for node in nodes if node.op == "call_function")
    return any("fft" in name or "stft" in name for name in targets)


class PlanWatch:
    """Counts how often plans were dropped. One for all engines of a device.

    What is dropped and made up for by as many others between two looks is not noticed. Every replay looks; and the
    marker, which is made for each capture and which nobody else makes again, is then missing from the count.

    Args:
        count: says how many plans there are now, or `FULL`.
        mark: runs a transform that nobody else runs.
    """

    def __init__(self, count: Callable[[], int], mark: Callable[[], object]) -> None:
        self._count, self._mark, self._seen, self._drops = count, mark, FULL, 0

    def drops(self) -> int:
        """Times that there were fewer plans than at the look before. What was captured at another number is dead."""
        now = self._count()
        self._drops += now < self._seen
        self._seen = now
        return self._drops

    def begin(self) -> bool:
        """Before the first run of what will be captured: look, and set the marker; False if no plan is safe."""
        self.drops()
        self._mark()
        return self._count() != FULL
