"""Step 4, order: what any order of documents must keep to, and the order by id.

``preserve`` keeps the caller's order, which is relevance, and ``canonical`` sorts by id. What is popular
(``gateway.canonical.popularity``) and what a replica holds (``gateway.canonical.resident``) decide the other two. A
caller may limit how far any of them goes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from heapq import heappop, heappush
from typing import Final

import msgspec

from gateway.canonical.documents import Document

__all__ = ["MAX_ORDERED", "UNLIMITED", "OrderLimits", "by_id"]

MAX_ORDERED: Final = 64
"""Documents that popularity and residency put in order; those behind keep the caller's places."""


class OrderLimits(msgspec.Struct, frozen=True):
    """Which documents may stand where. Indexes and places count from 0 in the caller's order.

    The first ``keep_first`` and the last ``keep_last`` documents keep their places; no other one moves further than
    ``max_displacement`` places (None: as far as it likes).
    """

    keep_first: int = 0
    keep_last: int = 0
    max_displacement: int | None = None

    @property
    def unlimited(self) -> bool:
        """Whether every permutation is allowed."""
        return not self.keep_first and not self.keep_last and self.max_displacement is None

    def end(self, place: int, first: int, count: int) -> int:
        """Of the documents without a place yet, those with a lower index than this may stand at ``place``.

        Places are taken in ascending order, all in this way; ``first`` is the lowest index without one, ``count`` how
        many documents there are. Whichever is chosen, the rest can be placed: in ascending order the first of them is
        in time, and so are those behind it, whose indexes are at least as far apart as their places.
        """
        last = count - self.keep_last
        if place < self.keep_first or first >= last:
            return first + 1
        if self.max_displacement is None:
            return last
        if first + self.max_displacement <= place:
            return first + 1  # its last chance
        return min(last, place + self.max_displacement + 1)

    def choices(self, place: int, remaining: Sequence[int], count: int) -> Sequence[int]:
        """Those of ``remaining``, the indexes without a place yet in ascending order, that may stand at ``place``."""
        end = self.end(place, remaining[0], count)
        return remaining if remaining[-1] < end else remaining[: bisect_left(remaining, end)]


UNLIMITED: Final = OrderLimits()


def by_id(documents: Sequence[Document], limits: OrderLimits = UNLIMITED) -> tuple[int, ...]:
    """The indexes of ``documents`` sorted by id as far as ``limits`` allow; equal ids stay in the caller's order."""
    count = len(documents)
    order = sorted(range(count), key=lambda index: documents[index].id)
    if limits.unlimited:
        return tuple(order)
    rank = {index: position for position, index in enumerate(order)}
    waiting: list[int] = []  # a heap: ranks of documents that may stand here
    placed = bytearray(count)
    result: list[int] = []
    first = released = 0
    for place in range(count):
        while placed[first]:
            first += 1
        end = limits.end(place, first, count)
        for index in range(released, end):
            heappush(waiting, rank[index])
        released = max(released, end)
        chosen = first if end == first + 1 else order[heappop(waiting)]
        while placed[chosen]:  # it was placed at its last chance
            chosen = order[heappop(waiting)]
        placed[chosen] = 1
        result.append(chosen)
    return tuple(result)
