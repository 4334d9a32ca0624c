"""Engine processes: how they are started, listened to and ended.

A child of its own per replica, so that a crash or an out-of-memory kill never takes the gateway along.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import shutil
import signal
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import structlog

from engine.launch import module_command, module_environment
from engine.memory import GPU_MEMORY_SHARE, MEMORY_SHARE
from gateway.config import EngineConfig
from gateway.errors import ConfigError
from gateway.socket_folder import NoSocketFolder, make_socket_folder

__all__ = ["EngineLauncher", "EngineProcess", "RestartDelay", "engine_command", "require_engine_packages"]

_FIRST_DELAY_S: Final = 0.5
_LAST_DELAY_S: Final = 30.0
_STABLE_S: Final = 60.0  # a life that long was a good one: the next restart is quick again
_STOP_TIMEOUT_S: Final = 10.0
_LAST_WORDS: Final = 20
_MAX_LINE_BYTES: Final = 4096
_ENGINE_PACKAGES: Final = ("torch", "transformers")

_log = structlog.get_logger("headstart.engine")


def require_engine_packages() -> None:
    """Raises ``ConfigError`` when no engine can run in this Python, with the way to change that."""
    missing = [name for name in _ENGINE_PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"A local engine needs {' and '.join(missing)}: pip install 'headstart[engine]'. "
            "(PyTorch's CPU build is enough on a machine without a GPU.)"
        )


def engine_command(config: EngineConfig, folder: Path, served_name: str) -> list[str]:
    """The command line of one engine but for its socket. Cores and memory are shared among its ``engines``."""
    threads = config.threads or max(1, _usable_cores() // (config.engines or 1))
    share = MEMORY_SHARE if config.device == "cpu" else GPU_MEMORY_SHARE
    options = {
        "model": folder,
        "served-name": served_name,
        "device": config.device,
        "dtype": config.dtype,
        "kv-dtype": config.kv_dtype,
        "kv-blocks": config.kv_blocks,
        "memory-share": round(share / (config.engines or 1), 4),
        "block-size": config.block_size,
        "policy": config.policy,
        "max-batch-tokens": config.max_batch_tokens,
        "max-running": config.max_running,
        "threads": threads,
    }
    command = module_command("engine.worker")
    for name, value in options.items():
        command += [f"--{name}", str(value)]
    return command


class EngineProcess:
    """One life of one engine process. Owned by the launcher's caller, who ends it with ``stop``."""

    def __init__(self, process: asyncio.subprocess.Process, socket: Path, replica_id: str) -> None:
        self.socket: Final = socket
        self._process = process
        self._log = _log.bind(replica=replica_id)
        self._last_words: deque[str] = deque(maxlen=_LAST_WORDS)
        self._listener = asyncio.create_task(self._forward_log(), name=f"{replica_id}-log")

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    async def wait(self) -> str:
        """Return when it has ended, with what is known of the reason."""
        status = await self._process.wait()
        with contextlib.suppress(TimeoutError):
            # Whoever inherited its stderr may keep it open; its own words are here by now.
            await asyncio.wait_for(asyncio.shield(self._listener), 1.0)
        words = f": {self._last_words[-1]}" if self._last_words and status > 0 else ""
        return f"the engine process ended with {_status_in_words(status)}{words}"

    async def stop(self, timeout: float = _STOP_TIMEOUT_S) -> None:
        """Ask it to end, kill it after ``timeout`` seconds."""
        for kill in (self._process.terminate, self._process.kill):
            if self._process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    kill()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._process.wait(), timeout)
        self._listener.cancel()
        await asyncio.wait([self._listener])
        self.socket.unlink(missing_ok=True)

    async def _forward_log(self) -> None:
        """Its stderr, line by line, into our log. It writes no prompts."""
        assert self._process.stderr is not None
        rest = b""
        while data := await self._process.stderr.read(_MAX_LINE_BYTES):
            *lines, rest = (rest + data).split(b"\n")
            if len(rest) > _MAX_LINE_BYTES:
                lines, rest = [*lines, rest], b""
            for line in lines:
                self._forward(line)
        self._forward(rest)

    def _forward(self, line: bytes) -> None:
        text = line.decode("utf-8", "replace").strip()
        if text:
            self._last_words.append(text)
            self._log.info("engine says", line=text)


class EngineLauncher:
    """Starts engine processes for one replica, each on a new socket in a directory of its own.

    ``command`` is run with ``--parent PID`` and ``--socket PATH`` appended. Owns the directory.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self._command = list(command)
        self._folder: Path | None = None
        self._lives = 0

    async def launch(self, replica_id: str) -> EngineProcess:
        """Start a process; it serves on its ``socket`` some seconds later. Raises ``OSError``, ``ConfigError``."""
        if self._folder is None:
            try:
                self._folder = make_socket_folder("engine")
            except NoSocketFolder as error:
                raise ConfigError(str(error)) from error
        self._lives += 1
        socket = self._folder / f"{self._lives}.sock"
        process = await asyncio.create_subprocess_exec(
            *self._command, "--parent", str(os.getpid()), "--socket", str(socket),
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE,
            env=module_environment(),
            start_new_session=True,  # Ctrl-C in the terminal reaches the gateway alone, which drains first
        )  # fmt: skip
        _log.info("engine is starting: its model has to be loaded first", replica=replica_id, pid=process.pid)
        return EngineProcess(process, socket, replica_id)

    def close(self) -> None:
        """Remove the directory."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None


class RestartDelay:
    """How long to wait before the next life: half a second, doubled up to half a minute while lives stay short."""

    def __init__(self) -> None:
        self._next_s = _FIRST_DELAY_S

    def after(self, served_s: float) -> float:
        """Seconds to wait after a life that served for ``served_s`` seconds."""
        if served_s >= _STABLE_S:
            self._next_s = _FIRST_DELAY_S
        delay = self._next_s
        self._next_s = min(delay * 2, _LAST_DELAY_S)
        return delay


def _usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _status_in_words(status: int) -> str:
    if status >= 0:
        return f"exit status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = str(-status)
    return f"signal {name}" + (" (out of memory?)" if -status == signal.SIGKILL else "")
