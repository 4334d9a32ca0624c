"""Our own engine as a replica: a process behind a unix socket, kept alive, or one that others run, also by TCP."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
import structlog

from engine.wire import Abort, Call, EngineInfo, FromEngine, Output, Reply, StepReport
from gateway.configuration import TCP_PREFIX
from gateway.errors import HeadstartError, ReplicaError
from gateway.redaction import redacted
from gateway.replicas.base import GenerationRequest, ReplicaState
from gateway.replicas.connection import EngineConnection
from gateway.replicas.openai_server import words_for
from gateway.replicas.own_engine import OwnEngineReplica
from gateway.replicas.supervisor import EngineLauncher, EngineProcess, RestartDelay

__all__ = ["EngineReplica", "TcpEndpoint"]

_CONNECT_INTERVAL_S: Final = 0.05
_CONNECT_TIMEOUT_S: Final = 5.0
_LOOK_INTERVAL_S: Final = 1.0  # for an engine that somebody else starts, and may take minutes for
_START_TIMEOUT_S: Final = 600.0  # weights on a slow disk; a process that hangs is ended after it
_GREETING_TIMEOUT_S: Final = 30.0  # an engine greets as soon as it has computed the step it is at
_LAST_WORDS_TIMEOUT_S: Final = 0.5

_log = structlog.get_logger("headstart.replica")


class _LifeEnded(Exception):
    """Why the engine does not serve (any longer), in words."""


class TcpEndpoint:
    """Where an engine listens on another machine, and the secret that it wants (see ``engine.tcp``)."""

    __slots__ = ("host", "port", "secret")

    def __init__(self, host: str, port: int, secret: bytes) -> None:
        self.host = host
        self.port = port
        self.secret = secret

    def __str__(self) -> str:
        """As in the configuration, and so to be told from other words: it is for the operator alone."""
        return TCP_PREFIX + (f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}")


class EngineReplica(OwnEngineReplica):
    """A ``gateway.replicas.base.Replica`` over ``engine.wire``.

    With a launcher it owns the engine process and starts it again when it ends, after a growing pause; with a path or
    an endpoint it connects, again and again, to an engine that somebody else runs. Owns the connection beside what
    ``OwnEngineReplica`` owns; belongs to one event loop.
    """

    def __init__(
        self,
        id: str,
        source: EngineLauncher | Path | TcpEndpoint,
        *,
        url: str | None = None,
        unfit: Callable[[EngineInfo], str | None] = lambda _: None,
        left: Callable[[], None] = lambda: None,
    ) -> None:
        """``url`` names an engine of somebody else's; ``unfit`` says why this gateway cannot use what one serves.

        ``left`` is called when one that could be used is gone.
        """
        super().__init__(id, restarts=isinstance(source, EngineLauncher), url=url)
        self._source = source
        self._unfit = unfit
        self._left = left
        self._calls: dict[int, asyncio.Future[Reply]] = {}
        self._last_call = 0
        self._connection: EngineConnection | None = None
        self._process: EngineProcess | None = None
        self._ready_since: float | None = None
        self._life: asyncio.Task[None] | None = None
        self._log = _log.bind(replica=id)

    @property
    def pid(self) -> int | None:
        """Process id of the engine; None while none of our own runs."""
        return None if self._process is None else self._process.pid

    # --- life ------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Begin to come up; returns without waiting for READY."""
        assert self._life is None, "a replica is started once"
        self._life = asyncio.create_task(self._keep_alive(), name=self.id)

    async def stop(self, grace: float) -> None:
        """Stop for good: running requests get ``grace`` seconds to end, then are aborted."""
        await self._stop_answering(grace)
        if self._life is not None:
            self._life.cancel()
            await asyncio.wait([self._life])
            self._life = None
        if isinstance(self._source, EngineLauncher):
            self._source.close()

    # --- work ------------------------------------------------------------------------------------------

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Output, None]:
        """Stream the outputs of one request; the last one of each choice has a ``finish_reason``.

        Raises: as ``Replica.generate``.
        """
        connection = self._connected()
        mailbox = self._in_flight.open(request.n)
        try:
            connection.send(request.submit(mailbox.id))
            while not mailbox.emptied:
                yield await mailbox.take()
        finally:
            if self._in_flight.close(mailbox):
                connection.send(Abort((mailbox.id,)))

    async def call(
        self, method: str, params: Mapping[str, Any] | None = None, *, timeout: float = 30.0
    ) -> dict[str, Any]:
        """A control call (see ``engine.wire.Call``).

        Raises:
            ReplicaError: It answered with an error, was lost, or gave no answer within ``timeout`` seconds.
            ReplicaUnavailable: It is not READY.
        """
        connection = self._connected()
        self._last_call += 1
        id = self._last_call
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._calls[id] = future
        try:
            connection.send(Call(id, method, dict(params or {})))
            reply = await asyncio.wait_for(future, timeout)
        except TimeoutError:
            raise ReplicaError(f"{self.id} gave no answer to {method!r} within {timeout:.0f} s.") from None
        finally:
            self._calls.pop(id, None)
        if reply.error is not None:
            raise ReplicaError(f"{self.id}: {reply.error}")
        if method == "set_policy" and self.info is not None:
            self.info = msgspec.structs.replace(self.info, policy=reply.result["policy"])
        return reply.result

    def resync(self) -> None:
        """Have observers told again of all the blocks it holds."""
        if self._connection is not None and self.state is ReplicaState.READY:
            self._last_call += 1
            self._connection.send(Call(self._last_call, "retell"))

    def _connected(self) -> EngineConnection:
        if self._connection is None or self.state is not ReplicaState.READY:
            raise self._not_ready()
        return self._connection

    # --- one life after another --------------------------------------------------------------------------

    async def _keep_alive(self) -> None:
        delay = RestartDelay()
        while True:
            self._ready_since = None
            try:
                await self._live()
            except _LifeEnded as ended:
                reason = str(ended)
            except (OSError, HeadstartError) as error:
                reason = str(error)
            if self._ready_since is not None:
                pause_s = delay.after(time.monotonic() - self._ready_since)
            elif self.refused or isinstance(self._source, EngineLauncher):
                pause_s = delay.after(0.0)
            else:
                pause_s = _LOOK_INTERVAL_S
            self._lost(reason, pause_s)
            await asyncio.sleep(pause_s)
            self._set_state(ReplicaState.STARTING, self.down_reason)

    async def _live(self) -> None:
        """One life of the engine, or of the connection to it; ends with an exception that says why."""
        if not isinstance(self._source, EngineLauncher):
            await self._serve(self._source, None)
            return
        process = self._process = await self._source.launch(self.id)
        try:
            await self._serve(process.socket, process)
        finally:
            self._connection = self._process = None
            await process.stop()

    async def _serve(self, socket: Path | TcpEndpoint, process: EngineProcess | None) -> None:
        ended = asyncio.create_task(process.wait()) if process is not None else None
        try:
            self.refused = False
            connection = await self._connect(socket, ended)
            try:
                reason = await self._until_closed(connection)
            finally:
                connection.close()
            self.refused = self._ready_since is None
            if ended is not None:
                # The process says better why; it may still be on its way out.
                await asyncio.wait([ended], timeout=_LAST_WORDS_TIMEOUT_S)
                reason = ended.result() if ended.done() else reason
            raise _LifeEnded(reason)
        finally:
            if ended is not None:
                ended.cancel()

    async def _until_closed(self, connection: EngineConnection) -> str:
        """Return when the connection has ended, with the reason; one on which no engine introduces itself is one."""
        await asyncio.wait([connection.closed], timeout=_GREETING_TIMEOUT_S)
        if self.state is ReplicaState.STARTING and not connection.closed.done():
            return f"what answers there did not introduce itself within {_GREETING_TIMEOUT_S:.0f} s"
        return await connection.closed

    async def _connect(self, socket: Path | TcpEndpoint, ended: asyncio.Task[str] | None) -> EngineConnection:
        """Try until the engine listens; a process that ends before that ends the trying."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _START_TIMEOUT_S
        while True:
            try:
                return await self._open(socket)
            except OSError as error:
                if ended is None:
                    raise _LifeEnded(f"no engine answers on {socket} ({words_for(error)})") from None
            await asyncio.wait([ended], timeout=_CONNECT_INTERVAL_S)
            if ended.done():
                raise _LifeEnded(ended.result())
            if loop.time() > deadline:
                raise _LifeEnded(f"the engine did not come up within {_START_TIMEOUT_S:.0f} s")

    async def _open(self, socket: Path | TcpEndpoint) -> EngineConnection:
        """Raises ``OSError`` when nobody listens there."""
        loop = asyncio.get_running_loop()
        secret = None if isinstance(socket, Path) else socket.secret
        connection = self._connection = EngineConnection(self._receive, secret=secret)  # it may be greeted at once
        if isinstance(socket, Path):
            await loop.create_unix_connection(lambda: connection, path=str(socket))
        else:
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):  # whose TimeoutError is an OSError
                await loop.create_connection(lambda: connection, socket.host, socket.port)
        return connection

    # --- what it reports -----------------------------------------------------------------------------------

    def _receive(self, message: FromEngine) -> None:
        match message:
            case StepReport():
                self._take(message)
            case EngineInfo():
                self._ready(message)
            case Reply():
                future = self._calls.get(message.id)
                if future is not None and not future.done():
                    future.set_result(message)

    def _ready(self, info: EngineInfo) -> None:
        if self.state is ReplicaState.STOPPED:
            return
        if (reason := self._unfit(info)) is not None:
            if self._connection is not None:
                self._connection.close(reason)
            return
        self.info = info
        self.load = None
        self._ready_since = time.monotonic()
        self._set_state(ReplicaState.READY, None)
        self._log.info(
            "replica ready",
            model=info.model, dtype=info.dtype, device=info.device, blocks=info.num_blocks, context=info.max_model_len,
        )  # fmt: skip
        for observer in self._observers:
            observer.on_ready(self, info)

    def _lost(self, reason: str, pause_s: float) -> None:
        was_ready = self.state is ReplicaState.READY
        self._connection = None
        self.load = None  # what ran there runs no more, and nothing will tell so before it is back
        self._left()
        if self.state is ReplicaState.STOPPED:
            return
        repeated = reason == self.down_reason
        self._set_state(ReplicaState.DOWN, reason)
        if not repeated:
            self._log.warning("replica down", reason=reason, next_try_s=pause_s)
        self._in_flight.lose(f"{self.id} was lost: {redacted(reason)}")  # callers get to read it
        for future in self._calls.values():
            if not future.done():
                future.set_result(Reply(0, error=f"lost: {reason}"))
        if was_ready:
            for observer in self._observers:
                observer.on_down(self, reason)
