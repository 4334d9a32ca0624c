"""One connection to an engine process: frames in, frames out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, cast

import msgspec

from engine.errors import ProtocolError
from engine.wire import FromEngine, ToEngine, decode_from_engine, frame, take_frames

__all__ = ["EngineConnection"]


class EngineConnection(asyncio.Protocol):
    """Speaks ``engine.wire`` on a stream socket. Owned by the replica that opened it.

    ``on_message`` is called on the event loop with each message and must not raise. ``closed`` is done when the
    connection has ended, with the reason in words as its result.
    """

    def __init__(self, on_message: Callable[[FromEngine], None]) -> None:
        self.closed: Final[asyncio.Future[str]] = asyncio.get_running_loop().create_future()
        self._on_message = on_message
        self._buffer = bytearray()
        self._reason: str | None = None
        self._transport: asyncio.Transport | None = None

    def send(self, message: ToEngine) -> None:
        """Write a message; dropped when the connection has ended, as ``closed`` will tell."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frame(message))

    def close(self) -> None:
        """End the connection at once."""
        if self._transport is not None:
            self._transport.abort()

    # --- asyncio.Protocol ------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The socket is connected."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance

    def data_received(self, data: bytes) -> None:
        """Decode every frame that is complete."""
        self._buffer += data
        try:
            for body in take_frames(self._buffer):
                self._on_message(decode_from_engine(body))
        except (msgspec.DecodeError, ProtocolError) as error:
            self._reason = f"it broke the protocol: {error}"
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """The other side is gone, or ``close`` was called."""
        if not self.closed.done():
            self.closed.set_result(self._reason or "the connection to the engine was lost")
