"""Answers agree by what they say, not by how it is written."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.quality.answers import contains_any, distance


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ("The capital is Paris.", "capital is  paris", 0),
        ("", "", 0),
        ("", "yes", 1),
        ("Yes.", "yes", 0),
        ("Yes, sir", "No, sir", 1),  # of short answers half is nothing
        ("red green blue", "red green black", 1 / 3),
        ("one two three", "four five six", 1),
        ("x x y", "x y y", 1 / 3),
        ("北京是首都", "首都是北京", 0),  # a character is a word
        ("北京是首都", "北京是城市", 0.4),
        ("Größe: 5 €", "GRÖSSE 5", 0),
    ],
)
def test_distance_is_one_less_the_f1_of_words(one: str, other: str, expected: float) -> None:
    assert distance(one, other) == pytest.approx(expected)


@given(st.text(), st.text())
def test_distance_is_symmetric_bounded_and_zero_to_itself(one: str, other: str) -> None:
    assert 0 <= distance(one, other) <= 1
    assert distance(one, other) == distance(other, one)
    assert distance(one, one) == 0


@pytest.mark.parametrize(
    ("answer", "gold", "found"),
    [
        ("It was founded in 1889, they say.", ["1889"], True),
        ("It was founded in 18890.", ["1889"], False),
        ("Emma Woodhouse said so", ["emma woodhouse"], True),
        ("Woodhouse, Emma", ["Emma Woodhouse"], False),
        ("the Seine", ["a river", "Seine"], True),
        ("anything", ["", "the", "?!"], False),  # a gold answer without a word is none
        ("答案是北京市", ["北京"], True),
        ("", ["x"], False),
    ],
)
def test_gold_answers_are_found_word_for_word(answer: str, gold: list[str], found: bool) -> None:
    assert contains_any(answer, gold) is found


def test_endless_answers_are_compared_by_their_beginning() -> None:
    assert distance("word " * 10_000, "word " * 10_000 + "other " * 10_000) == 0
