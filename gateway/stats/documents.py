"""Which documents earned the cache's hits, and which cost what it missed: the largest of each span of time.

Documents are kept by tenant and id, never with text. In every minute, hour and day those with the most tokens are kept
apart and all others summed up as one, so that memory is bounded whatever is asked for and sums stay exact.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, NamedTuple

import msgspec

from gateway.attribution.causes import Run
from gateway.attribution.history import Cause
from gateway.attribution.live import Judged
from gateway.stats.distinct import DistinctKeys
from gateway.stats.timeline import HOUR, MINUTE, Span

__all__ = [
    "DOCUMENT_SPANS",
    "DocumentKey",
    "DocumentReport",
    "DocumentRow",
    "DocumentSums",
    "Documents",
    "Sketch",
]

DOCUMENT_SPANS: Final = (MINUTE._replace(keep=60), HOUR._replace(keep=24), Span("day", 24 * 3600, 30, 1))
_MOST_SHOWN: Final = 100
_LONGEST_ID: Final = 128


class DocumentKey(NamedTuple):
    """Whose document, and its id (of long ones the beginning)."""

    tenant: str
    id: str


class DocumentSums(msgspec.Struct, array_like=True):
    """Figures of one document, or of several: how often it was laid out, its prompt tokens, how many of them were
    cached, its share of the saved seconds, and the rest of its tokens by cause.
    """

    requests: int = 0
    tokens: int = 0
    cached_tokens: int = 0
    saved_prefill_s: float = 0.0
    missed: dict[Cause, int] = {}

    def add(self, other: DocumentSums) -> None:
        """Add another one's figures."""
        self.requests += other.requests
        self.tokens += other.tokens
        self.cached_tokens += other.cached_tokens
        self.saved_prefill_s += other.saved_prefill_s
        for cause, tokens in other.missed.items():
            self.missed[cause] = self.missed.get(cause, 0) + tokens


class Sketch:
    """The documents of one span of time: ``rows`` those kept apart, at most twice ``size``, ``other`` the sum of the
    rest. ``prefixes`` counts the different block keys that were asked for. Owned by ``Documents``.
    """

    def __init__(self, size: int) -> None:
        self._size: Final = size
        self.rows: dict[DocumentKey, DocumentSums] = {}
        self.other = DocumentSums()
        self.prefixes: Final = DistinctKeys()

    def row(self, key: DocumentKey) -> DocumentSums:
        """The figures of a document, to be added to at once and not kept."""
        sums = self.rows.get(key)
        if sums is None:
            if len(self.rows) >= 2 * self._size:
                self.trim()
            sums = self.rows[key] = DocumentSums()
        return sums

    def merge(self, other: Sketch) -> None:
        """Add another one's figures."""
        for key, sums in other.rows.items():
            self.row(key).add(sums)
        self.other.add(other.other)
        self.prefixes.merge(other.prefixes)

    def trim(self) -> None:
        """Keep the half with the most tokens apart."""
        ordered = sorted(self.rows.items(), key=lambda item: -item[1].tokens)
        self.rows = dict(ordered[: self._size])
        for _, sums in ordered[self._size :]:
            self.other.add(sums)


class DocumentRow(msgspec.Struct, frozen=True):
    """Figures of one document of one tenant. ``tokens`` are those it had in prompts, cached or not.

    ``missed`` are those that were not, by cause; ``saved_prefill_s`` is its share of the saved seconds, by tokens.
    """

    tenant: str
    id: str
    requests: int
    tokens: int
    cached_tokens: int
    token_hit_rate: float | None
    saved_prefill_s: float
    missed: dict[Cause, int]

    @classmethod
    def of(cls, key: DocumentKey, sums: DocumentSums) -> DocumentRow:
        """The row of these sums."""
        rate = sums.cached_tokens / sums.tokens if sums.tokens else None
        return cls(*key, sums.requests, sums.tokens, sums.cached_tokens, rate, sums.saved_prefill_s, sums.missed)


class DocumentReport(msgspec.Struct, frozen=True):
    """The documents of a window from Unix time ``since`` on, most tokens first; ``other`` sums up those not shown.

    ``distinct_prefixes`` is the number of different blocks that were asked for, each with all that is before it: so
    many blocks it takes to keep them all. It is exact to some 3 %. ``enabled`` is whether this gateway attributes.
    """

    window_s: int
    since: float
    enabled: bool
    distinct_prefixes: int
    rows: list[DocumentRow]
    other: DocumentRow


class Documents:
    """What this gateway has counted, and what others have. Owns both; belongs to the event loop.

    Requests are counted in the current minute, which is added to its hour and its day when it is over. ``size``
    documents are kept apart in each. ``clock`` tells Unix time.
    """

    def __init__(self, size: int, *, clock: Callable[[], float] = time.time) -> None:
        self.size: Final = size
        self._clock: Final = clock
        self._spans: Final[dict[Span, dict[int, Sketch]]] = {span: {} for span in DOCUMENT_SPANS}
        self._others: dict[tuple[Span, int], Sketch] = {}
        self._open: int | None = None  # the minute that is not in its hour and day yet
        self._changed: set[tuple[Span, int]] = set()

    def observe(self, tenant: str, keys: Sequence[bytes], judged: Judged, cached: int, saved_s: float) -> None:
        """Count one request of ``tenant``, of which ``cached`` prompt tokens were cached, and ``saved_s`` saved."""
        minute = max(DOCUMENT_SPANS[0].number(self._clock()), self._open or 0)  # a clock may be set back
        if minute != self._open:
            self.roll()
            self._open = minute
        sketch = self._own(DOCUMENT_SPANS[0], minute)
        sketch.prefixes.add(keys)
        start = 0
        for part, end in zip(judged.parts, judged.ends, strict=True):
            if part.kind == "document" and end > start:
                sums = sketch.row(DocumentKey(tenant, part.label[:_LONGEST_ID]))
                hit = (end if end < cached else cached) - start
                sums.requests += 1
                sums.tokens += end - start
                if hit > 0:
                    sums.cached_tokens += hit
                    sums.saved_prefill_s += saved_s * hit / cached
                if end > cached:
                    _add_missed(sums.missed, judged.runs, start, end)
            start = end

    def roll(self) -> None:
        """Add the minute that is not in its hour and day yet to both, whether it is over or not."""
        if self._open is None:
            return
        first, *longer = DOCUMENT_SPANS
        minute = self._spans[first].get(self._open)
        at = self._open * first.seconds
        if minute is not None:
            for span in longer:
                self._own(span, span.number(at)).merge(minute)
        self._open = None

    def roll_if_over(self) -> None:
        """Do so if that minute is over."""
        if self._open is not None and DOCUMENT_SPANS[0].number(self._clock()) > self._open:
            self.roll()

    def report(self, minutes: int | None, *, enabled: bool = True) -> DocumentReport:
        """The last so many minutes, thirty days at most and by default; in whole minutes, hours or days."""
        now = self._clock()
        span = next(
            (span for span in DOCUMENT_SPANS if minutes is not None and minutes * 60 <= span.keep * span.seconds),
            DOCUMENT_SPANS[-1],
        )
        length = span.keep if minutes is None else -(-minutes * 60 // span.seconds)
        last = span.number(now)
        numbers = range(last - length + 1, last + 1)
        total = Sketch(self.size)
        for sketch in self._within(span, numbers):
            total.merge(sketch)
        if span is not DOCUMENT_SPANS[0] and self._open is not None:
            total.merge(self._spans[DOCUMENT_SPANS[0]][self._open])
        rows = sorted(total.rows.items(), key=lambda item: (-item[1].tokens, item[0]))
        for _, sums in rows[_MOST_SHOWN:]:
            total.other.add(sums)
        return DocumentReport(
            window_s=length * span.seconds,
            since=numbers[0] * span.seconds,
            enabled=enabled,
            distinct_prefixes=total.prefixes.count,
            rows=[DocumentRow.of(key, sums) for key, sums in rows[:_MOST_SHOWN]],
            other=DocumentRow.of(DocumentKey("", ""), total.other),
        )

    # --- what is shared ----------------------------------------------------------------------------

    def take_changed(self) -> list[tuple[Span, int, Sketch]]:
        """What has changed since this was last asked, the minute that goes on included in its hour and its day."""
        changed, self._changed = self._changed, set()
        first, *longer = DOCUMENT_SPANS
        taken = []
        going_on = None if self._open is None else self._spans[first][self._open]
        at = 0 if self._open is None else self._open * first.seconds
        if self._open is not None and (first, self._open) in changed:
            changed |= {(span, span.number(at)) for span in longer}
        for span, number in changed:
            sketch = self._spans[span].get(number)
            if going_on is not None and span is not first and number == span.number(at):
                parts = [going_on] if sketch is None else [sketch, going_on]
                sketch = Sketch(self.size)
                for part in parts:
                    sketch.merge(part)
            if sketch is not None:
                taken.append((span, number, sketch))
        return taken

    def change_all(self) -> None:
        """All has to be shared again."""
        self._changed = {(span, number) for span, sketches in self._spans.items() for number in sketches}

    def set_others(self, span: Span, number: int, sketches: Iterable[Sketch]) -> None:
        """Replace what the other gateways have counted in a span of time."""
        total = Sketch(self.size)
        for sketch in sketches:
            total.merge(sketch)
        self._others[span, number] = total
        oldest = {each: each.number(self._clock()) - each.keep for each in DOCUMENT_SPANS}
        for known in [known for known in self._others if known[1] < oldest[known[0]]]:
            del self._others[known]

    # --- inside ------------------------------------------------------------------------------------

    def _own(self, span: Span, number: int) -> Sketch:
        sketches = self._spans[span]
        sketch = sketches.get(number)
        if sketch is None:
            for old in [known for known in sketches if known < number - span.keep]:
                del sketches[old]
            sketch = sketches[number] = Sketch(self.size)
        self._changed.add((span, number))
        return sketch

    def _within(self, span: Span, numbers: range) -> Iterator[Sketch]:
        for number in numbers:
            if (own := self._spans[span].get(number)) is not None:
                yield own
            if (others := self._others.get((span, number))) is not None:
                yield others


def _add_missed(missed: dict[Cause, int], runs: Sequence[Run], start: int, end: int) -> None:
    """Add the tokens from ``start`` to ``end`` that were missed, by cause."""
    for cause, first, last in runs:
        if first >= end:
            return
        if last > start:
            lost = (last if last < end else end) - (first if first > start else start)
            missed[cause] = missed.get(cause, 0) + lost
