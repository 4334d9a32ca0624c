"""The additive figures of a group of requests, and the labels that name the group.

Everything reported is a sum or derived from sums, so that minutes add up to totals, labels to the whole and
gateways to the fleet, without error.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

import msgspec

from gateway.attribution.history import Cause
from gateway.stats.record import HeldOut, RequestRecord

__all__ = [
    "BUCKETS_PER_DOUBLING",
    "OTHER",
    "HoldOut",
    "Labels",
    "Missed",
    "Sums",
    "add_counts",
    "bucket_bound",
    "quantile",
]

OTHER = "other"
"""The label that takes what exceeds the bound on distinct labels."""

BUCKETS_PER_DOUBLING = 3
_SMALLEST_BOUND_S = 1e-3
_LAST_PERCENT: Final = 200
_LAST_BUCKET = 18 * BUCKETS_PER_DOUBLING + 1  # bounds reach 262 s; one more bucket for what is longer


class Labels(NamedTuple):
    """Whose figures these are. What an engine counts by itself (evictions) has neither template, tenant nor model."""

    template: str | None
    tenant: str | None
    replica: str
    model: str | None = None

    def in_other(self, *, of_replica: bool) -> Labels:
        """Where these figures are counted beyond the bound: with others of the replica, or of all replicas."""
        template, tenant = self.template and OTHER, self.tenant and OTHER
        if of_replica:
            return Labels(template, tenant, self.replica, self.model)
        return Labels(template, tenant, OTHER, self.model and OTHER)


class Missed(msgspec.Struct, array_like=True):
    """What one cause cost a group of requests: so many of them missed ``tokens`` tokens for it.

    ``seconds`` is the part of their measured prefill time that these tokens took, by their number.
    """

    requests: int = 0
    tokens: int = 0
    seconds: float = 0.0


class HoldOut(msgspec.Struct, omit_defaults=True):
    """Sums over requests that were kept from the cache to hold the estimates against what was measured.

    ``covered`` is how many lay in the interval that had been foretold for them. ``errors`` is a sparse histogram of
    the estimates' errors, in whole percents of what was measured, the last class being 200 and more.
    """

    requests: int = 0
    measured_s: float = 0.0
    estimated_s: float = 0.0
    covered: int = 0
    errors: dict[int, int] = {}

    def count(self, held_out: HeldOut) -> None:
        """Add one request."""
        self.requests += 1
        self.measured_s += held_out.measured
        self.estimated_s += held_out.estimated
        self.covered += held_out.low <= held_out.measured <= held_out.high
        error = abs(held_out.estimated - held_out.measured) / max(held_out.measured, 1e-9)
        percent = min(_LAST_PERCENT, int(100 * error))
        self.errors[percent] = self.errors.get(percent, 0) + 1

    def add(self, other: HoldOut) -> None:
        """Add another group's figures."""
        self.requests += other.requests
        self.measured_s += other.measured_s
        self.estimated_s += other.estimated_s
        self.covered += other.covered
        add_counts(self.errors, other.errors)

    @property
    def median_error(self) -> float | None:
        """The median of the errors as a fraction of what was measured; None without requests."""
        half, below = self.requests / 2, 0
        for percent in sorted(self.errors):
            count = self.errors[percent]
            if below + count >= half:
                return (percent + (half - below) / count) / 100
            below += count
        return None


class Sums(msgspec.Struct, omit_defaults=True):
    """Figures of a group of requests; mutable, owned by the collection that holds it.

    ``requests`` counts every finished request, ``failed`` and ``aborted`` among them. Tokens equal the usage fields
    sent to clients. Times are sums in seconds. ``ttft`` is a sparse histogram, bucket number (see ``bucket_bound``) to
    count, over the requests that gave a first token. ``evictions`` and ``preemptions`` are an engine's own.

    Single savings are off in both directions: their errors add up as squares (``saved_below_s2``, ``saved_above_s2``).
    That of the curve is the same for all and adds up as it is (``saved_bias_s``).

    ``missed`` are the prompt tokens that were not cached, by cause, ``evicted_ages`` those that were evicted by how
    long ago, as in ``RequestRecord``.
    """

    requests: int = 0
    failed: int = 0
    aborted: int = 0
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    completion_tokens: int = 0
    prefill_s: float = 0.0
    saved_prefill_s: float = 0.0
    saved_below_s2: float = 0.0
    saved_above_s2: float = 0.0
    saved_bias_s: float = 0.0
    ttft_s: float = 0.0
    ttft: dict[int, int] = {}
    missed: dict[Cause, Missed] = {}
    evicted_ages: dict[int, int] = {}
    held_out: HoldOut | None = None
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
        if record.saved_prefill_s:
            self.saved_prefill_s += record.saved_prefill_s
            self.saved_below_s2 += record.saved_below_s * record.saved_below_s
            self.saved_above_s2 += record.saved_above_s * record.saved_above_s
            self.saved_bias_s += record.saved_bias_s
        if record.ttft_s is not None:
            self.ttft_s += record.ttft_s
            bucket = _bucket(record.ttft_s)
            self.ttft[bucket] = self.ttft.get(bucket, 0) + 1
        if record.missed:
            per_token = record.prefill_s / (record.prompt_tokens - record.cached_tokens)
            for cause, tokens in record.missed.items():
                missed = self._missed(cause)
                missed.requests += 1
                missed.tokens += tokens
                missed.seconds += tokens * per_token
            add_counts(self.evicted_ages, record.evicted_ages)
        if record.held_out is not None:
            self._hold_out().count(record.held_out)

    def add(self, other: Sums) -> None:
        """Add another group's figures."""
        for name in _SCALARS:
            if more := getattr(other, name):
                setattr(self, name, getattr(self, name) + more)
        add_counts(self.ttft, other.ttft)
        for cause, theirs in other.missed.items():
            missed = self._missed(cause)
            missed.requests += theirs.requests
            missed.tokens += theirs.tokens
            missed.seconds += theirs.seconds
        add_counts(self.evicted_ages, other.evicted_ages)
        if other.held_out is not None:
            self._hold_out().add(other.held_out)

    def since(self, earlier: Sums) -> Sums:
        """What came after ``earlier``, a former state of the same sums; nothing is ever below zero.

        Of the hold-out nothing is told.
        """
        later = Sums(**{name: max(0, getattr(self, name) - getattr(earlier, name)) for name in _SCALARS})
        for now, before, more in (
            (self.ttft, earlier.ttft, later.ttft),
            (self.evicted_ages, earlier.evicted_ages, later.evicted_ages),
        ):
            more.update({key: count - before.get(key, 0) for key, count in now.items() if count > before.get(key, 0)})
        for cause, missed in self.missed.items():
            known = earlier.missed.get(cause) or Missed()
            if missed.tokens > known.tokens:
                grown = missed.requests - known.requests, missed.tokens - known.tokens, missed.seconds - known.seconds
                later.missed[cause] = Missed(*grown)
        return later

    @property
    def saved_interval(self) -> tuple[float, float]:
        """Nine of ten times the saved seconds lie between these two."""
        below = self.saved_bias_s + math.sqrt(self.saved_below_s2)
        above = self.saved_bias_s + math.sqrt(self.saved_above_s2)
        return max(0.0, self.saved_prefill_s - below), self.saved_prefill_s + above

    def _missed(self, cause: Cause) -> Missed:
        missed = self.missed.get(cause)
        if missed is None:
            missed = self.missed[cause] = Missed()
        return missed

    def _hold_out(self) -> HoldOut:
        if self.held_out is None:
            self.held_out = HoldOut()
        return self.held_out

    @classmethod
    def of(cls, parts: Iterable[Sums]) -> Sums:
        """The sum of several groups, as a value of its own."""
        total = cls()
        for part in parts:
            total.add(part)
        return total


_SCALARS: Final = tuple(
    name for name in Sums.__struct_fields__ if name not in ("ttft", "missed", "evicted_ages", "held_out")
)


def add_counts(histogram: dict[int, int], other: Mapping[int, int]) -> None:
    """Add ``other`` to a sparse histogram."""
    for bucket, count in other.items():
        histogram[bucket] = histogram.get(bucket, 0) + count


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
