"""SIEVE (Zhang et al., "SIEVE is simpler than LRU", NSDI 2024)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from cache_policy.policies.base import BlockKey, EvictionPolicy

__all__ = ["SievePolicy"]

_END: Final = -1
"""Stands for both ends of the queue: the oldest block comes after it, the newest before it."""


class SievePolicy(EvictionPolicy):
    """A FIFO queue and a hand that walks it from the oldest to the newest block, and round again.

    A hit marks a block where it stands. The hand takes marks away and evicts the first unmarked block; what is in use
    or has children it passes over, mark and all.
    """

    name = "sieve"

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._newer: dict[int, int] = {_END: _END}
        self._older: dict[int, int] = {_END: _END}
        self._marked: set[int] = set()
        self._hand = _END

    def inserted(self, block: int, parent: int | None, key: BlockKey, depth: int) -> None:
        """The newest, unmarked."""
        newest = self._older[_END]
        self._older[block], self._newer[block] = newest, _END
        self._newer[newest] = self._older[_END] = block

    def acquired(self, block: int) -> None:
        """Keeps its place, which ``evictable`` passes over."""

    def touched(self, block: int) -> None:
        """Marked."""
        self._marked.add(block)

    def removed(self, block: int) -> None:
        """Gone; the hand goes on from the next newer one."""
        older, newer = self._older.pop(block), self._newer.pop(block)
        self._newer[older], self._older[newer] = newer, older
        self._marked.discard(block)
        if self._hand == block:
            self._hand = newer

    def victim(self, evictable: Callable[[int], bool]) -> int | None:
        """The first unmarked block from the hand on. Two rounds find one: the first takes all marks away."""
        block, start = self._hand, self._hand
        for _ in range(2):
            while True:
                if block != _END and evictable(block):
                    if block not in self._marked:
                        self._hand = block
                        return block
                    self._marked.remove(block)
                block = self._newer[block]
                if block == start:
                    break
        return None
