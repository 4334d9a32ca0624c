"""Sums in total and per minute: what this gateway has counted itself, and what it must still write to Redis."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

import msgspec

from gateway.stats.record import RequestRecord
from gateway.stats.sums import OTHER, Labels, Sums

__all__ = ["KEEP_MINUTES", "Aggregate", "Changes", "Table", "Timeline", "merge"]

KEEP_MINUTES = 24 * 60
"""How far back minutes are kept, here and in Redis."""

_BLOCK = 10  # minutes that are summed once and then reused

Table = dict[Labels, Sums]
"""Sums by label."""


def merge(tables: Iterable[Table]) -> Table:
    """Add tables up, label by label, into new sums."""
    merged: Table = {}
    for table in tables:
        for labels, sums in table.items():
            merged.setdefault(labels, Sums()).add(sums)
    return merged


class Timeline:
    """Sums per minute and label over the last day. Minutes are Unix time divided by 60.

    Its owner writes through ``cell`` and ``replace``; windows are read at little cost because blocks of ten minutes
    are summed once and kept until one of their minutes changes.
    """

    def __init__(self) -> None:
        self._rows: dict[int, Table] = {}
        self._blocks: dict[int, tuple[Table, Sums]] = {}

    def __iter__(self) -> Iterator[tuple[int, Table]]:
        return iter(self._rows.items())

    def cell(self, minute: int, labels: Labels) -> Sums:
        """The sums of one minute and label, to be changed at once and not kept."""
        self._blocks.pop(minute // _BLOCK, None)
        row = self._rows.get(minute)
        if row is None:
            self._prune(minute)
            row = self._rows[minute] = {}
        sums = row.get(labels)
        if sums is None:
            sums = row[labels] = Sums()
        return sums

    def replace(self, minute: int, row: Table) -> None:
        """Set the whole row of one minute."""
        if self._rows.get(minute) == row:
            return
        self._blocks.pop(minute // _BLOCK, None)
        if minute not in self._rows:
            self._prune(minute)
        self._rows[minute] = row

    def window(self, last: int, length: int) -> Table:
        """Sums by label over ``length`` minutes, the last one being ``last``, as a value of its own."""
        return merge(table for table, _ in self._parts(last - length + 1, last))

    def total(self, last: int, length: int) -> Sums:
        """The same window over all labels."""
        return Sums.of(total for _, total in self._parts(last - length + 1, last))

    def _parts(self, first: int, last: int) -> Iterator[tuple[Table, Sums]]:
        """What a window consists of: blocks where they fit, single minutes elsewhere, each with its total."""
        minute = first
        while minute <= last:
            if minute % _BLOCK == 0 and minute + _BLOCK - 1 <= last:
                yield self._block(minute // _BLOCK)
                minute += _BLOCK
                continue
            row = self._rows.get(minute)
            if row is not None:
                yield row, Sums.of(row.values())
            minute += 1

    def _block(self, block: int) -> tuple[Table, Sums]:
        summed = self._blocks.get(block)
        if summed is None:
            first = block * _BLOCK
            table = merge(self._rows[minute] for minute in range(first, first + _BLOCK) if minute in self._rows)
            summed = self._blocks[block] = table, Sums.of(table.values())
        return summed

    def _prune(self, newest: int) -> None:
        oldest = newest - KEEP_MINUTES
        for minute in [minute for minute in self._rows if minute < oldest]:
            del self._rows[minute]
        for block in [block for block in self._blocks if (block + 1) * _BLOCK <= oldest]:
            del self._blocks[block]


class Changes(msgspec.Struct, frozen=True):
    """Absolute values that changed since they were last taken, encoded as JSON at that moment."""

    totals: dict[Labels, bytes]
    minutes: dict[int, dict[Labels, bytes]]

    def __bool__(self) -> bool:
        return bool(self.totals or self.minutes)


_encode = msgspec.json.Encoder().encode


class Aggregate:
    """What this process has counted since it started. Owns totals, minutes and the list of unwritten changes.

    At most ``max_series`` distinct (template, tenant, replica) combinations are kept apart, and half of them for one
    tenant: templates are learned from what it sends. What comes later is counted under ``other`` of the tenant or, at
    last, of the replica. A combination never changes its place, so counters only grow.
    """

    def __init__(self, max_series: int = 512) -> None:
        self.totals: Table = {}
        self.timeline = Timeline()
        self._max_series = max_series
        self._series: Counter[str] = Counter()  # by tenant
        self._dirty_totals: set[Labels] = set()
        self._dirty_minutes: dict[int, set[Labels]] = {}

    def record(self, record: RequestRecord) -> None:
        """Count one finished request."""
        labels = self._bounded(Labels(record.template, record.tenant, record.replica))
        minute = int(record.finished_at // 60)
        self.totals[labels].count(record)
        self.timeline.cell(minute, labels).count(record)
        self._touch(minute, labels)

    def add_engine(self, replica: str, minute: int, *, evictions: int, preemptions: int) -> None:
        """Count what an engine did by itself."""
        labels = self._bounded(Labels(None, None, replica))
        for sums in (self.totals[labels], self.timeline.cell(minute, labels)):
            sums.evictions += evictions
            sums.preemptions += preemptions
        self._touch(minute, labels)

    def take_changes(self) -> Changes:
        """What was not written yet; from here on it counts as written (see ``restore``)."""
        totals = {labels: _encode(self.totals[labels]) for labels in self._dirty_totals}
        rows = dict(self.timeline)
        minutes = {
            minute: {labels: _encode(rows[minute][labels]) for labels in dirty}
            for minute, dirty in self._dirty_minutes.items()
            if minute in rows
        }
        self._dirty_totals, self._dirty_minutes = set(), {}
        return Changes(totals, minutes)

    def restore(self, changes: Changes) -> None:
        """Take back changes whose writing failed."""
        self._dirty_totals.update(changes.totals)
        for minute, row in changes.minutes.items():
            self._dirty_minutes.setdefault(minute, set()).update(row)

    def restore_all(self) -> None:
        """Everything must be written again: the store has lost it."""
        self._dirty_totals = set(self.totals)
        self._dirty_minutes = {minute: set(row) for minute, row in self.timeline}

    def _touch(self, minute: int, labels: Labels) -> None:
        self._dirty_totals.add(labels)
        dirty = self._dirty_minutes.get(minute)
        if dirty is None:
            oldest = minute - KEEP_MINUTES
            self._dirty_minutes = {m: row for m, row in self._dirty_minutes.items() if m >= oldest}
            dirty = self._dirty_minutes[minute] = set()
        dirty.add(labels)

    def _bounded(self, labels: Labels) -> Labels:
        if labels in self.totals:
            return labels
        tenant = labels.tenant
        if labels.template is not None and tenant is not None:
            if len(self.totals) >= self._max_series:
                labels = Labels(OTHER, OTHER, labels.replica)
            elif self._series[tenant] >= self._max_series // 2:
                labels = Labels(OTHER, tenant, labels.replica)
            else:
                self._series[tenant] += 1
        self.totals.setdefault(labels, Sums())
        return labels
