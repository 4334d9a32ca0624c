"""The optimum, which sees the future: for replays only."""

from __future__ import annotations

from collections.abc import Callable

from cache_policy.policies.base import BlockKey
from cache_policy.policies.leaves import RankedPolicy

__all__ = ["OptPolicy"]


class OptPolicy(RankedPolicy):
    """The leaf whose next use lies furthest ahead leaves first (Belady, IBM Systems Journal 5(2), 1966).

    No policy that must cache every block of a request, and evicts leaves only, gets more hits. Of leaves that are used
    again by the same request the deepest leaves first.
    """

    name = "opt"

    def __init__(self, capacity: int, next_use: Callable[[BlockKey], int]) -> None:
        """``next_use`` gives the position of the first use of a key after the one that ends now, the larger the later.

        It is asked when a use ends, and answers with a position after all others when there is none.
        """
        super().__init__(capacity)
        self._next_use = next_use
        self._key: dict[int, BlockKey] = {}
        self._rank_of: dict[int, tuple[int, int]] = {}
        self._depth: dict[int, int] = {}

    def inserted(self, block: int, parent: int | None, key: BlockKey, depth: int) -> None:
        """Looks up when it is used again."""
        self._key[block] = key
        self._depth[block] = depth
        self._rank_of[block] = (-self._next_use(key), -depth)
        super().inserted(block, parent, key, depth)

    def touched(self, block: int) -> None:
        """Looks up when it is used again."""
        self._rank_of[block] = (-self._next_use(self._key[block]), -self._depth[block])
        super().touched(block)

    def removed(self, block: int) -> None:
        """Gone."""
        del self._key[block], self._depth[block], self._rank_of[block]
        super().removed(block)

    def _rank(self, block: int) -> tuple[int, int]:
        return self._rank_of[block]
