from __future__ import annotations

import sys
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.canonical import text as text_module
from gateway.canonical.messages import Message
from gateway.canonical.text import normalize_system_messages, normalize_text, original_span, text_changes

SYSTEM = "You are helpful.\nRules: é, ü"


@pytest.mark.parametrize(
    "variant",
    [
        SYSTEM.replace("\n", "\r\n"),
        SYSTEM.replace("\n", "\r"),
        SYSTEM.replace("\n", "  \t\n") + "   ",
        "\ufeff" + SYSTEM,
        unicodedata.normalize("NFD", SYSTEM),
        SYSTEM + "\n",
        "\ufeff" + unicodedata.normalize("NFD", SYSTEM.replace("\n", " \r\n")) + "\r\n\r\n",
    ],
)
def test_l3_every_spelling_of_a_system_prompt_becomes_one(variant: str) -> None:
    assert variant != SYSTEM
    assert normalize_text(variant) == SYSTEM


def test_l3_user_and_assistant_text_is_untouched() -> None:
    code = "\ufeff```\r\n\tif x:  \r\n" + unicodedata.normalize("NFD", "é") + "\n```\n\n"
    messages = (Message("system", "S "), Message("user", code), Message("assistant", code), Message("tool", code))
    normalized = normalize_system_messages(messages)
    changes = text_changes(messages, normalized)
    assert normalized == (Message("system", "S"), *messages[1:])
    assert [change.step for change in changes] == ["text"]


def test_text_that_is_normal_already_is_reported_as_unchanged() -> None:
    messages = (Message("developer", SYSTEM), Message("user", "hi "))
    assert normalize_system_messages(messages) == messages
    assert text_changes(messages, messages) == ()


def test_leading_blanks_and_inner_blanks_keep_their_meaning() -> None:
    assert normalize_text("  - a  b\n\n\n  - c\u00a0\n") == "  - a  b\n\n\n  - c\u00a0"


@given(
    st.text(
        alphabet=st.one_of(
            st.sampled_from("\ufeff\r\n\t aeéi\u0301\u0308\u2126\u212b\x85"), st.characters(exclude_categories=["Cs"])
        )
    )
)
def test_l7_normalizing_is_idempotent(text: str) -> None:
    once = normalize_text(text)
    assert normalize_text(once) == once


def test_no_pile_of_marks_holds_up_the_event_loop() -> None:
    """Canonical ordering in ``unicodedata`` takes the square of a row's length: for this one it would take hours."""
    for pile in ("\u0301\u0323", "\u0323\u0301", "\u0f73\u0f71", "\u0344"):
        text = "S\u00e9 e" + pile * 1_000_000
        assert normalize_text(text) == text


@pytest.mark.parametrize("before", range(0, 70, 7))
def test_more_marks_than_any_language_piles_up_are_left_alone_wherever_they_stand(before: int) -> None:
    for marks, is_left in ((30, False), (31, True), (75, True)):
        text = "x" * before + "\u0323\u0301".join(["e", *[""] * (marks // 2)]) + "\u0323" * (marks % 2) + " e\u0301."
        assert (normalize_text(text) == text) is is_left
        assert normalize_text(normalize_text(text)) == normalize_text(text)


def test_every_character_that_may_be_reordered_is_known_as_a_mark() -> None:
    for code in range(sys.maxunicode + 1):
        decomposed = unicodedata.normalize("NFD", chr(code))
        if unicodedata.combining(decomposed[0]):
            assert text_module._is_mark(chr(code)), hex(code)


@pytest.mark.parametrize("documents", ["d\u0301 \r\n\r\n  e\u0301\t\n", "", "one line", "\n\n", "\ufeffx"])
@pytest.mark.parametrize(
    ("before", "after"),
    [("Answer.\n\n", ""), ("Context: ", "\n\nBe kind."), ("a \r\nb\r\n", "\r\n c \r\n\r\n"), ("\ufeffé: ", " !\n")],
)
def test_what_stands_between_normalized_texts_is_found_in_its_own_bytes(
    documents: str, before: str, after: str
) -> None:
    around = normalize_text(before + "|").removesuffix("|"), normalize_text("|" + after).removeprefix("|")
    span = original_span(before + documents + after, *around)
    assert span is not None
    assert (before + documents + after)[slice(*span)] == documents


def test_a_span_that_cannot_be_told_is_none() -> None:
    assert original_span("One\nTwo", "Other\n", "") is None
    assert original_span("ab", "ab", "ab") is None
    assert original_span("", "a\nb", "") is None


@pytest.mark.timeout(60)
def test_finding_a_span_in_a_hostile_text_ends() -> None:
    text = "a\n" * 500_000
    assert original_span(text + "b", text, "") == (1_000_000, 1_000_001)
