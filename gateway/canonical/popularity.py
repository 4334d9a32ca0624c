"""Which documents are asked for often, and which of them together: the order of what no replica holds.

Counts drift with every request, and an order that follows them would change the prefix of a prompt that has just been
cached. So requests are ordered by a snapshot, which has a version and stays as it is until the next one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import combinations
from typing import Final

import msgspec

from gateway.canonical.crowding import first_to_leave
from gateway.canonical.order import MAX_ORDERED, UNLIMITED, OrderLimits
from gateway.canonical.sighting import Scope, Sighting

__all__ = [
    "MAX_DOCUMENTS",
    "MAX_PAIRS",
    "MAX_SCOPES",
    "Counts",
    "Popularity",
    "Snapshot",
    "ranking",
]

MAX_DOCUMENTS: Final = 100_000
"""Counts of documents kept over all scopes, about 10 MB."""

MAX_PAIRS: Final = 200_000
"""Counts of pairs of documents kept over all scopes, about 25 MB."""

MAX_SCOPES: Final = 1024

_FIRST_PERIOD: Final = 32
_LAST_PERIOD: Final = 4096
"""Requests between two snapshots: the number doubles from the first to the last, so that a new source is soon in order
and an old one seldom put in another."""

_PAIRED: Final = 12
"""Leading documents of a request whose pairs are counted."""


class Counts(msgspec.Struct, frozen=True):
    """In how many requests of one period a document stood, and a pair (the exclusive or of its fingerprints)."""

    documents: dict[int, int] = {}
    pairs: dict[int, int] = {}


class Snapshot(msgspec.Struct, frozen=True):
    """The counts of the last two periods that ended. ``version`` 0 knows nothing; each renewal adds one."""

    version: int = 0
    recent: Counts = Counts()
    before: Counts = Counts()

    def asked(self, documents: Sequence[int]) -> list[int]:
        """How often each of ``documents`` was asked for."""
        recent, before = self.recent.documents, self.before.documents
        return [recent.get(document, 0) + before.get(document, 0) for document in documents]

    def order(
        self,
        documents: Sequence[int],
        led: tuple[int, ...] = (),
        limits: OrderLimits = UNLIMITED,
        ranks: Sequence[int] | None = None,
        asked: Sequence[int] | None = None,
    ) -> tuple[int, ...]:
        """All indexes of ``documents``, fingerprints in the caller's order: ``led``, then what goes with it most often.

        Next is always the document that was most often together with those before it, counted by the one of them with
        which it was least often; then the one most asked for; then the one with the lowest of ``ranks`` (None: the
        caller's order). Documents behind the first ``MAX_ORDERED`` keep their places. ``asked`` is what ``asked()``
        says of ``documents``, where it is at hand.
        """
        count = len(documents)
        ordered = min(count, MAX_ORDERED)
        remaining = [index for index in range(ordered) if index not in led]
        if len(remaining) < 2 or (not self.version and ranks is None):
            return (*led, *remaining, *range(ordered, count))
        ranks = ranks or range(ordered)
        asked = asked or self.asked(documents)
        # together, asked for, rank, index: the greatest is next
        entries = [[asked[index], asked[index], -ranks[index], index] for index in remaining]
        for index in led:
            self._join(entries, documents, index)
        result = list(led)
        while len(entries) > 1:
            best = max(entries)
            if not limits.unlimited:
                remaining = sorted([entry[3] for entry in entries])
                allowed = limits.choices(len(result), remaining, count)
                best = max([entry for entry in entries if entry[3] in allowed])
            entries.remove(best)
            result.append(best[3])
            self._join(entries, documents, best[3])
        return (*result, entries[0][3], *range(ordered, count))

    def _join(self, entries: list[list[int]], documents: Sequence[int], placed: int) -> None:
        """Bring ``entries`` up to date when the document ``placed`` stands before them."""
        recent, before, other = self.recent.pairs, self.before.pairs, documents[placed]
        for entry in entries:
            if together := entry[0]:
                pair = other ^ documents[entry[3]]
                shared = recent.get(pair, 0) + before.get(pair, 0)
                if shared < together:
                    entry[0] = shared


def ranking(asked: Sequence[int]) -> list[int]:
    """The indexes of documents asked for so often, the most frequent first, ties in the caller's order."""
    return sorted(range(len(asked)), key=asked.__getitem__, reverse=True)


_UNKNOWN: Final = Snapshot()


class _Window:
    """One scope: the snapshot in force and what has been counted since. Belongs to ``Popularity``."""

    __slots__ = ("documents", "pairs", "period", "requests", "snapshot")

    def __init__(self) -> None:
        self.snapshot = _UNKNOWN
        self.documents: dict[int, int] = {}
        self.pairs: dict[int, int] = {}
        self.period = _FIRST_PERIOD
        self.requests = 0

    @property
    def sizes(self) -> tuple[int, int]:
        """Counts of documents and of pairs, together with those of the snapshot."""
        recent, before = self.snapshot.recent, self.snapshot.before
        return (
            len(self.documents) + len(recent.documents) + len(before.documents),
            len(self.pairs) + len(recent.pairs) + len(before.pairs),
        )

    def renew(self) -> None:
        """End the period: a new snapshot, without the older half of the one before."""
        self.snapshot = Snapshot(self.snapshot.version + 1, Counts(self.documents, self.pairs), self.snapshot.recent)
        self.documents, self.pairs, self.requests = {}, {}, 0
        self.period = min(self.period * 2, _LAST_PERIOD)

    def shrink(self) -> None:
        """Forget about half of what is known."""
        if not self.snapshot.before.documents:
            self.renew()
        self.snapshot = Snapshot(self.snapshot.version + 1, self.snapshot.recent)


class Popularity:
    """Counts documents per scope and publishes snapshots. Owns all counts; belongs to one thread.

    The bounds hold over all scopes together. A scope whose period has filled a third of one begins the next; where one
    is exceeded all the same, the largest scope forgets, so that a flood of documents drives out none but its own. Of
    too many scopes the one leaves that was unused for longest, of the tenant that has most of them.
    """

    def __init__(
        self, *, max_documents: int = MAX_DOCUMENTS, max_pairs: int = MAX_PAIRS, max_scopes: int = MAX_SCOPES
    ) -> None:
        self._max_documents: Final = max_documents
        self._max_pairs: Final = max_pairs
        self._max_scopes: Final = max_scopes
        self._scopes: OrderedDict[Scope, _Window] = OrderedDict()
        self.documents = 0
        """Counts of documents in memory."""
        self.pairs = 0
        """Counts of pairs in memory."""

    def snapshot(self, scope: Scope) -> Snapshot:
        """The snapshot in force for ``scope``."""
        window = self._scopes.get(scope)
        return _UNKNOWN if window is None else window.snapshot

    def observe(self, sighting: Sighting) -> None:
        """Count one request that was sent."""
        window = self._scopes.get(sighting.scope)
        if window is None:
            window = self._scopes[sighting.scope] = _Window()
            if len(self._scopes) > self._max_scopes:
                left = self._scopes.pop(first_to_leave(self._scopes, lambda _: 1))
                self._resize(left.sizes, (0, 0))
        else:
            self._scopes.move_to_end(sighting.scope)
        documents, pairs = window.documents, window.pairs
        known, paired = len(documents), len(pairs)
        for document in sighting.documents:
            documents[document] = documents.get(document, 0) + 1
        for one, other in combinations(sighting.documents[:_PAIRED], 2):
            pair = one ^ other
            pairs[pair] = pairs.get(pair, 0) + 1
        self._resize((known, paired), (len(documents), len(pairs)))
        window.requests += 1
        full = len(documents) * 3 >= self._max_documents or len(pairs) * 3 >= self._max_pairs
        if full or window.requests >= window.period:
            before = window.sizes
            window.renew()
            self._resize(before, window.sizes)
        while self.documents > self._max_documents or self.pairs > self._max_pairs:
            largest = max(self._scopes.values(), key=lambda window: sum(window.sizes))
            before = largest.sizes
            largest.shrink()
            self._resize(before, largest.sizes)

    def _resize(self, before: tuple[int, int], after: tuple[int, int]) -> None:
        self.documents += after[0] - before[0]
        self.pairs += after[1] - before[1]
