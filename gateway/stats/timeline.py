"""Sums over time: minutes over a day, hours over thirty days."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Final, NamedTuple

from gateway.stats.sums import Labels, Sums

__all__ = ["HOUR", "KEEP_MINUTES", "LONGEST_WINDOW_MINUTES", "MINUTE", "SPANS", "Span", "Table", "Timeline", "merge"]


class Span(NamedTuple):
    """A unit of time, ``seconds`` long. ``keep`` of them are kept, and ``block`` of them are summed up once."""

    name: str
    seconds: int
    keep: int
    block: int

    def number(self, at: float) -> int:
        """Which one Unix time ``at`` lies in, counted from 1970."""
        return int(at // self.seconds)


MINUTE: Final = Span("minute", 60, 24 * 60, 10)
HOUR: Final = Span("hour", 3600, 30 * 24, 6)
SPANS: Final = (MINUTE, HOUR)

KEEP_MINUTES: Final = MINUTE.keep
"""How far back minutes are kept, here and in Redis."""

LONGEST_WINDOW_MINUTES: Final = HOUR.keep * 60

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
    """Sums per span of time and label, as far back as such spans are kept.

    Its owner writes through ``cell`` and ``replace``; windows are read at little cost because blocks of several spans
    are summed once and kept until one of these changes.
    """

    def __init__(self, span: Span) -> None:
        self.span: Final = span
        self._rows: dict[int, Table] = {}
        self._blocks: dict[int, tuple[Table, Sums]] = {}

    def __iter__(self) -> Iterator[tuple[int, Table]]:
        return iter(self._rows.items())

    @property
    def rows(self) -> Mapping[int, Table]:
        """All rows by the number of their span of time."""
        return self._rows

    def cell(self, number: int, labels: Labels) -> Sums:
        """The sums of one span and label, to be changed at once and not kept."""
        self._blocks.pop(number // self.span.block, None)
        row = self._rows.get(number)
        if row is None:
            self._prune(number)
            row = self._rows[number] = {}
        sums = row.get(labels)
        if sums is None:
            sums = row[labels] = Sums()
        return sums

    def replace(self, number: int, row: Table) -> None:
        """Set the whole row of one span."""
        if self._rows.get(number) == row:
            return
        self._blocks.pop(number // self.span.block, None)
        if number not in self._rows:
            self._prune(number)
        self._rows[number] = row

    def window(self, last: int, length: int) -> Table:
        """Sums by label over ``length`` spans, the last one being ``last``, as a value of its own."""
        return merge(table for table, _ in self._parts(last - length + 1, last))

    def total(self, last: int, length: int) -> Sums:
        """The same window over all labels."""
        return Sums.of(total for _, total in self._parts(last - length + 1, last))

    def _parts(self, first: int, last: int) -> Iterator[tuple[Table, Sums]]:
        """What a window consists of: blocks where they fit, single spans elsewhere, each with its total."""
        number = first
        while number <= last:
            if number % self.span.block == 0 and number + self.span.block - 1 <= last:
                yield self._block(number // self.span.block)
                number += self.span.block
                continue
            row = self._rows.get(number)
            if row is not None:
                yield row, Sums.of(row.values())
            number += 1

    def _block(self, block: int) -> tuple[Table, Sums]:
        summed = self._blocks.get(block)
        if summed is None:
            first = block * self.span.block
            table = merge(
                self._rows[number] for number in range(first, first + self.span.block) if number in self._rows
            )
            summed = self._blocks[block] = table, Sums.of(table.values())
        return summed

    def _prune(self, newest: int) -> None:
        oldest = newest - self.span.keep
        for number in [number for number in self._rows if number < oldest]:
            del self._rows[number]
        for block in [block for block in self._blocks if (block + 1) * self.span.block <= oldest]:
            del self._blocks[block]
