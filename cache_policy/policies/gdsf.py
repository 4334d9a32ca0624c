"""Greedy dual size frequency (Cherkasova, HP Labs technical report HPL-98-69, 1998)."""

from __future__ import annotations

from cache_policy.policies.base import BlockKey
from cache_policy.policies.leaves import RankedPolicy

__all__ = ["GdsfPolicy"]


class GdsfPolicy(RankedPolicy):
    """LFU with dynamic ageing: a block ranks by its uses plus the rank of the last victim at its last use.

    Blocks have one size and one cost here, which leaves exactly that. A block that was used often and is not any more
    is overtaken as the rank of the victims rises.
    """

    name = "gdsf"

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._inflation = 0
        self._uses: dict[int, int] = {}
        self._priority: dict[int, int] = {}

    def inserted(self, block: int, parent: int | None, key: BlockKey, depth: int) -> None:
        """Used once."""
        self._uses[block] = 1
        self._priority[block] = self._inflation + 1
        super().inserted(block, parent, key, depth)

    def touched(self, block: int) -> None:
        """Used once more."""
        self._uses[block] += 1
        self._priority[block] = self._inflation + self._uses[block]
        super().touched(block)

    def removed(self, block: int) -> None:
        """Gone; what is used from now on ranks above it."""
        del self._uses[block]
        # A block dropped by its owner may have ranked high: everything else would look old after it.
        priority = self._priority.pop(block)
        if self._heap and self._heap[0][2] == block:
            self._inflation = max(self._inflation, priority)
        super().removed(block)

    def _rank(self, block: int) -> int:
        return self._priority[block]
