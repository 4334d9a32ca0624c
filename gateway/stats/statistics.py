"""The statistics service: counts requests and engine steps, shares them through Redis, answers with snapshots."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Callable, Iterable, Sequence

import gateway
from engine.wire import CacheEvent, EngineInfo, Load, StepTiming
from gateway.config import RedisConfig
from gateway.replicas.base import Replica
from gateway.stats.aggregate import KEEP_MINUTES, Aggregate, Table, merge
from gateway.stats.cost import PrefillCost
from gateway.stats.fleet import Fleet
from gateway.stats.recent import STEP_S, WINDOW_S, Recent
from gateway.stats.record import RequestRecord
from gateway.stats.snapshot import Grouping, MinuteRow, Series, Snapshot, StoreStatus, figures, group, replica_rows
from gateway.stats.store import Companion, StatisticsStore
from gateway.stats.sums import Sums

__all__ = ["Statistics"]


class Statistics:
    """Owns everything this gateway counts, and the prefill-cost curve of each replica.

    A ``ReplicaObserver``. ``record`` and the observer methods are synchronous and cheap; Redis is spoken to by a task
    of its own, so that Redis being slow, down or read-only costs a request nothing. Give it the replicas that should
    be shown before they are first ready; others are shown from their ``on_ready`` on. ``companions`` are shared through
    the same Redis.
    """

    def __init__(
        self,
        config: RedisConfig,
        replicas: Iterable[Replica] = (),
        *,
        companions: Sequence[Companion] = (),
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._clock = clock
        self.started_at = clock()
        self.epoch = secrets.token_hex(8)
        self.aggregate = Aggregate()
        self.fleet = Fleet()
        self.replicas: dict[str, Replica] = {replica.id: replica for replica in replicas}
        self._timelines = (self.aggregate.timeline, self.fleet.timeline)
        self._costs: dict[str, PrefillCost] = {}
        self._counters: dict[str, _EngineCounters] = {}
        self._recent = Recent(Sums(), self.started_at)
        self._store = StatisticsStore(
            config,
            epoch=self.epoch,
            aggregate=self.aggregate,
            fleet=self.fleet,
            companions=companions,
            clock=clock,
        )
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
        await self._store.stop()

    @property
    def store_status(self) -> StoreStatus:
        """How the connection to Redis does."""
        return self._store.status

    # --- what is told -----------------------------------------------------------------------------------

    def record(self, record: RequestRecord) -> None:
        """Count one finished request."""
        self.aggregate.record(record)

    def on_ready(self, replica: Replica, info: EngineInfo) -> None:
        """Start the replica's cost curve over with its warm-up profile; a new boot counts evictions from 0."""
        self.replicas[replica.id] = replica
        self.prefill_cost(replica.id).seed(info.profile, info.max_batch_tokens)
        counters = self._counters.get(replica.id)
        if counters is None or counters.boot_id != info.boot_id:
            self._counters[replica.id] = _EngineCounters(info.boot_id)

    def on_down(self, replica: Replica, reason: str) -> None:
        """Nothing to count: the snapshot reads state and reason from the replica itself."""

    def on_events(self, replica: Replica, events: tuple[CacheEvent, ...]) -> None:
        """Nothing to count: evictions are taken from the load report, where none can be missed."""

    def on_step(self, replica: Replica, timing: StepTiming, load: Load) -> None:
        """Update the replica's cost curve and its counters."""
        self.prefill_cost(replica.id).observe(timing)
        counters = self._counters.get(replica.id)
        if counters is None:
            return
        evictions, preemptions = load.evictions - counters.evictions, load.preemptions - counters.preemptions
        if evictions > 0 or preemptions > 0:
            counters.evictions, counters.preemptions = load.evictions, load.preemptions
            minute = int(self._clock() // 60)
            self.aggregate.add_engine(replica.id, minute, evictions=max(0, evictions), preemptions=max(0, preemptions))

    # --- what is asked ----------------------------------------------------------------------------------

    def prefill_cost(self, replica_id: str) -> PrefillCost:
        """The cost curve of a replica, kept up to date; an unknown replica gets an unfitted one."""
        cost = self._costs.get(replica_id)
        if cost is None:
            cost = self._costs[replica_id] = PrefillCost()
        return cost

    @property
    def requests_ever(self) -> int:
        """Requests that were ever counted, by all gateways."""
        return sum(sums.requests for table in (self.aggregate.totals, self.fleet.totals) for sums in table.values())

    def snapshot(self, *, window_minutes: int | None = None, minutes: int = 60, by: Grouping | None = None) -> Snapshot:
        """All figures, over the last ``window_minutes`` or (None) over everything counted, at most 2 s old.

        ``minutes`` is the number of minute rows (at most a day), ``by`` adds the figures per label to each.
        """
        now = self._clock()
        table = self._table(now, window_minutes)
        return Snapshot(
            time=now,
            window_s=None if window_minutes is None else window_minutes * 60,
            started_at=self.started_at,
            version=gateway.__version__,
            gateways=1 + self.fleet.live_gateways,
            totals=figures(Sums.of(table.values())),
            templates={label: figures(sums) for label, sums in group(table, "template").items()},
            tenants={label: figures(sums) for label, sums in group(table, "tenant").items()},
            replicas=replica_rows(table, self.replicas.values()),
            minutes=self._minute_rows(int(now // 60), min(minutes, KEEP_MINUTES), by),
            redis=self.store_status,
        )

    def series(self, *, window_minutes: int | None = None) -> Series:
        """Figures over time for a chart of the window: 10 s, 1 min or 10 min a step, a day at most."""
        now = self._clock()
        if window_minutes is not None and window_minutes * 60 <= WINDOW_S:
            return Series.of(STEP_S, self._recent.steps(self._live_totals()))
        length = min(window_minutes or KEEP_MINUTES, KEEP_MINUTES)
        step = 1 if length <= 60 else 10
        newest = int(now // 60) // step
        points = range(newest - length // step + 1, newest + 1)
        return Series.of(
            step * 60,
            (
                (
                    point * step * 60,
                    Sums.of(timeline.total(point * step + step - 1, step) for timeline in self._timelines),
                )
                for point in points
            ),
        )

    # --- inside -----------------------------------------------------------------------------------------

    def _table(self, now: float, window_minutes: int | None) -> Table:
        if window_minutes is None:
            return merge((self.aggregate.totals, self.fleet.totals))
        return self._window(int(now // 60), window_minutes)

    def _window(self, last: int, length: int) -> Table:
        return merge(timeline.window(last, length) for timeline in self._timelines)

    def _minute_rows(self, newest: int, count: int, by: Grouping | None) -> list[MinuteRow]:
        rows = []
        for minute in range(newest - count + 1, newest + 1):
            total = Sums.of(timeline.total(minute, 1) for timeline in self._timelines)
            table = self._window(minute, 1) if by else {}
            groups = {label: figures(sums) for label, sums in group(table, by).items()} if by else None
            rows.append(MinuteRow.of(minute * 60, total, groups))
        return rows

    def _live_totals(self) -> Sums:
        totals = Sums.of(self.aggregate.totals.values())
        totals.add(self.fleet.grown)
        return totals

    async def _observe_recent(self) -> None:
        while True:
            self._recent.observe(self._live_totals(), self._clock())
            await asyncio.sleep(1.0)


class _EngineCounters:
    """How much of one engine life's own counters was already counted here."""

    __slots__ = ("boot_id", "evictions", "preemptions")

    def __init__(self, boot_id: str) -> None:
        self.boot_id = boot_id
        self.evictions = 0
        self.preemptions = 0
