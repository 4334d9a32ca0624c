"""The additive figures of a group of requests, and the labels that name the group.

Everything reported is a sum or derived from sums, so that minutes add up to totals, labels to the whole and
gateways to the fleet, without error.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import msgspec

from gateway.stats.record import RequestRecord

__all__ = ["BUCKETS_PER_DOUBLING", "OTHER", "Labels", "Sums", "bucket_bound", "quantile"]

OTHER = "other"
"""The label that takes what exceeds the bound on distinct labels."""

BUCKETS_PER_DOUBLING = 3
_SMALLEST_BOUND_S = 1e-3
_LAST_BUCKET = 18 * BUCKETS_PER_DOUBLING + 1  # bounds reach 262 s; one more bucket for what is longer


class Labels(NamedTuple):
    """Whose figures these are. What an engine counts by itself (evictions) has neither template nor tenant."""

    template: str | None
    tenant: str | None
    replica: str


class Sums(msgspec.Struct, omit_defaults=True):
    """Figures of a group of requests; mutable, owned by the collection that holds it.

    ``requests`` counts every finished request, ``failed`` and ``aborted`` among them. Tokens equal the usage fields
    sent to clients. Times are sums in seconds. ``ttft`` is a sparse histogram, bucket number (see ``bucket_bound``) to
    count, over the requests that gave a first token. ``evictions`` and ``preemptions`` are an engine's own.
    """

    requests: int = 0
    failed: int = 0
    aborted: int = 0
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    completion_tokens: int = 0
    prefill_s: float = 0.0
    saved_prefill_s: float = 0.0
    ttft_s: float = 0.0
    ttft: dict[int, int] = {}
    evictions: int = 0
    preemptions: int = 0

    def count(self, record: RequestRecord) -> None:
        """Add one finished request."""
        self.requests += 1
        if record.status == "failed":
            self.failed += 1
        elif record.status == "aborted":
            self.aborted += 1
        self.prompt_tokens += record.prompt_tokens
        self.cached_prompt_tokens += record.cached_tokens
        self.completion_tokens += record.completion_tokens
        self.prefill_s += record.prefill_s
        self.saved_prefill_s += record.saved_prefill_s
        if record.ttft_s is not None:
            self.ttft_s += record.ttft_s
            bucket = _bucket(record.ttft_s)
            self.ttft[bucket] = self.ttft.get(bucket, 0) + 1

    def add(self, other: Sums) -> None:
        """Add another group's figures."""
        self.requests += other.requests
        self.failed += other.failed
        self.aborted += other.aborted
        self.prompt_tokens += other.prompt_tokens
        self.cached_prompt_tokens += other.cached_prompt_tokens
        self.completion_tokens += other.completion_tokens
        self.prefill_s += other.prefill_s
        self.saved_prefill_s += other.saved_prefill_s
        self.ttft_s += other.ttft_s
        self.evictions += other.evictions
        self.preemptions += other.preemptions
        for bucket, count in other.ttft.items():
            self.ttft[bucket] = self.ttft.get(bucket, 0) + count

    def since(self, earlier: Sums) -> Sums:
        """What came after ``earlier``, a former state of the same sums; nothing is ever below zero."""
        scalars = (name for name in self.__struct_fields__ if name != "ttft")
        later = Sums(**{name: max(0, getattr(self, name) - getattr(earlier, name)) for name in scalars})
        for bucket, count in self.ttft.items():
            if count > (before := earlier.ttft.get(bucket, 0)):
                later.ttft[bucket] = count - before
        return later

    @classmethod
    def of(cls, parts: Iterable[Sums]) -> Sums:
        """The sum of several groups, as a value of its own."""
        total = cls()
        for part in parts:
            total.add(part)
        return total


def bucket_bound(bucket: int) -> float:
    """Upper bound of a TTFT bucket in seconds, inclusive; the last bucket is unbounded.

    Bounds start at 1 ms and double every three buckets, so a quantile is off by at most a quarter.
    """
    return math.inf if bucket >= _LAST_BUCKET else _SMALLEST_BOUND_S * 2.0 ** (bucket / BUCKETS_PER_DOUBLING)


def quantile(histogram: Mapping[int, int], q: float) -> float | None:
    """The ``q`` quantile (0..1) of a TTFT histogram in seconds, interpolated; None when it is empty."""
    total = sum(histogram.values())
    if not total:
        return None
    rank = q * total
    below = 0
    bucket = 0
    for bucket in sorted(histogram):
        count = histogram[bucket]
        if below + count >= rank:
            lower = bucket_bound(bucket - 1) if bucket else 0.0
            upper = bucket_bound(bucket)
            return lower if math.isinf(upper) else lower + (upper - lower) * max(0.0, (rank - below) / count)
        below += count
    return bucket_bound(bucket)


def _bucket(seconds: float) -> int:
    if seconds <= _SMALLEST_BOUND_S:
        return 0
    exact = math.log2(seconds / _SMALLEST_BOUND_S) * BUCKETS_PER_DOUBLING
    return min(_LAST_BUCKET, math.ceil(exact - 1e-9))  # the margin keeps a value that is a bound in its own bucket
