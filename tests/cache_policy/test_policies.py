"""Whom each policy chooses, against its definition spelled out over all blocks."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cache_policy.policy import create_policy

# What the victim must be the smallest of, among the blocks that may leave.
DEFINITIONS = {
    "lru": lambda pool, block: pool.last_use[block],
    "fifo": lambda pool, block: pool.first_use[block],
}

chains = st.lists(st.integers(0, 2), min_size=1, max_size=6)
operations = st.lists(chains | st.integers(0, 5), max_size=80)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=operations)
@pytest.mark.parametrize("name", DEFINITIONS)
def test_the_victim_is_the_one_the_definition_names(name, pool_type, steps):
    pool = pool_type(create_policy(name, 8))
    running = []
    for step in steps:
        if isinstance(step, list):
            running.append(pool.admit(step))
        elif running:
            pool.finish(running.pop(step % len(running)))
        expected = min(pool.evictable_blocks(), key=lambda block: DEFINITIONS[name](pool, block), default=None)
        assert pool.policy.victim(pool.evictable) == expected


def test_lru_keeps_what_was_used_last(pool_type):
    pool = pool_type(create_policy("lru", 3))
    (first,), (second,), (third,) = (pool.serve([label]) for label in (1, 2, 3))
    pool.serve([1])
    assert [pool.evict() for _ in range(3)] == [second, third, first]


def test_fifo_is_not_moved_by_a_hit(pool_type):
    pool = pool_type(create_policy("fifo", 3))
    (first,), (second,), (third,) = (pool.serve([label]) for label in (1, 2, 3))
    pool.serve([1])
    assert [pool.evict() for _ in range(3)] == [first, second, third]


def test_fifo_returns_a_parent_to_its_old_place_when_its_last_child_has_left(pool_type):
    pool = pool_type(create_policy("fifo", 3))
    (trunk,) = pool.serve([1])
    (young,) = pool.serve([2])
    (_, branch) = pool.serve([1, 1])
    assert pool.evict() == young  # the trunk is older and cannot leave
    pool.serve([3])
    assert [pool.evict() for _ in range(2)] == [branch, trunk]


def test_lru_asks_about_one_block_however_many_are_in_use(pool_type):
    pool = pool_type(create_policy("lru", 40))
    for label in range(20):
        pool.serve([label])
    for label in range(18):
        pool.admit([label])
    pool.questions = 0
    assert pool.evict() is not None
    assert pool.questions == 1


def test_fifo_does_not_look_at_shared_beginnings(pool_type):
    pool = pool_type(create_policy("fifo", 64))
    trunk = list(range(30))
    pool.serve(trunk)
    for label in range(10):
        pool.serve([*trunk, label])
    pool.evict()  # what gained children since it was queued is dropped here, once
    pool.questions = 0
    assert pool.evict() is not None
    assert pool.questions == 1


def test_a_swap_to_lru_keeps_the_old_order(pool_type):
    pool = pool_type(create_policy("fifo", 4))
    blocks = [pool.serve([label])[0] for label in (1, 2, 3)]
    pool.swap(create_policy("lru", 4))
    assert [pool.evict() for _ in blocks] == blocks


def test_lfu_lets_the_rarely_used_go_first(pool_type):
    pool = pool_type(create_policy("lfu", 3))
    (first,), (second,), (third,) = (pool.serve([label]) for label in (1, 2, 3))
    for label in (1, 1, 2, 3, 2):
        pool.serve([label])
    assert [pool.evict() for _ in range(3)] == [third, first, second]


def test_gdsf_forgets_old_fame(pool_type):
    pool = pool_type(create_policy("gdsf", 2))
    for _ in range(3):
        (famous,) = pool.serve([0])
    for label in range(1, 6):
        pool.serve([label])  # each evicts the one before, and ranks one higher
    assert (0,) not in pool.block_of
    assert famous in pool.path_of


@pytest.mark.parametrize("name", ["wtinylfu", "adaptive"])
def test_what_comes_back_too_late_for_lru_is_learned_amid_a_scan(name, pool_type):
    pool = pool_type(create_policy(name, 40))
    hits = 0
    for serial in range(600):
        hits += serial >= 200 and (0, serial % 10) in pool.block_of
        pool.serve([0, serial % 10])
        for scan in range(10):
            pool.serve([1, 1000 + 10 * serial + scan])
    lru = pool_type(create_policy("lru", 40))
    for serial in range(100):
        assert serial < 10 or (0, serial % 10) not in lru.block_of
        lru.serve([0, serial % 10])
        for scan in range(10):
            lru.serve([1, 1000 + 10 * serial + scan])
    assert hits > 300


def test_tlru_keeps_the_beginning_of_a_long_conversation(pool_type):
    pool = pool_type(create_policy("tlru", 64))
    long = pool.serve([1] * 40)
    short = pool.serve([2] * 10)
    order = [pool.evict() for _ in range(50)]
    assert order == [*long[:23:-1], *short[::-1], *long[23::-1]]


def test_rlt_spares_what_was_used_in_this_phase(pool_type):
    pool = pool_type(create_policy("rlt", 10))
    for label in range(10):
        pool.serve([label])
    pool.serve([10])  # all were used: a new phase begins, and one goes
    (survivor,) = pool.serve([min(path[0] for path in pool.block_of)])
    for label in range(11, 19):
        pool.serve([label])
    assert survivor in pool.path_of
    assert {label for (label,) in pool.block_of} == {pool.path_of[survivor][0], *range(10, 19)}


def test_adaptive_lets_lru_decide_while_its_mirror_is_ahead(pool_type):
    policy = create_policy("adaptive", 16)
    pool = pool_type(policy)
    policy._lead = -1e6
    for label in range(40):
        pool.serve([label])
    assert policy._cautious
    assert pool.policy.victim(pool.evictable) == min(pool.evictable_blocks(), key=pool.last_use.__getitem__)
