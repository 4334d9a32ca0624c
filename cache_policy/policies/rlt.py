"""Randomized leaf eviction (Wu, Silwal & Zhang, "Randomization Boosts KV Caching, Learning Balances Query Load: A Joint
Perspective", arXiv 2601.18999)."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Final

from cache_policy.policies.base import BlockKey
from cache_policy.policies.leaves import LeafPolicy

__all__ = ["RltPolicy"]

_SEED: Final = 0


class RltPolicy(LeafPolicy):
    """Evicts a random leaf among those that were not used in the current phase.

    A use marks a block and all before it; when no leaf without a mark can leave, a new phase begins and all marks go.
    This is randomized marking (Fiat et al., 1991) restricted to leaves: no sequence of requests is as bad for it as
    some are for LRU.

    The unit is a block here, one of the paper's tokens at a time there; as there, leaves are drawn evenly, and a leaf's
    parent can be drawn after it. Its authors' code ends a phase when the marks fill the cache, which differs where
    marked blocks are in use. Marks are set when a use ends, as all reports here. Draws are seeded: the same history
    gives the same victims.
    """

    name = "rlt"

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._random = Random(_SEED)  # noqa: S311 - no secret
        self._draw = self._random.random()
        self._phase = 0
        self._marked_in: dict[int, int] = {}
        # Leaves in no order, each with its index, so that one is drawn and taken out in O(1).
        self._unmarked: list[int] = []
        self._index: dict[int, int] = {}
        self._marked: dict[int, None] = {}

    def inserted(self, block: int, parent: int | None, key: BlockKey, depth: int) -> None:
        """Marked."""
        self._marked_in[block] = self._phase
        super().inserted(block, parent, key, depth)

    def touched(self, block: int) -> None:
        """Marked."""
        self._marked_in[block] = self._phase
        super().touched(block)

    def removed(self, block: int) -> None:
        """Gone; the next victim is drawn anew."""
        super().removed(block)
        del self._marked_in[block]
        self._draw = self._random.random()

    def victim(self, evictable: Callable[[int], bool]) -> int | None:
        """The drawn one of the unmarked leaves, or the next that the owner lets go."""
        block = self._pick(evictable)
        if block is None and any(map(evictable, self._marked)):
            self._phase += 1
            for leaf in self._marked:
                self._add(leaf)
            self._marked.clear()
            block = self._pick(evictable)
        return block

    def _pick(self, evictable: Callable[[int], bool]) -> int | None:
        start = int(self._draw * len(self._unmarked))
        for step in range(len(self._unmarked)):
            block = self._unmarked[start - step]
            if evictable(block):
                return block
        return None

    def _add(self, block: int) -> None:
        self._index[block] = len(self._unmarked)
        self._unmarked.append(block)

    def _became_leaf(self, block: int) -> None:
        if self._marked_in[block] == self._phase:
            self._marked[block] = None
        else:
            self._add(block)

    def _no_longer_leaf(self, block: int) -> None:
        if block in self._marked:
            del self._marked[block]
            return
        index, last = self._index.pop(block), self._unmarked.pop()
        if last != block:
            self._unmarked[index] = last
            self._index[last] = index
