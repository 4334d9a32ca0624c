"""S3-FIFO (Yang et al., "FIFO queues are all you need for cache eviction", SOSP 2023)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from cache_policy.policies.base import BlockKey
from cache_policy.policies.queues import GhostQueue, LeafQueue, QueuePolicy

__all__ = ["S3FifoPolicy"]

_SMALL: Final = 0.1
_COUNT_LIMIT: Final = 3
_PROMOTION: Final = 2


class S3FifoPolicy(QueuePolicy):
    """A small FIFO queue sorts out what is used once; the main queue gives second chances.

    New blocks enter the small queue (10 % of the pool). At its front, a block with two hits and more moves to the main
    queue, others leave and are remembered; what comes back while it is remembered enters the main queue. At the front
    of the main queue a block that was hit goes to its end again, with one hit less.
    """

    name = "s3fifo"

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._small_room = max(1, int(_SMALL * capacity))
        self._ghost_room = capacity - self._small_room
        self._small = LeafQueue()
        self._main = LeafQueue()
        self._key: dict[int, BlockKey] = {}
        self._hits: dict[int, int] = {}
        self._ghosts = GhostQueue()

    def inserted(self, block: int, parent: int | None, key: BlockKey, depth: int) -> None:
        """To the small queue, or to the main one when it has left not long ago."""
        self._key[block] = key
        self._hits[block] = 0
        self._move(block, self._main if self._ghosts.discard(key) else self._small)
        super().inserted(block, parent, key, depth)

    def touched(self, block: int) -> None:
        """Hit once more; a count of two bits."""
        self._hits[block] = min(_COUNT_LIMIT, self._hits[block] + 1)
        super().touched(block)

    def removed(self, block: int) -> None:
        """Gone, and remembered when it was in the small queue."""
        del self._hits[block]
        key = self._key.pop(block)
        if self._queue[block] is self._small:
            self._ghosts.add(key)
            while len(self._ghosts) > self._ghost_room:
                self._ghosts.drop_oldest()
        super().removed(block)

    def victim(self, evictable: Callable[[int], bool]) -> int | None:
        """The front of the small queue while that has its share, else of the main queue, else whatever may leave."""
        while len(self._small) >= self._small_room:
            block = self._small.first(evictable)
            if block is None:
                break
            if self._hits[block] < _PROMOTION:
                return block
            self._hits[block] = 0
            self._move(block, self._main)
        while (block := self._main.first(evictable)) is not None:
            if not self._hits[block]:
                return block
            self._hits[block] -= 1
            self._move(block, self._main)
        return self._small.first(evictable)
