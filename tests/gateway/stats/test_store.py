"""Shared statistics against a real server: what is written is exact, whatever happens to either side."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import structlog
from redis import Redis
from redis.exceptions import RedisError

from gateway.config import RedisConfig
from gateway.errors import ConfigError
from gateway.stats.statistics import Statistics

Record = Callable[..., Any]
Eventually = Callable[[Callable[[], bool]], Any]


@contextlib.asynccontextmanager
async def running(url: str, **changes: Any) -> AsyncIterator[Statistics]:
    statistics = Statistics(RedisConfig(url=url, flush_interval_s=0.02), **changes)
    await statistics.start()
    try:
        yield statistics
    finally:
        await statistics.stop()


def stored(client: Redis, prefix: str = "headstart") -> dict[str, float]:
    """Sums over all epochs and labels, as anyone could read them from the documented keys."""
    sums: dict[str, float] = {}
    try:
        for epoch in client.zrange(f"{prefix}:epochs", 0, -1):
            for field, value in client.hgetall(f"{prefix}:totals:{epoch.decode()}").items():
                if field != b"flush":
                    for name, number in json.loads(value).items():
                        if name != "ttft":
                            sums[name] = sums.get(name, 0) + number
    except RedisError:
        return {}
    return sums


def test_what_is_counted_reaches_the_server_in_totals_and_minutes(
    valkey: Any, record: Record, eventually: Eventually
) -> None:
    async def scenario() -> None:
        async with running(valkey.url) as statistics:
            for _ in range(10):
                statistics.record(record())
            await eventually(lambda: stored(valkey.client()).get("requests") == 10)
        with valkey.client() as client:
            assert stored(client)["cached_prompt_tokens"] == 480
            minutes = client.zrange("headstart:minutes", 0, -1)
            rows = [value for minute in minutes for value in client.hvals(f"headstart:minute:{minute.decode()}")]
            assert sum(json.loads(row)["prompt_tokens"] for row in rows) == 1000
            assert all(client.ttl(f"headstart:minute:{minute.decode()}") > 0 for minute in minutes)

    asyncio.run(scenario())


def test_two_gateways_sum_and_see_the_same_fleet(valkey: Any, record: Record, eventually: Eventually) -> None:
    async def scenario() -> None:
        async with running(valkey.url) as one, running(valkey.url) as two:
            for _ in range(3):
                one.record(record())
            for _ in range(4):
                two.record(record(tenant="acme", cached_tokens=0))
            for statistics in (one, two):
                await eventually(lambda statistics=statistics: statistics.snapshot().totals.requests == 7)
                snapshot = statistics.snapshot()
                assert snapshot.totals.cached_prompt_tokens == 3 * 48
                assert {name: row.requests for name, row in snapshot.tenants.items()} == {"acme": 4, "default": 3}
                assert snapshot.gateways == 2
                await eventually(
                    lambda statistics=statistics: statistics.snapshot(window_minutes=5).totals.requests == 7
                )
                assert sum(row.requests for row in statistics.snapshot(minutes=5).minutes) == 7

    asyncio.run(scenario())


def test_an_ended_gateway_stays_in_the_totals_but_is_no_news_to_the_next(
    valkey: Any, record: Record, eventually: Eventually
) -> None:
    async def scenario() -> None:
        async with running(valkey.url) as former:
            former.record(record())
        async with running(valkey.url) as present:
            await eventually(lambda: present.snapshot().totals.requests == 1)
            present.record(record())
            assert present.snapshot().totals.requests == 2
            assert sum(present.series(window_minutes=15).requests) == 1

    asyncio.run(scenario())


def test_p3_killing_the_server_in_the_middle_loses_and_doubles_nothing(
    valkey: Any, record: Record, eventually: Eventually
) -> None:
    async def scenario() -> None:
        async with running(valkey.url) as statistics:
            for _ in range(3):
                for _ in range(10):
                    statistics.record(record())
                before = statistics.snapshot().totals.requests
                await eventually(lambda before=before: stored(valkey.client()).get("requests") == before)
                valkey.kill()
                for _ in range(10):
                    statistics.record(record())
                await eventually(lambda: statistics.store_status.state == "down")
                assert statistics.snapshot().totals.requests == before + 10
                valkey.start()
            await eventually(lambda: stored(valkey.client()).get("requests") == 60)
            assert stored(valkey.client())["prompt_tokens"] == 6000
            assert statistics.snapshot().totals.prompt_tokens == 6000
            await eventually(lambda: statistics.store_status.state == "ok")

    asyncio.run(scenario())


def test_losing_the_data_without_losing_the_connection_is_noticed(
    valkey: Any, record: Record, eventually: Eventually
) -> None:
    async def scenario() -> None:
        async with running(valkey.url) as statistics:
            statistics.record(record())
            await eventually(lambda: stored(valkey.client()).get("requests") == 1)
            valkey.client().flushall()
            await eventually(lambda: stored(valkey.client()).get("requests") == 1)
            assert valkey.client().zcard("headstart:minutes") == 1

    asyncio.run(scenario())


def test_p3_writing_twice_counts_once(valkey: Any, record: Record, eventually: Eventually) -> None:
    async def scenario() -> None:
        client = valkey.client()
        async with running(valkey.url) as statistics:
            for count in range(1, 6):
                statistics.record(record())
                await eventually(lambda count=count: stored(client).get("requests") == count)
                statistics.aggregate.restore_all()
                flush = client.hget(f"headstart:totals:{statistics.epoch}", "flush")
                later = int(flush or 0) + 2
                await eventually(
                    lambda later=later: int(client.hget(f"headstart:totals:{statistics.epoch}", "flush") or 0) >= later
                )
                assert stored(client)["requests"] == count
                (minute,) = client.zrange("headstart:minutes", 0, -1)[-1:]
                assert client.hlen(f"headstart:minute:{minute.decode()}") == 1

    asyncio.run(scenario())


def test_p1_a_server_that_comes_late_gets_what_was_counted_before(
    valkey: Any, record: Record, eventually: Eventually
) -> None:
    valkey.kill()

    async def scenario() -> None:
        async with running(valkey.url) as statistics:
            statistics.record(record())
            await eventually(lambda: statistics.store_status.state == "down")
            assert statistics.store_status.reason
            valkey.start()
            await eventually(lambda: stored(valkey.client()).get("requests") == 1)

    asyncio.run(scenario())


def test_p2_a_frozen_server_delays_nothing_and_is_caught_up(
    valkey: Any, record: Record, eventually: Eventually
) -> None:
    async def scenario() -> None:
        async with running(valkey.url) as statistics:
            await eventually(lambda: statistics.store_status.state == "ok")
            valkey.send(signal.SIGSTOP)
            statistics.record(record())
            assert statistics.snapshot().totals.requests == 1
            await eventually(lambda: statistics.store_status.state == "down")
            valkey.send(signal.SIGCONT)
            await eventually(lambda: stored(valkey.client()).get("requests") == 1)

    asyncio.run(scenario())


def test_stopping_ends_even_when_the_server_is_frozen(valkey: Any, record: Record, eventually: Eventually) -> None:
    async def scenario() -> None:
        async with running(valkey.url) as statistics:
            await eventually(lambda: statistics.store_status.state == "ok")
            statistics.record(record())
            valkey.send(signal.SIGSTOP)

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_the_last_changes_are_written_at_the_stop(valkey: Any, record: Record, eventually: Eventually) -> None:
    async def scenario() -> None:
        async with running(valkey.url) as statistics:
            await eventually(lambda: statistics.store_status.state == "ok")
            statistics.record(record())
        assert stored(valkey.client())["requests"] == 1

    asyncio.run(scenario())


@pytest.mark.parametrize("name", ["epochs", "minutes", "totals", "minute"])
def test_a_key_of_a_foreign_type_is_named_and_healed_from(
    name: str, valkey: Any, record: Record, eventually: Eventually
) -> None:
    async def scenario() -> None:
        now = 1_700_000_000.0
        async with running(valkey.url, clock=lambda: now) as statistics:
            key = {"totals": f"totals:{statistics.epoch}", "minute": f"minute:{int(now // 60)}"}.get(name, name)
            valkey.client().set(f"headstart:{key}", "not ours")
            statistics.record(record(finished_at=now))
            await eventually(lambda: statistics.store_status.state == "down")
            assert f"headstart:{key}" in (statistics.store_status.reason or "")
            valkey.client().delete(f"headstart:{key}")
            await eventually(lambda: statistics.store_status.state == "ok")
            assert stored(valkey.client())["requests"] == 1
            assert valkey.client().zcard("headstart:minutes") == 1

    asyncio.run(scenario())


def test_foreign_fields_under_our_keys_are_ignored_and_reported(
    valkey: Any, record: Record, eventually: Eventually
) -> None:
    client = valkey.client()
    client.zadd("headstart:epochs", {"elsewhere": time.time()})
    client.hset("headstart:totals:elsewhere", mapping={"no labels": "no sums", '["t","x","r"]': '{"requests":2}'})

    async def scenario() -> None:
        async with running(valkey.url) as statistics:
            await eventually(lambda: statistics.snapshot().totals.requests == 2)
            await eventually(lambda: statistics.store_status.state == "ok")
            assert "unreadable" in (statistics.store_status.reason or "")

    asyncio.run(scenario())


def test_p5_a_demoted_server_is_retried_until_it_takes_writes_again(
    valkey: Any, record: Record, eventually: Eventually, tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with running(valkey.url) as statistics:
            await eventually(lambda: statistics.store_status.state == "ok")
            valkey.client().execute_command("REPLICAOF", "127.0.0.1", "1")
            statistics.record(record())
            await eventually(lambda: statistics.store_status.state == "down")
            assert "read only" in (statistics.store_status.reason or "")
            valkey.client().execute_command("REPLICAOF", "NO", "ONE")
            await eventually(lambda: stored(valkey.client()).get("requests") == 1)

    asyncio.run(scenario())


def test_p8_an_outage_makes_a_line_per_change_of_state_and_not_per_try(
    valkey: Any, record: Record, eventually: Eventually
) -> None:
    tries = 0

    async def scenario() -> None:
        nonlocal tries
        async with running(valkey.url) as statistics:
            await eventually(lambda: statistics.store_status.state == "ok")
            valkey.kill()
            original = statistics.aggregate.take_changes

            def counted() -> Any:
                nonlocal tries
                tries += 1
                return original()

            statistics.aggregate.take_changes = counted  # type: ignore[method-assign]
            await eventually(lambda: tries >= 4)

    with structlog.testing.capture_logs() as lines:
        asyncio.run(scenario())
    assert len([line for line in lines if "statistics" in line["event"]]) <= 2


def test_credentials_of_the_url_are_never_shown() -> None:
    statistics = Statistics(RedisConfig(url="redis://user:hunter2@localhost:6379/1?password=hunter2"))
    assert statistics.store_status.where == "redis://localhost:6379/1"


def test_an_impossible_url_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match=r"redis\.url"):
        Statistics(RedisConfig(url="http://localhost"))
