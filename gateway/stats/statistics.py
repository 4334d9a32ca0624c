"""The statistics service: counts requests and engine steps, shares them through Redis, answers with snapshots."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import secrets
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import gateway
from engine.wire import CacheEvent, EngineInfo, Load, StepTiming
from gateway.config import RedisConfig, SavingsConfig
from gateway.replicas.base import Replica
from gateway.stats.aggregate import Aggregate
from gateway.stats.board import Board
from gateway.stats.cost import PrefillCost
from gateway.stats.document_store import DocumentShare
from gateway.stats.documents import Documents
from gateway.stats.fleet import Fleet
from gateway.stats.hot_prefixes import HotPrefixes
from gateway.stats.recent import STEP_S, WINDOW_S, Recent
from gateway.stats.record import RequestRecord
from gateway.stats.snapshot import (
    Grouping,
    MinuteRow,
    Price,
    Series,
    Snapshot,
    StoreStatus,
    figures,
    group,
    replica_rows,
)
from gateway.stats.store import Companion, Share, StatisticsStore
from gateway.stats.sums import Sums
from gateway.stats.timeline import HOUR, KEEP_MINUTES, LONGEST_WINDOW_MINUTES, MINUTE, SPANS, Span, Table, merge

__all__ = ["Statistics", "Window"]


_DOCUMENT_FLUSHES: Final = 5
"""Documents are shared every so many flushes: there are more of them, and nobody watches them by the second."""


_LATEST: Final = 200
"""Requests that can be looked at one by one, some 1 KB each."""


class Statistics:
    """Owns everything this gateway counts, and the prefill-cost curve of each replica.

    A ``ReplicaObserver``. ``record`` and the observer methods are synchronous and cheap; Redis is spoken to by a task
    of its own, so that Redis being slow, down or read-only costs a request nothing. Replicas are shown from
    ``add_replica`` or their ``on_ready`` on. ``companions`` are shared through the same Redis. So many ``documents``
    are kept apart in each span of time.
    """

    def __init__(
        self,
        config: RedisConfig,
        *,
        companions: Sequence[Companion] = (),
        savings: SavingsConfig | None = None,
        documents: int = 128,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._clock = clock
        self.started_at = clock()
        self.epoch = secrets.token_hex(8)
        self.aggregate = Aggregate()
        self.fleet = Fleet()
        self.documents = Documents(documents, clock=clock)
        self._document_share = DocumentShare(self.documents, _DOCUMENT_FLUSHES * config.flush_interval_s)
        self.prefixes = HotPrefixes(clock=clock)
        self.replicas: dict[str, Replica] = {}
        self._timelines = {span: (self.aggregate.timelines[span], self.fleet.timelines[span]) for span in SPANS}
        self._price = Price.of(savings or SavingsConfig())
        self._costs: dict[str, PrefillCost] = {}
        self._counters: dict[str, _EngineCounters] = {}
        self._recent = Recent(Sums(), self.started_at)
        self._store = StatisticsStore(
            config,
            epoch=self.epoch,
            aggregate=self.aggregate,
            fleet=self.fleet,
            documents=self._document_share,
            companions=companions,
            clock=clock,
        )
        period_s = _DOCUMENT_FLUSHES * config.flush_interval_s
        self.also_share(Board("prefixes", self.prefixes.write, self.prefixes.read, period_s=period_s))
        self._latest: deque[RequestRecord] = deque(maxlen=_LATEST)
        self._task: asyncio.Task[None] | None = None

    # --- life -------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Begin to share; returns at once, whatever state Redis is in."""
        self._store.start()
        self._task = asyncio.create_task(self._observe_recent(), name="statistics-recent")

    async def stop(self) -> None:
        """Write what is left and close."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None
        self._document_share.finish()
        await self._store.stop()

    @property
    def store_status(self) -> StoreStatus:
        """How the connection to Redis does."""
        return self._store.status

    def also_share(self, share: Share) -> None:
        """Have something else shared through the same Redis; before ``start``."""
        self._store.also_share(share)

    def add_replica(self, replica: Replica) -> None:
        """Show a replica, also before it is first ready."""
        self.replicas[replica.id] = replica
        self._costs[replica.id] = PrefillCost()

    def remove_replica(self, replica_id: str) -> None:
        """It has left: what was counted stays, its state is shown no more."""
        self.replicas.pop(replica_id, None)
        self._costs.pop(replica_id, None)
        self._counters.pop(replica_id, None)

    # --- what is told -----------------------------------------------------------------------------------

    def record(self, record: RequestRecord) -> None:
        """Count one finished request."""
        self.aggregate.record(record)
        self._latest.append(record)

    @property
    def latest(self) -> list[RequestRecord]:
        """The last requests that ended at this gateway, newest first, at most 200."""
        return [*reversed(self._latest)]

    def on_ready(self, replica: Replica, info: EngineInfo) -> None:
        """Start the replica's cost curve over with its warm-up profile; a new boot counts evictions from 0."""
        if replica.id not in self.replicas:
            self.add_replica(replica)
        self._costs[replica.id].seed(info.profile, info.max_batch_tokens)
        counters = self._counters.get(replica.id)
        if counters is None or counters.boot_id != info.boot_id:
            self._counters[replica.id] = _EngineCounters(info.boot_id)

    def on_down(self, replica: Replica, reason: str) -> None:
        """Nothing to count: the snapshot reads state and reason from the replica itself."""

    def on_events(self, replica: Replica, events: tuple[CacheEvent, ...]) -> None:
        """Nothing to count: evictions are taken from the load report, where none can be missed."""

    def on_step(self, replica: Replica, timing: StepTiming, load: Load) -> None:
        """Update the replica's cost curve and its counters."""
        if (cost := self._costs.get(replica.id)) is not None:  # the last step of one that has left comes late
            cost.observe(timing)
        counters = self._counters.get(replica.id)
        if counters is None:
            return
        evictions, preemptions = load.evictions - counters.evictions, load.preemptions - counters.preemptions
        if evictions > 0 or preemptions > 0:
            counters.evictions, counters.preemptions = load.evictions, load.preemptions
            evictions, preemptions = max(0, evictions), max(0, preemptions)
            self.aggregate.add_engine(replica.id, self._clock(), evictions=evictions, preemptions=preemptions)

    # --- what is asked ----------------------------------------------------------------------------------

    def prefill_cost(self, replica_id: str) -> PrefillCost:
        """The cost curve of a replica, kept up to date; for one that is not there an unfitted one, kept by nobody."""
        return self._costs.get(replica_id) or PrefillCost()

    @property
    def requests_ever(self) -> int:
        """Requests that were ever counted, by all gateways."""
        return sum(sums.requests for table in (self.aggregate.totals, self.fleet.totals) for sums in table.values())

    def snapshot(self, *, window_minutes: int | None = None, minutes: int = 60, by: Grouping | None = None) -> Snapshot:
        """All figures, over the last ``window_minutes`` or (None) over everything counted, at most 2 s old.

        ``minutes`` is the number of minute rows (at most a day), ``by`` adds the figures per label to each.
        """
        now = self._clock()
        window = self.window(window_minutes)
        figure = functools.partial(figures, price=self._price)
        return Snapshot(
            time=now,
            window_s=None if window_minutes is None else window_minutes * 60,
            since=window.since,
            started_at=self.started_at,
            version=gateway.__version__,
            gateways=1 + self.fleet.live_gateways,
            price=self._price,
            totals=figure(Sums.of(window.table.values())),
            templates={label: figure(sums) for label, sums in group(window.table, "template").items()},
            tenants={label: figure(sums) for label, sums in group(window.table, "tenant").items()},
            models={label: figure(sums) for label, sums in group(window.table, "model").items()},
            replicas=replica_rows(window.table, self.replicas.values(), self._price),
            minutes=self._minute_rows(MINUTE.number(now), min(minutes, KEEP_MINUTES), by),
            redis=self.store_status,
        )

    def window(self, minutes: int | None) -> Window:
        """Sums by label over the last so many minutes, thirty days at most, or (None) over everything ever counted.

        Windows longer than a day are counted in whole hours.
        """
        if minutes is None:
            return Window(None, merge((self.aggregate.totals, self.fleet.totals)))
        span = MINUTE if minutes <= KEEP_MINUTES else HOUR
        length = -(-min(minutes, LONGEST_WINDOW_MINUTES) * 60 // span.seconds)
        last = span.number(self._clock())
        table = merge(timeline.window(last, length) for timeline in self._timelines[span])
        return Window((last - length + 1) * span.seconds, table)

    def series(self, *, window_minutes: int | None = None) -> Series:
        """Figures over time for a chart of the window: 10 s, 1 min, 10 min, or (beyond a day) 6 h a step."""
        now = self._clock()
        if window_minutes is not None and window_minutes * 60 <= WINDOW_S:
            steps = self._recent.steps(self._live_totals())
            return Series.of(STEP_S, steps[-(window_minutes * 60 // STEP_S) :])
        length, span, step = window_minutes or KEEP_MINUTES, MINUTE, 10
        if length > KEEP_MINUTES:
            length, span, step = min(length, LONGEST_WINDOW_MINUTES) // 60, HOUR, 6
        elif length <= 60:
            step = 1
        newest = span.number(now) // step
        points = range(newest - length // step + 1, newest + 1)
        return Series.of(
            step * span.seconds,
            ((point * step * span.seconds, self._total(span, point * step + step - 1, step)) for point in points),
        )

    # --- inside -----------------------------------------------------------------------------------------

    def _total(self, span: Span, last: int, length: int) -> Sums:
        return Sums.of(timeline.total(last, length) for timeline in self._timelines[span])

    def _minute_rows(self, newest: int, count: int, by: Grouping | None) -> list[MinuteRow]:
        rows = []
        for minute in range(newest - count + 1, newest + 1):
            total = self._total(MINUTE, minute, 1)
            groups = None
            if by:
                table = merge(timeline.window(minute, 1) for timeline in self._timelines[MINUTE])
                groups = {label: figures(sums, self._price) for label, sums in group(table, by).items()}
            rows.append(MinuteRow.of(minute * 60, total, groups, self._price))
        return rows

    def _live_totals(self) -> Sums:
        totals = Sums.of(self.aggregate.totals.values())
        totals.add(self.fleet.grown)
        return totals

    async def _observe_recent(self) -> None:
        while True:
            self._recent.observe(self._live_totals(), self._clock())
            await asyncio.sleep(1.0)


class Window(NamedTuple):
    """Sums by label from Unix time ``since`` on, or (None) of all that was ever counted."""

    since: float | None
    table: Table


class _EngineCounters:
    """How much of one engine life's own counters was already counted here."""

    __slots__ = ("boot_id", "evictions", "preemptions")

    def __init__(self, boot_id: str) -> None:
        self.boot_id = boot_id
        self.evictions = 0
        self.preemptions = 0
