"""The last quarter of an hour in steps of ten seconds, for a chart that moves while one watches."""

from __future__ import annotations

import itertools
from collections import deque

from gateway.stats.sums import Sums

__all__ = ["STEP_S", "WINDOW_S", "Recent"]

STEP_S = 10
WINDOW_S = 15 * 60


class Recent:
    """States of the fleet's totals at the start of each step; what a step added is the difference of two.

    Owned by ``Statistics``, which calls ``observe`` at least once a step.
    """

    def __init__(self, totals: Sums, now: float) -> None:
        self._states: deque[tuple[int, Sums]] = deque(maxlen=WINDOW_S // STEP_S)
        self._states.append((int(now // STEP_S) * STEP_S, totals))

    def observe(self, totals: Sums, now: float) -> None:
        """Keep ``totals`` as the state at the start of the current step, unless it has one already."""
        start = int(now // STEP_S) * STEP_S
        last = self._states[-1][0]
        if start < last:  # the clock was set back: steps must stay in order
            self._states.clear()
        elif start == last:
            return
        self._states.append((start, totals))

    def steps(self, totals: Sums) -> list[tuple[int, Sums]]:
        """(start, what it added) per step, the last one up to ``totals`` now."""
        states = [*self._states, (0, totals)]
        return [(start, later.since(earlier)) for (start, earlier), (_, later) in itertools.pairwise(states)]
