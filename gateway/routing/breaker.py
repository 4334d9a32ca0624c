"""A circuit breaker: a replica that fails one request after another is left alone, for longer each time."""

from __future__ import annotations

import enum
import random
from collections.abc import Callable
from typing import Final

__all__ = ["FAILURES", "BreakerState", "CircuitBreaker"]

FAILURES: Final = 3
"""So many failures in a row open it."""

_FIRST_PAUSE_S: Final = 1.0
_LAST_PAUSE_S: Final = 30.0
_LEAST_JITTER: Final = 0.75


class BreakerState(enum.StrEnum):
    """``CLOSED`` lets requests through, ``OPEN`` none, ``HALF_OPEN`` a single one, the probe, whose end decides."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class CircuitBreaker:
    """The breaker of one replica, owned by the router. Only failures of the replica count, never those of a caller.

    A pause begins at one second, doubles up to half a minute while probes fail, and is cut at random by up to a
    quarter, so that several gateways do not probe in step.
    """

    __slots__ = ("_clock", "_failures", "_pause_s", "_probing", "_random", "_resume_at")

    def __init__(self, clock: Callable[[], float], random: random.Random) -> None:
        """``clock`` counts seconds; ``random`` draws the jitter."""
        self._clock = clock
        self._random = random
        self.reset()

    def reset(self) -> None:
        """Forget all failures: the replica is another one now."""
        self._failures = 0
        self._pause_s = _FIRST_PAUSE_S
        self._resume_at: float | None = None
        self._probing = False

    @property
    def state(self) -> BreakerState:
        """What it lets through now."""
        if self._resume_at is None:
            return BreakerState.CLOSED
        return BreakerState.OPEN if self._clock() < self._resume_at else BreakerState.HALF_OPEN

    @property
    def failures(self) -> int:
        """Failures in a row, up to now."""
        return self._failures

    @property
    def retry_in_s(self) -> float:
        """Seconds until a probe may go; 0 when one may now, or nothing is wrong."""
        return 0.0 if self._resume_at is None else max(0.0, self._resume_at - self._clock())

    @property
    def admits(self) -> bool:
        """Whether a request may be sent: always when closed, one at a time when half open."""
        state = self.state
        return state is BreakerState.CLOSED or (state is BreakerState.HALF_OPEN and not self._probing)

    def begin(self) -> bool:
        """A request is sent. True when it is the probe, which its ``succeeded``, ``failed`` or ``ended`` must tell."""
        probe = self.state is BreakerState.HALF_OPEN and not self._probing
        self._probing = self._probing or probe
        return probe

    def succeeded(self, *, probe: bool) -> None:
        """The replica has begun to answer. While it is not closed only a probe says anything about now."""
        if self._resume_at is None or probe:
            self.reset()

    def failed(self, *, probe: bool) -> None:
        """The replica has failed a request."""
        self._failures += 1
        if self._resume_at is None and self._failures >= FAILURES:
            self._open()
        elif probe:
            self._pause_s = min(self._pause_s * 2, _LAST_PAUSE_S)
            self._open()

    def ended(self, *, probe: bool) -> None:
        """A request has ended that told nothing, because its caller left or was refused."""
        if probe:
            self._probing = False

    def _open(self) -> None:
        self._probing = False
        self._resume_at = self._clock() + self._pause_s * self._random.uniform(_LEAST_JITTER, 1.0)
