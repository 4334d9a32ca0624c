"""The HTTP server around a gateway: listening, limits, and an orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import socket
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any, Final, TypeVar

import structlog
import uvicorn
from uvicorn.loops.auto import auto_loop_factory

from gateway.app import asgi_app
from gateway.config import ServerConfig
from gateway.configuration import check_config
from gateway.errors import ConfigError
from gateway.http_protocol import LimitedHttpProtocol
from gateway.service import Gateway

__all__ = ["run", "serve", "serving", "settle_memory"]

_T = TypeVar("_T")

_log = structlog.get_logger("headstart.serve")

_BACKLOG: Final = 1024
_KEEP_ALIVE_S: Final = 75

_YOUNG_OBJECTS: Final = 20_000
"""New objects after which the garbage collector looks for cycles. At Python's own 700 it does so for each request or
two, and finds the objects of those in hand, which are no garbage."""


def run(main: Coroutine[Any, Any, _T]) -> _T:
    """``asyncio.run`` on the fastest event loop there is here: uvloop's, where it is installed."""
    with asyncio.Runner(loop_factory=auto_loop_factory()) as runner:
        return runner.run(main)


def settle_memory() -> None:
    """Take what there is for permanent: a full collection would go through all of it, 90 ms at a time.

    For a process that does nothing but serve, when it is about to.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS, *gc.get_threshold()[1:])


async def serve(
    gateway: Gateway, *, on_listening: Callable[[str], None] | None = None, start_timeout: float | None = None
) -> None:
    """Run until SIGINT or SIGTERM, then let requests in hand end (at most ``server.drain_grace_s``) and stop.

    A second signal ends at once. ``on_listening`` is called with the base URL as soon as connections are accepted,
    which is before the replicas are ready. Ends normally after a signal, whatever it was.

    Raises:
        ConfigError: The address cannot be bound, or must not be.
        ReplicaUnavailable: ``start_timeout`` is given, and within so many seconds no replica has come up or the first
            try of one has failed while none served: going on would only hide the reason.
    """
    async with _listening(gateway, handle_signals=True) as (server, url):
        if on_listening is not None:
            on_listening(url)
        ended = asyncio.create_task(server.ended.wait(), name="until-signal")
        if start_timeout is not None:
            first_start = asyncio.create_task(gateway.wait_ready(start_timeout), name="first-start")
            await asyncio.wait([ended, first_start], return_when=asyncio.FIRST_COMPLETED)
            if not ended.done() and gateway.ready_replicas == 0:
                ended.cancel()
                await first_start
            first_start.cancel()
        await ended


@contextlib.asynccontextmanager
async def serving(gateway: Gateway) -> AsyncIterator[str]:
    """Serve in the background for the length of the block, which gets the base URL; drains at its end.

    Raises: as ``serve``.
    """
    async with _listening(gateway, handle_signals=False) as (_, url):
        yield url


class _Server(uvicorn.Server):
    """uvicorn with our way to stop: new requests are refused first, and a signal is an ordinary end, exit code 0."""

    def __init__(self, config: uvicorn.Config, gateway: Gateway, *, handle_signals: bool) -> None:
        super().__init__(config)
        self.ended = asyncio.Event()
        self._gateway = gateway
        self._handle_signals = handle_signals

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Listen for SIGINT and SIGTERM while serving, without raising them again afterwards as uvicorn would."""
        if not self._handle_signals or threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()
        signals = (signal.SIGINT, signal.SIGTERM)
        for number in signals:
            loop.add_signal_handler(number, self._end, number)
        try:
            yield
        finally:
            for number in signals:
                loop.remove_signal_handler(number)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Refuse new requests, wait for those in hand, stop the gateway."""
        self._gateway.drain()
        await super().shutdown(sockets)
        if self.force_exit:  # uvicorn would leave the application as it is
            await self.lifespan.shutdown()

    def _end(self, number: signal.Signals) -> None:
        if self.should_exit:
            self.force_exit = True
            _log.info("ending at once", signal=number.name)
        else:
            _log.info(
                "ending: answers that are running may end, another signal cuts them off",
                signal=number.name,
                longest_s=self.config.timeout_graceful_shutdown,
            )
        self.should_exit = True
        self.ended.set()


@contextlib.asynccontextmanager
async def _listening(gateway: Gateway, *, handle_signals: bool) -> AsyncIterator[tuple[_Server, str]]:
    check_config(gateway.config)
    settings = gateway.config.server
    listener = _bind(settings)
    port: int = listener.getsockname()[1]
    config = uvicorn.Config(
        asgi_app(gateway),
        http=LimitedHttpProtocol,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,  # who calls is who connects: the operator's routes depend on it
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=max(1, round(settings.drain_grace_s)),
    )
    server = _Server(config, gateway, handle_signals=handle_signals)
    running = asyncio.create_task(server.serve(sockets=[listener]), name="http-server")
    try:
        await _started(server, running)
        yield server, f"http://{_authority(settings.host, port)}"
    finally:
        server.should_exit = True
        # Shielded: a second cancellation must not tear the orderly end apart.
        await asyncio.shield(running)
        if server.force_exit:  # uvicorn has then left the application as it was
            await gateway.stop()


async def _started(server: _Server, running: asyncio.Task[None]) -> None:
    while not server.started:
        await asyncio.wait([running], timeout=0.01)
        if running.done():
            await running
            raise ConfigError("The server did not start; the log says why.")


def _bind(settings: ServerConfig) -> socket.socket:
    """A listening-ready socket; bound here, so that a busy port is an error of ours and not an exit of uvicorn's."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(_BACKLOG)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise ConfigError(
            f"Cannot listen on {settings.host}:{settings.port}: {error.strerror or error}. "
            "Choose another address with --host and --port (0 for any free port)."
        ) from error
    return listener


def _authority(host: str, port: int) -> str:
    """Host and port of a URL under which this machine reaches the server."""
    shown = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104
    return f"[{shown}]:{port}" if ":" in shown else f"{shown}:{port}"
