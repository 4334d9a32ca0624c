from __future__ import annotations

import random

import pytest

from cache_policy.recency import RecencyIndex

KEYS = [bytes([number]) * 16 for number in range(12)]


def sent(index: RecencyIndex, *prompts: list[bytes]) -> list[int]:
    """Send prompts one after the other, each computed before the next."""
    numbers = []
    for keys in prompts:
        numbers.append(index.send(keys))
        index.settle(numbers[-1])
    return numbers


def test_what_was_sent_is_presumed_to_be_held_up_to_the_capacity():
    index = RecencyIndex(4)
    sent(index, KEYS[:3], KEYS[3:5])
    assert set(index.keys) == {*KEYS[:2], *KEYS[3:5]}  # the end of the older prompt has left, not its beginning
    sent(index, KEYS[:1])
    sent(index, KEYS[5:7])
    assert set(index.keys) == {KEYS[0], KEYS[3], *KEYS[5:7]}


def test_a_prompt_longer_than_the_capacity_leaves_its_beginning():
    index = RecencyIndex(4)
    sent(index, KEYS[:9])
    assert list(index.keys) == KEYS[3::-1]


def test_uses_end_at_the_first_gap_and_at_what_is_not_computed_yet():
    index = RecencyIndex(10)
    first, second = sent(index, KEYS[:4], KEYS[:2])
    assert index.computed_uses(KEYS[:6]) == [second, second, first, first]
    number = index.send([*KEYS[:1], *KEYS[4:6]])
    assert index.computed_uses(KEYS[:6]) == []
    assert KEYS[4] in index.keys  # it attracts others already
    index.settle(number)
    assert index.computed_uses(KEYS[:6]) == [number, second, first, first, number, number]


def test_what_was_evicted_takes_all_with_it_that_was_used_no_later():
    index = RecencyIndex(10)
    first, second, _third = sent(index, KEYS[:2], KEYS[2:4], KEYS[4:6])
    index.evicted(second)
    assert set(index.keys) == set(KEYS[4:6])
    index.evicted(first)
    assert len(index) == 2


def test_against_a_least_recently_used_cache_it_comes_true_after_a_while():
    """The true capacity is a third of the presumed one: reports alone bring the two together."""
    rng = random.Random(5)
    index, truth = RecencyIndex(300), RecencyIndex(100)
    trees = [[rng.randbytes(16) for _ in range(8)] for _ in range(24)]
    wrong = []
    for _ in range(600):
        keys = [*trees[min(int(rng.expovariate(0.2)), 23)][: rng.randint(4, 8)], rng.randbytes(16)]
        uses = index.computed_uses(keys)
        reported = len(truth.computed_uses(keys))
        index.settle(index.send(keys))
        truth.settle(truth.send(keys))
        if reported < len(uses):
            index.evicted(uses[reported])
        wrong.append(max(0, len(uses) - reported))
    assert sum(wrong) > 0
    assert sum(wrong) < 0.1 * 8 * len(wrong)
    assert len(index) < 200


def test_a_capacity_is_positive():
    with pytest.raises(ValueError, match="at least 1 block"):
        RecencyIndex(0)
