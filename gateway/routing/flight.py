"""A request at its replica: what it makes others wait for, and what its end says about the replica."""

from __future__ import annotations

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

    ``pending_tokens`` are the prompt tokens of those whose first output has not come. ``cost`` is what prefill costs
    there as seen from outside; it learns only while the replica does not tell (``tells_steps``) what its steps take,
    and says nothing before so many requests were ``timed`` that one slow answer decides nothing.
    """

    __slots__ = ("_learned_at", "breaker", "cost", "in_flight", "pending_tokens", "tells_steps", "timed")

    def __init__(self, breaker: CircuitBreaker) -> None:
        self.breaker = breaker
        self.in_flight = 0
        self.pending_tokens = 0
        self.tells_steps = False
        self.timed = 0
        self._learned_at = 0.0
        self.cost = PrefillCost(_ANY_LENGTH)

    def learns(self, now: float) -> bool:
        """Whether the time of a request sent ``now`` is to be learned from: a fit costs as much as the rest of it."""
        if self.tells_steps or (self.timed >= _ENOUGH and now - self._learned_at < _LEARNING_INTERVAL_S):
            return False
        self._learned_at = now
        return True

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
    )

    def __init__(self, log: FlightLog, clock: Callable[[], float], plan: Plan, index: FleetIndex) -> None:
        self._log = log
        self._clock = clock
        self._index = index
        self._expectation = index.sent(plan)
        self._prompt_tokens = len(plan.token_ids)
        self._cached = plan.predicted_cached
        self._tokens = self._prompt_tokens - self._cached
        self._ahead = log.pending_tokens
        self._since = clock()
        self._ttft_s: float | None = None
        self._probe = False

    def prefilled(self) -> None:
        """Its prompt is computed (the first output has come): nobody waits for it any more. Safe to repeat."""
        self._release()
        if self._ttft_s is None:
            self._ttft_s = self._clock() - self._since
            if self._probe:  # which need not be waited for to its end
                self._log.breaker.succeeded(probe=True)

    def told(self, cached_tokens: int | None) -> None:
        """It has been answered, and the replica has said how many of the prompt tokens it had cached, or nothing."""
        if cached_tokens is not None:
            self._cached = cached_tokens
            if self._expectation is not None:
                self._index.reported(self._expectation, cached_tokens)
        if self._ttft_s is not None and self._log.learns(self._since):
            # Until its first output all that waited before it was computed, then its own prompt.
            own = max(1, self._prompt_tokens - self._cached)
            context = own * self._cached + own * (own - 1) // 2 + self._ahead * (self._ahead - 1) // 2
            self._log.timed += 1
            self._log.cost.observe(StepTiming(own + self._ahead, context, 0, 0, self._ttft_s))

    def expired(self) -> None:
        """It was given up after it had waited for its first output for as long as a request may take."""
        self._log.breaker.failed(probe=self._probe)

    def __enter__(self) -> Flight:
        self._log.in_flight += 1
        self._log.pending_tokens += self._tokens
        self._probe = self._log.breaker.begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._release()
        self._log.in_flight -= 1
        probe = self._probe and self._ttft_s is None
        if isinstance(error, ReplicaLost | GenerationError):
            self._log.breaker.failed(probe=probe)
        elif self._ttft_s is None:
            self._log.breaker.ended(probe=probe)
        else:
            self._log.breaker.succeeded(probe=False)

    def _release(self) -> None:
        self._log.pending_tokens -= self._tokens
        self._tokens = 0
        if self._expectation is not None:
            self._index.computed(self._expectation)
