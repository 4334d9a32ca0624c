"""A request at its replica: what it makes others wait for, and what its end says about the replica."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Final

from engine.wire import StepTiming
from gateway.errors import GenerationError, ReplicaLost
from gateway.plan import Plan
from gateway.routing.breaker import CircuitBreaker
from gateway.routing.index import FleetIndex
from gateway.stats.cost import PrefillCost

__all__ = ["Flight", "FlightLog"]

_ENOUGH: Final = 8
_LEARNING_INTERVAL_S: Final = 0.25

_ANY_LENGTH: Final = 1 << 30
"""Tokens per step of a server that does not say: any prompt is one step."""


class FlightLog:
    """The requests at one replica. Owned by the router, written by its flights.

    ``pending_tokens`` are the prompt tokens of those whose prompt is not computed yet, as far as is known. ``cost`` is
    what prefill costs there as seen from outside; it learns only while the replica does not tell (``tells_steps``) what
    its steps take, and says nothing before so many requests were ``timed`` that one slow answer decides nothing.
    """

    __slots__ = (
        "_asked_at",
        "_learned_at",
        "_untold",
        "breaker",
        "cost",
        "in_flight",
        "pending_tokens",
        "tells_steps",
        "timed",
    )

    def __init__(self, breaker: CircuitBreaker) -> None:
        self.breaker = breaker
        self.in_flight = 0
        self.pending_tokens = 0
        self.tells_steps = False
        self.timed = 0
        self._learned_at = self._asked_at = 0.0
        self._untold: deque[tuple[float, Flight]] = deque()
        self.cost = PrefillCost(_ANY_LENGTH)

    def learns(self, now: float) -> bool:
        """Whether the time of a request sent ``now`` is to be learned from: a fit costs as much as the rest of it."""
        return not self.tells_steps and (self.timed < _ENOUGH or now - self._learned_at >= _LEARNING_INTERVAL_S)

    def asks(self, now: float) -> bool:
        """Whether a request that goes out ``now`` is to tell its time for no other reason than to learn from it."""
        if self.timed >= _ENOUGH and now - self._asked_at < _LEARNING_INTERVAL_S:
            return False
        self._asked_at = now
        return True

    def learn(self, timing: StepTiming, sent_at: float) -> None:
        """Learn what a request took that was sent then."""
        self._learned_at = sent_at
        self.timed += 1
        self.cost.observe(timing)

    def presume(self, flight: Flight, due: float) -> None:
        """Nothing will tell when the prompt of ``flight`` is computed: it is taken for computed when it is ``due``."""
        self._untold.append((due, flight))

    def waiting_tokens(self, now: float) -> int:
        """``pending_tokens`` as they are ``now``, short of those that ought to be computed by now."""
        while self._untold:
            due, flight = self._untold[0]
            if due > now and flight.waits:  # so do those behind it
                break
            self._untold.popleft()
            flight.release()
        return self.pending_tokens

    @property
    def measured(self) -> bool:
        """Whether ``cost`` is what it costs there."""
        return not self.tells_steps and self.timed >= _ENOUGH


class Flight:
    """One request at its replica; a block for as long as it is there. Owned by the request that dispatched it."""

    __slots__ = (
        "_ahead",
        "_cached",
        "_clock",
        "_expectation",
        "_index",
        "_log",
        "_probe",
        "_prompt_tokens",
        "_since",
        "_tokens",
        "_ttft_s",
        "untimed",
    )

    def __init__(self, log: FlightLog, clock: Callable[[], float], plan: Plan, index: FleetIndex) -> None:
        self._log = log
        self._clock = clock
        self._index = index
        self._expectation = index.sent(plan)
        self._prompt_tokens = plan.length
        self._cached = plan.predicted_cached
        self._tokens = self._prompt_tokens - self._cached
        self._ahead = log.pending_tokens
        self._since = clock()
        self._ttft_s: float | None = None
        self._probe = False
        self.untimed = False
        """Whether its first output says nothing about when its prompt was computed."""

    def leave_untimed(self) -> bool:
        """Make it ``untimed``, unless something is to be learned from its time; whether that was done.

        To be asked once it is in flight, for a request whose caller does not mind. Others stop to wait for its prompt
        when it ought to be computed.
        """
        log = self._log
        if not (log.tells_steps or self._probe or log.asks(self._since)):
            self.untimed = True
            log.presume(self, self._since + log.cost.seconds(self._tokens + self._ahead, self._cached))
        return self.untimed

    @property
    def waits(self) -> bool:
        """Whether its prompt is still to be computed, as far as is known."""
        return self._tokens > 0

    def prefilled(self) -> None:
        """Its first output has come, for which nobody waits any more. Safe to repeat."""
        self.release()
        if self._ttft_s is None:
            self._ttft_s = self._clock() - self._since
            if self._probe:  # which need not be waited for to its end
                self._log.breaker.succeeded(probe=True)

    def release(self) -> None:
        """Its prompt is computed, as far as is known: nobody waits for it any more. Safe to repeat."""
        self._log.pending_tokens -= self._tokens
        self._tokens = 0
        if self._expectation is not None:
            self._index.computed(self._expectation)

    def told(self, cached_tokens: int | None) -> None:
        """It has been answered, and the replica has said how many of the prompt tokens it had cached, or nothing."""
        if cached_tokens is not None:
            self._cached = cached_tokens
            if self._expectation is not None:
                self._index.reported(self._expectation, cached_tokens)
        if self._ttft_s is not None and not self.untimed and self._log.learns(self._since):
            # Until its first output all that waited before it was computed, then its own prompt.
            own = max(1, self._prompt_tokens - self._cached)
            context = own * self._cached + own * (own - 1) // 2 + self._ahead * (self._ahead - 1) // 2
            self._log.learn(StepTiming(own + self._ahead, context, 0, 0, self._ttft_s), self._since)

    def expired(self) -> None:
        """It was given up after it had waited for its first output for as long as a request may take.

        The first output of an ``untimed`` one is its last: that it took so long is no fault of the replica's.
        """
        if not self.untimed:
            self._log.breaker.failed(probe=self._probe)

    def __enter__(self) -> Flight:
        self._log.in_flight += 1
        self._log.pending_tokens += self._tokens
        self._probe = self._log.breaker.begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
        self._log.in_flight -= 1
        probe = self._probe and self._ttft_s is None
        if isinstance(error, ReplicaLost | GenerationError):
            self._log.breaker.failed(probe=probe)
        elif self._ttft_s is None:
            self._log.breaker.ended(probe=probe)
        else:
            self._log.breaker.succeeded(probe=False)
