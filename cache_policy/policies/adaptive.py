"""Our own policy: learns from the live requests when blocks come back, and never strays far below LRU."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from math import log2
from typing import Final

from cache_policy.policies.base import BlockKey
from cache_policy.policies.queues import LeafQueue, QueuePolicy

__all__ = ["AdaptivePolicy"]

_CLASSES: Final = 4
"""By uses so far: once, twice, three times, more often."""
_PERIODS_PER_TURNOVER: Final = 16
_SHORTEST_PERIOD: Final = 16
_HORIZON: Final = 4
"""Turnovers (as many insertions as the pool has blocks) for which a block is followed, resident or not; and the most
keys that are followed, in pools."""
_AGES: Final = _HORIZON * _PERIODS_PER_TURNOVER + 1
_BIN_OF_AGE: Final = tuple(int(4 * log2(1 + age)) for age in range(_AGES))
"""Ages in periods to bins of a quarter octave."""
_BINS: Final = _BIN_OF_AGE[-1] + 1
_DECAY: Final = 0.95
"""What a turnover leaves of older observations."""
_PRIOR_REUSES: Final = 2.5
"""How many observed reuses weigh as much as the mean of all classes."""
_TOLERANCE: Final = 0.05
"""Hits by which LRU may be ahead before it takes over, as a fraction of the pool."""
_TRUST: Final = 4
"""Turnovers for which LRU decides then; doubled each time it takes over again, halved each time it is beaten."""
_MARGIN: Final = 0.5
"""How much of the promise of LRU's victim another one may have at most to leave in its place."""


class AdaptivePolicy(QueuePolicy):
    """Evicts the block that promises the fewest hits for the room it takes.

    Blocks fall into classes by their uses so far. For each class the policy counts, by age since the last use, how much
    block time was spent and how many reuses came; it goes on counting for some turnovers after a block has left, so
    that it learns what longer stays would bring. From a given age on, the best ratio of reuses to time over any
    horizon is what a block promises: its Gittins index, computed as the hit density of LHD (Beckmann, Chen & Cidon,
    NSDI 2018) is. Of each class only the least recently used leaf can be the victim.

    Two things keep a wrong prediction cheap. LRU's victim is passed over only for one that promises less than half as
    much. And a mirror, a list of keys as LRU would keep them, tells how many hits LRU would have had: when it is ahead
    by more than a small part of the pool, LRU decides for some turnovers, longer each time.

    Nothing is set for a workload: times are in turnovers, counts decay, and there is no random choice. Memory: the
    mirror has as many keys as the pool has blocks, the observations at most four times as many.
    """

    name = "adaptive"

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._queues = tuple(LeafQueue() for _ in range(_CLASSES))
        self._key: dict[int, BlockKey] = {}
        self._uses: dict[int, int] = {}
        self._period_length = max(_SHORTEST_PERIOD, capacity // _PERIODS_PER_TURNOVER)
        self._insertions = 0
        self._period = 0
        # Key -> (period of the last use, uses), the longest unused first.
        self._observed: OrderedDict[BlockKey, tuple[int, int]] = OrderedDict()
        # How many observed keys of each class were last used in each period.
        self._cohorts: tuple[dict[int, int], ...] = tuple({} for _ in range(_CLASSES))
        self._reuses = [[0.0] * _BINS for _ in range(_CLASSES)]
        self._block_time = [[0.0] * _BINS for _ in range(_CLASSES)]
        self._promise = [[0.0] * _BINS for _ in range(_CLASSES)]
        self._mirror: OrderedDict[BlockKey, None] = OrderedDict()
        self._tolerated = _TOLERANCE * capacity
        self._lead = 0.0
        self._cautious = False
        self._cautious_until = 0
        self._trust = _TRUST

    def inserted(self, block: int, parent: int | None, key: BlockKey, depth: int) -> None:
        """In the class of all uses that are remembered of its content."""
        self._insertions += 1
        if self._insertions % self._period_length == 0:
            self._next_period()
        self._lead -= self._reflect(key)
        self._key[block] = key
        self._used(block, self._observed[key][1] + 1 if key in self._observed else 1)
        super().inserted(block, parent, key, depth)

    def touched(self, block: int) -> None:
        """One use more."""
        self._lead += 1 - self._reflect(self._key[block])
        self._used(block, self._uses[block] + 1)
        super().touched(block)

    def removed(self, block: int) -> None:
        """Gone, but its content is followed on."""
        super().removed(block)
        del self._key[block], self._uses[block]

    def victim(self, evictable: Callable[[int], bool]) -> int | None:
        """The least recently used leaf, or that of another class when it promises clearly less."""
        leaves = [(queue.first(evictable), level) for level, queue in enumerate(self._queues)]
        candidates = [(self._idle_since[block], block, level) for block, level in leaves if block is not None]
        if not candidates:
            return None
        _, oldest, level = min(candidates)
        if self._cautious:
            return oldest
        found, lowest = oldest, _MARGIN * self._promised(oldest, level)
        for _, block, level in candidates:
            promised = self._promised(block, level)
            if promised < lowest:
                found, lowest = block, promised
        return found

    def _promised(self, block: int, level: int) -> float:
        observed = self._observed.get(self._key[block])
        return self._promise[level][-1 if observed is None else _BIN_OF_AGE[self._period - observed[0]]]

    def _used(self, block: int, uses: int) -> None:
        """A use has ended: count the reuse, if it is one, and follow the block from now on."""
        key = self._key[block]
        before = self._observed.pop(key, None)
        if before is not None:
            period, uses_before = before
            level = _level(uses_before)
            self._reuses[level][_BIN_OF_AGE[self._period - period]] += 1
            self._leave_cohort(level, period)
        self._observed[key] = (self._period, uses)
        level = _level(uses)
        cohorts = self._cohorts[level]
        cohorts[self._period] = cohorts.get(self._period, 0) + 1
        if len(self._observed) > _HORIZON * self.capacity:
            self._forget_oldest()
        self._uses[block] = uses
        self._move(block, self._queues[level])

    def _forget_oldest(self) -> None:
        _, (period, uses) = self._observed.popitem(last=False)
        self._leave_cohort(_level(uses), period)

    def _leave_cohort(self, level: int, period: int) -> None:
        cohorts = self._cohorts[level]
        cohorts[period] -= 1
        if not cohorts[period]:
            del cohorts[period]

    def _next_period(self) -> None:
        """Add the block time of the period that ends, forget what is too old, and learn."""
        for cohorts, spent in zip(self._cohorts, self._block_time, strict=True):
            for period, blocks in cohorts.items():
                spent[_BIN_OF_AGE[self._period - period]] += blocks
        self._period += 1
        while self._observed and self._period - next(iter(self._observed.values()))[0] >= _AGES:
            self._forget_oldest()
        fade = _DECAY ** (self._period_length / self.capacity)
        for counts in (*self._reuses, *self._block_time):
            counts[:] = [count * fade for count in counts]
        self._weigh_lru()
        self._learn()

    def _learn(self) -> None:
        """The promise of every class at every age: its best ratio of reuses to block time over any horizon."""
        all_reuses = [sum(column) for column in zip(*self._reuses, strict=True)]
        all_time = [sum(column) for column in zip(*self._block_time, strict=True)]
        if not any(all_reuses) or not any(all_time):
            return
        # A class about which little is known is taken to be like all.
        weight = _PRIOR_REUSES * sum(all_time) / sum(all_reuses)
        prior = [reuses / time if time else 0.0 for reuses, time in zip(all_reuses, all_time, strict=True)]
        for level in range(_CLASSES):
            reuses = [count + weight * mean for count, mean in zip(self._reuses[level], prior, strict=True)]
            time = [spent + weight for spent in self._block_time[level]]
            for start in range(_BINS):
                best = total_reuses = total_time = 0.0
                for end in range(start, _BINS):
                    total_reuses += reuses[end]
                    total_time += time[end]
                    best = max(best, total_reuses / total_time)
                self._promise[level][start] = best

    def _reflect(self, key: BlockKey) -> int:
        """Use ``key`` in the mirror; returns 1 when it is a hit there, else 0."""
        hit = key in self._mirror
        self._mirror[key] = None
        if hit:
            self._mirror.move_to_end(key)
        elif len(self._mirror) > self.capacity:
            self._mirror.popitem(last=False)
        return int(hit)

    def _weigh_lru(self) -> None:
        """Let LRU decide for a while when it would have had clearly more hits, the longer the more often it had."""
        if self._cautious:
            if self._insertions >= self._cautious_until:
                self._cautious, self._lead = False, 0.0
        elif self._lead < -self._tolerated:
            self._cautious = True
            self._cautious_until = self._insertions + self._trust * self.capacity
            self._trust *= 2
        elif self._lead > self._tolerated:
            # An old lead must not hide that the requests have changed.
            self._lead = self._tolerated
            self._trust = max(_TRUST, self._trust // 2)


def _level(uses: int) -> int:
    return min(uses, _CLASSES) - 1
