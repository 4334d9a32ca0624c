from __future__ import annotations

import random
from array import array
from zlib import crc32

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.canonical.learning.skeleton import GAP, generalize
from gateway.canonical.learning.tokens import split_tokens
from gateway.canonical.templates import split_text


def digests(text: str) -> array[int]:
    return array("Q", [crc32(token.encode()) + 1 for token in split_tokens(text)])


def literals(*texts: str) -> tuple[str, ...]:
    """What the texts have in common, learned in this order."""
    pattern = digests(texts[0])
    for text in texts[1:]:
        skeleton = generalize(pattern, split_tokens(text), digests(text))
        pattern = skeleton.digests
    return skeleton.literals(split_tokens(texts[-1]))


def test_what_differs_is_a_gap_and_what_stays_is_literal() -> None:
    one = "You talk to Ann. Trace: 17. Be kind."
    two = "You talk to Bob. Trace: 93. Be kind."
    assert literals(one, two) == ("You talk to ", ". Trace: ", ". Be kind.")


def test_gaps_at_both_ends_are_gaps() -> None:
    assert literals("12:01 be kind 5", "12:02 be kind 6") == ("", " be kind ", "")


def test_equal_texts_have_no_gap() -> None:
    assert literals("be kind", "be kind") == ("be kind",)


@pytest.mark.parametrize(
    ("first", "second", "gap"),
    [
        ("2026-03-02 08:00:01", "2026-03-02 08:00:02", 1),  # the day is equal so far, and still part of the value
        ("Oz 087", "Quin Ann 035", 1),
        ("10.0.0.7", "10.1.0.9", 1),
        ("user 7", "user 8", 1),
        ("a (b)", "c (d)", 2),
        ("a; b", "c; d", 2),
    ],
)
def test_a_value_is_found_as_a_whole(first: str, second: str, gap: int) -> None:
    assert len(literals(f"It is <{first}> here.", f"It is <{second}> here.")) == gap + 1


@given(
    st.lists(st.text(alphabet="abc .:-\n", min_size=1, max_size=8), min_size=1, max_size=6),
    st.lists(st.text(alphabet="abc .:-\n", min_size=1, max_size=8), min_size=1, max_size=6),
)
def test_both_texts_have_the_form_that_comes_out(one: list[str], two: list[str]) -> None:
    first, second = "".join(one), "".join(two)
    pattern = generalize(digests(first), split_tokens(second), digests(second))
    for text in (first, second):
        again = generalize(pattern.digests, split_tokens(text), digests(text))
        if again.digests == pattern.digests:
            assert split_text(again.literals(split_tokens(text)), text) is not None
    assert split_text(pattern.literals(split_tokens(second)), second) is not None


@given(st.lists(st.integers(1, 5), max_size=30), st.lists(st.integers(1, 5), max_size=30))
def test_a_skeleton_only_loses_tokens(one: list[int], two: list[int]) -> None:
    skeleton = generalize(array("Q", one), [str(token) for token in two], array("Q", two))
    kept = iter(skeleton.digests)
    constant = [token for token in kept if token != GAP]
    for side in (one, two):
        rest = iter(side)
        assert all(token in rest for token in constant), "a subsequence of both"
    assert not any(pair == (GAP, GAP) for pair in zip(skeleton.digests, skeleton.digests[1:], strict=False))


@pytest.mark.timeout(60)
def test_hostile_texts_are_aligned_in_bounded_time() -> None:
    rng = random.Random(1)
    for tokens in (2, 50, 20_000):
        one, two = (array("Q", [rng.randrange(1, tokens + 1) for _ in range(32_768)]) for _ in range(2))
        generalize(one, [str(token) for token in two], two)
    forward = array("Q", range(1, 32_769))
    generalize(forward, [str(token) for token in forward], forward[::-1])


def test_what_was_left_out_of_a_skeleton_never_comes_back() -> None:
    one, two, three = ("12:01 be kind, Ann", "12:02 be kind, Bob", "12:03 be kind, Cid")
    tokens, text = split_tokens(two), digests(two)
    skeleton = generalize(digests(one), tokens, text)
    other = generalize(digests(three), tokens, text)
    both = generalize(other.digests, tokens, skeleton.masked(text))
    assert both.literals(tokens) == ("", " be kind, ", "")
    assert both.digests == skeleton.digests
