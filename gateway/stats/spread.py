"""How far estimates are off: by how much all of them, and an interval that holds nine of ten of what is measured."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from typing import Final

__all__ = ["COVERAGE", "Spread"]

COVERAGE: Final = 0.9
"""The share of what is measured that intervals are to hold."""

_KEPT: Final = 200
_ENOUGH: Final = 20
"""With fewer ratios than that no quantile of one in twenty is known."""

_UNKNOWN: Final = (0.5, 2.0)
_STEP: Final = 0.01
_CHECKED_STEP: Final = 0.08
_LEAST, _MOST = -0.1, 0.3  # below 0 the interval holds all that is known, and misses are owed for a while
_DRIFT: Final = 0.05  # weight of the latest ratio in the mean: it follows some twenty
_ODD: Final = 0.5  # as a logarithm; a process that was paused is not a slow machine
_LATEST: Final = 5


class Spread:
    """The ratios of what was measured to what was estimated over the last 200 requests. Owns them.

    ``factor`` is what estimates are to be multiplied by: the machine may have become slower within a few requests,
    while the curve behind the estimates remembers many steps. It follows slowly what changes slowly, and begins anew
    where the latest five ratios agree that the level is another one. All else is about estimates so corrected.

    The interval lies between two quantiles of their ratios, which are moved with each ratio so that in the long run it
    holds ``COVERAGE`` of them, even where the machine becomes noisier meanwhile (adaptive conformal inference, Gibbs
    and Candès 2021). A request that was kept from the cache moves them by more: it is what the interval is about, the
    time of a whole prompt, and there are few of them.
    """

    def __init__(self) -> None:
        self._ratios: deque[float] = deque()
        self._sorted: list[float] = []
        self._outside = 1 - COVERAGE  # the share of the kept ratios that the interval leaves out
        self._latest: deque[float] = deque(maxlen=_LATEST)  # as logarithms
        self._mean = 0.0  # of the ratios' logarithms
        self._variance = 0.0
        self._seen = 0

    @property
    def factor(self) -> float:
        """What was measured of late, divided by what had been estimated, in the mean."""
        return math.exp(self._mean)

    @property
    def interval(self) -> tuple[float, float]:
        """From so many to so many times the corrected estimate; half to double while too little is known."""
        count = len(self._sorted)
        if count < _ENOUGH:
            return _UNKNOWN
        # The k-th smallest of n holds k / (n + 1) of what comes.
        skipped = max(0, int(self._outside / 2 * (count + 1)) - 1)
        return self._sorted[skipped], self._sorted[-1 - skipped]

    @property
    def bias(self) -> float:
        """By which part of themselves all estimates may be off together, at the same level of confidence."""
        if len(self._sorted) < _ENOUGH:
            return _UNKNOWN[1] - 1
        return math.expm1(1.645 * math.sqrt(self._variance * _DRIFT / (2 - _DRIFT)))

    def add(self, ratio: float, *, held_out: bool = False) -> None:
        """Take in one more: what was measured, divided by what had been estimated, uncorrected."""
        level = math.log(ratio)
        error = level - self._mean
        ratio /= self.factor
        if len(self._sorted) >= _ENOUGH:
            low, high = self.interval
            missed = not low <= ratio <= high
            step = _CHECKED_STEP if held_out else _STEP
            self._outside = min(_MOST, max(_LEAST, self._outside + step * (1 - COVERAGE - missed)))
        self._seen += 1
        self._mean += max(_DRIFT, 1 / (self._seen + 1)) * min(_ODD, max(-_ODD, error))
        self._variance = (1 - _DRIFT) * (self._variance + _DRIFT * error * error)
        self._latest.append(level)
        if (changed := self._changed_level()) is not None:
            self._mean, self._seen = changed, _LATEST
        self._ratios.append(ratio)
        insort(self._sorted, ratio)
        if len(self._ratios) > _KEPT:
            del self._sorted[bisect_left(self._sorted, self._ratios.popleft())]

    def _changed_level(self) -> float | None:
        """The level of the latest ratios if all of them are to one side of the mean, and not by chance."""
        latest = sorted(self._latest)
        if len(latest) < _LATEST or latest[0] <= self._mean <= latest[-1]:
            return None
        weight = 1 - (1 - _DRIFT) ** (len(self._ratios) + 1)
        median = latest[_LATEST // 2]
        return median if (median - self._mean) ** 2 > self._variance / weight else None
