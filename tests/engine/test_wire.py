"""Framing: whatever pieces a stream arrives in, the same messages come out."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import ProtocolError
from engine.wire import MAX_FRAME_BYTES, Abort, Call, decode_to_engine, frame, take_frames

MESSAGES = [Abort((1, 2)), Call(3, "stats"), Abort(()), Call(4, "set_policy", {"policy": "lru"})]
STREAM = b"".join(map(frame, MESSAGES))


@given(st.lists(st.integers(0, len(STREAM))))
def test_frames_come_out_whole_wherever_the_stream_is_cut(cuts: list[int]) -> None:
    buffer, taken = bytearray(), []
    edges = [0, *sorted(cuts), len(STREAM)]
    for start, end in itertools.pairwise(edges):
        buffer += STREAM[start:end]
        taken += map(decode_to_engine, take_frames(buffer))
    assert taken == MESSAGES
    assert not buffer


def test_a_frame_that_is_too_long_is_refused_after_those_before_it() -> None:
    buffer = bytearray(frame(MESSAGES[0]) + (MAX_FRAME_BYTES + 1).to_bytes(4, "big"))
    frames = take_frames(buffer)
    assert decode_to_engine(next(frames)) == MESSAGES[0]
    with pytest.raises(ProtocolError, match=str(MAX_FRAME_BYTES + 1)):
        next(frames)
