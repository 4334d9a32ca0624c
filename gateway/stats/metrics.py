"""Prometheus exposition of what this gateway has counted since it started.

Everything is read from the aggregate at the moment of the scrape: a request pays nothing for it, and ``/metrics``
cannot disagree with ``/admin/stats``. Unlike the latter it covers this process alone; the Prometheus server adds
gateways up. Summing a series over its labels gives the total. Labels are bounded as the aggregate's are. Where vLLM has
a name for the same, it is there too, with vLLM's labels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import get_args

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

import gateway
from gateway.attribution.memory import TokenMemory
from gateway.canonical.learning.learner import MAX_WEIGHT, PassedOver, TemplateLearner
from gateway.canonical.popularity import MAX_DOCUMENTS, MAX_PAIRS
from gateway.canonical.resident import MAX_REMEMBERED
from gateway.generation import Dispatcher
from gateway.quality.report import QualityReport
from gateway.quality.shadows import MAX_BYTES
from gateway.replicas.base import ReplicaState
from gateway.request_path import RequestPath
from gateway.routing.router import Router
from gateway.stats.statistics import Statistics
from gateway.stats.sums import BUCKETS_PER_DOUBLING, HoldOut, Labels, Sums, bucket_bound

__all__ = [
    "CONTENT_TYPE",
    "DispatchCollector",
    "Exposition",
    "LearningCollector",
    "OrderingCollector",
    "PromptsCollector",
    "QualityCollector",
]

CONTENT_TYPE = "text/plain; version=0.0.4"

_LABELS = ("template", "tenant", "replica", "model")
_COUNTERS = (
    ("headstart_prompt_tokens", "Prompt tokens of finished requests.", "prompt_tokens"),
    ("headstart_cached_prompt_tokens", "Prompt tokens that were taken from the prefix cache.", "cached_prompt_tokens"),
    ("headstart_completion_tokens", "Generated tokens of finished requests.", "completion_tokens"),
    ("headstart_prefill_seconds", "Measured time that replicas spent on prompts.", "prefill_s"),
    ("headstart_saved_prefill_seconds", "Estimated prefill time that cached tokens saved.", "saved_prefill_s"),
)
_LOST = (
    ("headstart_missed_prompt_tokens", "Prompt tokens that were not cached, by cause.", "tokens"),
    ("headstart_missed_prefill_seconds", "Measured prefill time that they took, by cause.", "seconds"),
)
_HELD_OUT = (
    ("headstart_holdout_requests", "Requests kept from the cache to check estimates.", "requests"),
    ("headstart_holdout_covered", "Those within the interval foretold, meant to be 0.9 of them.", "covered"),
    ("headstart_holdout_prefill_seconds", "Prefill time measured of them.", "measured_s"),
    ("headstart_holdout_estimated_prefill_seconds", "Prefill time estimated for them.", "estimated_s"),
)
_TTFT_BUCKETS = range(0, 18 * BUCKETS_PER_DOUBLING + 1, BUCKETS_PER_DOUBLING)


_ALERTED = ("context_length_exceeded", "no_replica", "overloaded")
"""Refusals that are shown before there is one, so that the first of them is an increase."""


class Exposition:
    """What a scrape shows: the statistics, this process, and what ``collectors`` add."""

    def __init__(self, statistics: Statistics, *collectors: Collector) -> None:
        self._collectors = (_StatisticsCollector(statistics), *collectors)

    def render(self) -> bytes:
        """The scrape body, of type ``CONTENT_TYPE``."""
        registry = CollectorRegistry(auto_describe=False)
        for collector in self._collectors:
            registry.register(collector)
        ProcessCollector(registry=registry)
        return generate_latest(registry)


class LearningCollector(Collector):
    """What learning templates holds, and how many texts it has read."""

    def __init__(self, learner: TemplateLearner) -> None:
        self._learner = learner

    def collect(self) -> Iterator[Metric]:
        """The families of one scrape."""
        learner = self._learner
        read = CounterMetricFamily("headstart_learning_texts", "System texts that templates were learned from.")
        read.add_metric((), learner.observed)
        yield read
        passed_over = CounterMetricFamily(
            "headstart_learning_passed_over", "System texts that nothing was learned from.", labels=("reason",)
        )
        for reason in get_args(PassedOver):
            passed_over.add_metric((reason,), learner.passed_over[reason])
        yield passed_over
        for name, text, value in (
            ("templates", "Learned templates with a volatile field.", sum(1 for _ in learner.templates())),
            ("sources", "Sources whose texts are compared.", learner.sources),
            ("tokens", f"Tokens held to learn templates; bounded by {MAX_WEIGHT}.", learner.weight),
        ):
            yield GaugeMetricFamily(f"headstart_learning_{name}", text, value=float(value))


class OrderingCollector(Collector):
    """What is held to put documents in order."""

    def __init__(self, path: RequestPath, router: Router) -> None:
        self._path = path
        self._router = router

    def collect(self) -> Iterator[Metric]:
        """The families of one scrape."""
        popularity, paths = self._path.popularity, self._path.resident_paths
        for name, text, value in (
            ("documents", f"Counts of documents; at most {MAX_DOCUMENTS}.", popularity.documents),
            ("pairs", f"Counts of documents asked for together; at most {MAX_PAIRS}.", popularity.pairs),
            (
                "remembered_keys",
                f"Block keys kept from being hashed again; at most {MAX_REMEMBERED}.",
                paths.remembered,
            ),
            ("resident_blocks", "Blocks that the replicas are known to hold.", self._router.index.size()),
        ):
            yield GaugeMetricFamily(f"headstart_ordering_{name}", text, value=float(value))


class PromptsCollector(Collector):
    """What is held of recent prompts, to tell where another one leaves them."""

    def __init__(self, prompts: TokenMemory) -> None:
        self._prompts = prompts

    def collect(self) -> Iterator[Metric]:
        """The family of one scrape."""
        text = f"Tokens of recent prompts; at most {self._prompts.capacity}."
        yield GaugeMetricFamily("headstart_remembered_prompt_tokens", text, value=float(self._prompts.tokens))


class DispatchCollector(Collector):
    """Requests in hand, how many there may be, and those that were refused."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher

    def collect(self) -> Iterator[Metric]:
        """The families of one scrape."""
        dispatcher = self._dispatcher
        refused = CounterMetricFamily(
            "headstart_refused_requests", "Requests that were sent to no replica, by error.", labels=("code",)
        )
        for code in sorted({*_ALERTED, *dispatcher.refused}):
            refused.add_metric((code,), dispatcher.refused[code])
        yield refused
        yield GaugeMetricFamily("headstart_requests_in_hand", "Requests that wait or run.", value=dispatcher.active)
        yield GaugeMetricFamily(
            "headstart_requests_limit", "How many may wait or run (limits.max_queue).", value=dispatcher.max_queue
        )


class QualityCollector(Collector):
    """Which templates are reordered, and what became of the requests that were to be compared."""

    def __init__(self, report: Callable[[], QualityReport]) -> None:
        self._report = report

    def collect(self) -> Iterator[Metric]:
        """The families of one scrape."""
        report = self._report()
        reordering = GaugeMetricFamily(
            "headstart_quality_reordering", "0 where reordering is switched off.", labels=("template",)
        )
        pairs = GaugeMetricFamily(
            "headstart_quality_pairs",
            "Requests compared in the template's test, by all gateways.",
            labels=("template",),
        )
        for row in report.templates:
            reordering.add_metric((row.template,), float(row.reordering))
            pairs.add_metric((row.template,), row.pairs)
        shadows = CounterMetricFamily(
            "headstart_quality_shadows", "Requests that were to be compared, by outcome.", labels=("outcome",)
        )
        for outcome in ("compared", "dropped", "interrupted", "failed"):
            shadows.add_metric((outcome,), getattr(report.shadows, outcome))
        kept = GaugeMetricFamily("headstart_quality_kept_bytes", f"Held to be compared; at most {MAX_BYTES}.")
        kept.add_metric((), report.shadows.kept_bytes)
        return iter((reordering, pairs, shadows, kept))


class _StatisticsCollector(Collector):
    """Turns the aggregate into metric families, once per scrape."""

    def __init__(self, statistics: Statistics) -> None:
        self._statistics = statistics

    def collect(self) -> Iterator[Metric]:
        totals = self._statistics.aggregate.totals
        requests = {labels: sums for labels, sums in totals.items() if labels.template is not None}
        yield _info()
        yield _requests(requests)
        for name, text, field in _COUNTERS:
            family = CounterMetricFamily(name, text, labels=_LABELS)
            for labels, sums in requests.items():
                family.add_metric(_values(labels), getattr(sums, field))
            yield family
        yield from _missed(requests)
        yield from _held_out(requests)
        yield _ttft(requests)
        yield from _as_vllm_says(requests)
        yield from self._replicas(totals)
        yield GaugeMetricFamily(
            "headstart_redis_up",
            "Whether the shared statistics are being written.",
            value=float(self._statistics.store_status.state == "ok"),
        )

    def _replicas(self, totals: dict[Labels, Sums]) -> Iterator[Metric]:
        up = GaugeMetricFamily("headstart_replica_up", "Whether a replica is routed to.", labels=("replica",))
        blocks = GaugeMetricFamily(
            "headstart_kv_blocks",
            "Blocks of the KV pool: used by running requests, cached (idle, hittable), free.",
            labels=("replica", "state"),
        )
        running = GaugeMetricFamily("headstart_requests_running", "Requests in the batch.", labels=("replica",))
        waiting = GaugeMetricFamily("headstart_requests_waiting", "Requests in the queue.", labels=("replica",))
        evictions = CounterMetricFamily("headstart_evictions", "Cached blocks evicted.", labels=("replica",))
        preemptions = CounterMetricFamily("headstart_preemptions", "Requests preempted.", labels=("replica",))
        for replica in self._statistics.replicas.values():
            up.add_metric((replica.id,), float(replica.state is ReplicaState.READY))
            own = totals.get(Labels(None, None, replica.id), Sums())
            evictions.add_metric((replica.id,), own.evictions)
            preemptions.add_metric((replica.id,), own.preemptions)
            if (load := replica.load) is not None:
                running.add_metric((replica.id,), load.running)
                waiting.add_metric((replica.id,), load.waiting)
                if replica.info is None or not replica.info.num_blocks:
                    continue  # a remote server keeps its pool to itself
                for state in ("used", "cached", "free"):
                    blocks.add_metric((replica.id, state), getattr(load, f"{state}_blocks"))
        return iter((up, blocks, running, waiting, evictions, preemptions))


def _info() -> Metric:
    family = GaugeMetricFamily("headstart_build_info", "The running version; always 1.", labels=("version",))
    family.add_metric((gateway.__version__,), 1)
    return family


def _requests(table: dict[Labels, Sums]) -> Metric:
    family = CounterMetricFamily("headstart_requests", "Finished requests.", labels=(*_LABELS, "status"))
    for labels, sums in table.items():
        ok = sums.requests - sums.failed - sums.aborted
        for status, count in (("ok", ok), ("failed", sums.failed), ("aborted", sums.aborted)):
            family.add_metric((*_values(labels), status), count)
    return family


def _missed(table: dict[Labels, Sums]) -> Iterator[Metric]:
    for name, text, field in _LOST:
        family = CounterMetricFamily(name, text, labels=(*_LABELS, "cause"))
        for labels, sums in table.items():
            for cause, missed in sums.missed.items():
                family.add_metric((*_values(labels), cause), getattr(missed, field))
        yield family


def _held_out(table: dict[Labels, Sums]) -> Iterator[Metric]:
    held_out: dict[str, HoldOut] = {}
    for labels, sums in table.items():
        if sums.held_out is not None:
            held_out.setdefault(labels.replica, HoldOut()).add(sums.held_out)
    for name, text, field in _HELD_OUT:
        family = CounterMetricFamily(name, text, labels=("replica",))
        for replica, figures in held_out.items():
            family.add_metric((replica,), getattr(figures, field))
        yield family
    error = GaugeMetricFamily(
        "headstart_holdout_median_error", "Median error of the estimates, of what was measured.", labels=("replica",)
    )
    for replica, figures in held_out.items():
        error.add_metric((replica,), figures.median_error or 0.0)
    yield error


def _as_vllm_says(table: dict[Labels, Sums]) -> Iterator[Metric]:
    """What vLLM counts too, in its names: queries and hits of its prefix cache are tokens."""
    totals: dict[tuple[str, str], Sums] = {}
    for labels, sums in table.items():
        totals.setdefault((labels.model or "", labels.replica), Sums()).add(sums)
    for name, text, field in (
        ("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", "prompt_tokens"),
        ("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.", "cached_prompt_tokens"),
        ("vllm:prompt_tokens", "Prompt tokens of finished requests.", "prompt_tokens"),
        ("vllm:generation_tokens", "Generated tokens of finished requests.", "completion_tokens"),
    ):
        family = CounterMetricFamily(name, text, labels=("model_name", "engine"))
        for values, sums in totals.items():
            family.add_metric(values, getattr(sums, field))
        yield family


def _ttft(table: dict[Labels, Sums]) -> Metric:
    described = "Arrival to first output, in seconds, where it is known: not of what another server answered as one."
    family = HistogramMetricFamily("headstart_ttft_seconds", described, labels=_LABELS)
    for labels, sums in table.items():
        buckets = [
            (str(bucket_bound(bound)), float(sum(count for bucket, count in sums.ttft.items() if bucket <= bound)))
            for bound in _TTFT_BUCKETS
        ]
        buckets.append(("+Inf", float(sum(sums.ttft.values()))))
        family.add_metric(_values(labels), buckets, sum_value=sums.ttft_s)
    return family


def _values(labels: Labels) -> tuple[str, str, str, str]:
    return labels.template or "", labels.tenant or "", labels.replica, labels.model or ""
