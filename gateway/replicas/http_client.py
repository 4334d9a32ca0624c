"""HTTP/1.1 as it is spoken to one server on the way of every request: no more than that takes.

A general client costs a request 0.3 ms of processor time and each chunk of its answer some 10 us: sessions, cookies,
redirects, traces, payload and stream classes. Here a request is one write, and a connection is the protocol object
that parses what comes (with httptools, as the server's side does) and hands it to the one who waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import ssl
import time
from collections.abc import Iterable, Mapping
from typing import Final, cast
from urllib.parse import urlsplit

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

__all__ = ["AnswerCut", "HttpClient", "HttpConnection", "header_lines"]

_READ_AHEAD_BYTES: Final = 256 * 1024
"""What is taken in of an answer that nobody reads."""

_MAX_HEAD_BYTES: Final = 256 * 1024
_ENDING_TIMEOUT_S: Final = 0.2
_ALIVE: Final = (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3))
"""When the kernels make sure of each other, in seconds and tries, where they can be told. An answer that comes as one
says nothing for minutes, after which routers on the way forget its connection, and nobody would hear of its end."""

_LINE_BREAK: Final = re.compile(r"[\r\n\0]")

Headers = Iterable[tuple[str, str]]


class AnswerCut(ConnectionError):
    """The connection ended in the middle of an answer, or what came over it is no HTTP."""


class HttpClient:
    """Requests to the server at ``url``. Owns the connections that wait for the next one; belongs to one event loop.

    ``headers`` go with every request. An idle connection is closed after ``keep_alive_s``.
    """

    def __init__(self, url: str, headers: Mapping[str, str], *, connect_timeout_s: float, keep_alive_s: float) -> None:
        """Nothing is connected yet."""
        parts = urlsplit(url)
        self._host: Final = parts.hostname or ""
        self._port: Final = parts.port or (443 if parts.scheme == "https" else 80)
        self._tls: Final = ssl.create_default_context() if parts.scheme == "https" else None
        self._path: Final = parts.path.rstrip("/")
        self._common: Final = (
            b"\r\nhost: " + _authority(self._host, parts.port) + b"\r\n" + header_lines(headers.items())
        )
        self._connect_timeout_s: Final = connect_timeout_s
        self._keep_alive_s: Final = keep_alive_s
        self._idle: list[HttpConnection] = []  # that which was used last at the end
        self._ending: set[HttpConnection] = set()
        self._sweep: asyncio.TimerHandle | None = None
        self._closed = False

    def __len__(self) -> int:
        """How many connections wait for the next request, or for the end of an answer that nobody reads any more."""
        return len(self._idle) + len(self._ending)

    def head(self, route: str, headers: Headers) -> bytes:
        """The head of a request that posts something to ``route``, short of its length."""
        return b"".join((b"POST ", (self._path + route).encode(), b" HTTP/1.1", self._common, header_lines(headers)))

    def waiting(self) -> HttpConnection | None:
        """A connection that is open and idle."""
        idle, oldest = self._idle, time.monotonic() - self._keep_alive_s
        while idle:
            connection = idle.pop()
            if connection.usable and connection.idle_since > oldest:
                return connection
            connection.close()
        return None

    async def connect(self) -> HttpConnection:
        """A new connection. Raises ``OSError``, of which a time-out is one."""
        async with asyncio.timeout(self._connect_timeout_s):
            _, connection = await asyncio.get_running_loop().create_connection(
                lambda: HttpConnection(self), self._host, self._port, ssl=self._tls
            )
        return connection

    def close(self) -> None:
        """Close what is idle, and what is in use as soon as it is not."""
        self._closed = True
        if self._sweep is not None:
            self._sweep.cancel()
        for connection in (*self._idle, *self._ending):
            connection.close()
        self._idle.clear()

    def take_back(self, connection: HttpConnection, *, at_end: bool) -> None:
        """Keep a connection that is done with, or (not ``at_end``) will be in a moment."""
        self.forget(connection)
        if self._closed:
            connection.close()
            return
        if not at_end:
            self._ending.add(connection)
            return
        self._idle.append(connection)
        if self._sweep is None:
            self._sweep = asyncio.get_running_loop().call_later(self._keep_alive_s, self._close_old)

    def forget(self, connection: HttpConnection) -> None:
        """A connection is not about to come to the end of its answer any more."""
        self._ending.discard(connection)

    def _close_old(self) -> None:
        now, kept = time.monotonic(), list[HttpConnection]()
        for connection in self._idle:
            if connection.usable and connection.idle_since > now - self._keep_alive_s:
                kept.append(connection)
            else:
                connection.close()
        self._idle, self._sweep = kept, None
        if kept:  # who was used first stands in front; after a burst some are looked at together
            wait_s = max(kept[0].idle_since + self._keep_alive_s - now, self._keep_alive_s / 16)
            self._sweep = asyncio.get_running_loop().call_later(wait_s, self._close_old)


class HttpConnection(asyncio.Protocol):
    """One connection. Owned by the one request that uses it, between requests by its client.

    ``status`` and ``headers`` (names as they came) are there once ``head`` has returned. ``heard_at`` is when something
    came last, by the loop's clock.
    """

    __slots__ = (
        "_chunks",
        "_client",
        "_complete",
        "_ending",
        "_error",
        "_framed",
        "_head_bytes",
        "_headed",
        "_keep_alive",
        "_least",
        "_loop",
        "_named",
        "_parser",
        "_paused",
        "_size",
        "_transport",
        "_waiter",
        "headers",
        "heard_at",
        "idle_since",
        "status",
    )

    def __init__(self, client: HttpClient) -> None:
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self._named: dict[bytes, bytes] = {}  # the first of each name, in lower case
        self.idle_since = 0.0
        self.heard_at = 0.0
        self._client: Final = client
        self._parser: Final = HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._chunks: list[bytes] = []
        self._size = 0
        self._paused = False
        self._ending: asyncio.TimerHandle | None = None
        self._error: OSError | None = None
        self._headed = False
        self._complete = True
        self._framed = False
        self._keep_alive = False
        self._head_bytes = 0
        self._least = 0
        self._loop: Final = asyncio.get_running_loop()

    @property
    def usable(self) -> bool:
        """Whether it is open, and nothing is under way on it."""
        return self._complete and self._error is None

    @property
    def answered(self) -> bool:
        """Whether anything has come since a request was sent."""
        return self._head_bytes > 0

    @property
    def content_type(self) -> str:
        """The media type of the answer, without parameters."""
        return (self.header(b"content-type") or "").partition(";")[0].strip().lower()

    def header(self, wanted: bytes) -> str | None:
        """The first header of this name, given in lower case."""
        value = self._named.get(wanted)
        return None if value is None else value.decode("latin-1")

    def send(self, head: bytes, body: bytes) -> None:
        """Begin a request, its ``head`` made by the client. The answer is read by ``head`` and ``read``."""
        self.headers = []
        self._headed = self._complete = self._framed = self._keep_alive = False
        self._head_bytes = self._least = 0
        if self._transport is not None and self._error is None:  # it may be lost before it is used for the first time
            self._transport.writelines((b"%bcontent-length: %d\r\n\r\n" % (head, len(body)), body))

    async def head(self) -> None:
        """Return when status and headers are there. Raises ``OSError``."""
        while not self._headed:
            await self._more()

    async def read(self, least: int = 1) -> bytes:
        """What has come of the body, waiting for some; nothing at its end. Raises ``OSError``.

        Who wants all of it asks for at ``least`` so many bytes, to be woken once instead of for each packet.
        """
        self._least = least
        while self._size < least and not self._complete:
            await self._more()
        chunks = self._chunks
        data = chunks[0] if len(chunks) == 1 else b"".join(chunks)
        self._chunks, self._size = [], 0
        if self._paused and self._transport is not None:
            self._paused = False
            self._transport.resume_reading()
        return data

    def release(self, *, ending: bool = False) -> None:
        """End the use of it: it is kept for the next request if its answer was read to the end, else closed at once.

        ``ending``: all that is wanted of the answer has come, so that its end is worth a moment's waiting.
        """
        if not self._keep_alive or self._error is not None or self._paused:
            self.close()
        elif self._complete and (ending or not self._chunks):
            self._chunks, self._size = [], 0
            self.idle_since = time.monotonic()
            self._client.take_back(self, at_end=True)
        elif ending:
            self._client.take_back(self, at_end=False)
            self._ending = self._loop.call_later(_ENDING_TIMEOUT_S, self.close)
        else:
            self.close()

    def close(self) -> None:
        """Close it at once; whoever waits gets an error."""
        if self._ending is not None:
            self._ending.cancel()
            self._ending = None
        if self._transport is not None:
            self._transport.abort()
        self._fail(ConnectionAbortedError())

    # --- asyncio.Protocol ------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It is open."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance
        connection = transport.get_extra_info("socket")
        if connection is not None:
            with contextlib.suppress(OSError):  # it may have ended by now, which some kernels tell here
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                for name, value in _ALIVE:
                    if option := getattr(socket, name, None):
                        connection.setsockopt(socket.IPPROTO_TCP, option, value)

    def data_received(self, data: bytes) -> None:
        """Take in what has come."""
        if self._complete:  # nobody has asked
            self.close()
            return
        if not self._headed:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (HttpParserError, HttpParserUpgrade):
            if not self._complete:
                self._break("it sent what is no HTTP")
                return
            self._keep_alive = False  # something follows the answer
        if not self._headed and self._head_bytes > _MAX_HEAD_BYTES:
            self._break("its head is too long")
            return
        if self._ending is not None:
            self._chunks, self._size = [], 0
            if self._complete:
                self._ending.cancel()
                self._ending = None
                self.release(ending=True)
        elif self._size > _READ_AHEAD_BYTES and not self._paused and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()
        self.heard_at = self._loop.time()
        if self._size >= self._least or self._complete:
            self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        """The server has closed it, or it is gone."""
        self._client.forget(self)
        if self._headed and not self._framed and not self._complete and exc is None:
            self._complete, self._keep_alive = True, False  # such an answer ends with its connection
        self._fail(AnswerCut() if self._headed else ConnectionResetError())

    # --- the parser --------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """An answer begins."""
        if self._complete:
            raise HttpParserError("nobody has asked for another one")

    def on_header(self, name: bytes, value: bytes) -> None:
        """One of the head, or of what follows a body in chunks, which says nothing here."""
        if not self._headed:
            self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        """The head is there, unless it is that of a preliminary answer."""
        self.status = self._parser.get_status_code()
        if self.status < 200:
            self.headers = []
            return
        named = self._named = {name.lower(): value for name, value in reversed(self.headers)}
        self._framed = b"content-length" in named or b"transfer-encoding" in named
        self._keep_alive = self._parser.should_keep_alive()
        self._headed = True

    def on_body(self, data: bytes) -> None:
        """Some of the body."""
        self._chunks.append(data)
        self._size += len(data)

    def on_message_complete(self) -> None:
        """The answer is complete."""
        if self._headed:
            self._complete = True

    # --- inside ------------------------------------------------------------------------------------------

    async def _more(self) -> None:
        if self._error is not None:
            raise self._error
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def _break(self, reason: str) -> None:
        if self._transport is not None:
            self._transport.abort()
        self._fail(AnswerCut(reason))

    def _fail(self, error: OSError) -> None:
        if self._error is None:
            self._error = error
        self._wake()


def _authority(host: str, port: int | None) -> bytes:
    name = f"[{host}]" if ":" in host else host.encode("idna").decode()
    return (name if port is None else f"{name}:{port}").encode()


def header_lines(headers: Headers) -> bytes:
    """Headers as they are sent. Raises ``ValueError`` for one that would be several lines."""
    lines = []
    for name, value in headers:
        if _LINE_BREAK.search(name) or _LINE_BREAK.search(value):
            raise ValueError("a header holds a line break")
        lines.append(f"{name}: {value}\r\n")
    return "".join(lines).encode("latin-1")
