"""The replay's fast loops do what the semantics say, for every policy."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cache_policy.policy import POLICY_NAMES, UnknownPolicyError, create_policy
from cache_policy.replay import REPLAY_POLICY_NAMES, replay
from cache_policy.traces import Trace, TraceError

BLOCK = 4

chains = st.lists(st.lists(st.integers(0, 2), min_size=0, max_size=6), min_size=1, max_size=40)
capacities = st.integers(1, 12)
fuzz = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def trace_of(requests, block_size=BLOCK):
    """A trace of label paths: a block is its path, as a key is its whole prefix."""
    numbers, parents, blocks = {}, [], []
    for labels in requests:
        ids = []
        for end in range(1, len(labels) + 1):
            path = tuple(labels[:end])
            if path not in numbers:
                numbers[path] = len(parents)
                parents.append(numbers[path[:-1]] if end > 1 else -1)
            ids.append(numbers[path])
        blocks.append(tuple(ids))
    # The last block of every request is part-full.
    lengths = tuple(max(0, len(ids) * block_size - 1) for ids in blocks)
    return Trace("test", tuple(blocks), lengths, tuple(parents), block_size)


@pytest.mark.parametrize("policy", POLICY_NAMES)
@fuzz
@given(requests=chains, capacity=capacities)
def test_a_replay_hits_as_a_pool_does(policy, requests, capacity, pool_type):
    pool = pool_type(create_policy(policy, capacity))
    hits = tokens = 0
    for labels in requests:
        leading = 0
        while leading < len(labels) and tuple(labels[: leading + 1]) in pool.block_of:
            leading += 1
        hits += leading
        tokens += min(leading * BLOCK, max(0, len(labels) * BLOCK - 1))
        pool.serve(labels)
    result = replay(trace_of(requests), policy, capacity)
    assert (result.hit_blocks, result.hit_tokens) == (hits, tokens)


@pytest.mark.parametrize("policy", POLICY_NAMES)
@fuzz
@given(requests=chains, capacity=capacities)
def test_no_policy_beats_the_optimum(policy, requests, capacity):
    trace = trace_of(requests)
    assert replay(trace, policy, capacity).hit_blocks <= replay(trace, "opt", capacity).hit_blocks


@pytest.mark.parametrize("semantics", ["prefix", "object"])
@pytest.mark.parametrize("policy", REPLAY_POLICY_NAMES)
@fuzz
@given(requests=chains)
def test_with_room_for_everything_only_first_uses_miss(policy, semantics, requests):
    trace = trace_of(requests)
    if not trace.unique_blocks:
        return
    result = replay(trace, policy, trace.unique_blocks, semantics)
    assert result.hit_blocks == trace.accesses - trace.unique_blocks
    assert result.evictions == 0


@fuzz
@given(accesses=st.lists(st.integers(0, 6), min_size=1, max_size=60), capacity=st.integers(1, 6))
def test_plain_lru_keeps_the_last_used_objects(accesses, capacity):
    numbers = {key: number for number, key in enumerate(dict.fromkeys(accesses))}
    requests = tuple((numbers[key],) for key in accesses)
    trace = Trace("test", requests, (1,) * len(requests), (-1,) * len(numbers), 1)
    hits = 0
    for position, key in enumerate(accesses):
        earlier = [at for at in range(position) if accesses[at] == key]
        hits += bool(earlier) and len(set(accesses[earlier[-1] + 1 : position])) < capacity
    assert replay(trace, "lru", capacity, "object").hit_blocks == hits


def test_an_object_hits_without_its_parent_and_a_prefix_does_not():
    trace = trace_of([[1, 1], [2], [1, 1]])
    assert replay(trace, "lru", 2, "object").hit_blocks == 1 - 1  # 1 leaves for 2, and 1-1 for 1
    assert replay(trace, "fifo", 2, "object").hit_blocks == 1 - 1
    assert replay(trace, "lru", 2, "prefix").hit_blocks == 1  # the tail leaves first


def test_a_request_larger_than_the_cache_keeps_its_beginning():
    trace = trace_of([[0, 0, 0, 0], [0, 0, 0, 0]])
    assert replay(trace, "lru", 3).hit_blocks == 3


def test_a_trace_without_prefixes_is_replayed_as_objects_only():
    trace = Trace("test", ((0, 1), (1,)), (2, 1), (-1, 0), 1, "line 2: 1 stands elsewhere")
    with pytest.raises(TraceError, match="line 2"):
        replay(trace, "lru", 2)
    assert replay(trace, "lru", 2, "object").hit_blocks == 1


def test_an_unknown_policy_is_answered_with_all_that_can_be_replayed():
    with pytest.raises(UnknownPolicyError, match=r"known: lru, .*opt"):
        replay(trace_of([[0]]), "mru", 1)


def test_progress_is_reported_up_to_the_end():
    seen = []
    replay(trace_of([[0]] * 1000), "lru", 1, progress=seen.append)
    assert seen == sorted(seen)
    assert seen[0] == 0
    assert seen[-1] < 1
