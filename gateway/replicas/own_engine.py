"""What an engine of our own is to the gateway, wherever it runs: one stream brings its answers and its cache events."""

from __future__ import annotations

import asyncio
import contextlib

from engine.wire import StepReport
from gateway.replicas.base import EventHealth, Replica, ReplicaState
from gateway.replicas.inflight import InFlight
from gateway.replicas.life import ReplicaLife

__all__ = ["OwnEngineReplica"]


class OwnEngineReplica(ReplicaLife, Replica):
    """A replica that speaks ``engine.wire``. Owns the requests in flight beside what ``ReplicaLife`` owns."""

    def __init__(self, id: str, *, restarts: bool, url: str | None = None) -> None:
        super().__init__(id, restarts=restarts, url=url)
        self._in_flight = InFlight()

    @property
    def tells_events(self) -> bool:
        """Whether its cache events tell all that becomes of its blocks: their stream is in order and has no gaps."""
        return True

    @property
    def cache_blocks(self) -> int:
        """Blocks that its cache has room for; 0 before it has told."""
        return 0 if self.info is None else self.info.num_blocks

    @property
    def event_health(self) -> EventHealth | None:
        """None: its events come with its answers."""
        return None

    def _take(self, report: StepReport) -> None:
        """Hand out what a step has brought."""
        self._in_flight.deliver(report.outputs)
        self.load = report.load
        for observer in self._observers:
            if report.events:
                observer.on_events(self, report.events)
            if report.timing is not None:
                observer.on_step(self, report.timing, report.load)

    async def _stop_answering(self, grace: float) -> None:
        """Be STOPPED; running requests get ``grace`` seconds to end."""
        was_ready = self.state is ReplicaState.READY
        self._set_state(ReplicaState.STOPPED, "stopped")
        if was_ready and grace > 0:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._in_flight.wait_idle(), grace)
        self._in_flight.lose("the replica was stopped")
