"""Both passes over a log put together: the figures that ``headstart analyze --json`` prints, and what else is said."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from gateway.analysis.log import BadLine
from gateway.analysis.passes import Job, PassResult, TemplateTally
from gateway.analysis.suggestion import suggest
from gateway.attribution.causes import CauseRow

__all__ = ["Analysis", "HitRates", "Report", "TemplateReport", "make_report", "size_name"]


class HitRates(msgspec.Struct, frozen=True):
    """Shares of the prompt tokens that were cached, by cache size (``inf``, ``8192``).

    ``as_is`` is of the prompts as they are, ``canonical`` as the gateway lays them out. ``position_independent`` is the
    bound for any order: every document that was seen before counts, wherever it stood.
    """

    as_is: dict[str, float]
    canonical: dict[str, float]
    position_independent: float


class Analysis(msgspec.Struct, frozen=True):
    """What a log shows. ``requests`` and ``tokens`` are those of the prompts as they are.

    ``causes`` sum up to the tokens that these missed in the smallest of the caches.
    """

    requests: int
    tokens: int
    hit_rate: HitRates
    causes: tuple[CauseRow, ...]


class TemplateReport(msgspec.Struct, frozen=True):
    """One template's share: its fields, requests and tokens, and its hit rates by cache size."""

    template: str
    fields: tuple[str, ...]
    requests: int
    tokens: int
    as_is: dict[str, float]
    canonical: dict[str, float]


class Report(msgspec.Struct, frozen=True):
    """An analysis and what goes with it.

    ``causes_at`` is the cache of which the causes tell, ``configuration`` what is suggested, as TOML.
    """

    name: str
    analysis: Analysis
    templates: tuple[TemplateReport, ...]
    bad_lines: tuple[BadLine, ...]
    causes_at: str
    configuration: str


def size_name(blocks: int | None) -> str:
    """A cache size as it is written: ``inf`` for one that never forgets."""
    return "inf" if blocks is None else str(blocks)


def make_report(job: Job, as_is: PassResult, canonical: PassResult) -> Report:
    """Put the results of both passes together."""
    sizes = [size_name(size) for size in job.sizes]
    laid_out = {tally.template: tally for tally in canonical.tallies}
    templates = tuple(
        TemplateReport(
            tally.template,
            tally.fields,
            tally.requests,
            tally.tokens,
            _rates(sizes, [tally]),
            _rates(sizes, [laid_out[tally.template]] if tally.template in laid_out else []),
        )
        for tally in as_is.tallies
    )
    tokens = sum(tally.tokens for tally in canonical.tallies)
    anywhere = sum(tally.anywhere for tally in canonical.tallies)
    canonical_rates = _rates(sizes, canonical.tallies)
    # Text that is no part of its own, like documents in a system message, may be found in a cache all the same.
    bound = max(anywhere / tokens if tokens else 0.0, *canonical_rates.values())
    rates = HitRates(_rates(sizes, as_is.tallies), canonical_rates, bound)
    analysis = Analysis(
        sum(tally.requests for tally in as_is.tallies),
        sum(tally.tokens for tally in as_is.tallies),
        rates,
        as_is.causes,
    )
    finite = [size for size in job.sizes if size is not None]
    return Report(
        job.name,
        analysis,
        templates,
        as_is.bad_lines,
        size_name(min(finite, default=None)),
        suggest(job, analysis.causes, analysis.tokens, {tally.template: tally.requests for tally in as_is.tallies}),
    )


def _rates(sizes: Sequence[str], tallies: Sequence[TemplateTally]) -> dict[str, float]:
    tokens = sum(tally.tokens for tally in tallies)
    return {
        size: sum(tally.hits[index] for tally in tallies) / tokens if tokens else 0.0
        for index, size in enumerate(sizes)
    }
