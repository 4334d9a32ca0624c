"""Totals of gateways that ended long ago are added up: none is lost, none counted twice, whoever does it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from redis.asyncio import Redis

from gateway.config import RedisConfig
from gateway.stats import archive
from gateway.stats.archive import FOLDABLE_AFTER_S, Archive
from gateway.stats.statistics import Statistics

Record = Callable[..., Any]
Eventually = Callable[[Callable[[], bool]], Any]
NOW = 1_900_000_000.0
DAY = 24 * 3600.0


def plant(valkey: Any, epoch: str, silent_for: float, requests: int, template: str = "t", replica: str = "r") -> None:
    with valkey.client() as client:
        client.zadd("headstart:epochs", {epoch: NOW - silent_for})
        sums = json.dumps({"requests": requests, "prompt_tokens": 10 * requests, "ttft": {"3": requests}})
        client.hset(f"headstart:totals:{epoch}", mapping={f'["{template}","x","{replica}","m"]': sums, "flush": "7"})


def stored(valkey: Any) -> tuple[dict[str, float], int]:
    """Silence of each epoch, and the sum of all their requests."""
    with valkey.client() as client:
        epochs = {epoch.decode(): NOW - at for epoch, at in client.zrange("headstart:epochs", 0, -1, withscores=True)}
        fields = [client.hgetall(f"headstart:totals:{epoch}") for epoch in epochs]
    rows = [json.loads(value) for row in fields for key, value in row.items() if key != b"flush"]
    return epochs, sum(row["requests"] for row in rows)


def fold(valkey: Any, *, times: int = 1) -> None:
    async def scenario() -> None:
        async with Redis.from_url(valkey.url) as client:
            epochs = {e.decode(): at for e, at in await client.zrange("headstart:epochs", 0, -1, withscores=True)}
            await asyncio.gather(*[Archive("headstart").fold(client, epochs, NOW) for _ in range(times)])

    asyncio.run(scenario())


@asynccontextmanager
async def recording(valkey: Any, clock: Callable[[], float]) -> AsyncIterator[Statistics]:
    """The statistics of a gateway that writes to the Valkey all the time."""
    statistics = Statistics(RedisConfig(url=valkey.url, flush_interval_s=0.02), clock=clock)
    await statistics.start()
    yield statistics
    await statistics.stop()


def test_epochs_silent_for_thirty_days_are_added_up_and_others_are_left(valkey: Any) -> None:
    for number in range(5):
        plant(valkey, f"old-{number}", 31 * DAY + number, 10 + number, template=f"t{number % 2}")
    plant(valkey, "yesterday", 2 * DAY, 100)
    fold(valkey)
    epochs, requests = stored(valkey)
    assert set(epochs) == {"archive", "yesterday"}
    assert requests == 10 + 11 + 12 + 13 + 14 + 100
    with valkey.client() as client:
        row = json.loads(client.hget("headstart:totals:archive", '["t0","x","r","m"]'))
        assert row == {"requests": 36, "prompt_tokens": 360, "ttft": {"3": 36}}
        assert client.zcard("headstart:folded") == 5


def test_several_gateways_that_fold_at_once_count_nothing_twice(valkey: Any) -> None:
    for number in range(12):
        plant(valkey, f"old-{number}", 31 * DAY, 1)
    for _ in range(12):
        fold(valkey, times=4)
        epochs, requests = stored(valkey)
        assert requests == 12
    assert set(epochs) == {"archive"}


def test_very_many_epochs_are_folded_after_a_day(valkey: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive, "MOST_EPOCHS", 3)
    for number in range(6):
        plant(valkey, f"restarted-{number}", 2 * DAY - number, 1)
    plant(valkey, "fresh", 3600.0, 1)
    fold(valkey)
    epochs, requests = stored(valkey)
    assert requests == 7
    assert set(epochs) == {"archive", "fresh", "restarted-4", "restarted-5"}


def test_the_labels_of_the_archive_are_bounded(valkey: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive, "_MOST_LABELS", 2)
    for number in range(6):
        plant(valkey, f"old-{number}", 31 * DAY + number, 1, template=f"t{number}")
    fold(valkey)
    assert stored(valkey)[1] == 6
    with valkey.client() as client:
        assert client.hlen("headstart:totals:archive") == 2 + 1 + 1  # flush, and "other"


def test_so_are_the_replicas_in_it(valkey: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive, "_MOST_LABELS", 2)
    for number in range(8):
        plant(valkey, f"old-{number}", 31 * DAY + number, 1, replica=f"r{number}")
    fold(valkey)
    assert stored(valkey)[1] == 8
    with valkey.client() as client:
        assert client.hlen("headstart:totals:archive") == 2 * 2 + 1 + 1  # flush, and "other"


def test_what_is_not_understood_stays_where_it_is(valkey: Any) -> None:
    plant(valkey, "old", 31 * DAY, 1)
    with valkey.client() as client:
        client.hset("headstart:totals:old", "of a later version", "{}")
    fold(valkey)
    with valkey.client() as client:
        assert client.hlen("headstart:totals:old") == 3


def test_a_gateway_that_comes_back_after_it_was_folded_writes_nothing_and_says_so(
    valkey: Any, record: Record, eventually: Eventually
) -> None:
    now = NOW

    async def scenario() -> None:
        nonlocal now
        async with recording(valkey, lambda: now) as statistics:
            statistics.record(record(finished_at=now))
            await eventually(lambda: stored(valkey)[1] == 1)
            valkey.client().execute_command("REPLICAOF", "127.0.0.1", "1")  # it cannot write for a month
            await eventually(lambda: statistics.store_status.state == "down")
            now += 31 * DAY
            valkey.client().execute_command("REPLICAOF", "NO", "ONE")
            valkey.client().zadd("headstart:folded", {statistics.epoch: now})
            await eventually(lambda: "restart" in (statistics.store_status.reason or ""))
            statistics.record(record(finished_at=now))
        assert statistics.epoch not in stored(valkey)[0]

    asyncio.run(scenario())


def test_a_gateway_that_comes_back_before_it_was_folded_goes_on(
    valkey: Any, record: Record, eventually: Eventually
) -> None:
    now = NOW

    async def scenario() -> None:
        nonlocal now
        async with recording(valkey, lambda: now) as statistics:
            statistics.record(record(finished_at=now))
            await eventually(lambda: stored(valkey)[1] == 1)
            now += FOLDABLE_AFTER_S
            statistics.record(record(finished_at=now))
            await eventually(lambda: stored(valkey)[1] == 2)

    asyncio.run(scenario())


def test_readers_see_the_same_sum_before_and_after(valkey: Any, eventually: Eventually) -> None:
    for number in range(30):
        plant(valkey, f"old-{number}", 31 * DAY + number, 2)

    async def scenario() -> None:
        async with recording(valkey, lambda: NOW) as statistics:
            await eventually(lambda: set(stored(valkey)[0]) == {"archive", statistics.epoch})
            await eventually(lambda: statistics.snapshot().totals.requests == 60)
            assert sum(statistics.series(window_minutes=15).requests) == 0  # nothing of it is news

    asyncio.run(scenario())
