"""The statistics as they are shown: what ``/admin/stats`` answers and what the dashboard draws.

Times are seconds, rates fractions of 1, moments Unix time. A figure that has no meaning yet (a hit rate without
tokens) is null.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import msgspec

from gateway.attribution.ages import median_age
from gateway.attribution.causes import CAUSES
from gateway.attribution.history import Cause
from gateway.config import SavingsConfig
from gateway.replicas.base import Replica
from gateway.stats.sums import OTHER, HoldOut, Labels, Missed, Sums, quantile
from gateway.stats.timeline import Table

__all__ = [
    "Blocks",
    "Calibration",
    "Figures",
    "Grouping",
    "Lost",
    "MinuteRow",
    "Money",
    "Price",
    "ReplicaRow",
    "Series",
    "Snapshot",
    "StoreStatus",
    "figures",
    "group",
    "replica_rows",
]

Grouping = Literal["template", "tenant", "replica", "model"]

_MAX_ROWS = 50  # labels shown per table; the smallest ones above that are summed up as "other"


class Price(msgspec.Struct, frozen=True):
    """What an hour of a replica costs."""

    hour: float
    currency: str

    @classmethod
    def of(cls, config: SavingsConfig) -> Price | None:
        """As configured; None where it is not."""
        return None if config.gpu_hour_price is None else cls(config.gpu_hour_price, config.currency)


class Money(msgspec.Struct, frozen=True):
    """What saved prefill time is worth, with the ends of its interval."""

    amount: float
    low: float
    high: float
    currency: str


class Lost(msgspec.Struct, frozen=True):
    """What one cause cost: so many requests missed ``tokens`` tokens for it, which took ``prefill_s`` to compute."""

    requests: int
    tokens: int
    prefill_s: float

    @classmethod
    def of(cls, missed: Missed) -> Lost:
        """The figures of these sums."""
        return cls(missed.requests, missed.tokens, missed.seconds)


class Calibration(msgspec.Struct, frozen=True):
    """Estimated prefill time held against what was measured, over ``requests`` that were kept from the cache.

    ``median_error`` is the median of the single errors as a fraction of what was measured, ``coverage`` the share of
    requests that lay in the interval foretold for them, which is meant to hold 0.9.
    """

    requests: int
    measured_prefill_s: float
    estimated_prefill_s: float
    median_error: float | None
    coverage: float

    @classmethod
    def of(cls, held_out: HoldOut) -> Calibration:
        """The figures of these sums, of at least one request."""
        return cls(
            held_out.requests,
            held_out.measured_s,
            held_out.estimated_s,
            held_out.median_error,
            held_out.covered / held_out.requests,
        )


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of a group of finished requests; ``failed`` and ``aborted`` are among ``requests``.

    ``saved_prefill_s`` is the estimated prefill time that cached tokens made unnecessary, ``prefill_s`` the measured
    time spent. Of ten times nine what was saved lies between ``saved_prefill_low_s`` and ``saved_prefill_high_s``;
    ``saved_money`` is null where no price is configured. ``missed`` says by cause why ``missed_tokens`` prompt tokens
    were not cached, all of them; it is empty where attribution is off. Half of what was evicted was so less than
    ``evicted_ago_p50_s`` before. ``calibration`` is null without a hold-out. ``ttft_*`` are of the requests of which
    the time to the first token is known: not of those that another server answered as one. ``evictions`` and
    ``preemptions`` are known per replica only and 0 elsewhere but in totals.
    """

    requests: int
    failed: int
    aborted: int
    prompt_tokens: int
    cached_prompt_tokens: int
    completion_tokens: int
    token_hit_rate: float | None
    prefill_s: float
    saved_prefill_s: float
    saved_prefill_low_s: float
    saved_prefill_high_s: float
    saved_money: Money | None
    missed_tokens: int
    missed: dict[Cause, Lost]
    evicted_ago_p50_s: float | None
    calibration: Calibration | None
    ttft_mean_s: float | None
    ttft_p50_s: float | None
    ttft_p95_s: float | None
    evictions: int
    preemptions: int


class Blocks(msgspec.Struct, frozen=True):
    """A replica's pool: blocks of running requests, idle but hittable ones, and empty ones."""

    used: int
    cached: int
    free: int
    total: int
    block_size: int


class ReplicaRow(Figures, frozen=True, kw_only=True):
    """Figures of one replica id, with its state where it belongs to this gateway (else null)."""

    state: str | None = None
    down_reason: str | None = None
    model: str | None = None
    dtype: str | None = None
    device: str | None = None
    policy: str | None = None
    running: int | None = None
    waiting: int | None = None
    blocks: Blocks | None = None


class MinuteRow(Figures, frozen=True, kw_only=True):
    """Figures of one minute that starts at ``time``; ``groups`` holds the same per label when asked for."""

    time: int
    groups: dict[str, Figures] | None = None

    @classmethod
    def of(cls, time: int, sums: Sums, groups: dict[str, Figures] | None, price: Price | None = None) -> MinuteRow:
        """The row of one minute."""
        return cls(time=time, groups=groups, **_fields(sums, price))


class Series(msgspec.Struct, frozen=True):
    """Figures over time as columns of equal length, oldest first; ``time`` is the start of each step.

    ``missed`` has a column of tokens for each cause that there was, ``evicted_ages`` one for each class of how long ago
    those of cause ``evicted`` were (``gateway.attribution.ages``; where it is not known they are left out).
    """

    step_s: int
    time: list[int]
    requests: list[int]
    prompt_tokens: list[int]
    cached_prompt_tokens: list[int]
    prefill_s: list[float]
    saved_prefill_s: list[float]
    missed: dict[Cause, list[int]]
    evicted_ages: dict[int, list[int]]
    ttft_p50_s: list[float | None]
    ttft_p95_s: list[float | None]

    @classmethod
    def of(cls, step_s: int, points: Iterable[tuple[int, Sums]]) -> Series:
        """Columns out of (start, sums) pairs."""
        rows = list(points)
        causes = dict.fromkeys(cause for _, sums in rows for cause in sums.missed)
        ages = sorted({age for _, sums in rows for age in sums.evicted_ages})
        return cls(
            step_s=step_s,
            time=[start for start, _ in rows],
            requests=[sums.requests for _, sums in rows],
            prompt_tokens=[sums.prompt_tokens for _, sums in rows],
            cached_prompt_tokens=[sums.cached_prompt_tokens for _, sums in rows],
            prefill_s=[sums.prefill_s for _, sums in rows],
            saved_prefill_s=[sums.saved_prefill_s for _, sums in rows],
            missed={
                cause: [sums.missed[cause].tokens if cause in sums.missed else 0 for _, sums in rows]
                for cause in causes
            },
            evicted_ages={age: [sums.evicted_ages.get(age, 0) for _, sums in rows] for age in ages},
            ttft_p50_s=[quantile(sums.ttft, 0.5) for _, sums in rows],
            ttft_p95_s=[quantile(sums.ttft, 0.95) for _, sums in rows],
        )


class StoreStatus(msgspec.Struct, frozen=True):
    """How the shared statistics do. ``state`` is ``starting``, ``ok``, ``down`` (being retried) or ``off``.

    ``where`` names the server without credentials, ``reason`` says in words why the state is not ``ok``. ``since`` is
    when it was entered, ``last_write`` when the totals were last written; None before the first time.
    """

    state: Literal["starting", "ok", "down", "off"]
    where: str
    since: float
    reason: str | None = None
    last_write: float | None = None


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Everything at one moment, over all gateways that share the statistics.

    ``window_s`` is the span that the figures cover, up to ``time``; None means everything ever counted. Windows begin
    with a minute, those of more than a day with an hour: ``since`` says exactly when.
    ``started_at`` is when this gateway started, ``gateways`` how many write now. ``minutes`` are oldest first, the
    last one unfinished.
    """

    time: float
    window_s: int | None
    since: float | None
    started_at: float
    version: str
    gateways: int
    price: Price | None
    totals: Figures
    templates: dict[str, Figures]
    tenants: dict[str, Figures]
    models: dict[str, Figures]
    replicas: dict[str, ReplicaRow]
    minutes: list[MinuteRow]
    redis: StoreStatus


def figures(sums: Sums, price: Price | None = None) -> Figures:
    """The figures of one group."""
    return Figures(**_fields(sums, price))


def group(table: Table, by: Grouping) -> dict[str, Sums]:
    """Sums per template, tenant, replica or model, most requests first, at most 50 and then ``other``."""
    position = Labels._fields.index(by)
    grouped: dict[str, Sums] = {}
    for labels, sums in table.items():
        label = labels[position]
        if label is not None:
            grouped.setdefault(label, Sums()).add(sums)
    ordered = sorted(grouped.items(), key=lambda item: (-item[1].requests, item[0]))
    shown = dict(ordered[:_MAX_ROWS])
    for _, sums in ordered[_MAX_ROWS:]:
        shown.setdefault(OTHER, Sums()).add(sums)
    return shown


def replica_rows(table: Table, replicas: Iterable[Replica], price: Price | None = None) -> dict[str, ReplicaRow]:
    """One row per replica that is known here or was ever counted, own ones first."""
    grouped = group(table, "replica")
    rows = {}
    for replica in replicas:
        info, load = replica.info, replica.load
        sums = grouped.pop(replica.id, Sums())
        rows[replica.id] = ReplicaRow(
            **_fields(sums, price),
            state=replica.state.value,
            down_reason=replica.down_reason,
            model=info.model if info else None,
            dtype=info.dtype if info else None,
            device=info.device if info else None,
            policy=info.policy if info else None,
            running=load.running if load else None,
            waiting=load.waiting if load else None,
            blocks=Blocks(load.used_blocks, load.cached_blocks, load.free_blocks, info.num_blocks, info.block_size)
            if info and load and info.num_blocks
            else None,
        )
    for name, sums in grouped.items():
        rows[name] = ReplicaRow(**_fields(sums, price))
    return rows


def _fields(sums: Sums, price: Price | None) -> dict[str, Any]:
    answered = sum(sums.ttft.values())
    saved, (low, high) = sums.saved_prefill_s, sums.saved_interval
    per_second = price.hour / 3600 if price else 0.0
    return {
        "requests": sums.requests,
        "failed": sums.failed,
        "aborted": sums.aborted,
        "prompt_tokens": sums.prompt_tokens,
        "cached_prompt_tokens": sums.cached_prompt_tokens,
        "completion_tokens": sums.completion_tokens,
        "token_hit_rate": sums.cached_prompt_tokens / sums.prompt_tokens if sums.prompt_tokens else None,
        "prefill_s": sums.prefill_s,
        "saved_prefill_s": saved,
        "saved_prefill_low_s": low,
        "saved_prefill_high_s": high,
        "saved_money": Money(saved * per_second, low * per_second, high * per_second, price.currency)
        if price
        else None,
        "missed_tokens": sums.prompt_tokens - sums.cached_prompt_tokens,
        "missed": {cause: Lost.of(sums.missed[cause]) for cause in CAUSES if cause in sums.missed},
        "evicted_ago_p50_s": median_age(sums.evicted_ages),
        "calibration": Calibration.of(sums.held_out) if sums.held_out is not None else None,
        "ttft_mean_s": sums.ttft_s / answered if answered else None,
        "ttft_p50_s": quantile(sums.ttft, 0.5),
        "ttft_p95_s": quantile(sums.ttft, 0.95),
        "evictions": sums.evictions,
        "preemptions": sums.preemptions,
    }
