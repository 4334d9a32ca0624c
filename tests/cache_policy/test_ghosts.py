"""Ghost caches hit what a replay hits, exactly when they see every block and nearly so when they see few."""

from __future__ import annotations

import random
from hashlib import blake2b

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_policy.ghosts import Ghost, GhostCaches, GhostTally
from cache_policy.policy import POLICY_NAMES, UnknownPolicyError
from cache_policy.replay import replay

from .test_replay import trace_of

chains = st.lists(st.lists(st.integers(0, 2), min_size=0, max_size=6), min_size=1, max_size=40)


def key_of(block):
    return blake2b(block.to_bytes(4, "little"), digest_size=16).digest()


def keys_of(trace):
    return [[key_of(block) for block in request] for request in trace.requests]


def rag_like(count, seed=3):
    """Three templates, documents by popularity, a question of its own; every part a run of blocks of random length."""
    rng = random.Random(seed)
    templates = [[(t, i) for i in range(rng.randint(8, 14))] for t in range(3)]
    documents = [[("d", d, i) for i in range(rng.randint(8, 16))] for d in range(60)]
    weights = [1 / (rank + 1) for rank in range(len(documents))]
    for number in range(count):
        parts = list(rng.choice(templates))
        for document in rng.choices(documents, weights, k=4):
            parts += document
        yield parts + [("q", number, i) for i in range(rng.randint(1, 3))]


def estimated(trace, ghosts, one_in):
    caches, tally = GhostCaches(ghosts, one_in), GhostTally(len(ghosts))
    for keys in keys_of(trace):
        caches.observe(keys, tally)
    return [blocks / trace.accesses for blocks in tally.hit_blocks()]


@pytest.mark.parametrize("policy", POLICY_NAMES)
@settings(max_examples=40, deadline=None)
@given(requests=chains, capacity=st.integers(1, 12))
def test_without_sampling_a_ghost_hits_what_a_replay_hits(policy, requests, capacity):
    trace = trace_of(requests)
    caches, tally = GhostCaches([Ghost(policy, capacity)], 1), GhostTally(1)
    for keys in keys_of(trace):
        caches.observe(keys, tally)
    assert tally.hit_blocks() == [pytest.approx(replay(trace, policy, capacity).hit_blocks)]


@pytest.mark.parametrize("one_in", [8, 32])
def test_a_sample_of_the_blocks_is_within_two_points(one_in):
    trace = trace_of(rag_like(1000))
    ghosts = [
        Ghost(policy, trace.unique_blocks * percent // 100)
        for policy in ("lru", "s3fifo", "lfu")
        for percent in (3, 10, 30)
    ]
    exact = [replay(trace, ghost.policy, ghost.blocks).block_hit_rate for ghost in ghosts]
    assert max(exact) - min(exact) > 0.1, "the ghosts hardly differ, so that any estimate would do"
    for ghost, estimate, rate in zip(ghosts, estimated(trace, ghosts, one_in), exact, strict=True):
        assert abs(estimate - rate) < 0.02, ghost


def test_what_everybody_asks_for_counts_whether_it_is_in_the_sample_or_not():
    shared, caches, tally = [key_of(block) for block in range(6)], GhostCaches([Ghost("lru", 4096)], 256), GhostTally(1)
    for number in range(1, 400):
        caches.observe([*shared, *(key_of(10 * number + i) for i in range(2))], tally)
    assert tally.hit_blocks() == [6 * 398]


def test_the_block_of_the_last_token_is_asked_for_but_cannot_be_hit():
    for one_in in (1, 64):
        caches, tally = GhostCaches([Ghost("lru", 64)], one_in), GhostTally(1)
        for most in (3, 3, None):
            caches.observe([key_of(block) for block in range(4)], tally, most)
        assert tally.hit_blocks() == [3 + 4]


def test_tallies_add_up():
    trace = trace_of(rag_like(60))
    ghosts = [Ghost("lru", 400), Ghost("arc", 100)]
    caches, parts = GhostCaches(ghosts, 4), [GhostTally(2), GhostTally(2), GhostTally(2)]
    for number, keys in enumerate(keys_of(trace)):
        caches.observe(keys, parts[number // 20])
    total = GhostTally(2)
    for part in parts:
        total.add(part)
    assert [blocks / trace.accesses for blocks in total.hit_blocks()] == estimated(trace, ghosts, 4)


def test_blocks_are_forgotten_before_they_fill_the_memory():
    caches, tally = GhostCaches([Ghost("lru", 10)], 2), GhostTally(1)
    for number in range(1000):
        caches.observe([key_of(number * 10 + i) for i in range(5)], tally)
        assert len(caches._last) + len(caches._last_before) <= 2 * (4 * 10 + 5)
        assert len(caches._caches[0].resident) <= 5


def test_what_cannot_be_followed_is_refused():
    with pytest.raises(UnknownPolicyError):
        GhostCaches([Ghost("psychic", 10)], 1)
    for ghosts, one_in in (([], 1), ([Ghost("lru", 0)], 1), ([Ghost("lru", 10)], 0), ([Ghost("lru", 10)], 3)):
        with pytest.raises(ValueError, match="positive"):
            GhostCaches(ghosts, one_in)
