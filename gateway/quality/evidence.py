"""Anytime-valid statistics of a bounded mean: tests by betting, and the interval that they leave.

A *histogram* holds excesses, numbers from -1 to 1, counted in hundredths. Whoever bets against the claim "the mean is
at most b" and puts the share f of what he has on it gets

    1 - f + f * (1 + x) / (1 + b)

for each excess x. Under the claim that is no gain on average, whatever came before, so that his wealth is a
nonnegative supermartingale and reaches 1/alpha with a probability of at most alpha, however often one looks (Ville's
inequality; Waudby-Smith & Ramdas, "Estimating means of bounded random variables by betting", JRSS B 2024). He splits
what he has among several shares f once and for all ("diversified Kelly"): then his wealth depends on how often each
excess occurred and not on their order, the histogram is all that has to be kept, and those of several gateways add up.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Final

__all__ = ["SCALE", "Histogram", "count", "interval", "log_wealth", "mean", "merged"]

Histogram = dict[int, int]
"""Excess in hundredths (-100 to 100) to the number of times it was found."""

SCALE: Final = 100

_SHARES: Final = (1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 3 / 4, 0.95)
"""From small ones, which find a small excess among much noise, to one that is over with a blatant one at once."""

_STEPS: Final = 2 * SCALE
"""The ends of an interval are found to half a hundredth."""


def count(histogram: Mapping[int, int]) -> int:
    """How many excesses there are."""
    return sum(histogram.values())


def mean(histogram: Mapping[int, int]) -> float:
    """Their mean; 0 without any."""
    total = count(histogram)
    return sum(x * times for x, times in histogram.items()) / (SCALE * total) if total else 0.0


def merged(histograms: Iterable[Mapping[int, int]]) -> Histogram:
    """Several histograms as one."""
    result: Histogram = {}
    for histogram in histograms:
        for x, times in histogram.items():
            result[x] = result.get(x, 0) + times
    return result


def log_wealth(histogram: Mapping[int, int], bound: float) -> float:
    """Natural logarithm of what betting against "the mean is at most ``bound``" has made of 1. ``bound`` is below 1."""
    payoffs = [((1 + x / SCALE) / (1 + bound), times) for x, times in histogram.items()]
    gains = [sum(times * math.log(1 - share + share * payoff) for payoff, times in payoffs) for share in _SHARES]
    best = max(gains)
    return best + math.log(sum(math.exp(gain - best) for gain in gains) / len(gains))


def interval(histogram: Mapping[int, int], alpha: float) -> tuple[float, float]:
    """Lower and upper end of a confidence sequence for the mean.

    With a probability of at least 1 - ``alpha`` the mean lies within all the intervals that are ever made of a growing
    histogram. (-1, 1) without any excess.
    """
    enough = math.log(2 / alpha)
    mirrored = {-x: times for x, times in histogram.items()}
    return _lower_end(histogram, enough), -_lower_end(mirrored, enough)


def _lower_end(histogram: Mapping[int, int], enough: float) -> float:
    """The largest bound that the wealth speaks against; it falls as the bound grows, which makes a bisection do."""
    refuted, possible = -_STEPS, _STEPS
    while possible - refuted > 1:
        middle = (refuted + possible) // 2
        if log_wealth(histogram, middle / _STEPS) >= enough:
            refuted = middle
        else:
            possible = middle
    return refuted / _STEPS
