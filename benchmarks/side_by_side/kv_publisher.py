"""Tells of a cache's blocks as vLLM does: KV cache events on a ZeroMQ PUB socket, and a ROUTER that repeats them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Any, Final

import msgspec
import zmq
import zmq.asyncio

from cache_policy.keys import KEY_BYTES

__all__ = ["KvPublisher"]

_TOPIC: Final = b"kv-events"
_REMEMBERED: Final = 10_000
_END: Final = (-1).to_bytes(8, "big", signed=True)


def _name(key: bytes) -> int:
    """What the events call a block."""
    return int.from_bytes(key[KEY_BYTES - 8 :], "big")


class KvPublisher:
    """Owns both sockets, and the messages that can be repeated; belongs to the event loop."""

    def __init__(self, endpoint: str, replay: str, block_size: int) -> None:
        self._block_size: Final = block_size
        self._context: Final = zmq.asyncio.Context()
        self._messages: deque[tuple[bytes, bytes]] = deque(maxlen=_REMEMBERED)
        self._number = 0
        self._pub: Final = self._context.socket(zmq.PUB)
        self._router: Final = self._context.socket(zmq.ROUTER)
        for socket, address in ((self._pub, endpoint), (self._router, replay)):
            socket.set(zmq.LINGER, 0)
            socket.bind(address)
        self._repeating: Final = asyncio.create_task(self._repeat())

    async def close(self) -> None:
        """Let go of the sockets."""
        self._repeating.cancel()
        await asyncio.gather(self._repeating, return_exceptions=True)
        self._context.destroy(linger=0)

    async def tell(
        self, keys: Sequence[bytes], tokens: Sequence[int], salt: str, stored: Sequence[bytes], removed: Sequence[bytes]
    ) -> None:
        """A prompt of these ``keys`` and ``tokens`` was computed; ``stored`` came into the cache, ``removed`` left."""
        events: list[dict[str, Any]] = []
        if removed:
            names = [_name(key) for key in removed]
            events.append({"type": "BlockRemoved", "block_hashes": names, "medium": "GPU", "group_idx": 0})
        new, first = set(stored), 0
        while first < len(keys):
            if keys[first] not in new:
                first += 1
                continue
            end = first
            while end < len(keys) and keys[end] in new:
                end += 1
            events.append(self._stored(keys, tokens, salt, first, end))
            first = end
        if events:
            await self._publish(events)

    def _stored(self, keys: Sequence[bytes], tokens: Sequence[int], salt: str, first: int, end: int) -> dict[str, Any]:
        size = self._block_size
        return {
            "type": "BlockStored",
            "block_hashes": [_name(key) for key in keys[first:end]],
            "parent_block_hash": _name(keys[first - 1]) if first else None,
            "token_ids": tokens[first * size : end * size],
            "block_size": size,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
            "extra_keys": [[salt] if salt and not index else None for index in range(first, end)],
            "group_idx": 0,
        }

    async def _publish(self, events: list[dict[str, Any]]) -> None:
        message = self._number.to_bytes(8, "big"), msgspec.msgpack.encode([float(self._number), events, 0])
        self._number += 1
        self._messages.append(message)
        await self._pub.send_multipart([_TOPIC, *message])

    async def _repeat(self) -> None:
        while True:
            client, _, start = await self._router.recv_multipart()
            for number, payload in [*self._messages]:
                if number >= start:  # both big-endian
                    await self._router.send_multipart([client, b"", _TOPIC, number, payload])
            await self._router.send_multipart([client, b"", _TOPIC, _END, b""])
