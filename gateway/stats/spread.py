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
_SLOW: Final = 0.05
_RATES: Final = (_SLOW, 0.15, 0.4)
"""Weights of the latest ratio in the running means: on a calm machine many ratios tell best where the level is, while
its load changes the latest few do."""

_MEMORY: Final = 0.05  # weight of the latest error of a mean in what is thought of it
_BETTER: Final = 1.1  # the mean in use may be so much worse than another
_ODD: Final = 0.5  # as a logarithm; a process that was paused is not a slow machine


class _Mean:
    """A running mean of the ratios' logarithms, and how far off it was of late. Owned by its spread."""

    __slots__ = ("error", "rate", "value")

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self.value = 0.0
        self.error = 0.0

    def add(self, level: float, latest: float, number: int) -> None:
        """Take in the ``number``-th ratio: its logarithm to be judged by, and a ``latest`` one to follow."""
        self.error += max(_MEMORY, 1 / number) * (min(1.0, abs(level - self.value)) - self.error)
        self.value += max(self.rate, 1 / (number + 1)) * min(_ODD, max(-_ODD, latest - self.value))


class Spread:
    """The ratios of what was measured to what was estimated over the last 200 requests. Owns them.

    ``factor`` is what estimates are to be multiplied by: the machine may have become slower within a few requests,
    while the curve behind the estimates remembers many steps. Of several means of the ratios, slow and quick to follow,
    it is the one that was least off of late. All else is about estimates so corrected.

    The interval lies between two quantiles of their ratios, which are moved with each ratio so that in the long run it
    holds ``COVERAGE`` of them, even where the machine becomes noisier meanwhile (adaptive conformal inference, Gibbs
    and Candès 2021). A request that was kept from the cache moves them by more: it is what the interval is about, the
    time of a whole prompt, and there are few of them.
    """

    def __init__(self) -> None:
        self._ratios: deque[float] = deque()
        self._sorted: list[float] = []
        self._outside = 1 - COVERAGE  # the share of the kept ratios that the interval leaves out
        self._means: Final = [_Mean(rate) for rate in _RATES]
        self._mean = self._means[0]  # the one in use
        self._latest: deque[float] = deque(maxlen=3)  # as logarithms
        self._variance = 0.0
        self._seen = 0

    @property
    def factor(self) -> float:
        """What was measured of late, divided by what had been estimated, in the mean."""
        return math.exp(self._mean.value)

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
        rate = self._mean.rate
        return math.expm1(1.645 * math.sqrt(self._variance * rate / (2 - rate)))

    def add(self, ratio: float, *, held_out: bool = False) -> None:
        """Take in one more: what was measured, divided by what had been estimated, uncorrected."""
        level = math.log(ratio)
        ratio /= self.factor
        if len(self._sorted) >= _ENOUGH:
            low, high = self.interval
            missed = not low <= ratio <= high
            step = _CHECKED_STEP if held_out else _STEP
            self._outside = min(_MOST, max(_LEAST, self._outside + step * (1 - COVERAGE - missed)))
        self._variance += _SLOW * ((level - self._mean.value) ** 2 - self._variance)
        self._latest.append(level)
        # One pause of the process is nothing to follow quickly, so the quick ones see the median of three.
        median = sorted(self._latest)[1] if len(self._latest) == 3 else level
        self._seen += 1
        for mean in self._means:
            mean.add(level, level if mean.rate == _SLOW else median, self._seen)
        used = self._mean
        self._mean = min(self._means, key=lambda mean: mean.error * (1.0 if mean is used else _BETTER))
        self._ratios.append(ratio)
        insort(self._sorted, ratio)
        if len(self._ratios) > _KEPT:
            del self._sorted[bisect_left(self._sorted, self._ratios.popleft())]
