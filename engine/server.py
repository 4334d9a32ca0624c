"""The engine on a socket: one thread computes steps, the event loop talks to any number of connections.

The two share nothing but two queues: commands go to the engine thread as calls to make between steps, reports come
back to the event loop as callbacks. So a slow reader can never hold up a step, and nothing needs a lock.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import socket
import stat
import threading
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Final

import msgspec

from engine.core import EngineCore
from engine.errors import CallError, EngineError, ProtocolError, WorkerError
from engine.tcp import REPLY_BYTES, challenge, keep_alive, verdict
from engine.wire import (
    Abort,
    Call,
    EngineInfo,
    Output,
    Reply,
    StepReport,
    Submit,
    decode_to_engine,
    frame,
    read_frame,
)

__all__ = ["MAX_CONSECUTIVE_FAILURES", "MAX_UNSENT_BYTES", "EngineServer", "bind_unix_socket"]

MAX_UNSENT_BYTES: Final = 16 * 1024 * 1024
"""A connection that leaves more than this unread is cut."""

MAX_CONSECUTIVE_FAILURES: Final = 3
"""So many steps may raise in a row before the engine is given up."""

_CLOSE_SECONDS: Final = 2.0  # to flush what is written when the server stops
_HANDSHAKE_SECONDS: Final = 10.0
_MAX_STRANGERS: Final = 64
"""Connections that have not shown the secret yet. For one more the longest silent is cut: a gateway answers at once, so
that whoever only holds connections open keeps none out."""

_log: Final = logging.getLogger(__name__)


class EngineServer:
    """Serves one ``EngineCore`` by the protocol of ``engine.wire``.

    Each connection hears ``EngineInfo``, then a report of everything hittable, then every step. Ids of requests belong
    to their connection; when it closes, its requests are aborted.
    """

    def __init__(
        self,
        core: EngineCore,
        listener: socket.socket,
        *,
        secret: bytes | None = None,
        thread: Executor | None = None,
        max_unsent_bytes: int = MAX_UNSENT_BYTES,
    ) -> None:
        """Serve ``core`` to whoever connects to ``listener``, a bound stream socket that the server will close.

        To a TCP socket everybody can connect: there whoever does must know ``secret`` (see ``engine.tcp``).

        ``thread`` runs the steps, by default a new one. A core that computes has to be made in it: OpenMP keeps threads
        for each one that has ever computed, and when there are more of them than cores, they sleep between operations
        instead of waiting, which makes a decode step half as long again.
        """
        if (secret is None) != (listener.family == socket.AF_UNIX):
            raise ValueError("a secret is for a TCP socket, and needed there")
        self._core = core  # touched by the engine thread only
        self._secret = secret
        self._listener = listener
        self._max_unsent_bytes = max_unsent_bytes
        self._thread = thread or ThreadPoolExecutor(1, thread_name_prefix="engine-steps")
        self._commands: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self._stopping = threading.Event()
        # Owned by the event loop:
        self._ids = itertools.count()
        self._routes: dict[int, _Route] = {}  # by the engine's ids
        self._connections: set[_Connection] = set()
        self._strangers: dict[asyncio.StreamWriter, None] = {}  # in the order in which they came
        self._handlers: set[asyncio.Task[None]] = set()
        self._ended = asyncio.Event()
        self._failure: Exception | None = None
        self._loop: asyncio.AbstractEventLoop

    async def serve(self) -> None:
        """Serve until ``stop`` is called or a ``shutdown`` call comes.

        Raises:
            Exception: what stopped the engine for good, ``EngineError`` when steps failed again and again.
        """
        self._loop = asyncio.get_running_loop()
        start = asyncio.start_unix_server if self._secret is None else asyncio.start_server
        server = await start(self._handle, sock=self._listener)
        engine = self._loop.run_in_executor(self._thread, self._run_engine)
        try:
            await self._ended.wait()
        finally:
            server.close()
            self._stopping.set()
            self._commands.put(lambda: None)  # wakes the thread
            await engine
            await self._close_connections()
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        """Stop serving after the step that is being computed; called on the event loop."""
        self._ended.set()

    # --- the engine thread -----------------------------------------------------------------------------

    def _run_engine(self) -> None:
        core = self._core
        try:
            while not self._stopping.is_set():
                self._run_commands(wait=not core.has_work())
                report = core.step()
                if report is not None:
                    self._loop.call_soon_threadsafe(self._publish, report)
                if core.consecutive_failures >= MAX_CONSECUTIVE_FAILURES:
                    raise EngineError(f"{core.consecutive_failures} steps in a row have failed")
        except Exception as error:
            self._loop.call_soon_threadsafe(self._fail, error)

    def _run_commands(self, *, wait: bool) -> None:
        """Make the calls that have come in, waiting for the first one if there is nothing else to do."""
        with contextlib.suppress(Empty):
            self._commands.get(block=wait)()
            while True:
                self._commands.get(block=False)()

    def _greet(self, connection: _Connection) -> None:
        self._loop.call_soon_threadsafe(self._welcome, connection, self._core.info, self._core.snapshot())

    def _answer(self, connection: _Connection, call: Call) -> None:
        try:
            reply = Reply(call.id, self._core.call(call.method, call.params))
        except CallError as error:
            reply = Reply(call.id, error=str(error))
        self._loop.call_soon_threadsafe(self._send, connection, frame(reply))

    # --- the event loop --------------------------------------------------------------------------------

    def _fail(self, error: Exception) -> None:
        self._failure = error
        self._ended.set()

    def _welcome(self, connection: _Connection, info: EngineInfo, snapshot: StepReport) -> None:
        if connection in self._connections:
            self._send(connection, frame(info) + frame(snapshot))
            connection.welcomed = True

    def _publish(self, report: StepReport) -> None:
        """Send every connection the report with the outputs of its own requests."""
        outputs: dict[_Connection, list[Output]] = {}
        for output in report.outputs:
            route = self._routes.get(output.id)
            if route is None:  # its connection has gone
                continue
            outputs.setdefault(route.connection, []).append(msgspec.structs.replace(output, id=route.id))
            if output.finish_reason is not None:
                route.choices -= 1
                if not route.choices or output.error is not None:
                    del self._routes[output.id], route.connection.requests[route.id]
        others: bytes | None = None
        for connection in self._connections:
            if not connection.welcomed:
                continue
            if connection in outputs:
                own = msgspec.structs.replace(report, outputs=tuple(outputs[connection]))
                self._send(connection, frame(own))
            else:
                others = others or frame(msgspec.structs.replace(report, outputs=()))
                self._send(connection, others)

    def _send(self, connection: _Connection, data: bytes) -> None:
        transport = connection.writer.transport
        if transport.is_closing():
            return
        transport.write(data)
        unsent = transport.get_write_buffer_size()
        if unsent > self._max_unsent_bytes:
            _log.warning("cutting a connection that left %d bytes unread", unsent)
            transport.abort()

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Read one connection to its end."""
        task = asyncio.current_task()
        assert task is not None
        self._handlers.add(task)
        connection = _Connection(writer)
        try:
            if self._secret is not None and not await self._is_admitted(self._secret, reader, writer):
                return
            self._connections.add(connection)
            self._commands.put(partial(self._greet, connection))
            while True:
                self._dispatch(connection, decode_to_engine(await read_frame(reader)))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        except (msgspec.DecodeError, ProtocolError) as error:
            _log.warning("closing a connection that broke the protocol: %s", error)
        finally:
            self._handlers.discard(task)
            self._connections.discard(connection)
            self._abort(connection, [*connection.requests])
            writer.close()

    async def _is_admitted(self, secret: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Whether the other end of a TCP connection shows that it knows the secret, in time."""
        peer = writer.get_extra_info("peername")
        if len(self._strangers) >= _MAX_STRANGERS:
            longest = next(iter(self._strangers))
            del self._strangers[longest]
            longest.transport.abort()
        keep_alive(writer.get_extra_info("socket"))
        self._strangers[writer] = None
        try:
            asked = challenge()
            writer.write(asked)
            async with asyncio.timeout(_HANDSHAKE_SECONDS):
                admitted, told = verdict(secret, asked, await reader.readexactly(REPLY_BYTES))
            writer.write(told)
        except (TimeoutError, asyncio.IncompleteReadError, ConnectionError):
            admitted = False
        finally:
            self._strangers.pop(writer, None)
        if admitted:
            _log.info("a gateway at %s has connected", peer[0])
        else:
            _log.warning("refusing a connection from %s that does not show the secret", peer[0])
        return admitted

    def _dispatch(self, connection: _Connection, message: Submit | Abort | Call) -> None:
        match message:
            case Submit():
                if message.id in connection.requests:
                    raise ProtocolError(f"request id {message.id} is in use")
                id = next(self._ids)
                connection.requests[message.id] = id
                self._routes[id] = _Route(connection, message.id, message.n)
                self._commands.put(partial(self._core.submit, msgspec.structs.replace(message, id=id)))
            case Abort():
                known = tuple(connection.requests[id] for id in message.ids if id in connection.requests)
                self._commands.put(partial(self._core.abort, known))
            case Call(method="shutdown"):
                self._send(connection, frame(Reply(message.id)))
                self.stop()
            case Call():
                self._commands.put(partial(self._answer, connection, message))

    def _abort(self, connection: _Connection, ids: list[int]) -> None:
        """Forget a closed connection's requests and have the engine drop them."""
        known = tuple(connection.requests.pop(id) for id in ids)
        for id in known:
            del self._routes[id]
        self._commands.put(partial(self._core.abort, known))

    async def _close_connections(self) -> None:
        """Flush and close every connection; those that do not read are cut."""
        for stranger in self._strangers:
            stranger.transport.abort()
        for connection in self._connections:
            connection.writer.transport.close()
        if self._handlers:
            await asyncio.wait(self._handlers, timeout=_CLOSE_SECONDS)
        # Only those that are still there: a transport that has written its last bytes must not be aborted again.
        for connection in self._connections:
            connection.writer.transport.abort()
        await asyncio.gather(*self._handlers)


class _Connection:
    """One gateway. Owned by the event loop. ``requests`` maps its ids to the engine's; ``welcomed`` ones hear steps."""

    __slots__ = ("requests", "welcomed", "writer")

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self.writer = writer
        self.requests: dict[int, int] = {}
        self.welcomed = False


class _Route:
    """Where a request's outputs go: the connection, its own id, and how many choices have not ended there."""

    __slots__ = ("choices", "connection", "id")

    def __init__(self, connection: _Connection, id: int, choices: int) -> None:
        self.connection = connection
        self.id = id
        self.choices = choices


def bind_unix_socket(path: Path) -> socket.socket:
    """A listening-ready unix socket at ``path`` that only this user can connect to; a stale file is replaced.

    Raises:
        WorkerError: another process serves there, the file is no socket, or the path cannot be bound.
    """
    try:
        _remove_stale(path)
        listener = socket.socket(socket.AF_UNIX)
        umask = os.umask(0o177)  # the mode has to be right from the first moment
        try:
            listener.bind(str(path))
        except OSError:
            listener.close()
            raise
        finally:
            os.umask(umask)
    except OSError as error:
        raise WorkerError(f"cannot listen on {path}: {error} (a unix socket's path has at most 107 bytes)") from error
    return listener


def _remove_stale(path: Path) -> None:
    """Remove the socket that a killed process left at ``path``; raises ``WorkerError`` when it is anything else."""
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(path.stat().st_mode):
            raise WorkerError(f"{path} exists and is not a socket; choose another --socket")
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:
                path.unlink()
            else:
                raise WorkerError(f"another process is serving on {path}")
