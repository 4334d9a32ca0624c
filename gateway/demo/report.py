"""The demo's figures: one row per pass, as a table for people and as JSON for programs."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import msgspec
from rich import box
from rich.table import Table

from gateway.demo.client import Outcome

__all__ = ["PassFigures", "Report", "hit_rate", "pass_figures", "table"]


class PassFigures(msgspec.Struct, frozen=True):
    """What one pass came to. Rates are fractions of 1; a figure without a basis (no request succeeded) is null.

    Hit rate and times to first token are the client's own; prefill seconds are the gateway's: measured where spent,
    estimated from the engine's fitted cost curve where saved.
    """

    requests: int
    failed: int
    token_hit_rate: float | None
    ttft_p50_ms: float | None
    ttft_p95_ms: float | None
    prefill_s: float
    saved_prefill_s: float


class Report(msgspec.Struct, frozen=True):
    """The result of a run."""

    as_is: PassFigures
    canonical: PassFigures
    model: str


def hit_rate(outcomes: Sequence[Outcome]) -> float | None:
    """Cached prompt tokens by prompt tokens, or None without any."""
    tokens = sum(outcome.prompt_tokens for outcome in outcomes)
    return sum(outcome.cached_tokens for outcome in outcomes) / tokens if tokens else None


def pass_figures(outcomes: Sequence[Outcome], *, prefill_s: float, saved_prefill_s: float) -> PassFigures:
    """Sum up one pass; failed requests have no times or tokens."""
    rate = hit_rate(outcomes)
    times = [1000 * outcome.ttft_s for outcome in outcomes if outcome.failure is None]
    return PassFigures(
        requests=len(outcomes),
        failed=sum(outcome.failure is not None for outcome in outcomes),
        token_hit_rate=None if rate is None else round(rate, 4),
        ttft_p50_ms=_percentile(times, 50),
        ttft_p95_ms=_percentile(times, 95),
        prefill_s=round(prefill_s, 3),
        saved_prefill_s=round(saved_prefill_s, 3),
    )


def table(report: Report) -> Table:
    """Both passes side by side."""
    title = f"{report.model}, {report.as_is.requests} requests a pass"
    rows = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    rows.add_column("", no_wrap=True)
    for heading in ("token\nhit rate", "TTFT\np50", "TTFT\np95", "prefill\nspent", "prefill\nsaved", "failed"):
        rows.add_column(heading, justify="right", no_wrap=True)
    for name, figures in (("as written", report.as_is), ("canonicalized", report.canonical)):
        rows.add_row(
            name,
            "-" if figures.token_hit_rate is None else f"{figures.token_hit_rate:.1%}",
            _milliseconds(figures.ttft_p50_ms),
            _milliseconds(figures.ttft_p95_ms),
            f"{figures.prefill_s:.1f} s",
            f"{figures.saved_prefill_s:.1f} s",
            str(figures.failed),
        )
    return rows


def _milliseconds(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f} ms"


def _percentile(values: list[float], percent: int) -> float | None:
    if len(values) < 2:
        return round(values[0], 1) if values else None
    return round(statistics.quantiles(values, n=100, method="inclusive")[percent - 1], 1)
