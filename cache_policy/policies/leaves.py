"""Two beginnings for policies that choose among idle leaves: who is one, and which has the lowest rank."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import Any

from cache_policy.policies.base import BlockKey, EvictionPolicy

__all__ = ["LeafPolicy", "RankedPolicy"]


class LeafPolicy(EvictionPolicy):
    """Knows which blocks are idle and have no resident child: the only ones that may ever leave.

    A subclass hears of them through ``_became_leaf`` and ``_no_longer_leaf``. Shared beginnings, which cannot leave
    while something hangs on them, are never looked at.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._clock = 0
        self._idle_since: dict[int, int] = {}
        """When the last use of each idle block ended, in reports; so among equals the tail of a prompt is older."""
        self._parent: dict[int, int | None] = {}
        self._children: dict[int, int] = {}
        """Resident children; a block without any has no entry."""

    def inserted(self, block: int, parent: int | None, key: BlockKey, depth: int) -> None:
        """Idle, and a leaf unless a child was reported before it."""
        self._parent[block] = parent
        if parent is not None:
            self._children[parent] = self._children.get(parent, 0) + 1
        self._rests(block)

    def acquired(self, block: int) -> None:
        """Idle no more."""
        del self._idle_since[block]
        if block not in self._children:
            self._no_longer_leaf(block)

    def touched(self, block: int) -> None:
        """Idle again."""
        self._rests(block)

    def removed(self, block: int) -> None:
        """Gone; its parent may be a leaf now."""
        parent = self._parent.pop(block)
        if self._idle_since.pop(block, None) is not None and block not in self._children:
            self._no_longer_leaf(block)
        if parent is None:
            return
        left = self._children[parent] - 1
        if left:
            self._children[parent] = left
            return
        del self._children[parent]
        if parent in self._idle_since:
            self._became_leaf(parent)

    def _rests(self, block: int) -> None:
        self._clock += 1
        self._idle_since[block] = self._clock
        if block not in self._children:
            self._became_leaf(block)

    @abstractmethod
    def _became_leaf(self, block: int) -> None:
        """The idle ``block`` has no resident child (any more)."""

    @abstractmethod
    def _no_longer_leaf(self, block: int) -> None:
        """The leaf ``block`` is in use or gone."""


class RankedPolicy(LeafPolicy):
    """The idle leaf of the lowest rank leaves first, of equals the one whose last use ended first.

    The leaves stand in a heap: O(log n), plus one look at each lower leaf that the owner holds back.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        # Entries of blocks that are no leaf any more are dropped when they reach the top, or when there are many.
        self._heap: list[tuple[Any, int, int]] = []
        self._entry: dict[int, tuple[Any, int, int]] = {}

    @abstractmethod
    def _rank(self, block: int) -> Any:
        """Asked when ``block`` becomes an idle leaf; it holds until the block is one no more."""

    def victim(self, evictable: Callable[[int], bool]) -> int | None:
        """The lowest leaf that the owner lets go."""
        held_back: list[tuple[Any, int, int]] = []
        heap, entries = self._heap, self._entry
        found: int | None = None
        while heap:
            entry = heap[0]
            block = entry[2]
            if entries.get(block) is not entry:
                heappop(heap)
            elif evictable(block):
                found = block
                break
            else:
                held_back.append(heappop(heap))
        for entry in held_back:
            heappush(heap, entry)
        return found

    def _became_leaf(self, block: int) -> None:
        entry = (self._rank(block), self._idle_since[block], block)
        self._entry[block] = entry
        heappush(self._heap, entry)
        if len(self._heap) > 2 * self.capacity:
            self._rebuild()

    def _no_longer_leaf(self, block: int) -> None:
        del self._entry[block]

    def _rebuild(self) -> None:
        self._heap = list(self._entry.values())
        heapify(self._heap)
