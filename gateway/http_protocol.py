"""uvicorn's HTTP protocol with the limits it lacks: on the head of a request, in bytes, lines and seconds.

And with answers to clients that have said all they had to say.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from http import HTTPStatus
from math import inf
from typing import Any, Final

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from gateway.api.errors import encode_error
from gateway.api.exchange import CONNECTION, Headers
from gateway.errors import InvalidRequestError

__all__ = ["MAX_HEADERS", "MAX_HEAD_BYTES", "LimitedHttpProtocol"]

MAX_HEAD_BYTES: Final = 64 * 1024
"""Request line and headers together."""

MAX_HEADERS: Final = 256

HEAD_TIMEOUT_S: Final = 20.0
"""From a connection's first byte of a request to the end of its headers, however slowly they drip."""


STALLED_WRITE_TIMEOUT_S: Final = 60.0
"""How long an answer waits for a client that takes not one byte of it."""


FIRST_PROBE_S: Final = 0.1
PROBE_S: Final = 1.0
"""How soon, and then how often, it is looked whether a client that sends no more is still there."""

_FRAMING: Final = (b"content-length", b"transfer-encoding")
"""Headers that say where a body ends."""

_CHUNKED: Final = (b"transfer-encoding", b"chunked")

_CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"


class LimitedHttpProtocol(HttpToolsProtocol):
    """Closes connections whose request heads are too long, too many-lined, or too slow, and those that never read.

    The time for a body is limited where bodies are read; between requests uvicorn's keep-alive time-out rules.

    A client that has shut its side after a whole request gets its answer. To the kernel it looks like one that has left
    until something is sent: while the answer has not begun, that is ``100 Continue``, which every HTTP/1.1 client
    passes over, and to which a machine whose client has left says so. With HTTP/1.0 there is no such thing to send:
    there it has left.

    Nobody gets another protocol than HTTP/1.1 here. Who offers one beside a request (Java's ``HttpClient`` does so with
    HTTP/2) is answered in this one; the parser takes such a request for ended with its head, whatever body it has.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_bytes = 0
        self._in_head = True
        self._refused = False
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._probe_timer: asyncio.TimerHandle | None = None
        self._watchers: list[Callable[[], None]] = []
        self._lost = False
        self._head_again = False
        self._idle_timer: asyncio.TimerHandle | None = None
        self._idle_since = inf  # while it is not idle
        self._extensions: dict[str, Any] = {CONNECTION: self}

    def watch(self, gone: Callable[[], None]) -> None:
        """Call ``gone`` when the connection ends, at once if it has ended."""
        if self._lost:
            gone()
            return
        self._watchers.append(gone)
        self.flow.resume_reading()  # paused behind a long body; the end of a connection is read, too

    def unwatch(self, gone: Callable[[], None]) -> None:
        """Do so no more."""
        if gone in self._watchers:
            self._watchers.remove(gone)

    @property
    def has_body(self) -> bool:
        """Whether the body of the request in hand has come: it need not be waited for."""
        return not self.cycle.more_body  # of pipelined requests it is the last one, whose body comes last

    def write_answer(self, scope: Any, status: int, headers: Headers, body: bytes) -> bool:
        """Send the whole answer to the request of ``scope`` at once, as ASGI would in two steps and much more time.

        False where that cannot be done: it has to wait for the client or its turn, or is one without a body.
        """
        if not self._write_head(scope, status, headers, body):
            return False
        cycle = self.cycle
        cycle.response_complete = True
        cycle.message_event.set()
        if not cycle.keep_alive:
            self.transport.close()
        cycle.on_response()
        return True

    def begin_chunks(self, scope: Any, status: int, headers: Headers, data: bytes) -> bool:
        """Begin an answer in chunks with the first of them; the next ones may come over ASGI. False as above."""
        first = b"%x\r\n%b\r\n" % (len(data), data) if data else b""
        if not self._write_head(scope, status, [*headers, _CHUNKED], first):
            return False
        self.cycle.chunked_encoding = True
        return True

    def write_chunk(self, data: bytes) -> bool:
        """Send more of an answer in chunks that has begun; False where the client has to be waited for."""
        if self.flow.write_paused:
            return False
        self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return True

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has connected; the clock for its first request starts."""
        super().connection_made(transport)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """It is gone."""
        self._stop_timer()
        self._stop_write_timer()
        for timer in (self._probe_timer, self._idle_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)
        self._lost = True
        for gone in [*self._watchers]:
            gone()

    def eof_received(self) -> bool:  # type: ignore[override]
        """The client sends no more; whether the connection stays open for an answer."""
        cycle = self.cycle
        if self._refused or cycle is None or cycle.more_body or cycle.response_complete:
            return False
        if cycle.scope["http_version"] == "1.0":
            return False
        cycle.keep_alive = False
        if self._probe_timer is None:
            self._probe(FIRST_PROBE_S)
        return True

    def data_received(self, data: bytes) -> None:
        """Count before parsing: the parser keeps every header it has seen."""
        if self._refused:
            return
        if self._in_head:
            # Body bytes that come along in the same read are counted too; a read is 256 KiB at most.
            self._head_bytes += min(len(data), _head_length(data))
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse(431, f"The request's head is longer than {MAX_HEAD_BYTES} bytes.")
                return
        idle_since, self._idle_since = self._idle_since, inf
        try:
            self._parse(data)
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")
        if not self._in_head and self.cycle is not None and self.cycle.response_complete:
            self._idle_since = idle_since  # more of a body that nobody reads, as it was answered before its end
        if self._in_head and self._head_bytes and self._head_timer is None:  # not all of it came at once
            self._expect_head()

    def on_message_begin(self) -> None:
        """A request begins."""
        if self._head_again:
            return
        super().on_message_begin()
        self.scope["extensions"] = self._extensions

    def on_header(self, name: bytes, value: bytes) -> None:
        """One more header."""
        if self._head_again:
            return
        if len(self.headers) >= MAX_HEADERS:
            self._refuse(431, f"The request has more than {MAX_HEADERS} headers.")
            return
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The head is complete and within the limits."""
        if self._head_again:
            return
        self._stop_timer()
        self._in_head = False
        if not self._refused:
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Part of the body."""
        if not self._refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """The request is complete; the next one may follow."""
        if self.parser.should_upgrade():  # which says nothing about its body
            return
        self._in_head = True
        self._head_bytes = 0
        if not self._refused:
            super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Tell who speaks no HTTP so, in the shape of every other error."""
        self._refuse(400, msg)

    def pause_writing(self) -> None:
        """The client reads more slowly than we write; it has to go on reading."""
        super().pause_writing()
        self._expect_progress(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        """It has caught up."""
        self._stop_write_timer()
        super().resume_writing()

    def on_response_complete(self) -> None:
        """As uvicorn's, with one timer for all the times that a connection is idle instead of one for each."""
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
            return
        self._idle_since = self.loop.time()
        if self._idle_timer is None:
            self._idle_timer = self.loop.call_later(self.timeout_keep_alive, self._check_idle)

    def timeout_keep_alive_handler(self) -> None:
        """Close an idle connection; one whose last answer was not even taken would never be flushed."""
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            super().timeout_keep_alive_handler()

    def _should_upgrade(self) -> bool:
        return False

    def _parse(self, data: bytes) -> None:
        """Parse, and go on with the body behind a head that offers another protocol.

        That takes another parser, which is shown of the head only how long the body is.
        """
        while True:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as offer:
                data = data[offer.args[0] :]
            framing = (b"%b: %b\r\n" % header for header in self.headers if header[0] in _FRAMING)
            self.parser = httptools.HttpRequestParser(self)
            self._head_again = True
            self.parser.feed_data(b"POST / HTTP/1.1\r\n%b\r\n" % b"".join(framing))
            self._head_again = False

    def _probe(self, next_s: float) -> None:
        """Leave a client that has left; one that still waits for the beginning of its answer is asked again later."""
        connection = self.transport.get_extra_info("socket")
        if connection is not None and connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
        elif not self.cycle.response_started:  # what is sent of an answer shows it as well
            if not self.pipeline:  # else another answer may be on its way
                self.transport.write(_CONTINUE)
            self._probe_timer = self.loop.call_later(next_s, self._probe, PROBE_S)

    def _write_head(self, scope: Any, status: int, headers: Headers, behind: bytes) -> bool:
        """Send the head of an answer and what comes ``behind`` it, in one piece; False where it has to wait."""
        cycle = self.cycle  # of the last request that has come, whose answer may not be due yet
        if cycle.scope is not scope or cycle.response_started or cycle.disconnected or self.flow.write_paused:
            return False
        if scope["method"] == "HEAD":
            return False
        headers = [*self.server_state.default_headers, *headers]
        if not cycle.keep_alive:
            headers.append((b"connection", b"close"))
        lines = [STATUS_LINE[status]]
        for name, value in headers:
            lines += (name, b": ", value, b"\r\n")
        head = b"".join(lines)
        if not head.count(b"\r") == head.count(b"\n") == 1 + len(headers):
            raise RuntimeError("a header holds a line break")
        cycle.response_started = True
        cycle.waiting_for_100_continue = False
        self.transport.write(b"".join((head, b"\r\n", behind)))
        return True

    def _check_idle(self) -> None:
        """Close a connection that has been idle for too long."""
        self._idle_timer = None
        due = self._idle_since + self.timeout_keep_alive
        if due <= self.loop.time():
            self.timeout_keep_alive_handler()
        elif due < inf:  # else it is not idle
            self._idle_timer = self.loop.call_at(due, self._check_idle)

    def _expect_progress(self, unread: int) -> None:
        self._write_timer = self.loop.call_later(STALLED_WRITE_TIMEOUT_S, self._check_progress, unread)

    def _check_progress(self, unread: int) -> None:
        left = self.transport.get_write_buffer_size()
        if left < unread:  # nothing is added while writing is paused
            self._expect_progress(left)
        else:
            self.transport.abort()

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _expect_head(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._head_is_late)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        if not self._head_bytes:  # opened ahead of need and never used
            self.transport.close()
            return
        self._refuse(408, f"The request's head did not arrive within {HEAD_TIMEOUT_S:.0f} s.")

    def _refuse(self, status: int, message: str) -> None:
        """Answer unless another answer is being written, and close."""
        if self._refused:
            return
        self._refused = True
        cycle = self.cycle
        in_own_body = cycle is not None and not self._in_head and not cycle.response_started
        if not self.transport.is_closing() and (cycle is None or cycle.response_complete or in_own_body):
            body = encode_error(InvalidRequestError(message))
            head = (
                f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
                f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
            )
            self.transport.write(head.encode() + body)
        self.transport.close()


def _head_length(data: bytes) -> int:
    """How much of a read belongs to a request's head, as far as can be told before parsing."""
    end = data.find(b"\r\n\r\n")
    return len(data) if end < 0 else end + 4
