"""Adaptive replacement cache (Megiddo & Modha, FAST 2003)."""

from __future__ import annotations

from collections.abc import Callable

from cache_policy.policies.base import BlockKey
from cache_policy.policies.queues import GhostQueue, LeafQueue, QueuePolicy

__all__ = ["ArcPolicy"]


class ArcPolicy(QueuePolicy):
    """Two LRU queues, of blocks used once and of blocks used more often, with a moving border between them.

    Each queue remembers as many keys as have left it; a miss on one of them says that this queue should have been
    longer, and moves the border.
    """

    name = "arc"

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._once = LeafQueue()
        self._often = LeafQueue()
        self._key: dict[int, BlockKey] = {}
        self._once_ghosts = GhostQueue()
        self._often_ghosts = GhostQueue()
        self._once_target = 0.0
        self._missed_often = False

    def missed(self, key: BlockKey) -> None:
        """Moves the border when the key is remembered."""
        once, often = self._once_ghosts, self._often_ghosts
        self._missed_often = key in often
        if key in once:
            self._once_target = min(self.capacity, self._once_target + max(1.0, len(often) / len(once)))
        elif self._missed_often:
            self._once_target = max(0.0, self._once_target - max(1.0, len(once) / len(often)))

    def inserted(self, block: int, parent: int | None, key: BlockKey, depth: int) -> None:
        """Used once, or more often when its key is remembered."""
        self._key[block] = key
        returned = self._once_ghosts.discard(key) or self._often_ghosts.discard(key)
        self._move(block, self._often if returned else self._once)
        super().inserted(block, parent, key, depth)
        self._forget()

    def touched(self, block: int) -> None:
        """Used more often, and the most recently used of those."""
        self._move(block, self._often)
        super().touched(block)

    def removed(self, block: int) -> None:
        """Gone, and remembered by the queue it was in."""
        ghosts = self._once_ghosts if self._queue[block] is self._once else self._often_ghosts
        ghosts.add(self._key.pop(block))
        super().removed(block)

    def victim(self, evictable: Callable[[int], bool]) -> int | None:
        """The least recently used of the queue that is beyond the border."""
        excess = len(self._once) - self._once_target
        shrink_once = len(self._once) > 0 and (excess > 0 or (excess == 0 and self._missed_often))
        first, second = (self._once, self._often) if shrink_once else (self._often, self._once)
        block = first.first(evictable)
        return second.first(evictable) if block is None else block

    def _forget(self) -> None:
        """Hold |once| + its ghosts to the capacity, everything together to twice that.

        Only what is new adds to these sums: what leaves goes on as a ghost.
        """
        once_ghosts, often_ghosts = self._once_ghosts, self._often_ghosts
        surplus = len(self._once) + len(once_ghosts) - self.capacity
        for _ in range(min(surplus, len(once_ghosts))):
            once_ghosts.drop_oldest()
        surplus = len(self._key) + len(once_ghosts) + len(often_ghosts) - 2 * self.capacity
        for _ in range(min(surplus, len(often_ghosts))):
            often_ghosts.drop_oldest()
