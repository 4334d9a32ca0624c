"""Events are what the standard says they are, wherever the bytes are cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.replicas.sse import EventStreamParser, EventTooLong

TEXTS = [
    "",
    " ",
    "{}",
    "[DONE]",
    "data: [DONE]",
    "a\u2028b\u2029c\x85d\x0b\x0ce",
    "👩‍👩‍👧‍👦 漢字",
    "\ufeff",
    ":ping",
    "a: b",
]
lines = st.sampled_from(TEXTS) | st.text(
    st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]), max_size=9
)
ends = st.sampled_from(["\n", "\r\n", "\r"])
noise = st.sampled_from([":ping", ":", "event: x", "id: 1", "retry: 9", "datum: no", ""])


@st.composite
def streams(draw: st.DrawFn) -> tuple[bytes, list[str]]:
    """A stream with line ends of one kind, and the data of its events."""
    end = draw(ends)
    text, expected = draw(st.sampled_from(["", "\ufeff"])), []
    for event in draw(st.lists(st.lists(lines, min_size=1, max_size=3), max_size=6)):
        text += "".join(line + end for line in draw(st.lists(noise, max_size=2)))
        text += "".join(f"data: {line}{end}" for line in event) + end
        expected.append("\n".join(event))
    return text.encode(), expected


def read(data: bytes, sizes: list[int]) -> list[str]:
    """What a parser tells that gets ``data`` in pieces of ``sizes``, over and over."""
    parser = EventStreamParser()
    told, at, turn = [], 0, 0
    while at < len(data):
        size = sizes[turn % len(sizes)]
        told += parser.feed(data[at : at + size])
        at, turn = at + size, turn + 1
    return [event.decode() for event in told]


@given(streams(), st.lists(st.integers(1, 40), min_size=1, max_size=8))
def test_events_do_not_depend_on_the_cuts(stream: tuple[bytes, list[str]], sizes: list[int]) -> None:
    data, expected = stream
    assert read(data, sizes) == read(data, [1]) == read(data, [len(data) + 1]) == expected


@pytest.mark.parametrize(
    ("stream", "expected"),
    [
        (b"data: a\n\ndata: b\n\n", ["a", "b"]),
        (b"data:a\n\n", ["a"]),
        (b"data:  a\n\n", [" a"]),
        (b"data\n\n", [""]),
        (b"data: a\ndata: b\n\n", ["a\nb"]),
        (b":ping\n\ndata: a\n\n\n\n", ["a"]),
        (b": ping\r\n\r\ndata: a\r\n\r\n", ["a"]),
        (b"data: a\r\rdata: b\r\r", ["a", "b"]),
        (b"data: a\n\r\ndata: b\r\n\n", ["a", "b"]),
        (b"data: a\n\ndata: b\n", ["a"]),
        (b"\n\ndata: a\n\n", ["a"]),
        ("\ufeffdata: a\n\n".encode(), ["a"]),
        ("data: a\n\n\ufeffdata: b\n\n".encode(), ["a"]),
        (b"event: error\nid: 7\n\n", []),
    ],
)
def test_a_stream_is_read_as_the_standard_says(stream: bytes, expected: list[str]) -> None:
    assert read(stream, [1]) == read(stream, [len(stream)]) == expected


def test_an_event_is_told_with_its_last_byte() -> None:
    parser = EventStreamParser()
    assert parser.feed(b"data: a\r\n\r") == [b"a"]
    assert parser.feed(b"\ndata: b\n\n") == [b"b"]


@pytest.mark.parametrize("size", [1, 7, 4096])
def test_an_event_without_an_end_is_refused_at_the_limit(size: int) -> None:
    parser = EventStreamParser(max_event_bytes=1000)
    assert parser.feed(b"data: " + b"x" * 900 + b"\n\n") == [b"x" * 900]
    for _ in range(1000 // size):
        parser.feed(b"x" * size)
    with pytest.raises(EventTooLong):
        parser.feed(b"x" * size)
