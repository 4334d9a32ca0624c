"""Sums in total, per minute and per hour: what this gateway has counted, and what it must still write to Redis."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import msgspec

from gateway.stats.record import RequestRecord
from gateway.stats.sums import OTHER, Labels, Sums
from gateway.stats.timeline import SPANS, Span, Table, Timeline

__all__ = ["Aggregate", "Changes"]


class Changes(msgspec.Struct, frozen=True):
    """Absolute values that changed since they were last taken, encoded as JSON at that moment.

    ``rows`` are those of each span of time by the span's number.
    """

    totals: dict[Labels, bytes]
    rows: Mapping[Span, dict[int, dict[Labels, bytes]]]

    def __bool__(self) -> bool:
        return bool(self.totals or any(self.rows.values()))


_encode = msgspec.json.Encoder().encode


class Aggregate:
    """What this process has counted since it started. Owns totals, timelines and the list of unwritten changes.

    At most ``max_series`` distinct combinations of labels are kept apart, and half of them for one tenant: templates
    are learned from what it sends. What comes later is counted under ``other`` of the tenant, then of the replica, and
    at last, since replicas come and go, of all of them. A combination never changes its place, so counters only grow.
    """

    def __init__(self, max_series: int = 512) -> None:
        self.totals: Table = {}
        self.timelines = {span: Timeline(span) for span in SPANS}
        self._max_series = max_series
        self._series: Counter[str] = Counter()  # by tenant
        self._dirty_totals: set[Labels] = set()
        self._dirty: dict[Span, dict[int, set[Labels]]] = {span: {} for span in SPANS}

    def record(self, record: RequestRecord) -> None:
        """Count one finished request."""
        labels = self._bounded(Labels(record.template, record.tenant, record.replica, record.model))
        self.totals[labels].count(record)
        self._dirty_totals.add(labels)
        for timeline in self.timelines.values():
            timeline.cell(self._touched(timeline.span, record.finished_at, labels), labels).count(record)

    def add_engine(self, replica: str, at: float, *, evictions: int, preemptions: int) -> None:
        """Count what an engine did by itself, at Unix time ``at``."""
        labels = self._bounded(Labels(None, None, replica))
        self._dirty_totals.add(labels)
        cells = [
            timeline.cell(self._touched(timeline.span, at, labels), labels) for timeline in self.timelines.values()
        ]
        for sums in (self.totals[labels], *cells):
            sums.evictions += evictions
            sums.preemptions += preemptions

    def take_changes(self) -> Changes:
        """What was not written yet; from here on it counts as written (see ``restore``)."""
        totals = {labels: _encode(self.totals[labels]) for labels in self._dirty_totals}
        rows = {span: self._encoded(timeline) for span, timeline in self.timelines.items()}
        self._dirty_totals, self._dirty = set(), {span: {} for span in SPANS}
        return Changes(totals, rows)

    def restore(self, changes: Changes) -> None:
        """Take back changes whose writing failed."""
        self._dirty_totals.update(changes.totals)
        for span, rows in changes.rows.items():
            for number, row in rows.items():
                self._dirty[span].setdefault(number, set()).update(row)

    def restore_all(self) -> None:
        """Everything must be written again: the store has lost it."""
        self._dirty_totals = set(self.totals)
        self._dirty = {
            span: {number: set(row) for number, row in timeline} for span, timeline in self.timelines.items()
        }

    def _encoded(self, timeline: Timeline) -> dict[int, dict[Labels, bytes]]:
        rows = timeline.rows
        return {
            number: {labels: _encode(rows[number][labels]) for labels in dirty}
            for number, dirty in self._dirty[timeline.span].items()
            if number in rows
        }

    def _touched(self, span: Span, at: float, labels: Labels) -> int:
        """The number of the time ``at``, where ``labels`` are to be written."""
        number = span.number(at)
        dirty = self._dirty[span]
        if number not in dirty:
            for old in [known for known in dirty if known < number - span.keep]:
                del dirty[old]
            dirty[number] = set()
        dirty[number].add(labels)
        return number

    def _bounded(self, labels: Labels) -> Labels:
        if labels in self.totals:
            return labels
        tenant, known = labels.tenant, len(self.totals)
        if known >= self._max_series:
            labels = labels.in_other(of_replica=known < 2 * self._max_series)
        elif labels.template is not None and tenant is not None:
            if self._series[tenant] >= self._max_series // 2:
                labels = labels._replace(template=OTHER)
            else:
                self._series[tenant] += 1
        self.totals.setdefault(labels, Sums())
        return labels
