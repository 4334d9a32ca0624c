"""The statistics for programs: JSON for people's own tools, and Prometheus.

All belong to the operator: whoever mounts them guards them. They take dependencies named ``statistics``,
``exposition`` and ``gateway``.
"""

from __future__ import annotations

import re
from typing import Annotated, Final

import msgspec
from litestar import Response, get
from litestar.di import NamedDependency
from litestar.params import FromQuery, QueryParameter

from gateway.errors import InvalidRequestError
from gateway.service import Gateway
from gateway.stats.documents import DocumentReport
from gateway.stats.hot_prefixes import HotPrefix
from gateway.stats.metrics import CONTENT_TYPE, Exposition
from gateway.stats.misses import MissReport, miss_report
from gateway.stats.record import RequestRecord
from gateway.stats.snapshot import Grouping, Snapshot
from gateway.stats.statistics import Statistics
from gateway.stats.timeline import KEEP_MINUTES, LONGEST_WINDOW_MINUTES

__all__ = [
    "admin_documents",
    "admin_misses",
    "admin_prefixes",
    "admin_requests",
    "admin_stats",
    "prometheus",
    "window_minutes",
]

_WINDOW: Final = re.compile(r"([1-9][0-9]{0,8})([mhd]?)")
_Window = Annotated[str | None, QueryParameter(description="5m, 24h, 30d, or all")]
_MINUTES: Final = {"": 1, "m": 1, "h": 60, "d": 24 * 60}


def window_minutes(window: str | None) -> int | None:
    """The minutes of a window such as ``5m``, ``24h``, ``30d`` or ``90`` (minutes); None for everything ever counted.

    Raises ``InvalidRequestError`` for what is none, and for more than thirty days.
    """
    if window is None or window == "all":
        return None
    match = _WINDOW.fullmatch(window)
    if match is None:
        raise InvalidRequestError(f"window {window[:32]!r}: give one such as 5m, 24h or 30d, or all.", param="window")
    minutes = int(match[1]) * _MINUTES[match[2]]
    if minutes > LONGEST_WINDOW_MINUTES:
        raise InvalidRequestError(f"window {window}: the longest is 30d; or all.", param="window")
    return minutes


@get("/admin/stats", sync_to_thread=False)
def admin_stats(
    statistics: NamedDependency[Statistics],
    minutes: Annotated[int, QueryParameter(ge=0, le=KEEP_MINUTES)] = 60,
    by: FromQuery[Grouping | None] = None,
    window: _Window = None,
) -> Snapshot:
    """Totals over all gateways and per template, tenant, model and replica, at most 2 s old.

    ``minutes`` is the number of minute rows, ``by`` adds figures per label to each of them, ``window`` restricts the
    totals to the last so many minutes, hours or days (default: everything ever counted).
    """
    return statistics.snapshot(window_minutes=window_minutes(window), minutes=minutes, by=by)


@get("/admin/misses", sync_to_thread=False)
def admin_misses(gateway: NamedDependency[Gateway], window: _Window = None) -> MissReport:
    """Why prompt tokens were not cached, over all gateways by cause and template; examples are this gateway's."""
    minutes = window_minutes(window)
    return miss_report(
        gateway.statistics.window(minutes),
        minutes,
        None if gateway.attribution is None else gateway.attribution.examples,
        gateway.renderer.decode,
        show_text=gateway.config.attribution.show_text,
    )


@get("/admin/documents", sync_to_thread=False)
def admin_documents(gateway: NamedDependency[Gateway], window: _Window = None) -> DocumentReport:
    """The documents with the most prompt tokens over all gateways, some 5 s old (default: of thirty days)."""
    return gateway.statistics.documents.report(window_minutes(window), enabled=gateway.attribution is not None)


class PrefixReport(msgspec.Struct, frozen=True):
    """The prefixes that are asked for most over all gateways, some seconds old, by what it takes to compute them."""

    prefixes: list[HotPrefix]


@get("/admin/prefixes", sync_to_thread=False)
def admin_prefixes(statistics: NamedDependency[Statistics]) -> PrefixReport:
    """The hottest prefixes, by the key of their last block, as ``POST /v1/explain`` lists them."""
    return PrefixReport(statistics.prefixes.report())


class LatestRequests(msgspec.Struct, frozen=True):
    """Requests that have ended at this gateway, newest first, without any text."""

    requests: list[RequestRecord]


@get("/admin/requests", sync_to_thread=False)
def admin_requests(statistics: NamedDependency[Statistics]) -> LatestRequests:
    """The last 200 requests of this gateway one by one: what each cost and saved, and what it missed by cause."""
    return LatestRequests(statistics.latest)


@get("/metrics", sync_to_thread=False)
def prometheus(exposition: NamedDependency[Exposition]) -> Response[bytes]:
    """Prometheus exposition of this gateway."""
    return Response(exposition.render(), media_type=CONTENT_TYPE)
