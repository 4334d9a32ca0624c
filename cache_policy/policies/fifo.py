"""First in, first out."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush

from cache_policy.policies.base import BlockKey, EvictionPolicy

__all__ = ["FifoPolicy"]


class FifoPolicy(EvictionPolicy):
    """The block that came first leaves first, however often it was used.

    The oldest blocks are mostly shared beginnings that cannot leave while something hangs on them. So the queue, a heap
    by age, holds leaves only, and a block comes back to its old place when its last child has left: O(log n), plus one
    look at each older leaf in use.
    """

    name = "fifo"

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._clock = 0
        self._age: dict[int, int] = {}
        self._parent: dict[int, int | None] = {}
        self._children: dict[int, int] = {}
        # (age, block), one entry at most for each known block, and stale ones: of blocks that have left or have
        # children by now. They are dropped when they reach the top.
        self._leaves: list[tuple[int, int]] = []
        self._queued: set[int] = set()

    def inserted(self, block: int, parent: int | None, key: BlockKey, depth: int) -> None:
        """Young since now, a leaf when it has no child."""
        self._clock += 1
        self._age[block] = self._clock
        self._parent[block] = parent
        if parent is not None:
            self._children[parent] = self._children.get(parent, 0) + 1
        if block not in self._children:
            self._enqueue(block)

    def acquired(self, block: int) -> None:
        """Use changes nothing; ``evictable`` passes over blocks in use."""

    def touched(self, block: int) -> None:
        """Use changes nothing."""

    def removed(self, block: int) -> None:
        """Gone; its parent may be a leaf now."""
        del self._age[block]
        self._queued.discard(block)
        parent = self._parent.pop(block)
        if parent is not None:
            self._children[parent] -= 1
            if not self._children[parent]:
                del self._children[parent]
                if parent in self._age and parent not in self._queued:
                    self._enqueue(parent)
        if len(self._leaves) > 2 * self.capacity:
            self._leaves = [(self._age[leaf], leaf) for leaf in self._queued]
            heapify(self._leaves)

    def victim(self, evictable: Callable[[int], bool]) -> int | None:
        """The oldest leaf that is not in use."""
        in_use: list[tuple[int, int]] = []
        found: int | None = None
        while self._leaves:
            entry = age, block = self._leaves[0]
            if self._age.get(block) != age:
                heappop(self._leaves)
            elif block in self._children:
                heappop(self._leaves)
                self._queued.remove(block)
            elif evictable(block):
                found = block
                break
            else:
                in_use.append(heappop(self._leaves))
        for entry in in_use:
            heappush(self._leaves, entry)
        return found

    def _enqueue(self, block: int) -> None:
        heappush(self._leaves, (self._age[block], block))
        self._queued.add(block)
