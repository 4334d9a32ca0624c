"""Ghost caches: what other eviction policies and cache sizes would hit on live traffic, at a small part of the cost.

A ghost cache holds keys only, and runs the engine's own policy classes unchanged. It sees a sample of the blocks that
is even along every chain: the one at depth ``stride // 2`` and every ``stride``-th after it, each standing for the
``stride`` blocks around it, in a cache of ``1 / stride`` of the size. Sampling whole chains by their root, as SHARDS
(Waldspurger et al., FAST'15) samples objects, does not do here: a RAG log has as few roots as templates, and few
popular documents behind them, so that a sample of groups hangs on which of those are in it. A key stands for the whole
prefix before it, so that a sampled block tells of the blocks before it as well.

Where a hit ends between two sampled blocks is not known, but bounded: by the sampled blocks, and by the longest prefix
that has ever been seen, which is kept apart for all blocks.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Final

import msgspec

from cache_policy.policy import EvictionPolicy, create_policy

__all__ = ["Ghost", "GhostCache", "GhostCaches"]

_KEY_BYTES: Final = 8
"""So much of a key tells the blocks of a ghost cache apart."""

_REMEMBERED: Final = 4
"""Prefixes are remembered as seen for at least so many times the blocks of the largest ghost cache, but at most for"""
_MOST_REMEMBERED: Final = 100_000
"""so many blocks, and twice that in memory: some 20 MB."""


class Ghost(msgspec.Struct, frozen=True):
    """One combination to be followed: a policy and a size in blocks."""

    policy: str
    blocks: int


class GhostCache:
    """One policy at one size: an engine's prefix cache without its content. Belongs to one owner; not thread-safe.

    Requests come one at a time, as in ``cache_policy.replay``: the leading blocks that are resident are hit, the others
    are admitted in order, and only a block that is not in use and has no resident child is evicted.
    """

    def __init__(self, policy: str, capacity: int) -> None:
        """A cache for ``capacity`` blocks.

        Raises:
            UnknownPolicyError: there is no such policy.
            ValueError: ``capacity`` is not positive.
        """
        self._policy = create_policy(policy, capacity)
        self._hears_misses = type(self._policy).missed is not EvictionPolicy.missed
        self._free = capacity
        self._parents: dict[int, int | None] = {}  # of what is resident
        # How many resident children each has, one more for the last block that is in use.
        self._children: dict[int, int] = {}
        # Nothing in use and no resident child: neither makes a count.
        self._evictable = lambda block: not self._children[block]

    @property
    def resident(self) -> Set[int]:
        """The blocks that are cached now: a view that follows every request."""
        return self._children.keys()

    def request(self, blocks: Sequence[int]) -> int:
        """Ask for a chain of blocks, each known by a number of its own; return how many of the first were resident."""
        policy, children, parents = self._policy, self._children, self._parents
        acquired, inserted, touched = policy.acquired, policy.inserted, policy.touched
        hit = 0
        for block in blocks:
            if block not in children:
                break
            acquired(block)
            hit += 1
        tail: int | None = None
        if hit:
            tail = blocks[hit - 1]
            children[tail] += 1
        kept = hit
        for block in blocks[hit : policy.capacity]:
            if self._hears_misses:
                policy.missed(block)
            if self._free:
                self._free -= 1
            elif not self._evict():
                break
            parents[block] = tail
            children[block] = 1  # and what its parent had one more for is this child now
            tail = block
            kept += 1
        for depth in range(kept - 1, hit - 1, -1):
            block = blocks[depth]
            inserted(block, parents[block], block, depth)
        for block in reversed(blocks[:hit]):
            touched(block)
        if tail is not None:
            children[tail] -= 1
        return hit

    def _evict(self) -> bool:
        children = self._children
        block = self._policy.victim(self._evictable)
        if block is None:
            return False
        self._policy.removed(block)
        del children[block]
        parent = self._parents.pop(block)
        if parent is not None:
            children[parent] -= 1
        return True


class GhostCaches:
    """Several ghost caches that follow the same traffic. Belongs to one owner; not thread-safe.

    What is generated is not followed, only prompts. Memory is bounded by the sizes of the ghosts, not by the traffic.
    """

    def __init__(self, ghosts: Sequence[Ghost], stride: int) -> None:
        """Follow ``ghosts`` on every ``stride``-th block of a chain; 1 follows every block, exactly.

        Raises:
            UnknownPolicyError: there is no such policy.
            ValueError: a size or ``stride`` is not positive, or there are no ghosts.
        """
        if not ghosts or stride < 1 or min(ghost.blocks for ghost in ghosts) < 1:
            raise ValueError("ghost caches need at least one ghost, and positive sizes and stride")
        self.ghosts: Final = tuple(ghosts)
        self.stride: Final = stride
        self._caches = [GhostCache(ghost.policy, max(1, round(ghost.blocks / stride))) for ghost in ghosts]
        # Two generations, each closed under prefixes, as every request adds its whole chain.
        self._seen: set[bytes] = set()
        self._seen_before: set[bytes] = set()
        self._generation = min(_MOST_REMEMBERED, _REMEMBERED * max(ghost.blocks for ghost in ghosts))

    def observe(self, keys: Sequence[bytes]) -> list[float]:
        """Take in the chained keys of one prompt's full blocks; how many blocks each ghost is estimated to have hit."""
        seen = self._seen_blocks(keys)
        sampled = [int.from_bytes(key[:_KEY_BYTES], "little") for key in keys[self.stride // 2 :: self.stride]]
        return [self._hit_blocks(cache.request(sampled), seen) for cache in self._caches]

    def _seen_blocks(self, keys: Sequence[bytes]) -> int:
        """How many leading blocks were ever asked for before, as far as that is remembered; remembers these."""
        seen, before = self._seen, self._seen_before
        low, high = 0, len(keys)
        while low < high:
            middle = (low + high) // 2
            if keys[middle] in seen or keys[middle] in before:
                low = middle + 1
            else:
                high = middle
        seen.update(keys)
        if len(seen) > self._generation:
            self._seen_before, self._seen = seen, set()
        return low

    def _hit_blocks(self, hit: int, seen: int) -> float:
        """Blocks hit by a request of which ``hit`` sampled blocks were resident: the middle of what is possible.

        Unless the next sampled block has been seen, and so must have been evicted, nothing speaks for an eviction.
        """
        missed = hit * self.stride + self.stride // 2  # depth of the first sampled block that was not resident
        least = missed - self.stride + 1 if hit else 0
        if missed >= seen:
            return max(seen, least)
        return (least + missed) / 2
