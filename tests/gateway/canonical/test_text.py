from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.canonical.messages import Message
from gateway.canonical.text import normalize_system_messages, normalize_text

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
    normalized, changes = normalize_system_messages(messages)
    assert normalized == (Message("system", "S"), *messages[1:])
    assert [change.step for change in changes] == ["text"]


def test_text_that_is_normal_already_is_reported_as_unchanged() -> None:
    messages = (Message("developer", SYSTEM), Message("user", "hi "))
    assert normalize_system_messages(messages) == (messages, ())


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
