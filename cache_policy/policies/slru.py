"""Segmented LRU (Karedla, Love & Wherry, IEEE Computer 27(3), 1994)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from cache_policy.policies.base import BlockKey
from cache_policy.policies.queues import LeafQueue, QueuePolicy

__all__ = ["SlruPolicy"]

_PROTECTED: Final = 0.8


class SlruPolicy(QueuePolicy):
    """New blocks are on probation; a hit protects them, up to 80 % of the pool. Both segments are LRU queues.

    Blocks on probation leave first; the least recently used protected block goes back there when others need its place.
    """

    name = "slru"

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._protected_room = int(_PROTECTED * capacity)
        self._probation = LeafQueue()
        self._protected = LeafQueue()

    def inserted(self, block: int, parent: int | None, key: BlockKey, depth: int) -> None:
        """On probation."""
        self._move(block, self._probation)
        super().inserted(block, parent, key, depth)

    def touched(self, block: int) -> None:
        """Protected, and the most recently used."""
        self._move(block, self._protected)
        super().touched(block)
        if len(self._protected) > self._protected_room:
            self._move(self._protected.oldest(), self._probation)

    def victim(self, evictable: Callable[[int], bool]) -> int | None:
        """The least recently used on probation, else of the protected."""
        block = self._probation.first(evictable)
        return self._protected.first(evictable) if block is None else block
