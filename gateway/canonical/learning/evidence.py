"""What was seen of one field: how many values, how often they change, what they look like. Never a value itself.

Values are counted by salted digests in a sketch of fixed size, over a window of the latest requests.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from typing import Final

from gateway.canonical.learning.tokens import SHAPES, Shape, shape_of

__all__ = ["MAX_MOVED_CHARS", "WINDOW", "DistinctSketch", "FieldEvidence", "fits_metadata"]

WINDOW: Final = 1024
"""Requests that evidence covers: between half and all of so many, the latest ones."""

MAX_MOVED_CHARS: Final = 200
"""A value longer than this is an instruction, a list or a document rather than a field: it stays where it is."""

_HALF: Final = WINDOW // 2
_SHAPED: Final = 32  # values of each half window whose shape is looked at
_MIN_REQUESTS: Final = 8
_MIN_DISTINCT: Final[dict[Shape, int]] = {"name": 8, "text": 16}
_MIN_DISTINCT_IDS: Final = 3
_ENTER_RATE: Final = 0.04  # changes per request
_LEAVE_RATE: Final = 0.005


class DistinctSketch:
    """Counts distinct digests in 256 bytes: exactly up to 31, then by the 32nd smallest (Bar-Yossef et al. 2002)."""

    __slots__ = ("_smallest",)

    _SIZE: Final = 32

    def __init__(self) -> None:
        self._smallest = array("Q")

    def add(self, digest: int) -> None:
        """Count one 64-bit digest, uniformly distributed."""
        smallest = self._smallest
        if len(smallest) == self._SIZE and digest >= smallest[-1]:
            return
        place = bisect_left(smallest, digest)
        if place < len(smallest) and smallest[place] == digest:
            return
        smallest.insert(place, digest)
        if len(smallest) > self._SIZE:
            smallest.pop()

    def merged(self, other: DistinctSketch) -> DistinctSketch:
        """The sketch of both together."""
        union = DistinctSketch()
        union._smallest = array("Q", sorted({*self._smallest, *other._smallest})[: self._SIZE])
        return union

    @property
    def count(self) -> int:
        """Distinct digests; beyond 31 an estimate with an error of about 18 %."""
        smallest = self._smallest
        if len(smallest) < self._SIZE:
            return len(smallest)
        return round((self._SIZE - 1) / smallest[-1] * 2**64)


class _Half:
    """What one half of the window holds. ``unfit`` values could not stand in a metadata line."""

    __slots__ = ("changes", "distinct", "longest", "requests", "shapes", "unfit")

    def __init__(self) -> None:
        self.requests = 0
        self.changes = 0
        self.unfit = 0
        self.longest = 0
        self.shapes = [0] * len(SHAPES)
        self.distinct = DistinctSketch()


class FieldEvidence:
    """Owns what was seen of one field: about a kilobyte, whatever is sent.

    ``moving`` says whether the field differs between requests by this evidence. That takes 8 requests, a change in
    every 25th of them, and 3 values; of names 8 and of other words 16, since a few of those are rather variants of
    the prompt. It ends when fewer than one request in 200 of a full window changes the value: a constant is never
    moved, and what seldom changes does not flap. ``bulky`` is what changes as often and is too long to be moved.
    """

    __slots__ = ("_before", "_last", "_now", "bulky", "moving")

    def __init__(self) -> None:
        self._before = _Half()
        self._now = _Half()
        self._last: int | None = None
        self.moving = False
        self.bulky = False

    def add(self, value: str, digest: int) -> None:
        """Count the value of one request by its digest; ``value`` is only looked at."""
        now = self._now
        if now.requests == _HALF:
            self._before, self._now = now, _Half()
            now = self._now
        now.requests += 1
        if not fits_metadata(value):
            now.unfit += 1
        if digest == self._last and now.requests > 1:
            return
        now.changes += digest != self._last and self._last is not None
        self._last = digest
        now.distinct.add(digest)
        now.longest = max(now.longest, len(value))
        if now.requests <= _SHAPED:
            now.shapes[SHAPES.index(shape_of(value))] += 1

    def decide(self) -> bool:
        """Bring ``moving`` and ``bulky`` up to date, at least per half window; says whether either changed."""
        requests, changes = self.requests, self.changes
        if self.moving or self.bulky:
            volatile = requests < WINDOW or changes >= _LEAVE_RATE * WINDOW
        else:
            volatile = (
                requests >= _MIN_REQUESTS
                and changes >= _ENTER_RATE * requests
                and self.distinct >= _MIN_DISTINCT.get(self.shape, _MIN_DISTINCT_IDS)
            )
        before = self.moving, self.bulky
        self.moving = volatile and self.movable
        self.bulky = volatile and not self.movable
        return before != (self.moving, self.bulky)

    @property
    def requests(self) -> int:
        """Requests in the window."""
        return self._before.requests + self._now.requests

    @property
    def changes(self) -> int:
        """How often the value was another one than in the request before, in the window."""
        return self._before.changes + self._now.changes

    @property
    def distinct(self) -> int:
        """Distinct values in the window (see ``DistinctSketch.count``)."""
        return min(self.requests, self._before.distinct.merged(self._now.distinct).count)

    @property
    def longest(self) -> int:
        """Characters of the longest value in the window."""
        return max(self._before.longest, self._now.longest)

    @property
    def movable(self) -> bool:
        """Whether the values, but for one in fifty, could stand in a metadata line.

        While the field is moved, but for one in four: whoever may fill in his name must not end it for all others.
        """
        return (self._before.unfit + self._now.unfit) * (4 if self.moving else 50) <= self.requests

    @property
    def shape(self) -> Shape:
        """What most of the values look like."""
        counts = [before + now for before, now in zip(self._before.shapes, self._now.shapes, strict=True)]
        return SHAPES[counts.index(max(counts))]


def fits_metadata(value: str) -> bool:
    """Whether a value can stand in a metadata line: one line, not too long."""
    return len(value) <= MAX_MOVED_CHARS and (value.isprintable() or value.splitlines() == [value])
