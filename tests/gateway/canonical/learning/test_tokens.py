from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.canonical.learning.tokens import shape_of, split_tokens


@given(st.text() | st.text(alphabet="ab1-:./@ \n{}é", max_size=60))
def test_tokens_joined_are_the_text(text: str) -> None:
    assert "".join(split_tokens(text)) == text


@pytest.mark.parametrize(
    ("value", "shape"),
    [
        ("2026-03-02 08:00:01", "date-time"),
        ("2026-03-02T08:00:01.123Z", "date-time"),
        ("2026-03-02T08:00:01+01:00", "date-time"),
        ("Monday, March 2, 2026 at 8:00 AM", "date-time"),
        ("Mon Mar  2 08:00:01 2026", "date-time"),
        ("2 March 2026", "date-time"),
        ("03/02/2026", "date-time"),
        ("15:09:34 UTC", "date-time"),
        ("7c9e6679-7425-40de-944b-e07fc1f90ae7", "uuid"),
        ("57ff472785c7f25f4b2f943155f343bd", "hex-id"),
        ("deadbeef", "name-or-text"),
        ("req_8fG3x", "id"),
        ("dev-07", "id"),
        ("1772438401", "number"),
        ("3,000.50", "number"),
        ("https://example.org/a?b=c", "address"),
        ("ann.lee@example.org", "address"),
        ("Ann", "name"),
        ("Oz 087", "name"),
        ("María José O'Neill", "name"),
        ("be brief and kind", "text"),
        ("", "text"),
        ("Ann\nBob", "text"),
    ],
)
def test_a_value_has_the_shape_that_people_see(value: str, shape: str) -> None:
    assert shape_of(value) in shape if shape == "name-or-text" else shape_of(value) == shape


@pytest.mark.parametrize(
    "value",
    [
        "2026-03-02 08:00:01",
        "Monday, March 2, 2026 at 8:00 AM",
        "Mon Mar  2 08:00:01 2026",
        "7c9e6679-7425-40de-944b-e07fc1f90ae7",
        "ann.lee@example.org",
        "https://example.org/a?b=c",
        "3.11.2",
    ],
)
def test_a_value_within_a_sentence_is_one_token(value: str) -> None:
    assert value in split_tokens(f"It says: {value}. Then ({value}), and so on.")


HOSTILE = ["a@", "1.", "-", "1-", "http://.", "2026-03-0", "a.a-", "Mon ", "1:", "\u0301", " \t", "[({"]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("piece", HOSTILE)
def test_hostile_texts_are_cut_in_linear_time(piece: str) -> None:
    assert split_tokens(piece * 300_000)  # in quadratic time this takes hours
