from __future__ import annotations

import itertools
import random

from gateway.routing.breaker import FAILURES, BreakerState, CircuitBreaker


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def opened(clock: Clock) -> CircuitBreaker:
    breaker = CircuitBreaker(clock, random.Random(1))
    for _ in range(FAILURES):
        breaker.failed(probe=breaker.begin())
    return breaker


def test_failures_in_a_row_open_it_and_an_answer_between_them_does_not() -> None:
    breaker = CircuitBreaker(Clock(), random.Random(1))
    for _ in range(5):
        for _ in range(FAILURES - 1):
            breaker.failed(probe=False)
        breaker.succeeded(probe=False)
    assert breaker.admits
    for _ in range(FAILURES):
        breaker.failed(probe=False)
    assert (breaker.state, breaker.admits, breaker.failures) == (BreakerState.OPEN, False, FAILURES)
    assert 0 < breaker.retry_in_s <= 1


def test_after_its_pause_one_probe_goes_and_its_answer_closes_it() -> None:
    clock = Clock()
    breaker = opened(clock)
    clock.now += 1
    assert (breaker.state, breaker.admits) == (BreakerState.HALF_OPEN, True)
    assert breaker.begin()
    assert not breaker.admits
    assert not breaker.begin()
    breaker.succeeded(probe=False)  # of a request that was sent before: says nothing about now
    assert not breaker.admits
    breaker.succeeded(probe=True)
    assert (breaker.state, breaker.failures) == (BreakerState.CLOSED, 0)


def test_probes_that_fail_make_it_wait_longer_up_to_half_a_minute() -> None:
    clock = Clock()
    breaker = opened(clock)
    pauses = []
    for _ in range(8):
        pauses.append(breaker.retry_in_s)
        clock.now += breaker.retry_in_s
        breaker.failed(probe=breaker.begin())
    assert all(later > earlier for earlier, later in itertools.pairwise(pauses[:5]))
    assert 22 <= pauses[-1] <= 30


def test_late_failures_of_earlier_requests_do_not_lengthen_the_pause() -> None:
    clock = Clock()
    breaker = opened(clock)
    pause = breaker.retry_in_s
    for _ in range(10):
        breaker.failed(probe=False)
    assert breaker.retry_in_s == pause


def test_a_probe_that_tells_nothing_lets_the_next_one_go() -> None:
    clock = Clock()
    breaker = opened(clock)
    clock.now += 1
    breaker.ended(probe=breaker.begin())
    assert breaker.admits
    assert breaker.begin()


def test_several_gateways_do_not_probe_in_step() -> None:
    pauses = set()
    for seed in range(20):
        breaker = CircuitBreaker(Clock(), random.Random(seed))
        for _ in range(FAILURES):
            breaker.failed(probe=False)
        pauses.add(round(breaker.retry_in_s, 3))
    assert len(pauses) > 10
