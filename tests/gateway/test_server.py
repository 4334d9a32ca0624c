"""Listening, and stopping: signals, grace, exit codes."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gateway.config import Config, RedisConfig, ServerConfig
from gateway.errors import ConfigError, ReplicaUnavailable
from gateway.replicas.base import ReplicaState
from gateway.replicas.engine import EngineReplica
from gateway.replicas.supervisor import EngineLauncher
from gateway.server import serve, serving
from gateway.service import Gateway

TIMEOUT_S = 60.0

SERVER = textwrap.dedent("""
    import sys
    from pathlib import Path
    from tokenizers import Tokenizer
    from gateway.config import Config, RedisConfig, ServerConfig
    from gateway.logs import configure_logging
    from gateway.replicas.scripted import ScriptedReplica, scripted_info
    from gateway.server import run, serve
    from gateway.service import Gateway

    configure_logging("debug")
    folder = Path(sys.argv[1])
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    async def main():
        replica = ScriptedReplica("engine-0", tokenizer, scripted_info(tokenizer, model="scripted"))
        config = Config(server=ServerConfig(port=0), redis=RedisConfig(url="redis://127.0.0.1:1/0"))
        gateway = Gateway(config, model="scripted", folder=folder, replicas=[replica])
        if sys.argv[2] == "held":
            replica.hold()
            gateway.when_draining(replica.let_go)
        elif sys.argv[2] == "stuck":
            replica.hold()
        await serve(gateway, on_listening=lambda url: print(url, flush=True))
        print("ended", flush=True)

    run(main())
""")


async def _start(
    folder: Path, mode: str, *, stderr: int = asyncio.subprocess.DEVNULL
) -> tuple[asyncio.subprocess.Process, str, int]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", SERVER, str(folder), mode,
        stdout=asyncio.subprocess.PIPE, stderr=stderr,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
    )  # fmt: skip
    assert process.stdout is not None
    host, port = (await process.stdout.readline()).decode().strip().removeprefix("http://").split(":")
    return process, host, int(port)


async def _ask(host: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    body = b'{"model":"scripted","prompt":"x","max_tokens":50,"stream":true}'
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
    await writer.drain()
    return reader, writer


async def _until_refused(host: str, port: int) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        try:
            _, writer = await asyncio.open_connection(host, port)
        except ConnectionError:  # refused, or reset: taken by the kernel just before the listener closed
            return
        writer.close()
        await asyncio.sleep(0.01)
    raise AssertionError("new connections are still taken")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_r1_a_signal_lets_streams_end_and_exits_with_0(
    model_folder: Callable[[str], Path], number: signal.Signals
) -> None:
    async def main() -> None:
        process, host, port = await _start(model_folder("chatml"), "held")
        streams = [await _ask(host, port) for _ in range(5)]
        await asyncio.sleep(0)
        process.send_signal(number)
        for reader, writer in streams:
            answer = await reader.read()
            assert answer.startswith(b"HTTP/1.1 200"), answer
            assert answer.rstrip().endswith(b"data: [DONE]\n\n\r\n0".strip()), answer[-100:]
            writer.close()
        await _until_refused(host, port)
        assert await process.wait() == 0
        assert process.stdout is not None
        assert await process.stdout.read() == b"ended\n"

    asyncio.run(asyncio.wait_for(main(), TIMEOUT_S))


def test_a_second_signal_ends_at_once_and_without_a_traceback(model_folder: Callable[[str], Path]) -> None:
    async def main() -> None:
        process, host, port = await _start(model_folder("chatml"), "stuck", stderr=asyncio.subprocess.PIPE)
        _, writer = await _ask(host, port)
        process.send_signal(signal.SIGINT)
        await _until_refused(host, port)
        assert process.returncode is None
        process.send_signal(signal.SIGINT)
        _, log = await process.communicate()
        assert process.returncode == 0
        assert b"Traceback" not in log
        assert b"another signal cuts them off" in log
        assert b"ending at once" in log
        writer.close()

    asyncio.run(asyncio.wait_for(main(), TIMEOUT_S))


def test_n5_what_callers_send_never_reaches_the_log(model_folder: Callable[[str], Path]) -> None:
    marker = "ZEBRA-7731"
    bodies: list[Any] = [
        {"model": "scripted", "prompt": marker, "max_tokens": 3},
        {"model": marker, "prompt": "x"},
        {"model": "scripted", "prompt": "x", "headstart": {"template": marker}},
        {"model": "scripted", "messages": [{"role": "user", "content": marker, "name": marker}], "max_tokens": 3},
        {"model": "scripted", "messages": [{"role": marker, "content": "x"}]},
        {"model": "scripted", "messages": [{"role": "user", "content": "x"}], "documents": [{marker: [marker]}]},
        marker,
    ]

    async def main() -> bytes:
        process, host, port = await _start(model_folder("chatml"), "free", stderr=asyncio.subprocess.PIPE)
        headers = {"authorization": f"Bearer {marker}", "x-request-id": "r"}
        async with aiohttp.ClientSession(f"http://{host}:{port}", headers=headers) as client:
            for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", f"/{marker}"):
                for body in bodies:
                    async with client.post(path, json=body, params={"q": marker}) as response:
                        assert response.status < 500
        process.terminate()
        _, log = await process.communicate()
        return log

    log = asyncio.run(asyncio.wait_for(main(), TIMEOUT_S))
    assert b"statistics stay in this process" in log, "the log was not captured"
    assert marker.encode() not in log


def test_a_busy_port_is_named(model_folder: Callable[[str], Path]) -> None:
    async def main(port: int) -> None:
        config = Config(server=ServerConfig(port=port))
        gateway = Gateway(config, model="m", folder=model_folder("chatml"), replicas=[])
        async with serving(gateway):
            raise AssertionError("two servers on one port")

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}.*--port"):
            asyncio.run(main(port))


def test_a_gateway_open_to_the_network_without_keys_is_not_even_composed(model_folder: Callable[[str], Path]) -> None:
    config = Config(server=ServerConfig(host="0.0.0.0"))
    with pytest.raises(ConfigError, match="keys"):
        Gateway(config, model="m", folder=model_folder("chatml"), replicas=[])


def test_an_engine_that_cannot_start_ends_the_server_with_its_reason(model_folder: Callable[[str], Path]) -> None:
    async def main() -> None:
        replica = EngineReplica("engine-0", EngineLauncher([sys.executable, "-c", "raise SystemExit('no such model')"]))
        config = Config(server=ServerConfig(port=0), redis=RedisConfig(url="redis://127.0.0.1:1/0"))
        gateway = Gateway(config, model="m", folder=model_folder("chatml"), replicas=[replica])
        urls: list[str] = []
        with pytest.raises(ReplicaUnavailable, match="no such model"):
            await serve(gateway, on_listening=urls.append, start_timeout=TIMEOUT_S)
        assert len(urls) == 1
        assert replica.state is ReplicaState.STOPPED

    asyncio.run(asyncio.wait_for(main(), TIMEOUT_S))


def test_a_signal_while_the_engine_comes_up_is_an_ordinary_end(model_folder: Callable[[str], Path]) -> None:
    async def main() -> None:
        replica = EngineReplica("engine-0", EngineLauncher([sys.executable, "-c", "import time; time.sleep(60)"]))
        config = Config(server=ServerConfig(port=0), redis=RedisConfig(url="redis://127.0.0.1:1/0"))
        gateway = Gateway(config, model="m", folder=model_folder("chatml"), replicas=[replica])

        def interrupt(_url: str) -> None:
            os.kill(os.getpid(), signal.SIGINT)

        await serve(gateway, on_listening=interrupt, start_timeout=TIMEOUT_S)
        assert replica.state is ReplicaState.STOPPED
        assert replica.pid is None

    asyncio.run(asyncio.wait_for(main(), TIMEOUT_S))
