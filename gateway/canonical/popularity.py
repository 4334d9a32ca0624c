"""Which documents are asked for often, and which of them together: the order of what no replica holds.

Counts drift with every request, and an order that follows them would change the prefix of a prompt that has just been
cached. So requests are ordered by a snapshot, which has a version and stays as it is until the next one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
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

MAX_DOCUMENTS: Final = 300_000
"""Counts of documents kept over all scopes, about 30 MB: 100,000 documents that were seen in each of three periods."""

MAX_PAIRS: Final = 200_000
"""Counts of pairs of documents kept over all scopes, about 25 MB."""

MAX_SCOPES: Final = 1024

_FIRST_PERIOD: Final = 32
_LAST_PERIOD: Final = 16_384
"""Requests between two snapshots: the number doubles from the first to the last, so that a new source is soon in order
and an old one seldom put in another. Two of the last go round 100,000 documents, five in each request."""

_AT_ONCE: Final = 8
"""Requests that are counted together."""

_PAIRED: Final = 12
"""Leading documents of a request whose pairs are counted."""

_MANY: Final = 16_384
"""Counts of documents from which on a scope counts a pair only when it has seen both of its documents before: most
pairs of so many never come again (the pruning of Apriori, Agrawal and Srikant 1994)."""


class Counts(msgspec.Struct, frozen=True):
    """In how many requests of one period a document stood, and a pair (the exclusive or of its fingerprints)."""

    documents: dict[int, int] = {}
    pairs: dict[int, int] = {}


class Snapshot(msgspec.Struct, frozen=True):
    """The counts of the last two periods that ended. ``version`` 0 knows nothing; each change adds one.

    Documents that were asked for ``unpaired`` times or less are in no pair.
    """

    version: int = 0
    recent: Counts = Counts()
    before: Counts = Counts()
    unpaired: int = 0

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
        waiting = [index for index in range(ordered) if index not in led]
        if len(waiting) < 2 or (not self.version and ranks is None):
            return (*led, *waiting, *range(ordered, count))
        asked = asked or self.asked(documents)
        if ranks is not None:
            waiting.sort(key=ranks.__getitem__)
        waiting.sort(key=asked.__getitem__, reverse=True)
        together = [asked[index] for index in waiting]  # of equal ones the first goes first
        for index in led:
            self._join(together, waiting, documents, index)
        result = list(led)
        free = limits.unlimited
        while len(waiting) > 1:
            if free:
                most = max(together)
                if not most:
                    break  # they are in order already
                place = together.index(most)
            else:
                allowed = limits.choices(len(result), sorted(waiting), count)
                place = max(
                    [place for place, index in enumerate(waiting) if index in allowed], key=together.__getitem__
                )
            del together[place]
            result.append(waiting.pop(place))
            self._join(together, waiting, documents, result[-1])
        return (*result, *waiting, *range(ordered, count))

    def _join(self, together: list[int], waiting: Sequence[int], documents: Sequence[int], placed: int) -> None:
        """Bring ``together`` up to date when the document ``placed`` stands before those ``waiting``."""
        recent, before, other = self.recent.pairs, self.before.pairs, documents[placed]
        for place, least in enumerate(together):
            if least > self.unpaired:
                pair = other ^ documents[waiting[place]]
                shared = recent.get(pair, 0) + before.get(pair, 0)
                if shared < least:
                    together[place] = shared
            else:
                together[place] = 0


def ranking(asked: Sequence[int]) -> list[int]:
    """The indexes of documents asked for so often, the most frequent first, ties in the caller's order."""
    return sorted(range(len(asked)), key=asked.__getitem__, reverse=True)


_UNKNOWN: Final = Snapshot()


class _Tally:
    """Counts of one kind: of the period that lasts, of the one before, and of that before it."""

    __slots__ = ("before", "now", "recent")

    def __init__(self) -> None:
        self.now: dict[int, int] = {}
        self.recent: dict[int, int] = {}
        self.before: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self.now) + len(self.recent) + len(self.before)

    def renew(self) -> None:
        """End the period, without the oldest counts."""
        self.now, self.recent, self.before = {}, self.now, self.recent

    def shrink(self) -> None:
        """Forget about half of what is known."""
        if not self.before:
            self.renew()
        self.before = {}


class _Window:
    """One scope: the snapshot in force and what has been counted. Belongs to ``Popularity``."""

    __slots__ = ("documents", "pairs", "period", "requests", "snapshot")

    def __init__(self) -> None:
        self.snapshot = _UNKNOWN
        self.documents = _Tally()
        self.pairs = _Tally()
        self.period = _FIRST_PERIOD
        self.requests = 0

    def publish(self) -> None:
        """A new snapshot of the periods that have ended."""
        documents, pairs = self.documents, self.pairs
        self.snapshot = Snapshot(
            self.snapshot.version + 1,
            Counts(documents.recent, pairs.recent),
            Counts(documents.before, pairs.before),
            unpaired=int(len(documents.recent) + len(documents.before) >= _MANY),
        )


class Popularity:
    """Counts documents per scope and publishes snapshots. Owns all counts; belongs to one thread.

    The bounds hold over all scopes together, for documents and for pairs apart, so that many pairs drive out no
    documents. Of a kind whose counts have filled a third of its bound the next period begins; where a bound is exceeded
    all the same, the scope with most forgets, so that a flood of documents drives out none but its own. Of too many
    scopes the one leaves that was unused for longest, of the tenant that has most of them.
    """

    def __init__(
        self, *, max_documents: int = MAX_DOCUMENTS, max_pairs: int = MAX_PAIRS, max_scopes: int = MAX_SCOPES
    ) -> None:
        self._max_documents: Final = max_documents
        self._max_pairs: Final = max_pairs
        self._max_scopes: Final = max_scopes
        self._scopes: OrderedDict[Scope, _Window] = OrderedDict()
        self._waiting: list[tuple[_Window, tuple[int, ...]]] = []
        self._documents = 0
        self._pairs = 0

    @property
    def documents(self) -> int:
        """Counts of documents in memory."""
        self._count()
        return self._documents

    @property
    def pairs(self) -> int:
        """Counts of pairs in memory."""
        self._count()
        return self._pairs

    def snapshot(self, scope: Scope) -> Snapshot:
        """The snapshot in force for ``scope``."""
        window = self._scopes.get(scope)
        return _UNKNOWN if window is None else window.snapshot

    def observe(self, sighting: Sighting) -> None:
        """Count one request that was sent.

        Nobody reads a count before its period ends, so that requests are counted several at a time: each of them comes
        by memory that no processor cache holds, and so does the code that counts.
        """
        scope = sighting.scope
        window = self._scopes.get(scope)
        if window is None:
            window = self._admit(scope)
        else:
            self._scopes.move_to_end(scope)
        self._waiting.append((window, sighting.documents))
        window.requests += 1
        if window.requests >= window.period:
            self._count()
            window.requests, window.period = 0, min(window.period * 2, _LAST_PERIOD)
            self._change(window, _Tally.renew, window.documents, window.pairs)
        elif len(self._waiting) >= _AT_ONCE or len(sighting.documents) > MAX_ORDERED:
            self._count()

    def _count(self) -> None:
        """Count the requests that wait for it, and keep the bounds."""
        waiting, self._waiting = self._waiting, []
        for window, seen in waiting:
            documents, recent, pairs = window.documents.now, window.documents.recent, window.pairs.now
            known, paired = len(documents), len(pairs)
            pairing: Sequence[int] = seen[:_PAIRED]
            if known + len(recent) >= _MANY:
                pairing = [document for document in pairing if document in documents or document in recent]
            for document in seen:
                documents[document] = documents.get(document, 0) + 1
            for one, other in combinations(pairing, 2):
                pair = one ^ other
                pairs[pair] = pairs.get(pair, 0) + 1
            self._documents += len(documents) - known
            self._pairs += len(pairs) - paired
            if len(documents) * 3 >= self._max_documents:
                self._change(window, _Tally.renew, window.documents)
            if len(pairs) * 3 >= self._max_pairs:
                self._change(window, _Tally.renew, window.pairs)
        while self._documents > self._max_documents:
            largest = max(self._scopes.values(), key=lambda window: len(window.documents))
            self._change(largest, _Tally.shrink, largest.documents)
        while self._pairs > self._max_pairs:
            largest = max(self._scopes.values(), key=lambda window: len(window.pairs))
            self._change(largest, _Tally.shrink, largest.pairs)

    def _admit(self, scope: Scope) -> _Window:
        window = self._scopes[scope] = _Window()
        if len(self._scopes) > self._max_scopes:
            self._count()
            left = self._scopes.pop(first_to_leave(self._scopes, lambda _: 1))
            self._documents -= len(left.documents)
            self._pairs -= len(left.pairs)
        return window

    def _change(self, window: _Window, change: Callable[[_Tally], None], *tallies: _Tally) -> None:
        """Let counts of ``window`` forget, and publish what is left."""
        documents, pairs = len(window.documents), len(window.pairs)
        for tally in tallies:
            change(tally)
        window.publish()
        self._documents += len(window.documents) - documents
        self._pairs += len(window.pairs) - pairs
