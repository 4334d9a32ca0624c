"""One request's connection to a remote server, and what ends it: its answer, the server, the caller, or silence."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from typing import Final

import aiohttp

from gateway.replicas.openai_server import COMPLETIONS, EVENTS, OpenAIServer

__all__ = ["Flight"]

_ERROR_TIMEOUT_S: Final = 4.0
_MAX_ERROR_BYTES: Final = 64 * 1024
_ENDING_TIMEOUT_S: Final = 0.2


class Flight:
    """Owned by the one task that opens and reads it and closes it in any case; ``lose`` may be called by others.

    Silence is measured while an answer that has begun is waited for: ``idle_timeout_s`` seconds of it end the flight.
    Before that the server may have a queue. One timer that is seldom set again does it, so that an event costs nothing.
    """

    __slots__ = ("_idle_timeout_s", "_loop", "_opening", "_response", "_timer", "_waits_since", "loss", "produced")

    def __init__(self, idle_timeout_s: float) -> None:
        self.loss: str | None = None
        """Why it was ended by ``lose``."""
        self.produced = False
        """Whether any output has come; set by the owner."""
        self._idle_timeout_s = idle_timeout_s
        self._loop = asyncio.get_running_loop()
        self._opening: asyncio.Timeout | None = None
        self._response: aiohttp.ClientResponse | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._waits_since: float | None = None

    async def open(
        self, server: OpenAIServer, body: bytes, route: str = COMPLETIONS, headers: Mapping[str, str] = EVENTS
    ) -> aiohttp.ClientResponse:
        """Send the request and wait for the head of the response. Raises ``aiohttp.ClientError``, ``OSError``."""
        try:
            async with asyncio.timeout(None) as self._opening:
                self._response = await server.post(route, body, headers)
        finally:
            self._opening = None
        return self._response

    async def read(self) -> bytes:
        """The next bytes of the body, none at its end. Raises ``aiohttp.ClientError``, ``OSError``."""
        if self.loss is not None:
            raise ConnectionAbortedError
        assert self._response is not None, "a flight is opened first"
        self._waits_since = self._loop.time()
        if self._timer is None and self.produced:
            self._timer = self._loop.call_at(self._waits_since + self._idle_timeout_s, self._check_idle)
        try:
            return await self._response.content.readany()
        finally:
            self._waits_since = None

    async def read_error(self) -> bytes:
        """The body of a response that is no answer, as far as it comes in time and is not too long."""
        assert self._response is not None, "a flight is opened first"
        data = b""
        with contextlib.suppress(aiohttp.ClientError, OSError):
            async with asyncio.timeout(_ERROR_TIMEOUT_S):
                while len(data) < _MAX_ERROR_BYTES and (piece := await self._response.content.readany()):
                    data += piece
        return data

    async def finish(self) -> None:
        """Wait a moment for the end of a body whose last event has come, so that the connection can be used again."""
        assert self._response is not None, "a flight is opened first"
        content = self._response.content
        if not content.at_eof():
            with contextlib.suppress(aiohttp.ClientError, OSError):
                async with asyncio.timeout(_ENDING_TIMEOUT_S):
                    while await content.readany():
                        pass

    def lose(self, reason: str) -> None:
        """End it now: whoever waits for it gets an error, and ``loss`` says why."""
        if self.loss is None:
            self.loss = reason
            if self._opening is not None:
                self._opening.reschedule(self._loop.time())
            elif self._response is not None:
                self._response.close()

    def close(self) -> None:
        """Close the connection at once, unless the response was read to its end. Safe to repeat."""
        if self._timer is not None:
            self._timer.cancel()
        if self._response is not None:
            self._response.close()

    def _check_idle(self) -> None:
        now, since = self._loop.time(), self._waits_since
        due = (now if since is None else since) + self._idle_timeout_s
        if due <= now:
            self.lose(f"nothing more came for {self._idle_timeout_s:g} s")
        else:
            self._timer = self._loop.call_at(due, self._check_idle)
