"""What every registered policy must do, whatever it prefers. A new policy is tested by being registered."""

from __future__ import annotations

import inspect
import pkgutil
import random
from collections.abc import Sized
from importlib import import_module

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import cache_policy.policies
from cache_policy import policy as registry
from cache_policy.policies.opt import OptPolicy
from cache_policy.policy import POLICY_NAMES, EvictionPolicy, UnknownPolicyError

CAPACITY = 8

# Short chains over few labels share much. An operation starts a chain, finishes a running request, or (below 0)
# has the owner drop a block without asking for a victim.
chains = st.lists(st.integers(0, 2), min_size=1, max_size=6)
operations = st.lists(chains | st.integers(-2, 5), max_size=60)
# The fixture is a type without state, so that examples cannot disturb each other through it.
fuzz = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

ALL_NAMES = (*POLICY_NAMES, OptPolicy.name)

pytestmark = pytest.mark.parametrize("name", ALL_NAMES)


def create_policy(name, capacity):
    """The policy as its owners make it; the optimum is told a future, any will do."""
    if name == OptPolicy.name:
        return OptPolicy(capacity, lambda key: hash(key) % 7)
    return registry.create_policy(name, capacity)


def play(pool, steps):
    """Run the operations and then finish what still runs; returns the victims in order."""
    victims = []
    drop = pool.drop
    pool.drop = lambda block: (victims.append(pool.path_of[block]), drop(block))
    running = []
    for step in steps:
        if isinstance(step, list):
            running.append(pool.admit(step))
        elif step < 0:
            for block in sorted(pool.evictable_blocks())[step:]:
                pool.drop(block)
        elif running:
            pool.finish(running.pop(step % len(running)))
    while running:
        pool.finish(running.pop())
    return victims


@fuzz
@given(steps=operations)
def test_a_victim_is_evictable_and_found_whenever_there_is_one(name, pool_type, steps):
    play(pool_type(create_policy(name, CAPACITY)), steps)  # the pool asserts it at every eviction


@fuzz
@given(steps=operations)
def test_an_idle_pool_can_be_emptied_to_the_last_block(name, pool_type, steps):
    pool = pool_type(create_policy(name, CAPACITY))
    play(pool, steps)
    resident = len(pool.block_of)
    assert sum(pool.evict() is not None for _ in range(resident)) == resident
    assert pool.evict() is None
    assert len(pool.free) == CAPACITY


@fuzz
@given(steps=operations)
def test_asking_twice_names_the_same_victim(name, pool_type, steps):
    pool = pool_type(create_policy(name, CAPACITY))
    play(pool, steps)
    assert pool.policy.victim(pool.evictable) == pool.policy.victim(pool.evictable)


@fuzz
@given(steps=operations)
def test_the_same_history_gives_the_same_victims(name, pool_type, steps):
    first = play(pool_type(create_policy(name, CAPACITY)), steps)
    assert play(pool_type(create_policy(name, CAPACITY)), steps) == first


@fuzz
@given(steps=operations, successor=st.sampled_from(ALL_NAMES))
def test_a_swap_keeps_every_block_and_loses_track_of_none(name, successor, pool_type, steps):
    pool = pool_type(create_policy(name, CAPACITY))
    play(pool, steps)
    running = pool.admit([0, 0])
    resident = dict(pool.block_of)
    pool.swap(create_policy(successor, CAPACITY))
    assert pool.block_of == resident
    play(pool, steps)
    pool.finish(running)
    play(pool, steps)
    while pool.block_of:
        assert pool.evict() is not None


def test_blocks_in_use_are_left_when_everything_else_has_gone(name, pool_type):
    pool = pool_type(create_policy(name, CAPACITY))
    pool.serve([1, 2, 3])
    running = pool.admit([1, 2, 4])
    while pool.evict() is not None:
        pass
    assert set(pool.path_of) == set(running)
    pool.finish(running)
    assert [pool.evict() for _ in running] == running[::-1]  # the tail of a prompt leaves first


def test_a_block_number_may_come_back_with_other_content(name):
    policy = create_policy(name, 2)
    policy.inserted(0, None, 100, 0)
    policy.removed(0)
    policy.inserted(1, None, 101, 0)
    policy.inserted(0, 1, 102, 1)
    assert policy.victim(lambda block: block == 0) == 0
    policy.removed(0)
    assert policy.victim(lambda block: True) == 1


def test_a_block_in_use_can_be_dropped(name):
    policy = create_policy(name, 2)
    policy.inserted(0, None, 100, 0)
    policy.acquired(0)
    policy.removed(0)
    policy.inserted(1, None, 101, 0)
    assert policy.victim(lambda block: True) == 1
    policy.removed(1)
    assert policy.victim(lambda block: True) is None


@pytest.mark.parametrize("owner", ["evicts", "drops", "does both"])
def test_memory_is_bounded_by_the_capacity(name, owner, pool_type):
    capacity = 32
    policy = create_policy(name, capacity)
    pool = pool_type(policy)
    rng = random.Random(20)
    for serial in range(500):
        pool.serve([rng.choice((0, 1, serial)) for _ in range(rng.randint(1, 6))])
        if owner == "drops" or (owner == "does both" and rng.random() < 0.3):
            for block in sorted(pool.evictable_blocks()):
                pool.drop(block)
    held = sum(len(value) for value in vars(policy).values() if isinstance(value, Sized))
    assert held <= 12 * capacity


def test_without_blocks_there_is_no_victim(name):
    assert create_policy(name, 1).victim(lambda block: True) is None


def test_a_pool_needs_room_for_a_block(name):
    with pytest.raises(ValueError, match="at least 1 block, not 0"):
        create_policy(name, 0)


def test_it_is_created_by_its_name(name):
    policy = create_policy(name, 5)
    assert policy.name == name
    assert policy.capacity == 5


def test_an_unknown_name_is_answered_with_the_known_ones(name):
    with pytest.raises(UnknownPolicyError) as error:
        registry.create_policy("lfru", 5)
    assert "'lfru'" in str(error.value)
    assert (name in str(error.value).partition("known: ")[2].split(", ")) == (name in POLICY_NAMES)


def test_only_what_needs_no_future_can_be_selected(name):
    if name == OptPolicy.name:
        with pytest.raises(UnknownPolicyError):
            registry.create_policy(name, 5)
    else:
        assert registry.create_policy(name, 5).name == name


def test_every_policy_in_the_folder_is_registered(name):
    files = pkgutil.iter_modules(cache_policy.policies.__path__)
    modules = [import_module(f"cache_policy.policies.{file.name}") for file in files]
    found = {
        policy.name
        for module in modules
        for _, policy in inspect.getmembers(module, inspect.isclass)
        if issubclass(policy, EvictionPolicy) and not inspect.isabstract(policy)
    }
    assert found == set(ALL_NAMES)
