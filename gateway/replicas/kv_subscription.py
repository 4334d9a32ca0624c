"""The ZeroMQ side of KV cache events: an engine's PUB socket for what happens, its ROUTER for what was missed."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Final

import structlog
import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from gateway.logs import where_from
from gateway.replicas.kv_events import KvEvents

__all__ = ["KvSubscription"]

_QUIET_S: Final = 2.0
"""After so long without a message it is asked whether one was missed: the last one before a pause leaves no gap."""

_REPLAY_TIMEOUT_S: Final = 3.0  # between two messages of a replay
_MIN_PAUSE_S: Final = 0.1  # between two tries
_MAX_PAUSE_S: Final = 5.0
_MAX_MESSAGE_BYTES: Final = 32 * 1024 * 1024
_MAX_WAITING: Final = 100_000  # messages that ZeroMQ may keep before they are taken

_log = structlog.get_logger("headstart.kv_events")


class KvSubscription:
    """Feeds ``KvEvents`` from one engine's sockets. Owns both; belongs to the event loop.

    ZeroMQ connects again by itself. Where there is no ``replay`` endpoint, what was missed cannot be asked for.
    """

    def __init__(self, events: KvEvents, endpoint: str, replay: str | None, *, name: str) -> None:
        self._events: Final = events
        self._endpoint: Final = endpoint
        self._replay_endpoint: Final = replay
        self._name: Final = name
        self._tasks: list[asyncio.Task[None]] = []
        self._context: zmq.asyncio.Context | None = None
        self._heard = asyncio.Event()
        self._replay_limit: asyncio.Timeout | None = None  # until when the next message of a replay has to come
        self.connected = False
        """Whether the publisher is connected."""
        self.replays_fail = False
        """Whether the last replay that was asked for did not come."""

    def verify(self) -> None:
        """Have it verified that nothing is missing."""
        self._events.sequence.check()
        self._heard.set()

    def reset(self) -> None:
        """Drop what is known and learn it again."""
        self._events.sequence.reset()
        self._heard.set()

    def start(self) -> None:
        """Begin to listen; returns without waiting for a connection."""
        assert self._context is None, "a subscription is started once"
        context = self._context = zmq.asyncio.Context()
        jobs = {"listen": self._listen(context), "repair": self._repair(context)}
        self._tasks = [asyncio.create_task(job, name=f"{self._name}-{kind}") for kind, job in jobs.items()]

    async def stop(self) -> None:
        """Close the sockets. Safe to repeat."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        if self._context is not None:
            self._context.destroy(linger=0)
            self._context = None

    async def _listen(self, context: zmq.asyncio.Context) -> None:
        """One connection after another. ZeroMQ waits for a server by itself, but gives one up that sends rubbish."""
        loop, pause_s = asyncio.get_running_loop(), _MIN_PAUSE_S
        while True:
            subscriber = self._socket(context, zmq.SUB)
            subscriber.set(zmq.RECONNECT_IVL, int(1000 * _MIN_PAUSE_S))
            subscriber.set(zmq.RECONNECT_IVL_MAX, int(1000 * _MAX_PAUSE_S))
            subscriber.set(zmq.RCVHWM, _MAX_WAITING)
            subscriber.subscribe(b"")
            monitor = subscriber.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
            receiving = asyncio.create_task(self._receive(subscriber), name=f"{self._name}-receive")
            try:
                subscriber.connect(self._endpoint)
                while not self.connected:
                    self._now(connected=await self._is_connection(monitor))
                since = loop.time()
                while self.connected:
                    self._now(connected=await self._is_connection(monitor))
            finally:
                self.connected = False
                receiving.cancel()
                await asyncio.gather(receiving, return_exceptions=True)
                subscriber.disable_monitor()
                subscriber.close(linger=0)
            pause_s = _MIN_PAUSE_S if loop.time() - since > _MAX_PAUSE_S else min(_MAX_PAUSE_S, 2 * pause_s)
            await asyncio.sleep(pause_s)

    async def _receive(self, subscriber: zmq.asyncio.Socket) -> None:
        while True:
            frames = await subscriber.recv_multipart()
            try:
                self._events.receive(frames)
            except Exception as error:  # an observer's
                self._failed(error)
            self._heard.set()

    async def _is_connection(self, monitor: zmq.asyncio.Socket) -> bool:
        """Whether what happens next to the connection is that it is made, not that it is lost."""
        event = parse_monitor_message(await monitor.recv_multipart())["event"]
        return bool(event == zmq.EVENT_HANDSHAKE_SUCCEEDED)

    def _now(self, *, connected: bool) -> None:
        if connected != self.connected:
            self.connected = connected
            if self._replay_limit is not None and not self._replay_limit.expired():  # who was asked is gone
                self._replay_limit.reschedule(asyncio.get_running_loop().time())
            self._events.sequence.doubt()
            self._heard.set()

    async def _repair(self, context: zmq.asyncio.Context) -> None:
        """Ask for what is wanted, and when it has been quiet for a while, whether anything is missing."""
        sequence, pause_s = self._events.sequence, 0.0
        while True:
            if sequence.wanted is None or not self.connected:
                await self._until_wanted()
                continue
            try:
                if not self._replay_endpoint:
                    sequence.give_up()
                    continue
                complete = await self._replay(context, self._replay_endpoint, sequence.wanted)
            except Exception as error:  # an observer's, or of a socket that could not be made
                self._failed(error)
                complete = False
            if not self.connected:
                continue
            if complete:
                pause_s = 0.0
                await asyncio.sleep(0)
            else:
                pause_s = min(_MAX_PAUSE_S, max(_MIN_PAUSE_S, 2 * pause_s))
                await asyncio.sleep(pause_s)
            if complete == self.replays_fail:
                self.replays_fail = not complete
                if not complete:
                    _log.warning("cache events are not replayed", replica=self._name, endpoint=self._replay_endpoint)

    def _failed(self, error: Exception) -> None:
        _log.error("cache events could not be taken in", replica=self._name, error=where_from(error))
        self._events.failed()

    async def _until_wanted(self) -> None:
        self._heard.clear()
        try:
            async with asyncio.timeout(_QUIET_S):
                await self._heard.wait()
        except TimeoutError:
            if self._replay_endpoint and self.connected:
                self._events.sequence.check()

    async def _replay(self, context: zmq.asyncio.Context, endpoint: str, start: int) -> bool:
        """Have the messages from ``start`` on told again; whether they came to their end."""
        sequence = self._events.sequence
        dealer = self._socket(context, zmq.DEALER)
        sequence.begin_replay()
        try:
            dealer.connect(endpoint)
            await dealer.send_multipart([b"", start.to_bytes(8, "big")])
            while True:
                async with asyncio.timeout(_REPLAY_TIMEOUT_S) as self._replay_limit:
                    frames = await dealer.recv_multipart()
                if not self._events.replay(frames):
                    break
        except (TimeoutError, zmq.ZMQError):
            if self.connected:
                sequence.fail_replay()
            else:
                sequence.abandon_replay()
            return False
        finally:
            self._replay_limit = None
            dealer.close(linger=0)
        sequence.end_replay()
        return True

    def _socket(self, context: zmq.asyncio.Context, kind: int) -> zmq.asyncio.Socket:
        socket = context.socket(kind)
        socket.set(zmq.LINGER, 0)
        socket.set(zmq.MAXMSGSIZE, _MAX_MESSAGE_BYTES)
        with contextlib.suppress(zmq.ZMQError):  # where there is no IPv6
            socket.set(zmq.IPV6, 1)
        return socket
