"""One request's connection to a remote server, and what ends it: its answer, the server, the caller, or silence."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Final

from gateway.replicas.http_client import HttpClient, HttpConnection
from gateway.replicas.openai_completion import BrokenAnswer

__all__ = ["Flight", "Flights"]

_ERROR_TIMEOUT_S: Final = 4.0
_MAX_ERROR_BYTES: Final = 64 * 1024

_PIECE_BYTES: Final = 64 * 1024
"""Of an answer that comes as one so much is taken in before it is looked at."""

_STALE_S: Final = 1.0
"""A server that had closed a connection before a request came says so within a round trip. Later it had the request."""


class Flight:
    """Owned by the one task that opens and reads it and closes it in any case; ``lose`` may be called by others.

    Silence is measured while an answer that has begun is waited for: ``idle_timeout_s`` seconds of it end the flight.
    Before that the server may have a queue. One timer that is seldom set again does it, so that an event costs nothing.
    ``produced`` is set by the owner.
    """

    __slots__ = (
        "_connection",
        "_ending",
        "_idle_timeout_s",
        "_loop",
        "_opening",
        "_timer",
        "_waits_since",
        "begun",
        "loss",
        "produced",
        "whole",
    )

    def __init__(self, idle_timeout_s: float, *, whole: bool = False) -> None:
        self.whole: Final = whole
        """Whether the answer comes as one, so that it may be under way although nothing has come."""
        self.loss: str | None = None
        """Why it was ended by ``lose``."""
        self.begun = False
        """Whether some of an answer has come that is told when all of it is there."""
        self.produced = False
        """Whether any output has come."""
        self._idle_timeout_s = idle_timeout_s
        self._loop = asyncio.get_running_loop()
        self._opening: asyncio.Timeout | None = None
        self._connection: HttpConnection | None = None
        self._ending = False
        self._timer: asyncio.TimerHandle | None = None
        self._waits_since: float | None = None

    async def open(self, client: HttpClient, head: bytes, body: bytes) -> HttpConnection:
        """Send the request and wait for the head of the response. Raises ``OSError``.

        A kept connection that ends without a byte of an answer says nothing about the server, which may close it at any
        time: the request is sent once more, over a new one. Unless that took a while: the server had it then.
        """
        connection = client.waiting()
        if connection is not None:
            sent_at = self._loop.time()
            try:
                return await self._send(connection, head, body)
            except OSError:
                if connection.answered or self.loss is not None or self._loop.time() - sent_at > _STALE_S:
                    raise
                connection.close()
        try:
            async with asyncio.timeout(None) as self._opening:
                connection = await client.connect()
        finally:
            self._opening = None
        return await self._send(connection, head, body)

    async def read(self, least: int = 1) -> bytes:
        """The next bytes of the body, at ``least`` so many, none at its end. Raises ``OSError``."""
        if self.loss is not None:
            raise ConnectionAbortedError
        assert self._connection is not None, "a flight is opened first"
        self._waits_since = self._loop.time()
        if self._timer is None and (self.produced or self.begun):
            self._timer = self._loop.call_at(self._waits_since + self._idle_timeout_s, self._check_idle)
        try:
            return await self._connection.read(least)
        finally:
            self._waits_since = None

    async def read_all(self, most: int) -> bytes:
        """The body of an answer that comes as one. Raises ``OSError``, and ``BrokenAnswer`` beyond ``most`` bytes."""
        pieces = [await self.read()]
        self.begun = True
        size = len(pieces[0])
        while piece := await self.read(_PIECE_BYTES):
            pieces.append(piece)
            size += len(piece)
            if size > most:
                raise BrokenAnswer("its answer is too long")
        return b"".join(pieces)

    async def read_error(self) -> bytes:
        """The body of a response that is no answer, as far as it comes in time and is not too long."""
        assert self._connection is not None, "a flight is opened first"
        data = b""
        with contextlib.suppress(OSError):
            async with asyncio.timeout(_ERROR_TIMEOUT_S):
                while len(data) < _MAX_ERROR_BYTES and (piece := await self._connection.read()):
                    data += piece
        return data

    def finish(self) -> None:
        """All that is wanted of the answer has come: its connection may be used again when its body has ended."""
        self._ending = True

    def lose(self, reason: str) -> None:
        """End it now: whoever waits for it gets an error, and ``loss`` says why."""
        if self.loss is None:
            self.loss = reason
            if self._opening is not None:
                self._opening.reschedule(self._loop.time())
            elif self._connection is not None:
                self._connection.close()

    def close(self) -> None:
        """Close the connection at once, unless the response was read to its end. Safe to repeat."""
        if self._timer is not None:
            self._timer.cancel()
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.release(ending=self._ending)

    async def _send(self, connection: HttpConnection, head: bytes, body: bytes) -> HttpConnection:
        self._connection = connection
        connection.send(head, body)
        await connection.head()
        return connection

    def _check_idle(self) -> None:
        now, since = self._loop.time(), self._waits_since
        heard_at = 0.0 if self._connection is None else self._connection.heard_at
        due = (now if since is None else max(since, heard_at)) + self._idle_timeout_s
        if due <= now:
            self.lose(f"nothing more came for {self._idle_timeout_s:g} s")
        else:
            self._timer = self._loop.call_at(due, self._check_idle)


class Flights:
    """The requests that are at one server. Owned by its replica; ``on_change`` hears when they have become others."""

    def __init__(self, on_change: Callable[[], None]) -> None:
        self._flights: set[Flight] = set()
        self._on_change: Final = on_change
        self._empty = asyncio.Event()
        self._empty.set()

    def __len__(self) -> int:
        return len(self._flights)

    def add(self, flight: Flight) -> None:
        """One more."""
        self._flights.add(flight)
        self._empty.clear()
        self._on_change()

    def remove(self, flight: Flight) -> None:
        """One has ended."""
        self._flights.discard(flight)
        if not self._flights:
            self._empty.set()
        self._on_change()

    def lose(self, reason: str) -> None:
        """End all of them."""
        for flight in list(self._flights):
            flight.lose(reason)

    def lose_waiting(self, reason: str, *, whole: bool) -> None:
        """End those of whose answers nothing has come; those that come as one, and may be under way, if ``whole``."""
        for flight in list(self._flights):
            if not (flight.produced or flight.begun) and (whole or not flight.whole):
                flight.lose(reason)

    async def wait_empty(self) -> None:
        """Return when there are none."""
        await self._empty.wait()
