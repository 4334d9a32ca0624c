"""Server processes: started on loopback, waited for, and gone at the end whatever happens."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import aiohttp

import engine.parent

__all__ = ["RunningServer", "ServerError", "free_port", "running"]

_POLL_S: Final = 0.25
_END_S: Final = 15.0  # until a server that was told to end is killed
_SHOWN_LINES: Final = 15


class ServerError(Exception):
    """A server did not come up; the message has the last lines it wrote."""


class RunningServer:
    """A server while it runs."""

    def __init__(self, pid: int, log: Path) -> None:
        self.pid = pid
        self._log = log

    def last_lines(self) -> str:
        """What it wrote last."""
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-_SHOWN_LINES:])

    def cpu_seconds(self) -> float:
        """Processor time of its session up to now: of it and of all that it has started."""
        ticks = 0
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                fields = stat.read_text().rpartition(")")[2].split()
                if int(fields[3]) == self.pid:
                    ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")


def free_port() -> int:
    """A port of 127.0.0.1 on which nobody listens now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        assert isinstance(port, int)
        return port


@asynccontextmanager
async def running(
    command: Sequence[str], environment: Mapping[str, str], ready: str, timeout_s: float
) -> AsyncIterator[RunningServer]:
    """Run a server until the block ends, from when ``GET ready`` answers 200 on.

    It runs in a process group of its own, which is ended as a whole. Should this process be killed, the server is told
    to end by the kernel.

    Raises:
        ServerError: it ended, or was not ready in time.
    """
    with tempfile.TemporaryDirectory(prefix="headstart-benchmark-") as folder:
        log = Path(folder) / "log"
        process = _start(command, environment, folder, log)
        server = RunningServer(process.pid, log)
        try:
            await _wait_ready(process, ready, timeout_s, server.last_lines)
            yield server
        finally:
            _end(process)


def _start(command: Sequence[str], environment: Mapping[str, str], folder: str, log: Path) -> subprocess.Popen[bytes]:
    guard = [sys.executable, "-I", "-S", engine.parent.__file__, str(os.getpid())]
    with log.open("w") as output:
        return subprocess.Popen(
            [*guard, *command],
            env=dict(environment),
            cwd=folder,  # nothing that lies where the user stands is taken for a module
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


async def _wait_ready(
    process: subprocess.Popen[bytes], ready: str, timeout_s: float, last_lines: Callable[[], str]
) -> None:
    deadline = time.monotonic() + timeout_s
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as session:
        while True:
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                async with session.get(ready) as response:
                    if response.status == 200:
                        return
            if process.poll() is not None:
                raise ServerError(f"the server ended with status {process.returncode}:\n{last_lines()}")
            if time.monotonic() > deadline:
                raise ServerError(f"the server was not ready after {timeout_s:.0f} s:\n{last_lines()}")
            await asyncio.sleep(_POLL_S)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process and all it has started: in order, and after a while by force."""
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_END_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # its session's id is its own
    process.wait()
