"""What each running gateway tells all others of itself through Redis: a note, written anew and gone when it has ended.

======================  ======  ==============================================================================
``{name}``              zset    epoch -> Unix time of its last write
``{name}:{epoch}``      string  what that life of a gateway has to tell; expires
======================  ======  ==============================================================================

Ids, keys, names and numbers only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from gateway.stats.batch import Batch
from gateway.stats.connection import RedisClient

__all__ = ["KEEP_S", "MAX_NOTES", "Board"]

KEEP_S: Final = 60
"""A gateway that has written nothing for so long has ended."""

MAX_NOTES: Final = 200
_MAX_BYTES: Final = 1024 * 1024


class Board:
    """Writes one note and reads those of others, every ``period_s``. Owns when it is next due."""

    def __init__(
        self,
        name: str,
        write: Callable[[], bytes],
        read: Callable[[Mapping[str, bytes]], bool],
        *,
        period_s: float,
    ) -> None:
        """``read`` gets the notes of others by epoch; False when one of them is not to be understood."""
        self._name: Final = name
        self._write: Final = write
        self._read: Final = read
        self._period_s: Final = period_s
        self._due = float("-inf")

    def write_all(self) -> None:
        """Redis has lost what was written."""
        self._due = float("-inf")

    async def exchange(self, client: RedisClient, prefix: str, own: str, now: float) -> bool:
        """Write this gateway's note, read the others'; False when one of them is not to be understood."""
        if now < self._due:
            return True
        batch = Batch(client, prefix)
        batch.pipe.set(batch.key(f"{self._name}:{own}"), self._write(), ex=KEEP_S)
        batch.pipe.zadd(batch.key(self._name), {own: now})
        batch.pipe.zremrangebyscore(batch.key(self._name), "-inf", now - KEEP_S)
        batch.pipe.zrevrange(batch.key(self._name), 0, MAX_NOTES)
        *_, epochs = await batch.send()
        others = [epoch.decode() for epoch in epochs if epoch != own.encode()]
        notes: dict[str, bytes] = {}
        if others:
            batch = Batch(client, prefix)
            for epoch in others:
                batch.pipe.get(batch.key(f"{self._name}:{epoch}"))
            told = await batch.send()
            notes = {epoch: note for epoch, note in zip(others, told, strict=True) if note and len(note) <= _MAX_BYTES}
        self._due = now + self._period_s
        return self._read(notes)
