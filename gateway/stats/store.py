"""The statistics in Redis or Valkey: totals that survive crashes of either side and add up over gateways.

Each life of a gateway process is an *epoch* with a random id. A writer stores the absolute totals of its own epoch and
never increments, so writing twice counts once; a reader sums all epochs, those that ended long ago included. Keys, all
under the configured prefix (``headstart``):

====================  ======  ====================================================================================
``epochs``            zset    epoch -> Unix time of its last write
``totals:{epoch}``    hash    ``["template","tenant","replica","model"]`` -> sums as JSON (``gateway.stats.sums.Sums``,
                              zeros left out); ``flush`` -> number of the last write
``minute:{minute}``   hash    ``{epoch} ["template",…]`` -> sums of that minute (Unix time // 60); expires after a day
``minutes``           zset    minute -> Unix time of its last write
``hour:{hour}``       hash    the same of hours (Unix time // 3600); expires after thirty days
``hours``             zset    hour -> Unix time of its last write
``documents:…``       …       documents by minute, hour and day (``gateway.stats.document_store``)
``folded``            zset    epoch that was added to the epoch ``archive`` (``gateway.stats.archive``) -> when
``pins``, …           hash    pins (``gateway.pins.share``)
``prefixes:{epoch}``  string  the prefixes that were asked for most there (``gateway.stats.hot_prefixes``)
``gateways:{epoch}``  string  its replicas and templates (``gateway.presence``); both as ``gateway.stats.board`` does
``{name}:epochs``     zset    for each companion by its name: epoch -> Unix time of its last change
``{name}:{epoch}``    hash    what the companion of that epoch has to tell, in absolute values
====================  ======  ====================================================================================

Each exchange first reads the number of its last write back. When it is not what was written, Redis has lost data (a
restart without persistence, a failover, FLUSHALL) and everything this process still knows is written again.
Labels, ids and numbers only: no text of prompts or documents ever comes here.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, Protocol

import msgspec
import structlog
from redis.exceptions import RedisError
from redis.typing import EncodableT, FieldT

from gateway.config import RedisConfig
from gateway.embedded_valkey import EmbeddedValkey, ValkeyUnavailable
from gateway.stats.aggregate import Aggregate, Changes
from gateway.stats.archive import FOLDABLE_AFTER_S, Archive
from gateway.stats.batch import Batch, chunks
from gateway.stats.connection import RedisClient, StoreConnection
from gateway.stats.document_store import DocumentShare
from gateway.stats.fleet import Fleet
from gateway.stats.snapshot import StoreStatus
from gateway.stats.sums import Labels, Sums
from gateway.stats.timeline import SPANS, Span, Table, merge

__all__ = ["Companion", "Share", "StatisticsStore"]

_EXCHANGE_TIMEOUT_S = 8.0
_STOP_TIMEOUT_S = 2.0
_LAST_BACKOFF_S = 5.0
_LOG_INTERVAL_S = 10.0
_LIVE_S = 15.0  # a gateway that has not written for so long is not counted as running
_CLOCK_SKEW_S = 120.0
_EXPIRY_MARGIN_S = 3600
_FLUSH_FIELD = b"flush"

_Mapping = dict[FieldT, EncodableT]
_log = structlog.get_logger("headstart.statistics")
_decode_labels = msgspec.json.Decoder(Labels).decode
_decode_sums = msgspec.json.Decoder(Sums).decode
_encode = msgspec.json.encode


class Companion(Protocol):
    """Something else that gateways share, few in number: written as a whole whenever it has changed.

    ``revision`` is another number after each change. Numbers and names only, as everything here.
    """

    @property
    def name(self) -> str:
        """Begins its keys."""
        ...

    @property
    def revision(self) -> int:
        """Grows with each change of this gateway's own part."""
        ...

    def fields(self) -> dict[bytes, bytes]:
        """This gateway's own part; fields only ever come or change."""
        ...

    def set_epoch(self, epoch: str, fields: Mapping[bytes, bytes]) -> bool:
        """Replace the part of another epoch. False when some of it is not to be understood."""
        ...

    def keep_only(self, epochs: set[str]) -> None:
        """Forget other epochs than these."""
        ...


class Share(Protocol):
    """Something that gateways share in a way of its own, in the same exchanges."""

    def write_all(self) -> None:
        """Redis has lost what was written."""

    async def exchange(self, client: RedisClient, prefix: str, own: str, now: float) -> bool:
        """Write what is new here, read what is new there; False when some of that is not to be understood.

        ``own`` is this life of the gateway, ``now`` Unix time.
        """
        ...


class StatisticsStore:
    """Writes an aggregate to Redis and mirrors everyone else's into a fleet, in a task of its own.

    ``companions`` are shared beside it in the same exchanges.

    Owns the connection, the embedded server (when ``config.url`` is None) and the status. No failure leaves it: Redis
    down, frozen, read-only or with foreign data under our keys only shows in ``status``, is retried with back-off, and
    makes one log line per change of state.

    Raises:
        ConfigError: The URL cannot be understood.
    """

    def __init__(
        self,
        config: RedisConfig,
        *,
        epoch: str,
        aggregate: Aggregate,
        fleet: Fleet,
        documents: DocumentShare,
        companions: Sequence[Companion] = (),
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._config = config
        self._epoch = epoch
        self._aggregate = aggregate
        self._fleet = fleet
        self._shared: list[Share] = [documents, *map(_Shared, companions)]
        self._clock = clock
        self._embedded = EmbeddedValkey() if config.url is None else None
        self._connection = None if config.url is None else StoreConnection(config.url)
        self._prefix = config.prefix if self._connection is None else self._connection.prefix(config.prefix)
        where = "embedded Valkey" if self._connection is None else self._connection.where
        self.status = StoreStatus(state="starting", where=where, since=clock())
        self._archive = Archive(self._prefix)
        self._written = 0  # number of the last write that was answered
        self._written_at: float | None = None
        self._attempted = 0  # number of the last write that was sent
        self._seen_epochs: dict[str, float] = {}
        self._rows_since = float("-inf")
        self._unreadable: str | None = None
        self._logged_state = "starting"
        self._logged_at = float("-inf")
        self._stopping = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def also_share(self, share: Share) -> None:
        """Have something else shared; before ``start``."""
        self._shared.append(share)

    def start(self) -> None:
        """Begin; the first connection is made in the background."""
        self._task = asyncio.create_task(self._run(), name="statistics-store")

    async def stop(self) -> None:
        """Write the last changes if Redis answers within two seconds, and close."""
        self._stopping.set()
        if self._task is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._task, _STOP_TIMEOUT_S)
            self._task = None
        if self._connection is not None:
            await self._connection.close()
        if self._embedded is not None:
            await self._embedded.stop()

    # --- the loop ---------------------------------------------------------------------------------------

    async def _run(self) -> None:
        if self._embedded is not None:
            try:
                await self._embedded.start()
            except (ValkeyUnavailable, OSError) as error:
                self._enter("off", str(error))
                return
            self._connection = StoreConnection(self._embedded.url)
        assert self._connection is not None
        backoff = interval = self._config.flush_interval_s
        while True:
            last_round = self._stopping.is_set()
            complete = True
            try:
                complete = await self._exchange(self._connection.client)
            except Exception as error:  # whatever happens here, requests and the next round must not suffer
                await self._connection.drop()
                self._enter("down", _reason(error))
                pause = backoff = min(max(backoff * 2, 0.25), _LAST_BACKOFF_S)
            else:
                self._enter("ok", self._unreadable)
                backoff, pause = interval, interval if complete else 0.0
            if last_round and complete:
                return
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), pause)

    async def _exchange(self, client: RedisClient) -> bool:
        """Write what changed, read what others wrote; False when everything must be written again."""
        changes = self._aggregate.take_changes()
        try:
            async with asyncio.timeout(_EXCHANGE_TIMEOUT_S):
                complete = await self._write_and_read(client, changes)
        except BaseException:
            self._aggregate.restore(changes)
            raise
        if not complete:
            self._aggregate.restore_all()
            for shared in self._shared:
                shared.write_all()
        return complete

    async def _write_and_read(self, client: RedisClient, changes: Changes) -> bool:
        now = self._clock()
        await self._check_not_folded(client, now)
        own = self._epoch.encode()
        expected = {_flush_value(self._written), _flush_value(self._attempted)}
        self._attempted += 1
        batch = Batch(client, self._prefix)
        batch.pipe.hget(batch.key(f"totals:{self._epoch}"), _FLUSH_FIELD)
        for span, rows in changes.rows.items():
            for number, row in rows.items():
                fields: _Mapping = {own + b" " + _encode(labels): value for labels, value in row.items()}
                batch.pipe.hset(batch.key(f"{span.name}:{number}"), mapping=fields)
                expiry = (number + span.keep) * span.seconds + _EXPIRY_MARGIN_S
                batch.pipe.expireat(batch.key(f"{span.name}:{number}"), expiry)
                batch.pipe.zadd(batch.key(f"{span.name}s"), {str(number): now})
            oldest = now - span.keep * span.seconds - _EXPIRY_MARGIN_S
            batch.pipe.zremrangebyscore(batch.key(f"{span.name}s"), "-inf", oldest)
        totals: _Mapping = {_encode(labels): value for labels, value in changes.totals.items()}
        totals[_FLUSH_FIELD] = b"%d" % self._attempted
        batch.pipe.hset(batch.key(f"totals:{self._epoch}"), mapping=totals)
        batch.pipe.zadd(batch.key("epochs"), {self._epoch: now})
        batch.pipe.zrange(batch.key("epochs"), 0, -1, withscores=True)
        for span in SPANS:
            batch.pipe.zrangebyscore(batch.key(f"{span.name}s"), self._rows_since, "+inf")
        found, *_, epochs, minutes, hours = await batch.send()
        self._written, self._written_at = self._attempted, now
        self._unreadable = None
        await self._read_epochs(client, {epoch.decode(): score for epoch, score in epochs}, now)
        for span, numbers in zip(SPANS, (minutes, hours), strict=True):
            await self._read_rows(client, span, [int(number) for number in numbers])
        for shared in self._shared:
            if not await shared.exchange(client, self._prefix, self._epoch, now):
                self._unreadable = f"ignored unreadable fields under {self._prefix}:"
        self._rows_since = now - _CLOCK_SKEW_S
        return found in expected

    async def _check_not_folded(self, client: RedisClient, now: float) -> None:
        """Raise when this gateway was away for so long that its totals were added to those of the ended ones.

        What it would write then, all it has ever counted, would be counted a second time.
        """
        last = self._written_at
        if last is None or now - last < FOLDABLE_AFTER_S / 2:
            return
        if await self._archive.has(client, self._epoch, now):
            days = (now - last) / (24 * 3600)
            raise RedisError(f"not written to for {days:.0f} days and counted as ended; restart to share again")

    async def _read_epochs(self, client: RedisClient, epochs: dict[str, float], now: float) -> None:
        epochs.pop(self._epoch, None)
        changed = [epoch for epoch, score in epochs.items() if self._seen_epochs.get(epoch) != score]
        for chunk in chunks(changed):
            batch = Batch(client, self._prefix)
            for epoch in chunk:
                batch.pipe.hgetall(batch.key(f"totals:{epoch}"))
            for epoch, fields in zip(chunk, await batch.send(), strict=True):
                fields.pop(_FLUSH_FIELD, None)
                self._fleet.set_epoch(epoch, self._table(fields))
        self._seen_epochs = epochs
        self._fleet.keep_only(set(epochs))
        await self._archive.fold(client, epochs, now)
        self._fleet.live_gateways = sum(score > now - _LIVE_S for score in epochs.values())

    async def _read_rows(self, client: RedisClient, span: Span, numbers: list[int]) -> None:
        own = self._epoch.encode()
        timeline = self._fleet.timelines[span]
        for chunk in chunks(numbers):
            batch = Batch(client, self._prefix)
            for number in chunk:
                batch.pipe.hgetall(batch.key(f"{span.name}:{number}"))
            for number, fields in zip(chunk, await batch.send(), strict=True):
                by_epoch: dict[bytes, dict[bytes, bytes]] = {}
                for key, value in fields.items():
                    epoch, _, labels = key.partition(b" ")
                    if epoch != own:
                        by_epoch.setdefault(epoch, {})[labels] = value
                timeline.replace(number, merge(self._table(part) for part in by_epoch.values()))

    def _table(self, fields: Mapping[bytes, bytes]) -> Table:
        """Decode labels and sums; what is not ours is left out and reported with the status."""
        table: Table = {}
        for key, value in fields.items():
            try:
                table[_decode_labels(key)] = _decode_sums(value)
            except msgspec.MsgspecError:
                self._unreadable = f"ignored unreadable fields under {self._prefix}:"
        return table

    def _enter(self, state: Literal["ok", "down", "off"], reason: str | None) -> None:
        now = self._clock()
        since = self.status.since if state == self.status.state else now
        last_write = now if state == "ok" else self.status.last_write
        self.status = StoreStatus(
            state=state, where=self.status.where, since=since, reason=reason, last_write=last_write
        )
        # A server that comes and goes makes one line in ten seconds, not one for each change.
        if state == self._logged_state or (
            self._logged_state != "starting" and now < self._logged_at + _LOG_INTERVAL_S
        ):
            return
        self._logged_state, self._logged_at = state, now
        if state == "ok":
            _log.info("statistics are shared", where=self.status.where)
        else:
            _log.warning("statistics stay in this process", where=self.status.where, state=state, reason=reason)


class _Shared:
    """How far one companion is written and read."""

    def __init__(self, companion: Companion) -> None:
        self.companion = companion
        self.written: int | None = None
        self.seen: dict[str, float] = {}

    def write_all(self) -> None:
        """Redis has lost what was written."""
        self.written = None

    async def exchange(self, client: RedisClient, prefix: str, own: str, now: float) -> bool:
        """Write what has changed, read what others changed; False when some of that is not to be understood."""
        companion = self.companion
        batch = Batch(client, prefix)
        revision = companion.revision
        if revision != self.written and (fields := companion.fields()):
            mapping: _Mapping = dict(fields.items())
            batch.pipe.hset(batch.key(f"{companion.name}:{own}"), mapping=mapping)
            batch.pipe.zadd(batch.key(f"{companion.name}:epochs"), {own: now})
        batch.pipe.zrange(batch.key(f"{companion.name}:epochs"), 0, -1, withscores=True)
        *_, scores = await batch.send()
        self.written = revision
        epochs = {epoch.decode(): score for epoch, score in scores}
        epochs.pop(own, None)
        readable = True
        for chunk in chunks([epoch for epoch, score in epochs.items() if self.seen.get(epoch) != score]):
            batch = Batch(client, prefix)
            for epoch in chunk:
                batch.pipe.hgetall(batch.key(f"{companion.name}:{epoch}"))
            for epoch, told in zip(chunk, await batch.send(), strict=True):
                readable = companion.set_epoch(epoch, told) and readable
        self.seen = epochs
        companion.keep_only(set(epochs))
        return readable


def _flush_value(number: int) -> bytes | None:
    return b"%d" % number if number else None


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
