"""Engine processes: started, listened to, started again, never left behind."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

from engine.launch import module_environment
from engine.memory import MEMORY_SHARE
from gateway.config import EngineConfig
from gateway.errors import ConfigError, ReplicaUnavailable
from gateway.replicas import engine, supervisor
from gateway.replicas.base import ReplicaState
from gateway.replicas.engine import EngineReplica
from gateway.replicas.supervisor import EngineLauncher, RestartDelay, engine_command, require_engine_packages

from ..conftest import until

WORKER = [sys.executable, str(Path(__file__).with_name("scripted_worker.py"))]
TIMEOUT_S = 60.0


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_pauses_grow_and_a_long_life_forgives() -> None:
    delay = RestartDelay()
    assert [delay.after(1.0) for _ in range(8)] == [0.5, 1, 2, 4, 8, 16, 30, 30]
    assert [delay.after(3600.0), delay.after(0.0)] == [0.5, 1]


def test_an_engine_that_cannot_start_says_why_at_once() -> None:
    async def main() -> None:
        replica = EngineReplica("engine-0", EngineLauncher([*WORKER, "--fail"]))
        await replica.start()
        try:
            with pytest.raises(ReplicaUnavailable, match="there is no such model"):
                await replica.wait_ready(TIMEOUT_S)
            assert "exit status 1" in (replica.down_reason or "")
        finally:
            await replica.stop(0)

    asyncio.run(main())


def test_nothing_is_left_behind_by_a_stop() -> None:
    async def main() -> None:
        launcher = EngineLauncher(WORKER)
        replica = EngineReplica("engine-0", launcher)
        await replica.start()
        await replica.wait_ready(TIMEOUT_S)
        assert replica.info is not None
        pid = int(replica.info.boot_id)
        folder = launcher._folder
        assert folder is not None
        assert folder.stat().st_mode & 0o777 == 0o700
        await replica.stop(0)
        await until(lambda: not _alive(pid))
        assert not folder.exists()

    asyncio.run(main())


def test_an_engine_run_by_somebody_else_is_found_when_it_comes(tmp_path: Path) -> None:
    async def main() -> None:
        socket = tmp_path / "engine.sock"
        replica = EngineReplica("engine-0", socket)
        await replica.start()
        await until(lambda: replica.state is ReplicaState.DOWN)
        assert "no engine answers" in (replica.down_reason or "")
        process = await asyncio.create_subprocess_exec(
            *WORKER, "--socket", str(socket), stderr=asyncio.subprocess.DEVNULL, env=module_environment()
        )
        try:
            await replica.wait_ready(TIMEOUT_S)
            await replica.stop(0)
            assert process.returncode is None, "an engine that is not ours is not ended"
        finally:
            process.kill()
            await process.wait()

    asyncio.run(main())


def test_a_peer_that_breaks_the_protocol_is_left(tmp_path: Path) -> None:
    async def main() -> None:
        socket = tmp_path / "engine.sock"

        async def garbage(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"\xff\xff\xff\xff not a frame")
            await writer.drain()
            writer.close()

        server = await asyncio.start_unix_server(garbage, socket)
        replica = EngineReplica("engine-0", socket)
        await replica.start()
        await until(lambda: replica.state is ReplicaState.DOWN)
        assert "protocol" in (replica.down_reason or "")
        await replica.stop(0)
        server.close()

    asyncio.run(main())


def test_a_peer_that_says_nothing_is_left(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(engine, "_GREETING_TIMEOUT_S", 0.05)

    async def main() -> None:
        socket = tmp_path / "engine.sock"

        async def silence(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read()
            writer.close()

        server = await asyncio.start_unix_server(silence, socket)
        replica = EngineReplica("engine-0", socket)
        await replica.start()
        await until(lambda: replica.state is ReplicaState.DOWN)
        assert "introduce" in (replica.down_reason or "")
        await replica.stop(0)
        server.close()

    asyncio.run(main())


def test_the_command_shares_cores_and_memory_among_the_engines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(supervisor, "_usable_cores", lambda: 8)
    command = engine_command(EngineConfig(engines=2, kv_blocks=100), tmp_path, "m")
    options = dict(zip(command[4::2], command[5::2], strict=True))
    assert command[:4] == [sys.executable, "-P", "-m", "engine.worker"]
    assert (options["--threads"], options["--kv-blocks"], options["--model"]) == ("4", "100", str(tmp_path))
    assert float(options["--memory-share"]) == MEMORY_SHARE / 2


def test_a_python_without_the_engine_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "_ENGINE_PACKAGES", ("msgspec", "no_such_package"))
    with pytest.raises(ConfigError, match=r"no_such_package.*headstart\[engine\]"):
        require_engine_packages()
