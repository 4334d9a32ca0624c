"""Tail-optimized LRU (Zhang, Li, Moallemi & Peng, "Tail-Optimized Caching for LLM Inference", arXiv 2510.15152)."""

from __future__ import annotations

from typing import Final

from cache_policy.policies.base import BlockKey
from cache_policy.policies.leaves import RankedPolicy

__all__ = ["TlruPolicy"]

_ALLOWANCE: Final = 16
"""The threshold less what the next turn brings: so many blocks at the end may be computed again without harm."""


class TlruPolicy(RankedPolicy):
    """LRU, but what no slow request would miss leaves before everything else.

    A request is slow when it must compute more than a threshold of tokens. Of a conversation of L blocks whose next
    turn is expected to bring Q more, those from L + Q - threshold on may be missing without making that turn slow: they
    leave first, in LRU's order, and only then the others, in LRU's order too. So long conversations keep their
    beginnings. L is the length that the conversation had, however much of its end has left since.

    Of the paper, whose threshold and Q are set for a service, only their difference counts, and it is a fixed number of
    blocks here. Its conversations share nothing; a block that several share goes by the one that used it last. The
    variants that know when a conversation ends or how long a turn will be are left out. What it minimizes are slow
    first tokens, so that its hit rate is often below LRU's.
    """

    name = "tlru"

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._depth: dict[int, int] = {}
        self._end: dict[int, int] = {}
        self._reported: int | None = None
        """The block reported last: the child of the next one when both are of one request."""

    def inserted(self, block: int, parent: int | None, key: BlockKey, depth: int) -> None:
        """The end of its conversation, or one block before the block reported last."""
        self._depth[block] = depth
        self._follow(block)
        super().inserted(block, parent, key, depth)

    def touched(self, block: int) -> None:
        """The conversation may have another end now."""
        self._follow(block)
        super().touched(block)

    def removed(self, block: int) -> None:
        """Gone; the conversation still ends where it did."""
        del self._depth[block], self._end[block]
        if self._reported == block:
            self._reported = None
        super().removed(block)

    def _follow(self, block: int) -> None:
        child = self._reported
        in_chain = child is not None and self._parent[child] == block
        self._end[block] = self._end[child] if in_chain and child is not None else self._depth[block]
        self._reported = block

    def _rank(self, block: int) -> tuple[bool, int]:
        harmless = self._end[block] - self._depth[block] < _ALLOWANCE
        return (not harmless, self._idle_since[block])
