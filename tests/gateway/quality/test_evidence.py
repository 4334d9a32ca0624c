"""Betting against a claim ruins whoever bets against a true one, and makes rich who bets against a false one."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.quality.evidence import SCALE, count, interval, log_wealth, mean, merged

EXCESSES = st.lists(st.integers(-SCALE, SCALE), max_size=60)


@given(EXCESSES, EXCESSES)
def test_histograms_add_up_in_any_order(one: list[int], other: list[int]) -> None:
    together = merged([Counter(one), Counter(other)])
    assert together == dict(Counter(one + other)) == merged([Counter(other), Counter(one)])
    assert count(together) == len(one) + len(other)


@given(EXCESSES, st.integers(-SCALE + 1, SCALE - 2))
def test_less_speaks_against_a_larger_bound(excesses: list[int], bound: int) -> None:
    histogram = Counter(excesses)
    assert log_wealth(histogram, bound / SCALE) >= log_wealth(histogram, (bound + 1) / SCALE) - 1e-9


@given(EXCESSES)
def test_the_interval_holds_the_mean_and_shrinks_with_what_is_known(excesses: list[int]) -> None:
    histogram = Counter(excesses)
    low, high = interval(histogram, 0.05)
    assert -1 <= low <= mean(histogram) <= high <= 1
    if excesses:
        closer = interval({x: 10 * times for x, times in histogram.items()}, 0.05)
        assert low <= closer[0] <= closer[1] <= high


def test_nothing_is_known_of_nothing() -> None:
    assert interval({}, 0.05) == (-1, 1)
    assert (log_wealth({}, 0.1), mean({}), count({})) == (0, 0, 0)


@pytest.mark.parametrize("spread", [0, 20, 60])
def test_a_true_bound_is_rarely_refuted_however_often_one_looks(spread: int) -> None:
    """At the bound itself, the hardest case: of 400 runs of 300 looks, 5 % may end in a false alarm."""
    rng = random.Random(spread)
    alarms = 0
    for _ in range(400):
        histogram: Counter[int] = Counter()
        for _ in range(60):
            histogram.update(10 + rng.choice((-spread, spread)) for _ in range(5))
            if log_wealth(histogram, 0.1) >= 2.9957:  # log(1 / 0.05)
                alarms += 1
                break
    assert alarms <= 20 + 9  # two standard deviations above


@pytest.mark.parametrize(("excess", "pairs"), [(100, 12), (50, 30), (30, 70)])
def test_a_harm_is_found_soon(excess: int, pairs: int) -> None:
    assert log_wealth({excess: pairs}, 0.1) > 5
    noisy = {max(-100, excess - 40): pairs, min(100, excess + 40): pairs}
    assert log_wealth(noisy, 0.1) > 5


def test_the_interval_misses_the_mean_rarely_at_any_time() -> None:
    rng = random.Random(7)
    missed = 0
    for _ in range(200):
        histogram: Counter[int] = Counter()
        for _ in range(20):
            histogram.update(rng.choice((0, 0, 0, 40)) for _ in range(10))
            low, high = interval(histogram, 0.1)
            if not low <= 0.1 <= high:
                missed += 1
                break
    assert missed <= 20 + 8


def test_what_does_not_differ_is_within_a_bound_for_certain() -> None:
    assert interval({0: 200}, 0.05)[1] < 0.1
