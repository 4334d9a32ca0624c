"""The what-if figures: what the policies would have hit, what follows from it, and what following may cost."""

from __future__ import annotations

import random
import tracemalloc
from hashlib import blake2b
from types import SimpleNamespace
from typing import Any, cast

import pytest

from cache_policy.replay import replay
from cache_policy.traces import Trace
from engine.wire import EngineInfo
from gateway.config import WhatIfConfig
from gateway.replicas.base import Replica
from gateway.stats.whatif import WhatIf

BLOCK = 16
POOL = 320


class Clock:
    def __init__(self) -> None:
        self.now = 60_000.0

    def __call__(self) -> float:
        return self.now


def info(num_blocks: int = POOL) -> EngineInfo:
    return EngineInfo("m", "", "f", "b", 4096, num_blocks, BLOCK, "f", "cpu", 1000, (), "lru", 512)


def replica(id: str = "engine-0") -> Replica:
    return cast(Replica, SimpleNamespace(id=id))


def scanning(count: int = 600, seed: int = 5, hot: int = 12) -> list[list[tuple[Any, ...]]]:
    """Popular prompts among many that come once: what LRU is bad at."""
    rng = random.Random(seed)
    chains = []
    for number in range(count):
        name = f"hot{rng.randrange(hot)}" if rng.random() < 0.5 else f"cold{number}"
        chains.append([(name, i) for i in range(20)])
    return chains


def keys(chain: list[tuple[Any, ...]]) -> list[bytes]:
    return [blake2b(f"{chain[0]} {i}".encode(), digest_size=16).digest() for i in range(len(chain))]


def follow(whatif: WhatIf, chains: list[list[tuple[Any, ...]]]) -> None:
    for chain in chains:
        whatif.observe("engine-0", keys(chain), len(chain) * BLOCK + 1, 0)


def made(policy: str = "lru", clock: Clock | None = None, timer: Any = None, **config: Any) -> WhatIf:
    whatif = WhatIf(
        WhatIfConfig(**({"policies": ("lru", "s3fifo")} | config)),
        policy=lambda: policy,
        seconds=lambda _replica, tokens: 0.001 * tokens,
        clock=clock or Clock(),
        timer=timer or (lambda: 0.0),
    )
    whatif.on_ready(replica(), info())
    return whatif


def test_rows_are_what_a_replay_of_the_same_traffic_gives() -> None:
    chains = scanning(3000, hot=120)
    numbers: dict[Any, int] = {}
    parents: list[int] = []
    for chain in chains:
        for place, block in enumerate(chain):
            if block not in numbers:
                numbers[block] = len(parents)
                parents.append(numbers[chain[place - 1]] if place else -1)
    requests = tuple(tuple(numbers[block] for block in chain) for chain in chains)
    trace = Trace("t", requests, tuple(len(chain) * BLOCK + 1 for chain in chains), tuple(parents), BLOCK)
    whatif = made()
    pool = 10 * POOL
    whatif.on_ready(replica(), info(num_blocks=pool))
    follow(whatif, chains)
    report = whatif.report()
    assert (report.requests, report.prompt_tokens) == (len(chains), trace.tokens)
    assert {(row.policy, row.size, row.blocks) for row in report.rows} == {
        (policy, size, round(pool * size)) for policy in ("lru", "s3fifo") for size in (0.5, 1.0, 2.0)
    }
    for row in report.rows:
        assert row.token_hit_rate == pytest.approx(replay(trace, row.policy, row.blocks).token_hit_rate, abs=0.02)


def test_the_better_policy_is_recommended_with_what_it_would_bring() -> None:
    whatif = made()
    follow(whatif, scanning())
    report = whatif.report()
    advice = report.recommendation
    row = next(row for row in report.rows if row.policy == "s3fifo" and row.size == 1)
    assert advice.policy == "s3fifo"
    assert advice.gain == row.gain > 0.01
    assert advice.saved_prefill_s == pytest.approx(row.gain * report.prompt_tokens * 0.001)
    assert advice.text.startswith("Switch from lru to s3fifo: +")


def test_who_runs_the_best_policy_is_told_to_stay() -> None:
    whatif = made("s3fifo")
    follow(whatif, scanning())
    report = whatif.report()
    assert report.recommendation.policy is None
    assert report.recommendation.text.startswith("Stay with s3fifo")
    assert report.estimated_token_hit_rate > 0.2


def test_with_few_requests_nothing_is_recommended() -> None:
    whatif = made()
    follow(whatif, scanning(50))
    assert whatif.report().recommendation.policy is None
    assert "Too early" in whatif.report().recommendation.text


def test_the_window_is_an_hour() -> None:
    clock = Clock()
    whatif = made(clock=clock)
    follow(whatif, scanning(30))
    clock.now += 30 * 60
    follow(whatif, scanning(40))
    assert whatif.report().requests == 70
    clock.now += 40 * 60
    assert whatif.report().requests == 40
    clock.now += 40 * 60
    assert whatif.report().requests == 0
    assert whatif.report().rows == []


def test_what_costs_too_much_sees_less() -> None:
    clock = Clock()
    times = iter(range(10**6))
    whatif = made(clock=clock, timer=lambda: float(next(times)))  # a second a request
    follow(whatif, scanning(10))
    before = whatif.report().sampling_rate
    clock.now += 61
    follow(whatif, scanning(1))
    report = whatif.report()
    assert report.cpu_share == pytest.approx(11 / 61)
    assert report.sampling_rate == before / 16  # halved until 0.02 are left of 0.18
    assert report.requests == 0  # what was seen with more blocks is not mixed with what is seen with fewer


def test_what_costs_far_too_much_is_not_followed_like_that_for_a_minute() -> None:
    clock = Clock()
    whatif = made(clock=clock, timer=iter(range(10**6)).__next__)  # a second a request, and a minute has 1.2
    follow(whatif, scanning(2))
    clock.now += 5
    follow(whatif, scanning(1))
    report = whatif.report()
    assert report.cpu_share == pytest.approx(3 / 5)
    assert report.sampling_rate == pytest.approx(1 / 128)  # 4, 8 … until 0.02 are left of 0.6


def test_large_pools_are_followed_in_less_detail() -> None:
    whatif = made()
    whatif.on_ready(replica(), info(num_blocks=100_000_000))
    assert 100_000_000 * (0.5 + 1 + 2) * 2 * whatif.report().sampling_rate <= 50_000


def test_the_memory_stays_below_64_megabytes_whatever_the_traffic() -> None:
    rng = random.Random(1)
    policies = ("adaptive", "wtinylfu", "arc")  # they remember most
    tracemalloc.start()
    try:
        whatif = made("adaptive", policies=policies)
        for number in range(4):
            whatif.on_ready(replica(f"engine-{number}"), info(num_blocks=18_000))
        for number in range(440):
            chain = [rng.randbytes(16) for _ in range(400)]
            whatif.observe(f"engine-{number % 4}", chain, len(chain) * BLOCK + 1, 0)
        assert whatif.report().sampling_rate == 1 / 16
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 20 < peak / 2**20 < 64, peak


def test_a_restarted_engine_with_the_same_pool_keeps_its_ghosts() -> None:
    whatif = made()
    follow(whatif, scanning(30))
    whatif.on_ready(replica(), info())
    assert whatif.report().requests == 30
    whatif.on_ready(replica(), info(num_blocks=64))
    assert whatif.report().requests == 0


def test_a_policy_that_is_not_among_the_configured_is_followed_once_it_is_in_force() -> None:
    policy = "lru"
    whatif = WhatIf(
        WhatIfConfig(policies=("lru",)), policy=lambda: policy, seconds=lambda _r, tokens: 0.0, clock=Clock()
    )
    whatif.on_ready(replica(), info())
    follow(whatif, scanning(5))
    policy = "sieve"
    follow(whatif, scanning(5))
    assert {row.policy for row in whatif.report().rows} == {"sieve", "lru"}


def test_replicas_without_a_pool_of_their_own_are_not_followed() -> None:
    whatif = made()
    whatif.observe("remote", [b"x" * 16], 17, 0)
    assert whatif.report().requests == 0
