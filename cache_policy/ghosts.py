"""Ghost caches: what other eviction policies and cache sizes would hit on live traffic, at a small part of the cost.

A ghost cache holds keys only, and runs the engine's own policy classes unchanged. It follows one block in ``one_in``,
chosen by its key as SHARDS does (Waldspurger et al., FAST'15), in a cache of ``1 / one_in`` of the size. What it
follows are sub-chains: the chosen blocks of a prompt, wherever they stand. Whole chains chosen by their root would not
do, as a RAG log has as few roots as templates.

Nor would the share of chosen blocks that were hit: it hangs on which of the few blocks that everybody asks for are
among them. So hits are estimated by classes (post-stratification): for every block, chosen or not, it is known how long
ago it was asked for last and how often before, which is what its presence depends on most. Of each class the chosen
blocks tell which part was resident, and that part is applied to all blocks of the class.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence, Set
from typing import Final

import msgspec

from cache_policy.policy import EvictionPolicy, create_policy

__all__ = ["MOST_ONE_IN", "Ghost", "GhostCache", "GhostCaches", "GhostTally"]

MOST_ONE_IN: Final = 2**16
"""The least that can be followed: the last two bytes of a key choose."""

_KEY_BYTES: Final = 8
"""So much of a key tells the blocks of a ghost cache apart."""

_AGES: Final = 48
"""Classes of ages, of half an octave each, in requests; and of each"""
_USES: Final = 4
"""classes of uses, of an octave each: 1, 2 to 3, 4 to 7, 8 and more. Class 0 is for blocks that are not remembered."""
_COUNTED: Final = 2**_USES - 1
"""Uses are counted so far."""

_REMEMBERED: Final = 4
"""Blocks are remembered as asked for at least up to so many times the blocks of the largest ghost cache."""


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
        self._policy = created = create_policy(policy, capacity)
        self._missed = None if type(created).missed is EvictionPolicy.missed else created.missed
        self._capacity = self._free = capacity
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
        policy, children = self._policy, self._children
        hit = 0
        for block in blocks:
            if block not in children:
                break
            policy.acquired(block)
            hit += 1
        tail: int | None = None
        if hit:
            tail = blocks[hit - 1]
            children[tail] += 1
        if hit < len(blocks):
            tail = self._admit(blocks, hit, tail)
        for block in blocks[hit - 1 :: -1] if hit else ():
            policy.touched(block)
        if tail is not None:
            children[tail] -= 1
        return hit

    def _admit(self, blocks: Sequence[int], hit: int, tail: int | None) -> int | None:
        """Let in what comes after the first ``hit`` blocks, as far as there is room; returns the last that is kept."""
        policy, children, parents = self._policy, self._children, self._parents
        missed, victim, removed, evictable = self._missed, policy.victim, policy.removed, self._evictable
        kept = hit
        for block in blocks[hit : self._capacity]:
            if missed is not None:
                missed(block)
            if self._free:
                self._free -= 1
            else:
                out = victim(evictable)
                if out is None:
                    break
                removed(out)
                del children[out]
                parent = parents.pop(out)
                if parent is not None:
                    children[parent] -= 1
            parents[block] = tail
            children[block] = 1  # and what its parent had one more for is this child now
            tail = block
            kept += 1
        for depth in range(kept - 1, hit - 1, -1):
            block = blocks[depth]
            policy.inserted(block, parents[block], block, depth)
        return tail


class GhostTally:
    """What some ghost caches found in some time, by classes of blocks. Those of alike caches can be added up."""

    __slots__ = ("_chosen", "_resident", "asked")

    def __init__(self, ghosts: int) -> None:
        """Nothing yet, for so many ghost caches."""
        self.asked = [0] * (_USES * _AGES)
        """All blocks asked for, by class."""
        self._chosen = [0] * (_USES * _AGES)
        self._resident = [[0] * (_USES * _AGES) for _ in range(ghosts)]

    def count(self, classes: Sequence[int], hits: Sequence[int]) -> None:
        """The classes of the chosen blocks of a request, first to last, and how many of these each ghost had."""
        for number in classes:
            self._chosen[number] += 1
        for row, hit in zip(self._resident, hits, strict=True):
            for number in classes[:hit]:
                row[number] += 1

    def add(self, other: GhostTally) -> None:
        """Take in what another one counted."""
        mine = (self.asked, self._chosen, *self._resident)
        for row, more in zip(mine, (other.asked, other._chosen, *other._resident), strict=True):
            row[:] = map(int.__add__, row, more)

    def hit_blocks(self) -> list[float]:
        """How many of all blocks asked for each ghost is estimated to have hit.

        A class of which no block was chosen is taken to be like that of the next younger blocks with as many uses.
        """
        estimates = []
        for row in self._resident:
            hits, share = 0.0, 0.0
            for number, (asked, chosen, resident) in enumerate(zip(self.asked, self._chosen, row, strict=True)):
                if number % _AGES == 1:
                    share = 1.0
                if chosen:
                    share = resident / chosen
                hits += asked * share
            estimates.append(hits)
        return estimates


class GhostCaches:
    """Several ghost caches that follow the same traffic. Belongs to one owner; not thread-safe.

    What is generated is not followed, only prompts. Memory is bounded by the sizes of the ghosts and what may be
    remembered, not by the traffic.
    """

    def __init__(self, ghosts: Sequence[Ghost], one_in: int, most_remembered: int = 100_000) -> None:
        """Follow ``ghosts`` on one block in ``one_in``; 1 follows every block, exactly.

        ``most_remembered`` bounds the blocks whose last request is remembered (some 150 bytes each, and up to twice as
        many). With fewer than are asked for again, estimates get less sure, not wrong.

        Raises:
            UnknownPolicyError: there is no such policy.
            ValueError: a size is not positive, ``one_in`` is no power of two up to ``MOST_ONE_IN``, or there are no
                ghosts.
        """
        if not ghosts or min(ghost.blocks for ghost in ghosts) < 1 or one_in < 1 or MOST_ONE_IN % one_in:
            raise ValueError(
                f"ghost caches need at least one ghost, positive sizes, and a power of two up to {MOST_ONE_IN}"
            )
        self.ghosts: Final = tuple(ghosts)
        self.one_in: Final = one_in
        self._caches = [GhostCache(ghost.policy, max(1, round(ghost.blocks / one_in))) for ghost in ghosts]
        self._marks = bytes(byte < max(1, 256 // one_in) for byte in range(256))
        self._second_below = min(256, MOST_ONE_IN // one_in)
        self._now = 0
        # Block -> when it was asked for last and how often so far (see _history). Two generations, each closed under
        # prefixes, as every request adds its whole chain.
        self._last: dict[bytes, int] = {}
        self._last_before: dict[bytes, int] = {}
        self._generation = min(most_remembered, _REMEMBERED * max(ghost.blocks for ghost in ghosts))

    def observe(self, keys: Sequence[bytes], tally: GhostTally, most: int | None = None) -> None:
        """Take in the chained keys of one prompt's full blocks, and count in ``tally`` what the ghosts found.

        ``most`` is how many of the blocks can be hit at all, where that is not each. Keys are of one length, and must
        look random in their first 8 bytes and in their last two.
        """
        if not keys:
            return
        count = len(keys)
        most = count if most is None else min(most, count)
        classes = self._classes(keys, tally.asked, most)
        tally.asked[0] += max(0, most - len(classes))
        width = len(keys[0])
        # All last bytes at once: a look at each key would take most of the time.
        marks = b"".join(keys)[width - 1 :: width].translate(self._marks)
        place = marks.find(1)
        if place < 0:
            return
        blocks, chosen = [], []
        while place >= 0:
            key = keys[place]
            if key[-2] < self._second_below:
                blocks.append(int.from_bytes(key[:_KEY_BYTES], "little"))
                if place < most:
                    chosen.append(classes[place] if place < len(classes) else 0)
            place = marks.find(1, place + 1)
        if blocks:
            tally.count(chosen, [cache.request(blocks) for cache in self._caches])

    def _classes(self, keys: Sequence[bytes], asked: list[int], most: int) -> list[int]:
        """The classes of the leading blocks that are remembered, counted in ``asked`` up to ``most``; remembers all."""
        last, before = self._last, self._last_before
        # Whoever asks for a block asks for all before it: the blocks that are remembered lead, the recent ones first.
        recent = _leading(keys, last, 0)
        known = _leading(keys, before, recent)
        histories = list(map(last.__getitem__, keys[:recent]))
        histories += map(before.__getitem__, keys[recent:known])
        self._now = now = self._now + 1
        classes: list[int] = []
        place = 0
        while place < known:
            # Histories are sorted along a chain, so that alike ones stand together.
            history = histories[place]
            end = bisect_right(histories, history, place)
            time, uses = -(history >> _USES), _COUNTED - (history & _COUNTED)
            number = (uses.bit_length() - 1) * _AGES + min(_AGES - 1, ((now - time) ** 2).bit_length())
            if place < most:
                asked[number] += min(end, most) - place
            classes += [number] * (end - place)
            history = _history(now, uses + 1)
            for key in keys[place:end]:
                last[key] = history
            place = end
        history = _history(now, 1)
        for key in keys[known:]:
            last[key] = history
        if len(last) > self._generation:
            self._last_before, self._last = last, {}
        return classes


def _history(time: int, uses: int) -> int:
    """Both in one number: the smaller the later, and of one time the smaller the more often."""
    return (-time << _USES) + max(0, _COUNTED - uses)


def _leading(keys: Sequence[bytes], known: Mapping[bytes, int], start: int) -> int:
    """Up to where the keys from ``start`` on are known; those that are come first."""
    low, high = start, len(keys)
    while low < high:
        middle = (low + high) // 2
        if keys[middle] in known:
            low = middle + 1
        else:
            high = middle
    return low
