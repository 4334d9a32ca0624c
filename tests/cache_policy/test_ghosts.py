"""Ghost caches hit what a replay hits, exactly when they see every block and nearly so when they see few."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_policy.ghosts import Ghost, GhostCaches
from cache_policy.policy import POLICY_NAMES, UnknownPolicyError
from cache_policy.replay import replay

from .test_replay import trace_of

chains = st.lists(st.lists(st.integers(0, 2), min_size=0, max_size=6), min_size=1, max_size=40)


def keys_of(trace):
    return [[block.to_bytes(16, "little") for block in request] for request in trace.requests]


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


def estimated(trace, ghosts, stride):
    caches = GhostCaches(ghosts, stride)
    sums = [0.0] * len(ghosts)
    for keys in keys_of(trace):
        sums = [before + more for before, more in zip(sums, caches.observe(keys), strict=True)]
    return [total / trace.accesses for total in sums]


@pytest.mark.parametrize("policy", POLICY_NAMES)
@settings(max_examples=40, deadline=None)
@given(requests=chains, capacity=st.integers(1, 12))
def test_without_sampling_a_ghost_hits_what_a_replay_hits(policy, requests, capacity):
    trace = trace_of(requests)
    caches = GhostCaches([Ghost(policy, capacity)], 1)
    assert sum(caches.observe(keys)[0] for keys in keys_of(trace)) == replay(trace, policy, capacity).hit_blocks


@pytest.mark.parametrize("stride", [4, 8])
def test_a_sample_along_the_chains_is_within_two_points(stride):
    trace = trace_of(rag_like(1500))
    ghosts = [
        Ghost(policy, trace.unique_blocks * percent // 100)
        for policy in ("lru", "s3fifo", "lfu")
        for percent in (3, 10, 30)
    ]
    exact = [replay(trace, ghost.policy, ghost.blocks).block_hit_rate for ghost in ghosts]
    assert max(exact) - min(exact) > 0.1, "the ghosts hardly differ, so that any estimate would do"
    for ghost, estimate, rate in zip(ghosts, estimated(trace, ghosts, stride), exact, strict=True):
        assert abs(estimate - rate) < 0.02, ghost


def test_prefixes_are_forgotten_before_they_fill_the_memory():
    caches = GhostCaches([Ghost("lru", 10)], 2)
    for number in range(1000):
        caches.observe([(number * 10 + i).to_bytes(16, "little") for i in range(5)])
        assert len(caches._seen) + len(caches._seen_before) <= 2 * (4 * 10 + 5)
        assert len(caches._caches[0]._children) <= 5


def test_what_cannot_be_followed_is_refused():
    with pytest.raises(UnknownPolicyError):
        GhostCaches([Ghost("psychic", 10)], 1)
    for ghosts, stride in (([], 1), ([Ghost("lru", 0)], 1), ([Ghost("lru", 10)], 0)):
        with pytest.raises(ValueError, match="positive"):
            GhostCaches(ghosts, stride)
