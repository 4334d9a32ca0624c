"""Where the gateway's own router places a RAG trace, in virtual time."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest

from benchmarks.placement import BlockLru, Outcome, Policy, rag_bodies, simulate
from gateway.prompt import PromptRenderer
from gateway.schema import ChatRequest

Run = Callable[[Policy, float], Outcome]


@pytest.fixture(scope="module")
def bodies() -> list[ChatRequest]:
    return rag_bodies(300, 7, corpus=60, words=25)


@pytest.fixture(scope="module")
def run(renderer: Callable[[str], PromptRenderer], bodies: list[ChatRequest]) -> Run:
    return cache(lambda policy, rate: simulate(bodies, renderer("chatml"), policy, blocks=1024, rate=rate))


def test_q7_at_low_load_a_fleet_hits_as_one_cache_of_all_its_memory_does(run: Run) -> None:
    """Six requests a second keep each of four replicas busy for a sixth of the time."""
    fleet, one = run("headstart", 6.0), run("one cache", 6.0)
    assert fleet.hit_rate >= 0.95 * one.hit_rate
    assert fleet.balance <= 1.5


@pytest.mark.parametrize("rate", [12.0, 20.0])
def test_q7_under_load_no_replica_is_a_hot_spot(run: Run, rate: float) -> None:
    assert run("headstart", rate).balance <= 1.5


@pytest.mark.parametrize("rate", [1.0, 6.0])
def test_first_tokens_come_earlier_than_by_round_robin(run: Run, rate: float) -> None:
    ours, turns = run("headstart", rate), run("round robin", rate)
    assert ours.hit_rate > turns.hit_rate
    assert ours.ttft(0.5) < turns.ttft(0.5)
    assert ours.ttft(0.9) < turns.ttft(0.9)


def test_the_end_of_a_prompt_leaves_a_full_cache_before_its_beginning() -> None:
    cache = BlockLru(4)
    one, other = [b"a", b"b", b"c"], [b"a", b"d", b"e"]
    assert cache.request(one) == (0, one, [])
    assert cache.request(other) == (1, [b"d", b"e"], [b"c"])
    assert cache.request(one) == (2, [b"c"], [b"e"])
