"""Which eviction policy the engines run, and its change while they run."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Final

import msgspec
import structlog

from cache_policy.policy import POLICY_NAMES, UnknownPolicyError
from engine.wire import CacheEvent, EngineInfo, Load, StepTiming
from gateway.errors import HeadstartError, InvalidRequestError, ReplicaUnavailable
from gateway.replicas.base import Replica, ReplicaState

__all__ = ["EvictionControl", "PolicyChange"]

_KEPT_CHANGES: Final = 100

_log = structlog.get_logger("headstart.eviction")


class PolicyChange(msgspec.Struct, frozen=True):
    """One switch: when (Unix time), from which policy to which."""

    time: float
    before: str
    after: str


class EvictionControl:
    """A ``ReplicaObserver`` that owns the policy in force; belongs to the event loop.

    An engine of this gateway that (re)starts with another policy is switched to it as soon as it is ready.
    """

    def __init__(self, replicas: Mapping[str, Replica], policy: str, *, clock: Callable[[], float] = time.time) -> None:
        """``policy`` is the one that the engines are started with."""
        self._replicas: Final = replicas
        self._clock: Final = clock
        self._tasks: set[asyncio.Task[None]] = set()
        self.policy = policy
        self.changes: deque[PolicyChange] = deque(maxlen=_KEPT_CHANGES)
        """The last switches, oldest first."""

    async def switch(self, policy: str) -> dict[str, str]:
        """Let every engine that serves run ``policy`` from now on; what became of it by replica, ``ok`` or the error.

        Nothing cached is lost. Engines that do not serve now follow when they come up.

        Raises:
            InvalidRequestError: there is no such policy.
            ReplicaUnavailable: no engine serves.
        """
        if policy not in POLICY_NAMES:
            error = UnknownPolicyError(policy)
            raise InvalidRequestError(f"{str(error)[:1].upper()}{str(error)[1:]}.", param="policy")
        ready = [replica for replica in self._replicas.values() if replica.state is ReplicaState.READY]
        if not ready:
            raise ReplicaUnavailable("No replica is ready; there is no policy to switch.")
        before, self.policy = self.policy, policy
        results = dict(
            zip(
                [replica.id for replica in ready],
                await asyncio.gather(*[self._apply(replica) for replica in ready]),
                strict=True,
            )
        )
        if before != policy:
            self.changes.append(PolicyChange(self._clock(), before, policy))
            _log.info("eviction policy switched", before=before, after=policy, replicas=results)
        return results

    # --- ReplicaObserver ---------------------------------------------------------------------------

    def on_ready(self, replica: Replica, info: EngineInfo) -> None:
        """Bring a replica that comes up with another policy to the one in force.

        An engine that somebody else runs keeps its own until the operator has switched here.
        """
        if info.policy and info.policy != self.policy and (replica.url is None or self.changes):
            task = asyncio.create_task(self._follow(replica), name=f"{replica.id}-policy")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def on_down(self, replica: Replica, reason: str) -> None:
        """It will be told again when it comes back."""

    def on_events(self, replica: Replica, events: tuple[CacheEvent, ...]) -> None:
        """Nothing to do."""

    def on_step(self, replica: Replica, timing: StepTiming, load: Load) -> None:
        """Nothing to do."""

    # --- inside ------------------------------------------------------------------------------------

    async def _apply(self, replica: Replica) -> str:
        try:
            await replica.call("set_policy", {"policy": self.policy})
        except HeadstartError as error:
            return error.message
        return "ok"

    async def _follow(self, replica: Replica) -> None:
        result = await self._apply(replica)
        if result != "ok":
            _log.warning("a replica keeps another eviction policy", replica=replica.id, reason=result)
