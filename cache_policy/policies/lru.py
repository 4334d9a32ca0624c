"""Least recently used."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from cache_policy.policies.base import BlockKey, EvictionPolicy

__all__ = ["LruPolicy"]


class LruPolicy(EvictionPolicy):
    """The idle block whose last use ended longest ago leaves first.

    Every operation is O(1): blocks in use are not in the queue, and whoever uses a child uses its parent and reports it
    later, so that children always stand before their parents and the head of the queue has no resident child.
    """

    name = "lru"

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        # An OrderedDict, as taking the first entry of a dict that loses its first entries all the time is linear.
        self._idle: OrderedDict[int, None] = OrderedDict()

    def inserted(self, block: int, parent: int | None, key: BlockKey, depth: int) -> None:
        """Idle since now."""
        self._idle[block] = None

    def acquired(self, block: int) -> None:
        """Out of the queue."""
        del self._idle[block]

    def touched(self, block: int) -> None:
        """Idle since now."""
        self._idle[block] = None

    def removed(self, block: int) -> None:
        """Out of the queue, when it was in it."""
        self._idle.pop(block, None)

    def victim(self, evictable: Callable[[int], bool]) -> int | None:
        """The block that has been idle longest."""
        return next(filter(evictable, self._idle), None)
