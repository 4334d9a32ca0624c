"""Server-sent events out of bytes, however the network cut them.

The grammar is that of the HTML standard, "Parsing an event stream" (9.2.6). Only ``data`` is of interest: OpenAI's API
uses no other field. The packages that parse such streams read them as lines of text from an HTTP client of their own;
what is wanted here is a parser of bytes that keeps no more than one unfinished event and bounds it.
"""

from __future__ import annotations

from typing import Final

__all__ = ["MAX_EVENT_BYTES", "EventStreamParser", "EventTooLong"]

MAX_EVENT_BYTES: Final = 4 * 1024 * 1024
"""Room for one event with the log-probabilities of many tokens."""

_BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"


class EventTooLong(Exception):
    """An event does not end within the limit."""


class EventStreamParser:
    """Cuts one stream into events. Owned by whoever reads the stream.

    Lines end with LF, CRLF or CR and with nothing else: U+2028 and its like are text. A blank line ends an event; what
    no blank line has ended by the end of the stream was never sent completely and is not told.
    """

    __slots__ = ("_after_cr", "_at_start", "_limit", "_rest")

    def __init__(self, max_event_bytes: int = MAX_EVENT_BYTES) -> None:
        self._limit: Final = max_event_bytes
        self._rest = bytearray()  # of an event that has not ended; its lines end with LF
        self._after_cr = False
        self._at_start = True

    def feed(self, data: bytes) -> list[bytes]:
        """The data of the events that end within ``data``, UTF-8, several lines joined by LF.

        Raises:
            EventTooLong: An event goes on for more than ``max_event_bytes``.
        """
        if self._after_cr or b"\r" in data:
            data = self._with_line_feeds(data)
        rest = self._rest
        whole = data.startswith(b"data: ") and data.endswith(b"\n\n") and data.find(b"\n") == len(data) - 2
        if whole and not rest and not self._at_start:  # what comes nearly always
            return [data[6:-2]]
        if rest:
            searched = len(rest) - 1
            rest += data
            if rest.find(b"\n\n", searched) < 0:
                return self._unfinished()
            data = bytes(rest)
            rest.clear()
        *events, unfinished = data.split(b"\n\n")
        if unfinished:
            rest += unfinished
            self._unfinished()
        if events and self._at_start:
            self._at_start = False
            events[0] = events[0].removeprefix(_BYTE_ORDER_MARK)
        return [told for event in events if (told := _data(event)) is not None]

    def _with_line_feeds(self, data: bytes) -> bytes:
        """``data`` with LF for each line end. A CR ends its line at once; an LF right behind it belongs to it."""
        if self._after_cr:
            data = data.removeprefix(b"\n")
        self._after_cr = data.endswith(b"\r")
        return data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")

    def _unfinished(self) -> list[bytes]:
        if len(self._rest) > self._limit:
            raise EventTooLong(f"an event of more than {self._limit} bytes")
        return []


def _data(event: bytes) -> bytes | None:
    """The data of one event; None when it has none (a comment that keeps the connection alive)."""
    if event.startswith(b"data: ") and b"\n" not in event:
        return event[6:]
    lines = []
    for line in event.split(b"\n"):
        if line.startswith(b"data:"):
            lines.append(line[5:].removeprefix(b" "))
        elif line == b"data":
            lines.append(b"")
    return b"\n".join(lines) if lines else None
