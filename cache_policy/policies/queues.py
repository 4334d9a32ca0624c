"""Queues of blocks and of remembered keys, for policies that have several."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from heapq import heapify, heappop, heappush

from cache_policy.policies.base import BlockKey
from cache_policy.policies.leaves import LeafPolicy

__all__ = ["GhostQueue", "LeafQueue", "QueuePolicy"]


class LeafQueue(OrderedDict[int, int]):
    """Blocks in the order in which they came, each with its place; only idle leaves are candidates.

    Blocks that are in use or have children keep their place and are never walked over, as the candidates stand in a
    heap by place: O(log n), plus one look at each older candidate that the owner holds back. A dict itself, as its
    length is asked for all the time.
    """

    def __init__(self) -> None:
        super().__init__()
        self._clock = 0
        self._candidates: dict[int, int] = {}
        # Entries that are out of date are dropped when they reach the top, or when there are many.
        self._heap: list[tuple[int, int]] = []

    def append(self, block: int) -> None:
        """``block`` is the youngest, and no candidate yet."""
        self._clock += 1
        self[block] = self._clock

    def discard(self, block: int) -> None:
        """Take ``block`` out, when it is in."""
        self._candidates.pop(block, None)
        self.pop(block, None)

    def oldest(self) -> int:
        """The block that came first, candidate or not."""
        return next(iter(self))

    def admit(self, block: int) -> None:
        """A block of this queue becomes a candidate."""
        place = self._candidates[block] = self[block]
        heappush(self._heap, (place, block))
        if len(self._heap) > 2 * len(self._candidates) + 16:
            self._heap = [(place, leaf) for leaf, place in self._candidates.items()]
            heapify(self._heap)

    def dismiss(self, block: int) -> None:
        """A block of this queue is a candidate no more."""
        self._candidates.pop(block, None)

    def first(self, evictable: Callable[[int], bool]) -> int | None:
        """The oldest candidate that the owner lets go."""
        heap, candidates = self._heap, self._candidates
        held_back: list[tuple[int, int]] | None = None
        found = None
        while heap:
            entry = heap[0]
            place, block = entry
            if candidates.get(block) != place:
                heappop(heap)
            elif evictable(block):
                found = block
                break
            else:
                held_back = held_back or []
                held_back.append(heappop(heap))
        for entry in held_back or ():
            heappush(heap, entry)
        return found


class QueuePolicy(LeafPolicy):
    """Every block stands in one of several queues; a subclass says in which, before it calls the method it extends."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._queue: dict[int, LeafQueue] = {}

    def removed(self, block: int) -> None:
        """Gone from its queue."""
        super().removed(block)
        self._queue.pop(block).discard(block)

    def _move(self, block: int, queue: LeafQueue) -> None:
        """Put ``block`` at the young end of ``queue``, wherever it was."""
        before = self._queue.get(block)
        if before is not None:
            before.discard(block)
        self._queue[block] = queue
        queue.append(block)
        if block in self._idle_since and block not in self._children:
            queue.admit(block)

    def _became_leaf(self, block: int) -> None:
        self._queue[block].admit(block)

    def _no_longer_leaf(self, block: int) -> None:
        self._queue[block].dismiss(block)


class GhostQueue(OrderedDict[BlockKey, None]):
    """Keys of blocks that have left, the oldest first. A dict itself, as its length is asked for all the time."""

    def add(self, key: BlockKey) -> None:
        """``key`` is the youngest."""
        self[key] = None
        self.move_to_end(key)

    def discard(self, key: BlockKey) -> bool:
        """Forget ``key``; returns whether it was here."""
        if key not in self:
            return False
        del self[key]
        return True

    def drop_oldest(self) -> None:
        """Forget the oldest key."""
        self.popitem(last=False)
