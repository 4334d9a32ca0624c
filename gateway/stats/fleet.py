"""What the other gateways have counted, mirrored from Redis."""

from __future__ import annotations

from gateway.stats.aggregate import Table, Timeline, merge
from gateway.stats.sums import Sums

__all__ = ["Fleet"]


class Fleet:
    """The totals of all other epochs and the minutes of all other gateways. Written by the store, read by snapshots.

    An epoch is one life of one gateway process; epochs that ended stay in the totals.
    """

    def __init__(self) -> None:
        self.timeline = Timeline()
        self.live_gateways = 0
        self._epochs: dict[str, Table] = {}
        self._at_first_sight: dict[str, Sums] = {}
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
        return Sums.of(
            Sums.of(table.values()).since(self._at_first_sight[epoch]) for epoch, table in self._epochs.items()
        )

    def set_epoch(self, epoch: str, table: Table) -> None:
        """Replace the totals of one epoch."""
        self._epochs[epoch] = table
        self._at_first_sight.setdefault(epoch, Sums.of(table.values()))
        self._totals = None

    def keep_only(self, epochs: set[str]) -> None:
        """Forget epochs that Redis no longer knows."""
        gone = self._epochs.keys() - epochs
        for epoch in gone:
            del self._epochs[epoch], self._at_first_sight[epoch]
        if gone:
            self._totals = None
