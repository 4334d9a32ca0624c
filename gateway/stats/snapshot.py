"""The statistics as they are shown: what ``/admin/stats`` answers and what the dashboard draws.

Times are seconds, rates fractions of 1, moments Unix time. A figure that has no meaning yet (a hit rate without
tokens) is null.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import msgspec

from gateway.replicas.base import Replica
from gateway.stats.aggregate import Table
from gateway.stats.sums import OTHER, Labels, Sums, quantile

__all__ = [
    "Blocks",
    "Figures",
    "Grouping",
    "MinuteRow",
    "ReplicaRow",
    "Series",
    "Snapshot",
    "StoreStatus",
    "figures",
    "group",
    "replica_rows",
]

Grouping = Literal["template", "tenant", "replica"]

_MAX_ROWS = 50  # labels shown per table; the smallest ones above that are summed up as "other"


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of a group of finished requests; ``failed`` and ``aborted`` are among ``requests``.

    ``saved_prefill_s`` is the estimated prefill time that cached tokens made unnecessary, ``prefill_s`` the measured
    time spent. ``evictions`` and ``preemptions`` are known per replica only and 0 elsewhere but in totals.
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
    def of(cls, time: int, sums: Sums, groups: dict[str, Figures] | None) -> MinuteRow:
        """The row of one minute."""
        return cls(time=time, groups=groups, **_fields(sums))


class Series(msgspec.Struct, frozen=True):
    """Figures over time as columns of equal length, oldest first; ``time`` is the start of each step."""

    step_s: int
    time: list[int]
    requests: list[int]
    prompt_tokens: list[int]
    cached_prompt_tokens: list[int]
    prefill_s: list[float]
    saved_prefill_s: list[float]
    ttft_p50_s: list[float | None]
    ttft_p95_s: list[float | None]

    @classmethod
    def of(cls, step_s: int, points: Iterable[tuple[int, Sums]]) -> Series:
        """Columns out of (start, sums) pairs."""
        rows = list(points)
        return cls(
            step_s=step_s,
            time=[start for start, _ in rows],
            requests=[sums.requests for _, sums in rows],
            prompt_tokens=[sums.prompt_tokens for _, sums in rows],
            cached_prompt_tokens=[sums.cached_prompt_tokens for _, sums in rows],
            prefill_s=[sums.prefill_s for _, sums in rows],
            saved_prefill_s=[sums.saved_prefill_s for _, sums in rows],
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

    ``window_s`` is the span that the figures cover, up to ``time``; None means everything ever counted.
    ``started_at`` is when this gateway started, ``gateways`` how many write now. ``minutes`` are oldest first, the
    last one unfinished.
    """

    time: float
    window_s: int | None
    started_at: float
    version: str
    gateways: int
    totals: Figures
    templates: dict[str, Figures]
    tenants: dict[str, Figures]
    replicas: dict[str, ReplicaRow]
    minutes: list[MinuteRow]
    redis: StoreStatus


def figures(sums: Sums) -> Figures:
    """The figures of one group."""
    return Figures(**_fields(sums))


def group(table: Table, by: Grouping) -> dict[str, Sums]:
    """Sums per template, tenant or replica, most requests first, at most 50 and then ``other``."""
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


def replica_rows(table: Table, replicas: Iterable[Replica]) -> dict[str, ReplicaRow]:
    """One row per replica that is known here or was ever counted, own ones first."""
    grouped = group(table, "replica")
    rows = {}
    for replica in replicas:
        info, load = replica.info, replica.load
        sums = grouped.pop(replica.id, Sums())
        rows[replica.id] = ReplicaRow(
            **_fields(sums),
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
        rows[name] = ReplicaRow(**_fields(sums))
    return rows


def _fields(sums: Sums) -> dict[str, Any]:
    answered = sum(sums.ttft.values())
    return {
        "requests": sums.requests,
        "failed": sums.failed,
        "aborted": sums.aborted,
        "prompt_tokens": sums.prompt_tokens,
        "cached_prompt_tokens": sums.cached_prompt_tokens,
        "completion_tokens": sums.completion_tokens,
        "token_hit_rate": sums.cached_prompt_tokens / sums.prompt_tokens if sums.prompt_tokens else None,
        "prefill_s": sums.prefill_s,
        "saved_prefill_s": sums.saved_prefill_s,
        "ttft_mean_s": sums.ttft_s / answered if answered else None,
        "ttft_p50_s": quantile(sums.ttft, 0.5),
        "ttft_p95_s": quantile(sums.ttft, 0.95),
        "evictions": sums.evictions,
        "preemptions": sums.preemptions,
    }
