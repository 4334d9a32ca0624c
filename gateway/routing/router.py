"""The gateway's picture of its replicas: blocks held, requests in flight, and which of them may take one more."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Set
from typing import Final

import msgspec

from engine.wire import CacheEvent, EngineInfo, Load, StepTiming
from gateway.config import IndexConfig
from gateway.errors import ReplicaUnavailable
from gateway.plan import Plan
from gateway.redaction import redacted
from gateway.replicas.base import Replica, ReplicaState
from gateway.routing.breaker import BreakerState, CircuitBreaker
from gateway.routing.candidate import Candidate, PrefillCurve
from gateway.routing.flight import Flight, FlightLog
from gateway.routing.index import FleetIndex
from gateway.stats.cost import PrefillCost

__all__ = ["Router", "RouterView"]

_DEFAULTS: Final = IndexConfig()
_LOAD_FACTOR: Final = 1.25
_FREE_SLOTS: Final = 4
"""Affinity is limited: a replica takes at most 1.25 times its share of the requests in flight (consistent hashing with
bounded loads, Mirrokni et al. 2016), but so few that they run side by side are never sent away from their cache."""

_ALL_LOOKED_AT: Final = 4
_DRAWN: Final = 3
"""Under load a request in a larger fleet looks at so many replicas, drawn at random, and at the one that holds most of
it: with a little choice queues stay short (the power of two choices, Mitzenmacher 2001), an order of documents has not
to be found for each replica, and gateways that see the same do not all do the same. In simulation two alone raised the
90th percentile of the time to the first token on four replicas by a tenth."""

_TYPICAL_TOKENS: Final = 512
_ALIKE: Final = 1.5
"""Replicas are equally fast whose prefill of a prompt of typical length takes so many times that of the median."""

_NOBODY: Final[frozenset[str]] = frozenset()


class RouterView(msgspec.Struct, frozen=True):
    """What the router knows of one replica.

    ``curve`` are the coefficients of its prefill cost (seconds per step, per token, per token of context), fitted to
    the ``steps`` that it reports or to the times until its answers began (``ttft``); ``nominal`` is neither yet.
    """

    in_flight: int
    waiting_tokens: int
    draining: bool
    breaker: BreakerState
    failures: int
    retry_in_s: float
    curve: tuple[float, float, float]
    curve_from: str


class _ReplicaState:
    """What the router keeps per replica."""

    __slots__ = ("breaker", "draining", "last_dispatch", "log", "replica")

    def __init__(self, replica: Replica, breaker: CircuitBreaker) -> None:
        self.replica = replica
        self.breaker = breaker
        self.log = FlightLog(breaker)
        self.draining = False
        self.last_dispatch = 0


class Router:
    """A ``ReplicaObserver``. Owns the index, the requests in flight, the circuit breakers and which replicas
    are drained; belongs to the event loop.

    ``curve`` gives the prefill-cost curve of a replica id, as fitted to the steps that it reports. ``clock`` counts
    seconds; ``draw`` is where chance comes from.
    """

    def __init__(
        self,
        curve: Callable[[str], PrefillCurve],
        index: IndexConfig = _DEFAULTS,
        *,
        clock: Callable[[], float] = time.monotonic,
        draw: random.Random | None = None,
    ) -> None:
        self._curve: Final = curve
        self._clock: Final = clock
        self._random: Final = draw or random.Random()  # noqa: S311 - nothing secret
        self.index: Final = FleetIndex(index)
        """What each replica is believed to hold."""
        self._states: dict[str, _ReplicaState] = {}
        self._dispatches = 0
        self._on_dispatch: Callable[[str], None] | None = None

    # --- ReplicaObserver ---------------------------------------------------------------------------

    def on_ready(self, replica: Replica, info: EngineInfo) -> None:
        """A replica (re)started with an empty cache, or was only seen again: no proof that a failing one is well."""
        self.index.on_ready(replica, info)
        state = self._state_of(replica)
        if replica.forgiven:
            state.breaker.reset()
        state.log.tells_steps = state.log.tells_steps or bool(info.profile)

    def on_down(self, replica: Replica, reason: str) -> None:
        """A replica was lost together with its cache."""
        self.index.on_down(replica, reason)

    def on_events(self, replica: Replica, events: tuple[CacheEvent, ...]) -> None:
        """Keep the index equal to what the replica holds."""
        self.index.on_events(replica, events)

    def on_step(self, replica: Replica, timing: StepTiming, load: Load) -> None:
        """It tells what its steps take; ``replica.load`` holds the latest load."""
        state = self._states.get(replica.id)
        if state is not None:
            state.log.tells_steps = True

    # --- which there are -----------------------------------------------------------------------------

    def add(self, replica: Replica) -> None:
        """Know a replica, before it is first ready."""
        self._state_of(replica)

    def remove(self, replica_id: str) -> None:
        """It has left for good."""
        self.index.forget(replica_id)
        self._states.pop(replica_id, None)

    def drain(self, replica_id: str) -> None:
        """Send it nothing new until ``resume``; what it has goes on."""
        self._states[replica_id].draining = True

    def resume(self, replica_id: str) -> None:
        """Let it have requests again, and forget its failures."""
        self._states[replica_id].draining = False
        self._states[replica_id].breaker.reset()

    def view(self, replica_id: str) -> RouterView:
        """What is known of a replica."""
        state = self._states[replica_id]
        curve = self._cost(state)
        return RouterView(
            state.log.in_flight,
            self._waiting(state),
            state.draining,
            state.breaker.state,
            state.breaker.failures,
            state.breaker.retry_in_s,
            curve.coefficients if isinstance(curve, PrefillCost) else (0.0, 0.0, 0.0),
            "nominal" if not _is_fitted(curve) else "steps" if state.log.tells_steps else "ttft",
        )

    # --- routing -----------------------------------------------------------------------------------

    def candidates(self, avoid: Set[str] = _NOBODY, *, as_text: bool = False) -> list[Candidate]:
        """The ready replicas that have room in their share of the load, without those to ``avoid``.

        ``as_text``: for a request that is passed on as it is. Token ids go only where they mean the same.

        Raises:
            ReplicaUnavailable: none is ready; the message says what each is doing.
        """
        ready = [
            state
            for id, state in self._states.items()
            if id not in avoid and _takes_more(state) and (as_text or state.replica.reads_tokens)
        ]
        if not ready:
            raise ReplicaUnavailable(self._why_none(avoid), retry_after=self._retry_after())
        total = sum(state.log.in_flight for state in ready)
        limit = max(_FREE_SLOTS, math.ceil(_LOAD_FACTOR * (total + 1) / len(ready)))
        # Longest idle first: equal candidates take turns.
        if len(ready) > 1:
            ready.sort(key=lambda state: (state.last_dispatch, state.replica.id))
        room = [state for state in ready if state.log.in_flight < limit]
        drawn = room
        if len(room) > _ALL_LOOKED_AT and any(state.log.in_flight >= _FREE_SLOTS for state in ready):
            drawn = self._random.sample(room, _DRAWN)
        curves = self._curves(ready)
        return [self._candidate(state, curves[state.replica.id], state in drawn) for state in room]

    def dispatch(self, plan: Plan) -> Flight:
        """A request that goes to its replica now: a block for as long as it is there, which learns from its end."""
        state = self._states[plan.replica_id]
        self._dispatches += 1
        state.last_dispatch = self._dispatches
        if self._on_dispatch is not None:
            self._on_dispatch(plan.replica_id)
        return Flight(state.log, self._clock, plan, self.index)

    def held_elsewhere(self, plan: Plan) -> int:
        """How many tokens at the front of a plan's prompt the best of the other ready replicas holds."""
        most = 0
        for state in self._states.values():
            replica = state.replica
            if replica.id == plan.replica_id or not _is_ready(state) or replica.info is None:
                continue
            held, size = self.index.holds(replica.id), replica.info.block_size
            keys = plan.keys[: (plan.length - 1) // size]  # the last prompt token is always computed
            most = max(most, size * next((index for index, key in enumerate(keys) if key not in held), len(keys)))
        return most

    def when_dispatching(self, callback: Callable[[str], None]) -> None:
        """Call back with the replica's id whenever a request is about to go to one."""
        self._on_dispatch = callback

    def in_flight(self, replica_id: str) -> int:
        """Requests that are at a replica now."""
        state = self._states.get(replica_id)
        return 0 if state is None else state.log.in_flight

    # --- inside --------------------------------------------------------------------------------------

    def _state_of(self, replica: Replica) -> _ReplicaState:
        state = self._states.get(replica.id)
        if state is None or state.replica is not replica:
            breaker = CircuitBreaker(self._clock, self._random)
            state = self._states[replica.id] = _ReplicaState(replica, breaker)
        return state

    def _curves(self, states: list[_ReplicaState]) -> dict[str, PrefillCurve]:
        """The curve by which each replica is judged: that of the median one, except for those that differ much.

        So equal replicas are equal, in spite of the noise in what was measured, and one that was not measured yet is
        neither shunned nor preferred for it.
        """
        curves = {state.replica.id: self._cost(state) for state in states}
        if len(curves) == 1:
            return curves
        measured = sorted(
            ((curve.seconds(_TYPICAL_TOKENS, 0), id) for id, curve in curves.items() if _is_fitted(curve)),
        )
        if len(measured) > 1 or len(curves) > len(measured) > 0:
            typical_s, typical = measured[len(measured) // 2]
            different = {id for seconds, id in measured if not typical_s / _ALIKE <= seconds <= typical_s * _ALIKE}
            return {id: curve if id in different else curves[typical] for id, curve in curves.items()}
        return curves

    def _candidate(self, state: _ReplicaState, curve: PrefillCurve, drawn: bool) -> Candidate:
        replica = state.replica
        assert replica.info is not None, "a ready replica has said what it serves"
        return Candidate(
            replica.id,
            replica.info,
            self.index.holds(replica.id),
            state.log.in_flight,
            self._waiting(state),
            curve,
            drawn,
            state.breaker.state is BreakerState.HALF_OPEN,
            self.index.believes(replica.id),
        )

    def _cost(self, state: _ReplicaState) -> PrefillCurve:
        return state.log.cost if state.log.measured else self._curve(state.replica.id)

    def _waiting(self, state: _ReplicaState) -> int:
        load = state.replica.load
        return max(load.queued_tokens if load is not None else 0, state.log.waiting_tokens(self._clock()))

    def _retry_after(self) -> int:
        """Seconds until asking again may help."""
        pauses = [state.breaker.retry_in_s for state in self._states.values() if _is_ready(state)]
        return max(1, math.ceil(min(pauses, default=ReplicaUnavailable.retry_after)))

    def _why_none(self, avoid: Set[str]) -> str:
        states = [f"{id}: {_why_not(state, id in avoid)}" for id, state in self._states.items()]
        return f"No engine is ready ({'; '.join(states) or 'none has started yet'}); try again."


def _is_fitted(curve: PrefillCurve) -> bool:
    return not isinstance(curve, PrefillCost) or curve.fitted


def _is_ready(state: _ReplicaState) -> bool:
    return state.replica.state is ReplicaState.READY and state.replica.info is not None and not state.draining


def _takes_more(state: _ReplicaState) -> bool:
    return _is_ready(state) and state.breaker.admits


def _why_not(state: _ReplicaState, avoided: bool) -> str:
    replica = state.replica
    if replica.state is not ReplicaState.READY:
        # Where servers and files are is the operator's to know (/admin/replicas), not the callers'.
        reason = replica.down_reason if replica.url is None else None
        return redacted(reason) if reason else str(replica.state)
    if not replica.reads_tokens:
        return "its tokenizer could not be checked"
    if state.draining:
        return "drained by the operator"
    if not state.breaker.admits:
        return f"failed {state.breaker.failures} requests in a row"
    return "failed this request" if avoided else str(replica.state)
