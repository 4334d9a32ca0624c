"""What a decision is told of one replica."""

from __future__ import annotations

from collections.abc import Set
from typing import Protocol

import msgspec

from engine.wire import EngineInfo

__all__ = ["Candidate", "PrefillCurve"]


class PrefillCurve(Protocol):
    """What prefill costs on one replica (``gateway.stats.cost``)."""

    def seconds(self, tokens: int, context: int) -> float:
        """Seconds to compute ``tokens`` prompt tokens behind ``context`` cached ones."""
        ...


class Candidate(msgspec.Struct, frozen=True):
    """A replica that may take a request now. ``resident`` follows later events; use it within one decision.

    ``waiting_tokens`` are the prompt tokens it still has to compute before a new request's. One that was not ``drawn``
    is to be taken only for what it holds. A ``probe`` goes before all others: it shows whether the replica is well
    again. Of one that is not ``indexed`` nobody can say what it holds.
    """

    replica_id: str
    info: EngineInfo
    resident: Set[bytes]
    in_flight: int
    waiting_tokens: int
    curve: PrefillCurve
    drawn: bool = True
    probe: bool = False
    indexed: bool = True

    def expected_seconds(self, prompt_tokens: int, cached_tokens: int) -> float:
        """From now to the first token of a prompt of which it holds ``cached_tokens``."""
        wait = self.curve.seconds(self.waiting_tokens, 0)
        return wait + self.curve.seconds(prompt_tokens - cached_tokens, cached_tokens)
