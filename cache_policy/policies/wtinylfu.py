"""W-TinyLFU (Einziger, Friedman & Manes, ACM Transactions on Storage 13(4), 2017)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from cache_policy.policies.base import BlockKey
from cache_policy.policies.queues import LeafQueue, QueuePolicy

__all__ = ["WTinyLfuPolicy"]

_WINDOW: Final = 0.01
_PROTECTED: Final = 0.8
_SAMPLE: Final = 10
_HISTORY: Final = 4


class WTinyLfuPolicy(QueuePolicy):
    """A small LRU window, and behind it a segmented LRU that only more popular blocks enter.

    Popularity is counted by key, also of blocks that have left, and halved regularly. The counts are exact; the keys
    touched longest ago are forgotten beyond four times the pool.
    """

    name = "wtinylfu"

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._window_room = max(1, round(_WINDOW * capacity))
        self._protected_room = int(_PROTECTED * (capacity - self._window_room))
        self._window = LeafQueue()
        self._probation = LeafQueue()
        self._protected = LeafQueue()
        self._key: dict[int, BlockKey] = {}
        self._count: OrderedDict[BlockKey, int] = OrderedDict()
        self._touches = 0

    def inserted(self, block: int, parent: int | None, key: BlockKey, depth: int) -> None:
        """Into the window, whose oldest block goes on to probation."""
        self._key[block] = key
        self._counted(key)
        self._move(block, self._window)
        super().inserted(block, parent, key, depth)
        if len(self._window) > self._window_room:
            self._move(self._window.oldest(), self._probation)

    def touched(self, block: int) -> None:
        """The most recently used of its queue; out of probation it is protected."""
        self._counted(self._key[block])
        self._move(block, self._window if self._queue[block] is self._window else self._protected)
        super().touched(block)
        if len(self._protected) > self._protected_room:
            self._move(self._protected.oldest(), self._probation)

    def removed(self, block: int) -> None:
        """Gone, but its count stays."""
        del self._key[block]
        super().removed(block)

    def victim(self, evictable: Callable[[int], bool]) -> int | None:
        """Of the oldest in the window and the oldest behind it the less popular; of equals that in the window.

        A window block that wins moves on to probation. While the window is below its size, it loses nothing.
        """
        while True:
            resident = self._probation.first(evictable)
            if resident is None:
                resident = self._protected.first(evictable)
            newcomer = self._window.first(evictable)
            if newcomer is None or resident is None:
                return resident if newcomer is None else newcomer
            if len(self._window) < self._window_room:
                return resident
            if self._popularity(newcomer) <= self._popularity(resident):
                return newcomer
            self._move(newcomer, self._probation)

    def _popularity(self, block: int) -> int:
        return self._count.get(self._key[block], 0)

    def _counted(self, key: BlockKey) -> None:
        self._count[key] = self._count.get(key, 0) + 1
        self._count.move_to_end(key)
        if len(self._count) > _HISTORY * self.capacity:
            self._count.popitem(last=False)
        self._touches += 1
        if self._touches >= _SAMPLE * self.capacity:
            self._touches = 0
            for known, count in list(self._count.items()):
                if count > 1:
                    self._count[known] = count // 2
                else:
                    del self._count[known]
