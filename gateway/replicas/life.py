"""What every replica that comes and goes shares: its state, who waits for it, and who is told."""

from __future__ import annotations

import asyncio

from engine.wire import EngineInfo, Load
from gateway.errors import ReplicaUnavailable
from gateway.redaction import redacted
from gateway.replicas.base import ReplicaObserver, ReplicaState

__all__ = ["ReplicaLife"]


class ReplicaLife:
    """The attributes of a ``Replica`` and their changes. Whoever inherits it owns them; belongs to one event loop."""

    def __init__(self, id: str, *, restarts: bool, url: str | None = None) -> None:
        self.id = id
        self.url = url
        self.restarts = restarts
        self.state = ReplicaState.STARTING
        self.info: EngineInfo | None = None
        self.load: Load | None = None
        self.down_reason: str | None = None
        self.refused = False
        """Whether what answers there will not have this gateway, or is of no use to it: somebody has to mend that."""
        self.degraded: tuple[str, ...] = ()
        self.reads_tokens = True
        self.forgiven = True  # an engine of our own loses requests only with its process or the connection to it
        self._observers: list[ReplicaObserver] = []
        self._changed = asyncio.Event()  # set at each change of state; replaced by whoever waits

    def observe(self, observer: ReplicaObserver) -> None:
        """Report to ``observer`` from now on."""
        self._observers.append(observer)

    async def wait_ready(self, timeout: float, *, patient: bool = True) -> None:
        """Return when READY; without being ``patient`` only as long as it may come up by itself.

        Raises:
            ReplicaUnavailable: Not within ``timeout`` seconds, it was stopped, or an engine of our own has ended.
        """
        try:
            async with asyncio.timeout(timeout):
                while self.state is not ReplicaState.READY:
                    in_vain = self.restarts or (self.refused and not patient)
                    if self.state is ReplicaState.STOPPED or (self.state is ReplicaState.DOWN and in_vain):
                        raise ReplicaUnavailable(f"{self.id} does not serve: {self.down_reason}.")
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            reason = f": {self.down_reason}" if self.down_reason else ""
            raise ReplicaUnavailable(f"{self.id} was not ready within {timeout:.0f} s{reason}.") from None

    def _set_state(self, state: ReplicaState, reason: str | None) -> None:
        self.state = state
        self.down_reason = reason
        self._changed.set()

    def _not_ready(self) -> ReplicaUnavailable:
        # Callers are told no server's address, nor where our files are.
        reason = redacted(self.down_reason) if self.down_reason and self.url is None else self.state
        return ReplicaUnavailable(f"{self.id} is not ready: {reason}.")
