"""Which replicas there are: those of the configuration, and those that join and leave while the gateway serves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Final, Literal

import structlog

from gateway.config import ReplicaConfig
from gateway.errors import ConflictError
from gateway.replicas.base import Replica, ReplicaObserver
from gateway.replicas.discovery import Discovery
from gateway.routing.router import Router
from gateway.stats.statistics import Statistics

__all__ = ["Connect", "Membership", "Source"]

Source = Literal["engine", "configured", "discovered", "added"]
"""Where a replica comes from: an engine of this gateway, its configuration, discovery, or the operator's request."""

Connect = Callable[[ReplicaConfig], Replica]
"""Makes a replica for a remote server, not started."""

_log = structlog.get_logger("headstart.membership")


class Membership:
    """Owns the replicas of a gateway; belongs to the event loop.

    ``replicas`` is the one mapping that all parts of the gateway look at, by id; nobody else changes it.
    """

    def __init__(
        self,
        replicas: Sequence[Replica],
        *,
        router: Router,
        statistics: Statistics,
        observers: Sequence[ReplicaObserver],
        discovery: Discovery,
        connect: Connect | None,
        grace_s: float,
    ) -> None:
        """``observers`` hear of every replica. ``connect`` None: no replica can join. ``grace_s`` is what requests get
        to end when theirs leaves.
        """
        self.replicas: Final[dict[str, Replica]] = {}
        self.discovery: Final = discovery
        self._router: Final = router
        self._statistics: Final = statistics
        self._observers: Final = tuple(observers)
        self._connect: Final = connect
        self._grace_s: Final = grace_s
        self._sources: dict[str, Source] = {}
        self._leaving: dict[str, asyncio.Task[None]] = {}
        self._starting: set[asyncio.Task[None]] = set()
        self._stopping = False
        for replica in replicas:
            self._register(replica, "engine" if replica.url is None else "configured")

    def source(self, replica_id: str) -> Source:
        """Where a replica comes from."""
        return self._sources[replica_id]

    def is_leaving(self, replica_id: str) -> bool:
        """Whether it only ends what it has."""
        return replica_id in self._leaving

    async def start(self) -> None:
        """Start the replicas there are, and look for more; returns without waiting for them."""
        for replica in list(self.replicas.values()):
            await replica.start()
        self.discovery.start(self._found)

    async def stop(self, grace: float) -> None:
        """Stop all of them for good: running requests get ``grace`` seconds to end."""
        self._stopping = True
        await self.discovery.stop()
        ending = [*self._leaving.values(), *self._starting]
        for task in ending:
            task.cancel()
        if ending:
            await asyncio.wait(ending)
        await asyncio.gather(*[replica.stop(grace) for replica in self.replicas.values()])

    def join(self, config: ReplicaConfig, source: Source) -> Replica:
        """Add the server at ``config.url`` and start to look for it.

        Raises:
            ConflictError: It is there already, or this gateway takes none.
        """
        if self._connect is None or self._stopping:
            raise ConflictError("This gateway takes no further replicas.")
        replica = self._connect(config)
        if replica.id in self.replicas:
            how = "about to leave" if self.is_leaving(replica.id) else f"there already, as {replica.id}"
            raise ConflictError(f"{config.url} is {how}.")
        self._register(replica, source)
        task = asyncio.create_task(replica.start(), name=f"{replica.id}-start")
        self._starting.add(task)
        task.add_done_callback(self._starting.discard)
        _log.info("replica joins", replica=replica.id, url=config.url, source=source)
        return replica

    def leave(self, replica_id: str) -> None:
        """Send a replica nothing new, let its requests end, then forget it. Safe to repeat."""
        if replica_id in self.replicas and replica_id not in self._leaving:
            _log.info("replica leaves", replica=replica_id, source=self._sources[replica_id])
            self._router.drain(replica_id)
            task = asyncio.create_task(self._see_off(self.replicas[replica_id]), name=f"{replica_id}-leaving")
            self._leaving[replica_id] = task

    def _register(self, replica: Replica, source: Source) -> None:
        self.replicas[replica.id] = replica
        self._sources[replica.id] = source
        self._statistics.add_replica(replica)
        self._router.add(replica)
        for observer in self._observers:
            replica.observe(observer)

    async def _see_off(self, replica: Replica) -> None:
        await replica.stop(self._grace_s)
        del self.replicas[replica.id], self._sources[replica.id], self._leaving[replica.id]
        self._router.remove(replica.id)
        self._statistics.remove_replica(replica.id)

    def _found(self, configs: Iterable[ReplicaConfig]) -> None:
        """Discovery has looked: those that are new join, those that are gone leave."""
        urls = {replica.url: id for id, replica in self.replicas.items() if replica.url is not None}
        wanted = {config.url: config for config in configs}
        for url, config in wanted.items():
            if url not in urls:
                self.join(config, "discovered")
        for url, id in urls.items():
            if url not in wanted and self._sources[id] == "discovered":
                self.leave(id)
