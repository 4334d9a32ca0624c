"""The dashboard's routes: public files under a strict policy, a guarded stream, and the figures for programs."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from litestar import Litestar
from litestar.di import Provide
from litestar.testing import TestClient

from gateway.api.errors import EXCEPTION_HANDLERS
from gateway.api.statistics import admin_stats, prometheus
from gateway.config import RedisConfig
from gateway.dashboard.feed import WINDOWS, Feed
from gateway.dashboard.routes import asset, front_door, page
from gateway.eviction import EvictionControl
from gateway.quality.report import QualityReport
from gateway.quality.shadows import ShadowStatus
from gateway.stats.metrics import Exposition
from gateway.stats.record import RequestRecord
from gateway.stats.statistics import Statistics

STATIC = Path(__file__).parents[3] / "gateway" / "dashboard" / "static"


def no_quality() -> QualityReport:
    return QualityReport([], ShadowStatus(0, 0, 0, 0, 0, 0))


@pytest.fixture
def statistics() -> Statistics:
    return Statistics(RedisConfig(url="redis://localhost:1"))


@pytest.fixture
def client(statistics: Statistics) -> Iterator[TestClient[Litestar]]:
    app = Litestar(
        [front_door, page, asset, admin_stats, prometheus],
        dependencies={
            "statistics": Provide(lambda: statistics, sync_to_thread=False),
            "exposition": Provide(lambda: Exposition(statistics), sync_to_thread=False),
        },
        exception_handlers=EXCEPTION_HANDLERS,
    )
    with TestClient(app) as client:
        yield client


def make_record(at: float) -> RequestRecord:
    return RequestRecord(at, "default", "support", "engine-0", "ok", 100, 48, 7, 0.25, 0.125, 0.0625)


def test_the_page_and_all_it_refers_to_are_served_from_here(client: TestClient[Litestar]) -> None:
    answer = client.get("/dashboard")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert "unsafe" not in answer.headers["content-security-policy"]
    references = re.findall(r'(?:src|href)="([^"]+)"', answer.text)
    assert len(references) >= 6
    todo, seen = list(references), set()
    while todo:
        reference = todo.pop()
        assert reference.startswith("/dashboard/static/")
        file = client.get(reference)
        assert file.status_code == 200, reference
        seen.add(reference)
        if reference.endswith(".js") and "/vendor/" not in reference:
            for name in re.findall(r'from "\./([^"]+)"', file.text):
                if (path := f"/dashboard/static/{name}") not in seen:
                    todo.append(path)
    own = {f"/dashboard/static/{path.name}" for path in STATIC.glob("*.js")}
    assert own <= seen


@pytest.mark.parametrize("query", ["", "?next=//example.org", "?window=1h"])
def test_the_bare_address_leads_to_the_page_this_time_and_nowhere_else(
    query: str, client: TestClient[Litestar]
) -> None:
    answer = client.get(f"/{query}", headers={"host": "example.org"}, follow_redirects=False)
    assert (answer.status_code, answer.headers["location"]) == (307, "/dashboard")
    assert answer.headers["cache-control"] == "no-store"
    assert client.post(f"/{query}").status_code == 405


def test_nothing_on_the_page_leads_to_another_host() -> None:
    for path in [*STATIC.glob("*.js"), *STATIC.glob("*.css"), *STATIC.glob("*.html"), *STATIC.glob("*.svg")]:
        addresses = re.findall(r"https?://[^\s\"'`)]+", path.read_text())
        assert [address for address in addresses if "www.w3.org" not in address] == [], path.name


def test_files_are_asked_again_and_answered_shortly(client: TestClient[Litestar]) -> None:
    first = client.get("/dashboard/static/dashboard.css")
    assert first.headers["content-type"].startswith("text/css")
    again = client.get("/dashboard/static/dashboard.css", headers={"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


@pytest.mark.parametrize(
    "path", ["nothing.js", "../feed.py", "%2e%2e/feed.py", "vendor/LICENSE.htm", "vendor", "x/y.js"]
)
def test_only_the_files_of_the_page_are_served(path: str, client: TestClient[Litestar]) -> None:
    assert client.get(f"/dashboard/static/{path}").status_code == 404


def test_vendored_files_keep_their_licences_beside_them() -> None:
    for name in ("LICENSE.uplot", "LICENSE.htm", "LICENSE.preact"):
        assert (STATIC / "vendor" / name).stat().st_size > 1000


def test_admin_stats_answers_totals_and_what_is_asked_for(client: TestClient[Litestar], statistics: Statistics) -> None:
    statistics.record(make_record(time.time()))
    answer = client.get("/admin/stats").json()
    assert answer["totals"]["requests"] == 1
    assert answer["templates"]["support"]["cached_prompt_tokens"] == 48
    assert len(answer["minutes"]) == 60
    answer = client.get("/admin/stats", params={"minutes": 2, "by": "tenant", "window": 5}).json()
    assert answer["window_s"] == 300
    assert len(answer["minutes"]) == 2
    assert sum(row["groups"].get("default", {"requests": 0})["requests"] for row in answer["minutes"]) == 1


@pytest.mark.parametrize("query", ["minutes=-1", "minutes=9999", "minutes=x", "by=colour", "window=0"])
def test_admin_stats_refuses_what_it_does_not_know(query: str, client: TestClient[Litestar]) -> None:
    assert client.get(f"/admin/stats?{query}").status_code == 400


def test_metrics_are_served_in_the_text_format(client: TestClient[Litestar], statistics: Statistics) -> None:
    statistics.record(make_record(0.0))
    answer = client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert "headstart_prompt_tokens_total{" in answer.text


@pytest.mark.parametrize("window", WINDOWS)
def test_events_carry_figures_and_series_of_their_window(window: Any, statistics: Statistics) -> None:
    statistics.record(make_record(time.time()))
    name, data = (
        Feed(statistics, EvictionControl({}, "lru"), None, no_quality).event(window).decode().rstrip().split("\n")
    )
    assert name == "event: update"
    update = json.loads(data.removeprefix("data: "))
    assert (update["window"], update["ever"]) == (window, 1)
    assert update["snapshot"]["totals"]["requests"] == 1
    assert sum(update["series"]["requests"]) == 1
    assert update["eviction"]["policy"] == "lru"
    assert "s3fifo" in update["eviction"]["policies"]


def test_pages_that_watch_the_same_window_share_an_encoding(
    statistics: Statistics, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.5
    monkeypatch.setattr("gateway.dashboard.feed.time.monotonic", lambda: now)
    feed = Feed(statistics, EvictionControl({}, "lru"), None, no_quality)
    assert (first := feed.event("1h")) is feed.event("1h")
    assert feed.event("1h") is not feed.event("15m")
    now += 1.0
    assert feed.event("1h") is not first


def test_events_that_are_dear_to_make_are_made_less_often(
    statistics: Statistics, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.5
    monkeypatch.setattr("gateway.dashboard.feed.time.monotonic", lambda: now)

    def slow() -> QualityReport:
        nonlocal now
        now += 0.4
        return no_quality()

    feed = Feed(statistics, EvictionControl({}, "lru"), None, slow)
    first = feed.event("30d")
    now += 7.0
    assert feed.event("30d") is first
    now += 1.0
    assert feed.event("30d") is not first


def test_closing_the_feed_ends_open_streams_and_new_ones_at_once(statistics: Statistics) -> None:
    async def scenario() -> None:
        feed = Feed(statistics, EvictionControl({}, "lru"), None, no_quality)
        stream = feed.stream("15m")
        assert (await anext(stream)).startswith(b"event: update")
        waiting = asyncio.ensure_future(anext(stream, None))
        await asyncio.sleep(0)
        feed.close()
        assert await waiting is None
        assert [event async for event in feed.stream("15m")] == []

    asyncio.run(asyncio.wait_for(scenario(), 60))
