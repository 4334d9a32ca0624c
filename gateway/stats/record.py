"""The one fact sheet that each finished request leaves behind; every statistic is a sum over these."""

from __future__ import annotations

import msgspec

__all__ = ["RequestRecord"]


class RequestRecord(msgspec.Struct, frozen=True):
    """What one request cost and saved. Numbers and labels only, never text.

    ``status`` is ``ok``, ``aborted`` (the client left) or ``failed`` (the replica could not finish). Token
    counts equal those in the usage field sent to the client; of a request that was cut off they are what it had cost
    so far, 0 before its first output. Times in seconds: ``ttft_s`` from arrival at the
    gateway to the first text or token event (None when there was none), ``prefill_s`` the replica's measured
    share spent on the prompt, ``saved_prefill_s`` the estimate of what the cached tokens would have cost (see
    ``gateway.stats.cost``).
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
