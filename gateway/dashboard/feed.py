"""What the page is told once a second: the figures of its window, as server-sent events."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Final, Literal

import msgspec

from cache_policy.policy import POLICY_NAMES
from gateway.eviction import EvictionControl, PolicyChange
from gateway.quality.report import QualityReport
from gateway.stats.snapshot import Series, Snapshot
from gateway.stats.statistics import Statistics
from gateway.stats.timeline import LONGEST_WINDOW_MINUTES
from gateway.stats.whatif import WhatIf, WhatIfReport

__all__ = ["WINDOWS", "Feed", "Update", "Window"]

Window = Literal["5m", "15m", "1h", "24h", "30d", "all"]

WINDOWS: Final[dict[Window, int | None]] = {
    "5m": 5,
    "15m": 15,
    "1h": 60,
    "24h": 24 * 60,
    "30d": 30 * 24 * 60,
    "all": None,
}
"""Minutes of each window that the page offers; None is everything ever counted."""

_PERIOD_S: Final = 1.0
_MOST_OF_A_CORE: Final = 0.05
"""What making the events of one window may cost: long windows over many templates are made anew less often."""


class Eviction(msgspec.Struct, frozen=True):
    """The policy in force and those there are, the last switches, and what the ghost caches say (None: off)."""

    policy: str
    policies: tuple[str, ...]
    changes: list[PolicyChange]
    whatif: WhatIfReport | None


class Update(msgspec.Struct, frozen=True):
    """One event's data. ``ever`` counts the requests of all time, ``series`` covers the window (30 days at most)."""

    window: Window
    ever: int
    snapshot: Snapshot
    series: Series
    eviction: Eviction
    quality: QualityReport


class Feed:
    """Makes the events. All pages that look at the same window share one encoding a second, or longer where it is dear.

    A page that reads slowly gets fewer events, never a queue of old ones. ``close`` ends all streams, so that
    a shutdown does not wait for pages that are left open.
    """

    def __init__(
        self,
        statistics: Statistics,
        eviction: EvictionControl,
        whatif: WhatIf | None,
        quality: Callable[[], QualityReport],
    ) -> None:
        self._statistics = statistics
        self._eviction = eviction
        self._whatif = whatif
        self._quality = quality
        self._closing = asyncio.Event()
        self._encoded: dict[Window, tuple[float, bytes]] = {}
        self._encode = msgspec.json.Encoder().encode

    def close(self) -> None:
        """End every stream now; new ones end at once."""
        self._closing.set()

    async def stream(self, window: Window) -> AsyncIterator[bytes]:
        """Server-sent events until the reader leaves or the feed is closed."""
        while not self._closing.is_set():
            yield self.event(window)
            try:
                await asyncio.wait_for(self._closing.wait(), _PERIOD_S)
            except TimeoutError:
                continue

    def event(self, window: Window) -> bytes:
        """The event of this moment."""
        started = time.monotonic()
        good_until, event = self._encoded.get(window, (0.0, b""))
        if started < good_until:
            return event
        minutes = WINDOWS[window]
        update = Update(
            window=window,
            ever=self._statistics.requests_ever,
            snapshot=self._statistics.snapshot(window_minutes=minutes, minutes=0),
            series=self._statistics.series(window_minutes=minutes or LONGEST_WINDOW_MINUTES),
            eviction=Eviction(
                self._eviction.policy,
                POLICY_NAMES,
                [*self._eviction.changes],
                None if self._whatif is None else self._whatif.report(),
            ),
            quality=self._quality(),
        )
        event = b"event: update\ndata: " + self._encode(update) + b"\n\n"
        spent = time.monotonic() - started
        # A little less than a period, so that a page that asks once in each gets a new one every time.
        self._encoded[window] = started + max(0.9 * _PERIOD_S, spent / _MOST_OF_A_CORE), event
        return event
