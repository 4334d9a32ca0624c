"""Several Redis commands in one exchange, and lists in pieces of a good size for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

from redis.exceptions import RedisError

from gateway.stats.connection import RedisClient

__all__ = ["Batch", "chunks"]

_READ_CHUNK = 200
_T = TypeVar("_T")


class Batch:
    """One pipeline whose commands name one key each, so that an error can say which key it is about."""

    def __init__(self, client: RedisClient, prefix: str) -> None:
        self.pipe = client.pipeline(transaction=False)
        self._prefix = prefix
        self._keys: list[str] = []

    def key(self, name: str) -> str:
        """The full name of the key that the next command is about."""
        self._keys.append(f"{self._prefix}:{name}")
        return self._keys[-1]

    async def send(self) -> list[Any]:
        """All replies. Raises the first error among them, with its key."""
        # Not in `async with`, at whose beginning a cluster's pipeline forgets its commands.
        replies = await self.pipe.execute(raise_on_error=False)
        for key, reply in zip(self._keys, replies, strict=True):
            if isinstance(reply, Exception):
                raise RedisError(f"{reply} (key {key})") from reply
        return replies


def chunks(items: list[_T]) -> Iterator[list[_T]]:
    """``items`` in pieces that one batch may ask for."""
    for start in range(0, len(items), _READ_CHUNK):
        yield items[start : start + _READ_CHUNK]
