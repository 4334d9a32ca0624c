"""One HTTP request and its answer at the level of ASGI, for the routes where every microsecond counts.

The generation routes answer once or in hundreds of pieces, must notice at any moment that the client has left, and
must count the bytes of a body instead of believing its header. On ASGI itself a streamed answer of 32 events costs a
fifth of what it costs through the framework's own streaming response.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Any, Final, Protocol

from litestar.types import ASGIApp, Message, Receive, Scope, Send

from gateway.errors import BodyTimeoutError, InvalidRequestError, PayloadTooLargeError
from gateway.identity import Peer

__all__ = [
    "CONNECTION",
    "ClientGone",
    "ClientWatch",
    "Connection",
    "Exchange",
    "Headers",
    "name_response",
    "request_id",
]

Headers = list[tuple[bytes, bytes]]

CONNECTION: Final = "headstart.connection"
"""The extension of ASGI's scope that holds the ``Connection``."""

_MAX_REQUEST_ID: Final = 128
_UNCLEAN: Final = re.compile(rb"[^A-Za-z0-9._:/+=@-]")
_BODY_TIMEOUT_S: Final = 30.0
_LAST_WORDS_TIMEOUT_S: Final = 5.0


class ClientGone(Exception):
    """The client has closed the connection. There is nobody to answer."""


def request_id(scope: Scope) -> str:
    """The client's own id (cut to 128 characters and cleaned) or a new one. The same for the whole request.

    It goes into the answer's header and the log. Nothing inside is keyed by it.
    """
    state: dict[str, Any] = scope.setdefault("state", {})
    known: str | None = state.get("request_id")
    if known is None:
        given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
        cleaned = _UNCLEAN.sub(b"", given[:_MAX_REQUEST_ID]).decode("ascii")
        known = state["request_id"] = cleaned or f"req-{secrets.token_hex(12)}"
    return known


def name_response(app: ASGIApp) -> ASGIApp:
    """Middleware that puts the request's id on every response that does not carry it yet."""

    async def named(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = list(message["headers"])
                if all(name != b"x-request-id" for name, _ in headers):
                    headers.append((b"x-request-id", request_id(scope).encode()))
                message = {**message, "headers": headers}
            await send(message)

        await app(scope, receive, send_named)

    return named


class Connection(Protocol):
    """What ASGI lacks: it tells of a client that leaves only to a task that waits for it, and sends each message."""

    def watch(self, gone: Callable[[], None]) -> None:
        """Call ``gone`` when the connection ends, at once if it has ended."""

    def unwatch(self, gone: Callable[[], None]) -> None:
        """Do so no more."""

    @property
    def has_body(self) -> bool:
        """Whether the body of the request in hand has come: it need not be waited for."""
        ...

    def write_answer(self, scope: Scope, status: int, headers: Headers, body: bytes) -> bool:
        """Send the whole answer to the request of ``scope``, ``headers`` complete; False where ASGI has to do it."""
        ...

    def begin_chunks(self, scope: Scope, status: int, headers: Headers, data: bytes) -> bool:
        """Begin an answer in chunks, with the first ``data`` where there is some; False where ASGI has to do it."""
        ...

    def write_chunk(self, data: bytes) -> bool:
        """Send more of an answer in chunks that has begun; False where the client has to be waited for."""
        ...


class Exchange:
    """Reads one request and writes one answer. Owned by the task that handles the request."""

    __slots__ = ("_chunked", "_connection", "_head", "_receive", "_scope", "_send", "started")

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope = scope
        self._receive = receive
        self._send = send
        extensions: Any = scope["extensions"]
        self._connection: Connection = extensions[CONNECTION]
        self._head: tuple[int, Headers] | None = None  # goes out with the first of the body
        self._chunked = False  # its length is not told
        self.started = False
        """Whether the status is settled, after which an error can only be told in the body."""

    @property
    def method(self) -> str:
        """The HTTP method."""
        return str(self._scope.get("method", ""))

    @property
    def id(self) -> str:
        """See ``request_id``."""
        return request_id(self._scope)

    @property
    def headers(self) -> Headers:
        """As they came, names in lower case."""
        return list(self._scope["headers"])

    @property
    def peer(self) -> Peer:
        """Who sent it, for ``gateway.identity``."""
        client = self._scope["client"]
        return Peer(client[0] if client else None, self._scope["headers"])

    async def body(self, limit: int) -> bytes:
        """The whole body.

        Raises:
            PayloadTooLargeError: More than ``limit`` bytes were announced or have come.
            InvalidRequestError: It is compressed.
            BodyTimeoutError: It did not arrive within 30 s.
            ClientGone: The client left before its end.
        """
        for name, value in self._scope["headers"]:
            if name == b"content-length" and value.isdigit() and int(value) > limit:
                raise _too_large(limit)
            if name == b"content-encoding" and value.lower() != b"identity":
                raise InvalidRequestError("Compressed bodies are not accepted: send plain JSON.")
        if self._connection.has_body:
            return await self._read(limit)
        try:
            async with asyncio.timeout(_BODY_TIMEOUT_S):
                return await self._read(limit)
        except TimeoutError:
            raise BodyTimeoutError(f"The body did not arrive within {_BODY_TIMEOUT_S:.0f} s.") from None

    async def _read(self, limit: int) -> bytes:
        chunks: list[bytes] = []
        size = 0
        while True:
            message: Any = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            chunk: bytes = message.get("body", b"")
            size += len(chunk)
            if size > limit:
                raise _too_large(limit)
            if not message.get("more_body"):
                return b"".join([*chunks, chunk]) if chunks else chunk
            chunks.append(chunk)

    async def answer(self, headers: Headers, body: bytes, status: int = 200) -> None:
        """Send a whole JSON answer."""
        headers += [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        self._start(headers, status)
        await self._send_body(body, more=False)

    def start_events(self, headers: Headers) -> None:
        """Begin a stream of server-sent events, with the next that are sent."""
        headers += [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),  # nginx would collect events otherwise
        ]
        self._start(headers)
        self._chunked = True

    def start_relay(self, status: int, headers: Headers) -> None:
        """Begin an answer that somebody else gives, with the next of it that is sent."""
        self._start(headers, status)
        self._chunked = all(name != b"content-length" for name, _ in headers)

    def send_at_once(self, data: bytes) -> bool:
        """Send one or more events of a stream that has begun; False where ``send_events`` has to wait for the client.

        An event costs half of it: no coroutine, and no message for ASGI.
        """
        return self._head is None and self._chunked and data != b"" and self._connection.write_chunk(data)

    async def send_events(self, data: bytes) -> None:
        """Send one or more events; waits while the client does not read."""
        await self._send_body(data, more=True)

    async def end_events(self, data: bytes) -> None:
        """Send the last events and end the answer."""
        await self._send_body(data, more=False)

    async def break_off(self, data: bytes) -> None:
        """End a stream that cannot be finished; a client that does not read is not waited for."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_LAST_WORDS_TIMEOUT_S):
                await self._send_body(data, more=False)

    def watch(self) -> ClientWatch:
        """A block that is cancelled when the client leaves. Only after ``body``."""
        return ClientWatch(self._connection)

    def _start(self, headers: Headers, status: int = 200) -> None:
        self.started = True
        headers.append((b"x-request-id", self.id.encode()))
        self._head = status, headers

    async def _send_body(self, data: bytes, *, more: bool) -> None:
        if self._head is not None:
            (status, headers), self._head = self._head, None
            if more and self._chunked:
                if self._connection.begin_chunks(self._scope, status, headers, data):
                    return
            elif not more and not self._chunked and self._connection.write_answer(self._scope, status, headers, data):
                return
            await self._send({"type": "http.response.start", "status": status, "headers": headers})
        message: Message = {"type": "http.response.body", "body": data, "more_body": more}
        await self._send(message)


class ClientWatch:
    """``async with`` block that ends with ``ClientGone`` as soon as the client closes the connection.

    Works like ``asyncio.timeout``, with the disconnect in place of the clock. Without it a request whose answer is not
    being written to would be computed to its end for nobody.
    """

    __slots__ = ("_cancelling", "_connection", "_gone", "_task")

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._gone = False
        self._cancelling = 0
        self._task: asyncio.Task[Any]

    async def __aenter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._cancelling = task.cancelling()
        self._connection.watch(self._leave)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._connection.unwatch(self._leave)
        if self._gone and self._task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise ClientGone from error

    def _leave(self) -> None:
        self._gone = True
        self._task.cancel()


def _too_large(limit: int) -> PayloadTooLargeError:
    return PayloadTooLargeError(f"The body is longer than the {limit} bytes allowed (limits.max_body_bytes).")
