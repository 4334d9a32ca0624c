"""Least frequently used."""

from __future__ import annotations

from cache_policy.policies.base import BlockKey
from cache_policy.policies.leaves import RankedPolicy

__all__ = ["LfuPolicy"]


class LfuPolicy(RankedPolicy):
    """The block with the fewest uses since it came leaves first, of equals the least recently used.

    The count is lost with the block. What was once popular stays for good: see GDSF for the same with ageing.
    """

    name = "lfu"

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._uses: dict[int, int] = {}

    def inserted(self, block: int, parent: int | None, key: BlockKey, depth: int) -> None:
        """Used once."""
        self._uses[block] = 1
        super().inserted(block, parent, key, depth)

    def touched(self, block: int) -> None:
        """Used once more."""
        self._uses[block] += 1
        super().touched(block)

    def removed(self, block: int) -> None:
        """Gone, and its count with it."""
        del self._uses[block]
        super().removed(block)

    def _rank(self, block: int) -> int:
        return self._uses[block]
