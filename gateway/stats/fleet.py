"""What the other gateways have counted, mirrored from Redis."""

from __future__ import annotations

from gateway.stats.sums import Sums
from gateway.stats.timeline import SPANS, Table, Timeline, merge

__all__ = ["ARCHIVE", "Fleet"]

ARCHIVE = "archive"
"""The epoch that holds the sum of those which ended long ago (``gateway.stats.archive``)."""


class Fleet:
    """The totals of all other epochs and the timelines of all other gateways. Written by the store, read by snapshots.

    An epoch is one life of one gateway process; epochs that ended stay in the totals.
    """

    def __init__(self) -> None:
        self.timelines = {span: Timeline(span) for span in SPANS}
        self.live_gateways = 0
        self._epochs: dict[str, Table] = {}
        self._at_first_sight: dict[str, Sums] = {}
        self._grown_before = Sums()  # of epochs that are gone
        self._totals: Table | None = None

    @property
    def totals(self) -> Table:
        """Sums by label over every other epoch; not to be changed."""
        if self._totals is None:
            self._totals = merge(self._epochs.values())
        return self._totals

    @property
    def grown(self) -> Sums:
        """What the others have added since this gateway first saw them: history does not count as news."""
        return Sums.of((self._grown_before, *map(self._growth, self._epochs)))

    def set_epoch(self, epoch: str, table: Table) -> None:
        """Replace the totals of one epoch. What the archive grows by is older than it looks."""
        self._epochs[epoch] = table
        if epoch == ARCHIVE:
            self._at_first_sight[epoch] = Sums.of(table.values())
        self._at_first_sight.setdefault(epoch, Sums.of(table.values()))
        self._totals = None

    def keep_only(self, epochs: set[str]) -> None:
        """Forget epochs that Redis no longer knows."""
        gone = self._epochs.keys() - epochs
        for epoch in gone:
            self._grown_before.add(self._growth(epoch))
            del self._epochs[epoch], self._at_first_sight[epoch]
        if gone:
            self._totals = None

    def _growth(self, epoch: str) -> Sums:
        return Sums.of(self._epochs[epoch].values()).since(self._at_first_sight[epoch])
