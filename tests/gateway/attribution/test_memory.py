"""The tree of token sequences finds the very token at which a prompt leaves all earlier ones."""

from __future__ import annotations

import random

import pytest

from cache_policy.keys import token_bytes
from gateway.attribution.memory import CommonPrefix, TokenMemory


def shared(one: list[int], other: list[int]) -> int:
    return next(
        (index for index, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(map(len, (one, other)))
    )


@pytest.mark.parametrize("seed", range(5))
def test_the_longest_common_prefix_with_any_earlier_prompt_is_found(seed: int) -> None:
    rng = random.Random(seed)
    memory = TokenMemory(1_000_000)
    prompts: list[list[int]] = []
    for serial in range(300):
        base = rng.choice(prompts)[: rng.randrange(80)] if prompts and rng.random() < 0.8 else []
        prompt = base + [rng.randrange(3) for _ in range(rng.randrange(1, 40))]
        found = memory.remember(b"ns", token_bytes(prompt), serial)
        expected = max((shared(prompt, earlier) for earlier in prompts), default=0)
        assert found.tokens == expected
        if prompts:
            assert found.serial is not None
            assert shared(prompt, prompts[found.serial]) == expected
        prompts.append(prompt)


def test_namespaces_know_nothing_of_each_other() -> None:
    memory = TokenMemory(1000)
    memory.remember(b"a", token_bytes([1, 2, 3]), 0)
    assert memory.remember(b"b", token_bytes([1, 2, 3]), 1) == CommonPrefix(0, None)
    assert memory.remember(b"a", token_bytes([1, 2, 4]), 2) == CommonPrefix(2, 0, token_bytes([3]))


def test_it_holds_no_more_tokens_than_its_capacity_and_forgets_what_was_unused_longest() -> None:
    memory = TokenMemory(500)
    system = list(range(100))
    for serial in range(200):
        memory.remember(b"ns", token_bytes([*system, 1000 + serial, *range(50)]), serial)
        assert memory.tokens <= 500
    latest = memory.remember(b"ns", token_bytes([*system, 1199, *range(50)]), 200)
    assert latest == CommonPrefix(151, 199)
    assert memory.remember(b"ns", token_bytes([*system, 1000, *range(50)]), 201).tokens == 100


def test_a_prompt_that_is_asked_again_is_kept() -> None:
    memory = TokenMemory(300)
    favourite = token_bytes([7, *range(50)])
    memory.remember(b"ns", favourite, 0)
    for serial in range(1, 60):
        memory.remember(b"ns", token_bytes([10 + serial, *range(50)]), serial)
        assert memory.remember(b"ns", favourite, -1).tokens == 51


def test_all_is_forgotten_of_a_namespace_that_made_room() -> None:
    memory = TokenMemory(100)
    memory.remember(b"old", token_bytes(list(range(60))), 0)
    memory.remember(b"new", token_bytes(list(range(60))), 1)
    assert memory.tokens == 60
    assert memory.remember(b"old", token_bytes(list(range(60))), 2) == CommonPrefix(0, None)


def test_to_look_is_not_to_take_in() -> None:
    memory = TokenMemory(1000)
    memory.remember(b"ns", token_bytes([1, 2, 3, 4]), 0)
    for _ in range(2):
        assert memory.find(b"ns", token_bytes([1, 2, 5])) == CommonPrefix(2, 0, token_bytes([3, 4]))
        assert memory.find(b"ns", token_bytes([1, 2, 3, 4, 5])) == CommonPrefix(4, 0)
        assert memory.find(b"other", token_bytes([1])) == CommonPrefix(0, None)
    assert memory.tokens == 4


def test_short_prompts_in_namespaces_of_their_own_are_bounded_by_number() -> None:
    """Whoever sends one token under a new salt each time must not fill the memory of the machine with nodes."""
    memory = TokenMemory(1280)
    for serial in range(1000):
        memory.remember(b"salt %d" % serial, token_bytes([5]), serial)
    assert memory.tokens == 10
    known = [memory.find(b"salt %d" % serial, token_bytes([5])).tokens for serial in range(1000)]
    assert known == [0] * 990 + [1] * 10
