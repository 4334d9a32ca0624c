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
_FORGIVENESS: Final = 32
"""Turnovers after which half of the lag is forgiven, so that the learned order is tried again."""


class AdaptivePolicy(QueuePolicy):
    """Evicts the block that promises the fewest hits for the room it takes.

    Blocks fall into classes by their uses so far. For each class the policy counts, by age since the last use, how much
    block time was spent and how many reuses came; it goes on counting for some turnovers after a block has left, so
    that it learns what longer stays would bring. From a given age on, the best ratio of reuses to time over any
    horizon is what a block promises: its Gittins index, computed as the hit density of LHD (Beckmann, Chen & Cidon,
    NSDI 2018) is, with classes and horizons for chains of blocks. Of each class only the least recently used leaf can
    be the victim.

    A mirror, a list of keys as LRU would keep them, tells how many hits LRU would have had. When it is ahead by more
    than a small part of the pool, LRU decides until that is made up or forgiven. This bounds what a wrong
    prediction can cost.

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
        """Of the least recently used leaves of all classes that which promises least, of equals the oldest."""
        self._watch_lead()
        found: int | None = None
        lowest: tuple[float, int] | None = None
        for level, queue in enumerate(self._queues):
            block = queue.first(evictable)
            if block is None:
                continue
            promise = 0.0 if self._cautious else self._promise[level][self._age_bin(self._key[block])]
            rank = (promise, self._idle_since[block])
            if lowest is None or rank < lowest:
                found, lowest = block, rank
        return found

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

    def _age_bin(self, key: BlockKey) -> int:
        observed = self._observed.get(key)
        return _BINS - 1 if observed is None else _BIN_OF_AGE[self._period - observed[0]]

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
        self._lead *= 0.5 ** (self._period_length / self.capacity / _FORGIVENESS) if self._lead < 0 else 1.0
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

    def _watch_lead(self) -> None:
        # An old lead must not hide that the requests have changed.
        self._lead = min(self._lead, self._tolerated)
        if self._lead < -self._tolerated:
            self._cautious = True
        elif self._lead > -self._tolerated / 2:
            self._cautious = False


def _level(uses: int) -> int:
    return min(uses, _CLASSES) - 1
