"""Documents: bounded, exact in sum, over every window, and the same for all gateways."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from gateway.attribution.causes import Run
from gateway.attribution.live import Judged
from gateway.attribution.part import Part
from gateway.config import RedisConfig
from gateway.stats.distinct import DistinctKeys
from gateway.stats.documents import DocumentReport, Documents
from gateway.stats.statistics import Statistics

Eventually = Callable[[Callable[[], bool]], Any]
START = 1_700_000_000.0


class Clock:
    def __init__(self) -> None:
        self.now = START

    def __call__(self) -> float:
        return self.now


def judged(*ids: str, cached: int = 0) -> Judged:
    """A prompt of ten tokens a document, the last ten being a question."""
    parts = [*(Part("document", id, label=id) for id in ids), Part("question", "?")]
    ends = [10 * number for number in range(1, len(parts) + 1)]
    return Judged({"never_seen": ends[-1] - cached}, [Run("never_seen", cached, ends[-1])], parts, ends)


def tokens(report: DocumentReport) -> dict[str, int]:
    return {row.id: row.tokens for row in report.rows}


def keys(*numbers: int) -> list[bytes]:
    return [random.Random(number).randbytes(16) for number in numbers]


def test_a_document_has_its_hits_its_misses_by_cause_and_its_share_of_what_was_saved() -> None:
    documents = Documents(10, clock=Clock())
    documents.observe("acme", (), judged("a", "b", "c", cached=15), 15, 3.0)
    a, b, c = sorted(documents.report(5).rows, key=lambda row: row.id)
    assert (a.tenant, a.requests, a.tokens, a.cached_tokens, a.missed) == ("acme", 1, 10, 10, {})
    assert (b.cached_tokens, b.missed, b.token_hit_rate) == (5, {"never_seen": 5}, 0.5)
    assert (c.cached_tokens, c.missed) == (0, {"never_seen": 10})
    assert (a.saved_prefill_s, b.saved_prefill_s) == (2.0, 1.0)


@pytest.mark.parametrize("minutes", [5, 60, 24 * 60, 30 * 24 * 60, None])
def test_every_window_counts_what_lies_in_it_once(minutes: int | None) -> None:
    clock = Clock()
    documents = Documents(10, clock=clock)
    for _ in range(40):
        documents.observe("t", (), judged("a"), 0, 0.0)
        clock.now += 3600 * 5
    clock.now -= 3600 * 5
    report = documents.report(minutes)
    expected = sum(START + 3600 * 5 * number >= report.since for number in range(40))
    assert tokens(report) == {"a": 10 * expected}
    assert clock.now - report.since <= report.window_s


def test_memory_is_bounded_the_largest_are_kept_and_nothing_is_lost() -> None:
    documents = Documents(5, clock=Clock())
    for number in range(1000):
        documents.observe("t", (), judged("often", f"once-{number}"), 0, 0.0)
    report = documents.report(60)
    assert len(report.rows) <= 10
    assert report.rows[0].id == "often"
    assert report.rows[0].tokens == 10_000
    assert sum(tokens(report).values()) + report.other.tokens == 20_000
    assert report.other.missed["never_seen"] + sum(row.missed["never_seen"] for row in report.rows) == 20_000


def test_different_prefixes_are_counted_once_over_all_spans_of_time() -> None:
    clock = Clock()
    documents = Documents(5, clock=clock)
    for _ in range(3):
        documents.observe("t", keys(*range(100)), judged("a"), 0, 0.0)
        clock.now += 61
    assert documents.report(5).distinct_prefixes == documents.report(None).distinct_prefixes == 100


def test_ever_so_many_keys_are_counted_to_a_few_percent_from_a_bounded_sample() -> None:
    one, two = DistinctKeys(), DistinctKeys()
    for number in range(30_000):
        (one if number % 2 else two).add(keys(number))
    one.merge(two)
    assert len(one.kept) <= 2048
    assert abs(one.count - 30_000) < 3_000


def test_gateways_see_each_others_documents_also_after_one_has_ended_or_redis_has_lost_all(
    valkey: Any, eventually: Eventually
) -> None:
    @contextlib.asynccontextmanager
    async def running() -> AsyncIterator[Statistics]:
        statistics = Statistics(RedisConfig(url=valkey.url, flush_interval_s=0.02))
        await statistics.start()
        try:
            yield statistics
        finally:
            await statistics.stop()

    async def scenario() -> None:
        async with running() as former:
            former.documents.observe("t", keys(1, 2), judged("a"), 0, 0.0)
        async with running() as one, running() as two:
            one.documents.observe("t", keys(2, 3), judged("a", "b"), 0, 0.0)

            def agreed(**expected: int) -> bool:
                reports = [each.documents.report(minutes) for each in (one, two) for minutes in (60, 24 * 60, None)]
                return all(tokens(report) == expected for report in reports) and all(
                    report.distinct_prefixes == (3 if expected["a"] == 20 else 2) for report in reports
                )

            await eventually(lambda: agreed(a=20, b=10))
            valkey.client().flushall()
            await eventually(lambda: agreed(a=10, b=10))  # what the former knew is lost with it

    asyncio.run(scenario())
