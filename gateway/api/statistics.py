"""The statistics for programs: JSON for people's own tools, and Prometheus.

Both belong to the operator: whoever mounts them guards them. They take a dependency named ``statistics`` and one
named ``exposition``.
"""

from __future__ import annotations

from typing import Annotated

from litestar import Response, get
from litestar.di import NamedDependency
from litestar.params import FromQuery, QueryParameter

from gateway.stats.aggregate import KEEP_MINUTES
from gateway.stats.metrics import CONTENT_TYPE, Exposition
from gateway.stats.snapshot import Grouping, Snapshot
from gateway.stats.statistics import Statistics

__all__ = ["admin_stats", "prometheus"]


@get("/admin/stats", sync_to_thread=False)
def admin_stats(
    statistics: NamedDependency[Statistics],
    minutes: Annotated[int, QueryParameter(ge=0, le=KEEP_MINUTES)] = 60,
    by: FromQuery[Grouping | None] = None,
    window: Annotated[int | None, QueryParameter(ge=1, le=KEEP_MINUTES)] = None,
) -> Snapshot:
    """Totals over all gateways and per template, tenant and replica, at most 2 s old.

    ``minutes`` is the number of minute rows, ``by`` adds figures per label to each of them, ``window`` restricts the
    totals to the last so many minutes (default: everything ever counted).
    """
    return statistics.snapshot(window_minutes=window, minutes=minutes, by=by)


@get("/metrics", sync_to_thread=False)
def prometheus(exposition: NamedDependency[Exposition]) -> Response[bytes]:
    """Prometheus exposition of this gateway."""
    return Response(exposition.render(), media_type=CONTENT_TYPE)
