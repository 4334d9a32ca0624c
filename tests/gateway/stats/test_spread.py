"""Intervals hold nine of ten of what comes, also when the machine changes; sums of savings add their errors rightly."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest

from engine.wire import StepTiming
from gateway.attribution.ages import age_bucket, median_age
from gateway.stats.cost import PrefillCost
from gateway.stats.record import HeldOut
from gateway.stats.spread import COVERAGE, Spread
from gateway.stats.sums import HoldOut, Sums

Record = Callable[..., Any]


def covered(spread: Spread, ratios: list[float]) -> float:
    """The share of ``ratios`` within the interval that stood before each of them."""
    inside = 0
    for ratio in ratios:
        low, high = spread.interval
        inside += low <= ratio / spread.factor <= high
        spread.add(ratio)
    return inside / len(ratios)


@pytest.mark.parametrize("noise", [0.02, 0.1, 0.4])
@pytest.mark.parametrize("bias", [0.8, 1.0, 1.3])
def test_nine_of_ten_lie_within_whatever_the_noise_and_the_bias(noise: float, bias: float) -> None:
    rng = random.Random(5)
    spread = Spread()
    ratios = [bias * math.exp(rng.gauss(0, noise)) for _ in range(1000)]
    covered(spread, ratios[:100])
    assert covered(spread, ratios[100:]) == pytest.approx(COVERAGE, abs=0.03)


def test_nine_of_ten_lie_within_also_while_the_machine_slows_down_and_gets_noisy() -> None:
    rng = random.Random(6)
    spread = Spread()
    ratios = [(1 + step / 1000) * math.exp(rng.gauss(0, 0.02 + step / 10_000)) for step in range(1500)]
    assert covered(spread, ratios) == pytest.approx(COVERAGE, abs=0.04)


def test_with_few_requests_known_the_interval_is_half_to_double() -> None:
    spread = Spread()
    for _ in range(19):
        spread.add(1.0)
    assert spread.interval == (0.5, 2.0)
    spread.add(1.0)
    assert spread.interval == (1.0, 1.0)


def test_an_error_that_all_share_is_taken_out_within_a_few_requests() -> None:
    rng = random.Random(7)
    spread = Spread()
    for _ in range(300):
        spread.add(math.exp(rng.gauss(0, 0.05)))
    assert spread.factor == pytest.approx(1.0, abs=0.03)
    for _ in range(60):
        spread.add(1.5 * math.exp(rng.gauss(0, 0.05)))
    assert spread.factor == pytest.approx(1.5, rel=0.06)


def test_a_machine_that_became_three_times_as_slow_is_another_one_within_ten_requests() -> None:
    rng = random.Random(8)
    spread = Spread()
    for level in (1.0, 3.0, 1.0, 3.0):
        for number in range(60):
            spread.add(level * math.exp(rng.gauss(0, 0.05)))
            if number >= 9:
                assert spread.factor == pytest.approx(level, rel=0.1)


def test_noise_alone_is_averaged_over_many_requests() -> None:
    rng = random.Random(9)
    spread = Spread()
    for number in range(400):
        spread.add(math.exp(rng.gauss(0, 0.1)))
        if number >= 50:
            assert spread.factor == pytest.approx(1.0, abs=0.08)


@pytest.mark.parametrize("seed", range(4))
def test_nine_of_ten_of_those_held_out_lie_within_also_if_the_others_are_surer(seed: int) -> None:
    rng = random.Random(seed)
    spread = Spread()
    inside = held_out = 0
    while held_out < 300:
        held = rng.random() < 0.2
        ratio = math.exp(rng.gauss(0, 0.08 if held else 0.04)) + (rng.random() < 0.1) * rng.uniform(0.1, 0.4)
        low, high = spread.interval
        held_out += held
        inside += held and low <= ratio / spread.factor <= high
        spread.add(ratio, held_out=held)
    assert inside / held_out == pytest.approx(COVERAGE, abs=0.035)


def test_a_pause_of_the_process_is_no_slower_machine() -> None:
    spread = Spread()
    for number in range(100):
        spread.add(20.0 if number % 50 == 49 else 1.0)
    assert spread.factor < 1.05


def fitted(requests: int = 0, noise: float = 0.0) -> PrefillCost:
    cost = PrefillCost()
    cost.seed([StepTiming(tokens, 0, 0, 0, 0.01 + 0.001 * tokens) for tokens in (64, 256, 512)], 512)
    rng = random.Random(8)
    for _ in range(requests):
        for tokens in (100, 300, 1000):
            cost.check(tokens, 1.0, math.exp(rng.gauss(0, noise)))
    return cost


def test_a_saving_is_the_difference_of_two_estimates_and_no_surer_than_both() -> None:
    cost = fitted(requests=100, noise=0.1)
    saving = cost.saved(1000, 700)
    factor, low, high = cost.outlook(1000)
    whole, rest = cost.seconds(1000, 0), cost.seconds(300, 700)
    assert saving.seconds == pytest.approx((whole - rest) * factor)
    assert whole * (high - factor) < saving.above < whole * (high - factor) + rest
    assert whole * (factor - low) < saving.below < whole * (factor - low) + rest


def test_nothing_saved_is_nothing_for_certain() -> None:
    saving = fitted().saved(1000, 0)
    assert (saving.seconds, saving.below, saving.above, saving.bias) == (0, 0, 0, 0)
    assert PrefillCost().saved(1000, 500).seconds == 0


def test_short_and_long_prompts_have_intervals_of_their_own() -> None:
    cost = fitted()
    rng = random.Random(9)
    for _ in range(100):
        cost.check(50, 1.0, math.exp(rng.gauss(0, 0.5)))
        cost.check(1000, 1.0, math.exp(rng.gauss(0, 0.01)))
    assert cost.outlook(1000)[2] < 1.1 < cost.outlook(50)[2]
    assert cost.outlook(300) == (1.0, 0.5, 2.0)  # nothing is known of these yet


def test_in_sums_single_errors_average_out_and_a_shared_one_does_not(record: Record) -> None:
    sums = Sums()
    for _ in range(100):
        sums.count(record(saved_prefill_s=1.0, saved_below_s=0.2, saved_above_s=0.5, saved_bias_s=0.03))
    low, high = sums.saved_interval
    assert sums.saved_prefill_s == pytest.approx(100)
    assert (low, high) == (pytest.approx(100 - 3 - 2), pytest.approx(100 + 3 + 5))


def test_missed_tokens_seconds_and_ages_add_up_and_what_came_since_is_told(record: Record) -> None:
    one, two = Sums(), Sums()
    one.count(record(prefill_s=0.5, missed={"evicted": 32, "volatile": 20}, evicted_ages={3: 16}))
    two.add(one)
    two.count(record(prefill_s=0.5, missed={"volatile": 52}))
    assert {cause: (lost.requests, lost.tokens) for cause, lost in two.missed.items()} == {
        "evicted": (1, 32),
        "volatile": (2, 72),
    }
    assert sum(lost.seconds for lost in two.missed.values()) == pytest.approx(1.0)
    assert {cause: lost.tokens for cause, lost in two.since(one).missed.items()} == {"volatile": 52}
    assert two.evicted_ages == {3: 16}
    two.add(one)
    assert one.missed["volatile"].tokens == 20  # adding changes nobody else's


def test_the_median_error_of_a_hold_out_is_that_of_its_requests() -> None:
    held_out = HoldOut()
    for percent in (1, 2, 5, 20, 400):
        held_out.count(HeldOut(measured=1.0, estimated=1 + percent / 100, low=0.9, high=1.1))
    assert held_out.median_error == pytest.approx(0.055, abs=0.006)
    assert (held_out.requests, held_out.covered) == (5, 5)
    assert HoldOut().median_error is None


def test_ages_are_told_to_a_factor_of_two() -> None:
    for seconds in (0.5, 1, 5, 100, 3600, 1e6):
        bucket = age_bucket(seconds)
        assert seconds <= 2**bucket <= max(1, 2 * seconds)
    assert median_age({}) is None
    assert median_age({0: 1, 5: 10, 9: 2}) == 32
    assert age_bucket(1e12) == age_bucket(1e9)
