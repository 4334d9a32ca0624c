"""The gateway's picture of its replicas: blocks held, requests in flight, and which of them may take one more."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Set
from contextlib import contextmanager
from typing import Final, Protocol

import msgspec

from engine.wire import CacheEvent, EngineInfo, Load, StepTiming
from gateway.config import IndexConfig
from gateway.errors import ReplicaUnavailable
from gateway.plan import Plan
from gateway.replicas.base import Replica, ReplicaState
from gateway.routing.index import Expectation, FleetIndex

__all__ = ["Candidate", "Flight", "PrefillCurve", "Router"]

_DEFAULTS: Final = IndexConfig()
_LOAD_FACTOR: Final = 1.25
_FREE_SLOTS: Final = 4
"""Affinity is limited: a replica takes at most 1.25 times its share of the requests in flight (consistent hashing with
bounded loads, Mirrokni et al. 2016), but so few that they run side by side are never sent away from their cache."""


class PrefillCurve(Protocol):
    """What prefill costs on one replica (``gateway.stats.cost``)."""

    def seconds(self, tokens: int, context: int) -> float:
        """Seconds to compute ``tokens`` prompt tokens behind ``context`` cached ones."""
        ...


class Candidate(msgspec.Struct, frozen=True):
    """A replica that may take a request now. ``resident`` follows later events; use it within one decision.

    ``waiting_tokens`` are the prompt tokens it still has to compute before a new request's.
    """

    replica_id: str
    info: EngineInfo
    resident: Set[bytes]
    in_flight: int
    waiting_tokens: int
    curve: PrefillCurve

    def expected_seconds(self, prompt_tokens: int, cached_tokens: int) -> float:
        """From now to the first token of a prompt of which it holds ``cached_tokens``."""
        wait = self.curve.seconds(self.waiting_tokens, 0)
        return wait + self.curve.seconds(prompt_tokens - cached_tokens, cached_tokens)


class Flight:
    """One request at its replica. Owned by the request that dispatched it."""

    __slots__ = ("_expectation", "_index", "_state", "_tokens")

    def __init__(self, state: _ReplicaState, tokens: int, index: FleetIndex, expectation: Expectation | None) -> None:
        self._state = state
        self._tokens = tokens
        self._index = index
        self._expectation = expectation

    def prefilled(self) -> None:
        """Its prompt is computed (the first output has come): nobody waits for it any more. Safe to repeat."""
        self._state.pending_tokens -= self._tokens
        self._tokens = 0
        if self._expectation is not None:
            self._index.computed(self._expectation)

    def told(self, cached_tokens: int) -> None:
        """The replica has said how many of the prompt tokens it had cached."""
        if self._expectation is not None:
            self._index.reported(self._expectation, cached_tokens)


class _ReplicaState:
    """What the router counts per replica."""

    __slots__ = ("in_flight", "last_dispatch", "pending_tokens", "replica")

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self.in_flight = 0
        self.pending_tokens = 0
        self.last_dispatch = 0


class Router:
    """A ``ReplicaObserver``. Owns the index and the in-flight counts; belongs to the event loop.

    ``curve`` gives the prefill-cost curve of a replica id.
    """

    def __init__(self, curve: Callable[[str], PrefillCurve], index: IndexConfig = _DEFAULTS) -> None:
        self._curve: Final = curve
        self.index: Final = FleetIndex(index)
        """What each replica is believed to hold."""
        self._states: dict[str, _ReplicaState] = {}
        self._dispatches = 0

    # --- ReplicaObserver ---------------------------------------------------------------------------

    def on_ready(self, replica: Replica, info: EngineInfo) -> None:
        """A replica (re)started with an empty cache."""
        self.index.on_ready(replica, info)
        self._states.setdefault(replica.id, _ReplicaState(replica)).replica = replica

    def on_down(self, replica: Replica, reason: str) -> None:
        """A replica was lost together with its cache."""
        self.index.on_down(replica, reason)

    def on_events(self, replica: Replica, events: tuple[CacheEvent, ...]) -> None:
        """Keep the index equal to what the replica holds."""
        self.index.on_events(replica, events)

    def on_step(self, replica: Replica, timing: StepTiming, load: Load) -> None:
        """Nothing to keep: ``replica.load`` holds the latest."""

    # --- routing -----------------------------------------------------------------------------------

    def candidates(self) -> list[Candidate]:
        """The ready replicas that have room in their share of the load.

        Raises:
            ReplicaUnavailable: none is ready; the message says what each is doing.
        """
        ready = [state for state in self._states.values() if _is_ready(state.replica)]
        if not ready:
            raise ReplicaUnavailable(_why_none(state.replica for state in self._states.values()))
        total = sum(state.in_flight for state in ready)
        limit = max(_FREE_SLOTS, math.ceil(_LOAD_FACTOR * (total + 1) / len(ready)))
        # Longest idle first: equal candidates take turns.
        ready.sort(key=lambda state: (state.last_dispatch, state.replica.id))
        return [self._candidate(state) for state in ready if state.in_flight < limit]

    @contextmanager
    def dispatch(self, plan: Plan) -> Iterator[Flight]:
        """Count a request as in flight at its replica for the duration of the block."""
        state = self._states[plan.replica_id]
        tokens = len(plan.token_ids) - plan.predicted_cached
        self._dispatches += 1
        state.last_dispatch = self._dispatches
        state.in_flight += 1
        state.pending_tokens += tokens
        flight = Flight(state, tokens, self.index, self.index.sent(plan))
        try:
            yield flight
        finally:
            flight.prefilled()
            state.in_flight -= 1

    def _candidate(self, state: _ReplicaState) -> Candidate:
        replica = state.replica
        assert replica.info is not None, "a ready replica has said what it serves"
        queued = replica.load.queued_tokens if replica.load is not None else 0
        return Candidate(
            replica.id,
            replica.info,
            self.index.holds(replica.id),
            state.in_flight,
            max(queued, state.pending_tokens),
            self._curve(replica.id),
        )


def _is_ready(replica: Replica) -> bool:
    return replica.state is ReplicaState.READY and replica.info is not None


def _why_none(replicas: Iterable[Replica]) -> str:
    states = [f"{replica.id}: {replica.down_reason or replica.state}" for replica in replicas]
    return f"No engine is ready ({'; '.join(states) or 'none has started yet'}); try again."
