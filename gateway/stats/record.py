"""The one fact sheet that each finished request leaves behind; every statistic is a sum over these."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from gateway.attribution.history import Cause

__all__ = ["HeldOut", "RequestRecord"]


class HeldOut(msgspec.Struct, frozen=True):
    """A request that was kept from the cache: what its prefill took, and what had been foretold, in seconds.

    The foretold interval reaches from ``low`` to ``high``.
    """

    measured: float
    estimated: float
    low: float
    high: float


class RequestRecord(msgspec.Struct, frozen=True):
    """What one request cost and saved. Numbers and labels only, never text.

    ``status`` is ``ok``, ``aborted`` (the client left) or ``failed`` (the replica could not finish). Token
    counts equal those in the usage field sent to the client; of a request that was cut off they are what it had cost
    so far, 0 before its first output. Times in seconds: ``ttft_s`` from arrival at the gateway to the first text or
    token event (None when there was none, or the replica gave its answer as one), ``prefill_s`` the replica's measured
    share spent on the prompt, ``saved_prefill_s`` the estimate of what the cached tokens would have cost, with the
    errors that ``gateway.stats.cost.Saving`` tells of.

    ``missed`` are the prompt tokens that were not cached, by cause: all of them, or none where attribution is off.
    ``evicted_ages`` are those of cause ``evicted`` by how long ago that was (``gateway.attribution.ages``); where it is
    not known they are left out.
    """

    finished_at: float
    tenant: str
    template: str
    replica: str
    status: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    ttft_s: float | None
    prefill_s: float
    saved_prefill_s: float
    saved_below_s: float = 0.0
    saved_above_s: float = 0.0
    saved_bias_s: float = 0.0
    model: str = ""
    missed: Mapping[Cause, int] = {}
    evicted_ages: Mapping[int, int] = {}
    held_out: HeldOut | None = None
