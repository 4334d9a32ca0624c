"""One connection to an engine: a handshake where it is reached by TCP, then frames in, frames out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, cast

import msgspec

from engine.errors import ProtocolError
from engine.tcp import GatewayHandshake, keep_alive
from engine.wire import FromEngine, ToEngine, decode_from_engine, frame, take_frames

__all__ = ["EngineConnection"]


class EngineConnection(asyncio.Protocol):
    """Speaks ``engine.wire`` on a stream socket. Owned by the replica that opened it.

    ``on_message`` is called on the event loop with each message and must not raise. ``closed`` is done when the
    connection has ended, with the reason in words as its result.
    """

    def __init__(self, on_message: Callable[[FromEngine], None], *, secret: bytes | None = None) -> None:
        """``secret`` is what both ends of a TCP connection must know; None on a unix socket."""
        self.closed: Final[asyncio.Future[str]] = asyncio.get_running_loop().create_future()
        self._on_message = on_message
        self._handshake = None if secret is None else GatewayHandshake(secret)
        self._buffer = bytearray()
        self._reason: str | None = None
        self._transport: asyncio.Transport | None = None

    def send(self, message: ToEngine) -> None:
        """Write a message; dropped when the connection has ended, as ``closed`` will tell."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frame(message))

    def close(self, reason: str | None = None) -> None:
        """End the connection at once, for ``reason``."""
        self._reason = self._reason or reason
        if self._transport is not None:
            self._transport.abort()

    # --- asyncio.Protocol ------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The socket is connected."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance
        if self._handshake is not None:
            keep_alive(transport.get_extra_info("socket"))

    def data_received(self, data: bytes) -> None:
        """Decode every frame that is complete."""
        self._buffer += data
        if self._handshake is not None and not self._shake_hands(self._handshake):
            return
        try:
            for body in take_frames(self._buffer):
                self._on_message(decode_from_engine(body))
        except (msgspec.DecodeError, ProtocolError) as error:
            self.close(f"it broke the protocol: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        """The other side is gone, or ``close`` was called."""
        if not self.closed.done():
            self.closed.set_result(self._reason or "the connection to the engine was lost")

    def _shake_hands(self, handshake: GatewayHandshake) -> bool:
        """Whether the handshake is over, and messages follow."""
        assert self._transport is not None
        try:
            while not handshake.done:
                if not (answer := handshake.take(self._buffer)):
                    break
                self._transport.write(answer)
        except ProtocolError as error:
            self.close(str(error))
            return False
        if handshake.done:
            self._handshake = None
        return handshake.done
