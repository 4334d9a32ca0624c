"""First in, first out."""

from __future__ import annotations

from cache_policy.policies.base import BlockKey
from cache_policy.policies.leaves import RankedPolicy

__all__ = ["FifoPolicy"]


class FifoPolicy(RankedPolicy):
    """The block that came first leaves first, however often it was used.

    A block that has children keeps its place: it is the oldest again when its last child has left.
    """

    name = "fifo"

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._arrival: dict[int, int] = {}

    def inserted(self, block: int, parent: int | None, key: BlockKey, depth: int) -> None:
        """Young since now."""
        self._arrival[block] = self._clock
        super().inserted(block, parent, key, depth)

    def removed(self, block: int) -> None:
        """Gone."""
        del self._arrival[block]
        super().removed(block)

    def _rank(self, block: int) -> int:
        return self._arrival[block]
