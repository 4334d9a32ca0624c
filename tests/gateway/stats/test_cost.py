"""The prefill-cost curve: recovers what generated the steps, follows changes, never claims a negative saving."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.wire import StepTiming
from gateway.stats.cost import PrefillCost

A, B, C = 0.02, 1e-3, 2e-7


def step(tokens: int, start: int, *, scale: float = 1.0, decode: int = 0) -> StepTiming:
    """A noiseless step of the curve (A, B, C)."""
    context = tokens * start + tokens * (tokens - 1) // 2
    return StepTiming(tokens, context, decode, decode * 500, scale * (A + B * tokens + C * context))


PROFILE = (step(16, 0), step(128, 0), step(512, 0), step(128, 1000), StepTiming(0, 0, 1, 100, 0.03))


def test_profile_alone_gives_the_curve_back() -> None:
    cost = PrefillCost()
    cost.seed(PROFILE, 512)
    assert cost.coefficients == pytest.approx((A, B, C), rel=1e-6)


def test_seconds_count_one_fixed_cost_per_step_of_the_token_budget() -> None:
    cost = PrefillCost()
    cost.seed(PROFILE, 256)
    expected = 3 * A + 600 * B + C * (600 * 100 + 600 * 599 / 2)
    assert cost.seconds(600, 100) == pytest.approx(expected, rel=1e-6)
    assert cost.seconds(0, 100) == 0.0


def test_saved_is_the_whole_prompt_less_the_rest_behind_the_cached_part() -> None:
    cost = PrefillCost()
    cost.seed(PROFILE, 512)
    saved = cost.saved(1000, 800).seconds
    assert saved == pytest.approx(cost.seconds(1000, 0) - cost.seconds(200, 800), rel=1e-9)
    assert saved == pytest.approx(A + 800 * B + C * 800 * 799 / 2, rel=1e-6)


def test_nothing_is_claimed_before_a_measurement() -> None:
    cost = PrefillCost()
    assert not cost.fitted
    assert cost.saved(1000, 900).seconds == 0.0
    assert cost.seconds(200, 0) > cost.seconds(100, 0) > 0.0


def test_live_steps_move_the_curve_to_a_machine_that_became_slower() -> None:
    cost = PrefillCost()
    cost.seed(PROFILE, 512)
    rng = random.Random(5)
    for _ in range(400):
        cost.observe(step(rng.choice((16, 64, 200, 512)), rng.choice((0, 300, 900)), scale=2.0))
    assert cost.seconds(400, 400) == pytest.approx(2 * step(400, 400).seconds, rel=0.1)


def test_one_paused_step_hardly_moves_the_curve() -> None:
    cost = PrefillCost()
    cost.seed(PROFILE, 512)
    for _ in range(50):
        cost.observe(step(300, 0))
    before = cost.seconds(500, 0)
    cost.observe(StepTiming(300, 300 * 299 // 2, 0, 0, 30.0))
    assert cost.seconds(500, 0) < 1.5 * before


def test_steps_that_are_mostly_decode_are_ignored() -> None:
    cost = PrefillCost()
    cost.seed(PROFILE, 512)
    before = cost.coefficients
    for _ in range(50):
        cost.observe(StepTiming(16, 0, 8, 8000, 5.0))
        cost.observe(StepTiming(0, 0, 32, 8000, 5.0))
    assert cost.coefficients == before


def test_sizes_that_traffic_does_not_show_stay_covered_by_the_profile() -> None:
    cost = PrefillCost()
    cost.seed(PROFILE, 512)
    for _ in range(500):
        cost.observe(step(16, 200))
    assert cost.seconds(512, 0) == pytest.approx(step(512, 0).seconds, rel=0.05)


def test_a_restart_forgets_the_former_life() -> None:
    cost = PrefillCost()
    cost.seed(PROFILE, 512)
    for _ in range(100):
        cost.observe(step(300, 0, scale=5.0))
    cost.seed(PROFILE, 512)
    assert cost.coefficients == pytest.approx((A, B, C), rel=1e-6)


timings = st.builds(
    StepTiming,
    st.integers(0, 4096),
    st.integers(0, 10**8),
    st.integers(0, 64),
    st.integers(0, 10**6),
    st.floats(0.0, 100.0),
)


@given(st.lists(timings, max_size=12), st.lists(timings, max_size=12), st.integers(1, 5000), st.data())
def test_costs_are_monotone_and_savings_lie_between_zero_and_the_whole(
    profile: list[StepTiming], live: list[StepTiming], prompt: int, data: st.DataObject
) -> None:
    cost = PrefillCost()
    cost.seed(profile, 512)
    for timing in live:
        cost.observe(timing)
    cached = data.draw(st.integers(0, prompt - 1))
    assert min(cost.coefficients) >= 0.0
    assert cost.seconds(prompt, 0) <= cost.seconds(prompt + 1, 0)
    assert 0.0 <= cost.saved(prompt, cached).seconds <= cost.seconds(prompt, 0) * (1 + 1e-9)
