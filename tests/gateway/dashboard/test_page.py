"""The page in a real browser: figures, keyboard, key, narrow screen, and what it says when the gateway is gone."""

from __future__ import annotations

import hashlib
import random
import re
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import uvicorn
from litestar import Litestar, Request, Response, Router, get, post, put
from litestar.connection import ASGIConnection
from litestar.di import Provide
from litestar.exceptions import NotAuthorizedException
from litestar.handlers import BaseRouteHandler
from litestar.params import FromPath

from engine.wire import EngineInfo
from gateway.api.learned import list_proposals, switch_proposal
from gateway.attribution.history import Cause
from gateway.attribution.live import KeptExample
from gateway.canonical.learning.learner import TemplateLearner
from gateway.canonical.learning.observation import Source
from gateway.canonical.learning.proposals import TemplateProposals
from gateway.config import QualityConfig, RedisConfig, WhatIfConfig
from gateway.dashboard.feed import Feed
from gateway.dashboard.routes import asset, events, page
from gateway.eviction import EvictionControl, PolicyChange
from gateway.learned_store import LearnedStore
from gateway.quality.gate import QualityGate
from gateway.quality.ledger import Pair
from gateway.quality.report import QualityReport
from gateway.quality.shadows import ShadowStatus
from gateway.replicas.base import Replica
from gateway.stats.misses import MissReport, miss_report
from gateway.stats.record import RequestRecord
from gateway.stats.statistics import Statistics
from gateway.stats.whatif import WhatIf

from .conftest import opened

GROUND = "getComputedStyle(document.body).backgroundColor"


def _replica(id: str) -> Replica:
    return cast(Replica, SimpleNamespace(id=id))


def _info() -> EngineInfo:
    return EngineInfo("m", "", "f", "b", 4096, 64, 16, "f", "cpu", 1000, (), "lru", 512)


def _seconds(_replica: str, tokens: int) -> float:
    return 0.001 * tokens


def _words(ids: Sequence[int]) -> str:
    return " ".join(("It is", "09:26", "10:05")[id] for id in ids)


class Site:
    """The dashboard alone on a local port; ``start`` and ``stop`` as often as needed."""

    def __init__(self, key: str | None = None) -> None:
        self.statistics = Statistics(RedisConfig(url="redis://localhost:1"))
        self.eviction = EvictionControl({}, "lru")
        self.learner = TemplateLearner(salt=7)
        self.whatif = WhatIf(WhatIfConfig(policies=("s3fifo",)), policy=lambda: self.eviction.policy, seconds=_seconds)
        self.quality = QualityGate(QualityConfig(sample=1.0), model="m", secret=b"s")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}/dashboard"
        self.examples: dict[tuple[Cause, str], KeptExample] = {}
        self._key = key
        self._server: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        feed = Feed(self.statistics, self.eviction, self.whatif, self.quality_report)
        proposals = TemplateProposals(self.learner, "suggest")
        store = LearnedStore(None, self.learner)

        def wants_key(connection: ASGIConnection[Any, Any, Any, Any], _: BaseRouteHandler) -> None:
            if self._key is not None and connection.headers.get("authorization") != f"Bearer {self._key}":
                raise NotAuthorizedException("Send the admin key.")

        def refused(_: Any, error: NotAuthorizedException) -> Response[Any]:
            return Response({"error": {"message": error.detail}}, status_code=401)

        app = Litestar(
            [
                page,
                asset,
                Router(
                    "/",
                    route_handlers=[
                        events,
                        self._switch(),
                        self._judge(),
                        self._misses(),
                        list_proposals,
                        switch_proposal,
                    ],
                    guards=[wants_key],
                ),
            ],
            dependencies={
                "feed": Provide(lambda: feed, sync_to_thread=False),
                "proposals": Provide(lambda: proposals, sync_to_thread=False),
                "learned": Provide(lambda: store, sync_to_thread=False),
            },
            exception_handlers={NotAuthorizedException: refused},
        )
        self._server = uvicorn.Server(uvicorn.Config(app, port=self.port, log_level="error"))
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        deadline = time.monotonic() + 60
        while not self._server.started:
            assert time.monotonic() < deadline, "the server did not start"
            time.sleep(0.01)

    def stop(self) -> None:
        """As a crash would, streams included."""
        if self._server is not None and self._thread is not None:
            self._server.should_exit = self._server.force_exit = True
            self._thread.join(10)
            self._server = None

    def _switch(self) -> Any:
        """The operator's route over no replicas."""

        @put("/admin/policy")
        async def switch(request: Request[Any, Any, Any]) -> dict[str, Any]:
            change = PolicyChange(time.time(), self.eviction.policy, (await request.json())["policy"])
            self.eviction.changes.append(change)
            self.eviction.policy = change.after
            return {"policy": change.after, "replicas": {}}

        return switch

    def _misses(self) -> Any:
        """The operator's route without a gateway, whose tokens would be words."""

        @get("/admin/misses", sync_to_thread=False)
        def misses() -> MissReport:
            return miss_report(self.statistics.window(15), 15, self.examples, _words, show_text=False)

        return misses

    def quality_report(self) -> QualityReport:
        return QualityReport(self.quality.report(), ShadowStatus(3, 4096, 12, 1, 0, 0))

    def _judge(self) -> Any:
        """The operator's other route."""

        @post("/admin/quality/{template:str}", status_code=200)
        async def judge(request: Request[Any, Any, Any], template: FromPath[str]) -> dict[str, Any]:
            body = await request.json()
            return {"reordering": self.quality.switch(template, reordering=body["reordering"]).reordering}

        return judge

    def record(self, count: int, **changes: Any) -> None:
        fields: dict[str, Any] = {"template": "support", "cached_tokens": 50, "finished_at": time.time()} | changes
        for _ in range(count):
            self.statistics.record(
                RequestRecord(
                    tenant="default",
                    replica="engine-0",
                    status="ok",
                    prompt_tokens=100,
                    completion_tokens=7,
                    ttft_s=0.25,
                    prefill_s=0.5,
                    saved_prefill_s=0.5,
                    **fields,
                )
            )


@pytest.fixture
def site() -> Iterator[Site]:
    site = Site()
    site.start()
    yield site
    site.stop()


def test_figures_arrive_and_move_without_a_reload(site: Site, browser: Any) -> None:
    site.record(4)
    with opened(browser, site.url) as tab:
        headline = tab.get_by_role("region", name="Headline figures, last 15 minutes")
        headline.get_by_text("50.0%", exact=True).wait_for()
        headline.get_by_text("200 of 400 prompt tokens").wait_for()
        tab.get_by_role("rowheader", name="default").wait_for()
        assert tab.locator("canvas").count() == 4
        site.record(4, cached_tokens=100)
        headline.get_by_text("75.0%", exact=True).wait_for()
        assert tab.locator("header").get_by_role("status").inner_text() == "Live"


def test_an_empty_gateway_says_what_to_do(site: Site, browser: Any) -> None:
    with opened(browser, site.url) as tab:
        tab.get_by_role("heading", name="Waiting for the first request").wait_for()
        assert f"curl http://127.0.0.1:{site.port}/v1/chat/completions" in tab.locator("pre").inner_text()
        site.record(1)
        tab.get_by_role("region", name="Headline figures, last 15 minutes").wait_for()
        assert not tab.get_by_role("heading", name="Waiting for the first request").is_visible()


def test_the_window_is_chosen_by_keyboard_and_remembered(site: Site, browser: Any) -> None:
    site.record(2, finished_at=time.time() - 1800)
    with opened(browser, site.url) as tab:
        headline = tab.get_by_role("region", name="Headline figures, last 15 minutes")
        headline.get_by_text("none in this window").wait_for()
        tab.get_by_role("radio", name="15 min").focus()
        tab.keyboard.press("ArrowRight")
        tab.get_by_role("region", name="Headline figures, last hour").get_by_text("50.0%", exact=True).wait_for()
        tab.reload()
        tab.get_by_role("region", name="Headline figures, last hour").wait_for()


def test_a_lost_gateway_is_told_and_found_again(site: Site, browser: Any) -> None:
    site.record(1)
    with opened(browser, site.url) as tab:
        tab.get_by_role("region", name="Headline figures, last 15 minutes").wait_for()
        site.stop()
        tab.get_by_text("Disconnected since").wait_for()
        assert tab.get_by_text("The figures are those of").is_visible()
        site.record(1)
        site.start()
        tab.get_by_text("Live", exact=True).wait_for()
        tab.get_by_text("100 of 200 prompt tokens").wait_for()


def test_the_admin_key_is_asked_for_and_kept_in_the_tab_only(browser: Any) -> None:
    site = Site(key="letmein")
    site.start()
    site.record(1)
    try:
        with opened(browser, site.url) as tab:
            field = tab.get_by_label("Admin key")
            field.fill("wrong")
            field.press("Enter")
            tab.get_by_text("That key was not accepted.").wait_for()
            field.fill("letmein")
            field.press("Enter")
            tab.get_by_role("region", name="Headline figures, last 15 minutes").wait_for()
            tab.reload()
            tab.get_by_role("region", name="Headline figures, last 15 minutes").wait_for()
            assert tab.evaluate("JSON.stringify(localStorage)").find("letmein") == -1
            assert "letmein" not in tab.url
    finally:
        site.stop()


def test_every_view_is_reached_by_keyboard_and_fits_a_phone(site: Site, browser: Any) -> None:
    site.record(1, template="a-template-with-quite-a-long-name-of-its-own")
    with opened(browser, site.url, width=390, height=844) as tab:
        tab.get_by_role("navigation", name="Views").wait_for()
        tab.keyboard.press("Tab")
        tab.keyboard.press("Enter")
        assert tab.evaluate("document.activeElement.tagName") == "MAIN"
        views = tab.get_by_role("navigation", name="Views").get_by_role("link")
        tab.get_by_role("region", name="Headline figures, last 15 minutes").wait_for()
        names = views.all_inner_texts()
        assert names[0] == "Overview"
        assert len(names) >= 6
        views.first.focus()
        for name in names:
            tab.keyboard.press("Enter")
            tab.get_by_role("link", name=name).and_(tab.locator("[aria-current=page]")).wait_for()
            tab.locator("main > *:not(.notices)").first.wait_for()
            assert tab.evaluate("document.documentElement.scrollWidth") == 390, name
            tab.keyboard.press("Tab")
        tab.go_back()
        tab.get_by_role("link", name=names[-2]).and_(tab.locator("[aria-current=page]")).wait_for()


def test_a_chart_is_told_in_figures_and_given_as_a_file(site: Site, browser: Any) -> None:
    site.record(4)
    with opened(browser, site.url) as tab:
        chart = tab.get_by_role("figure").filter(has_text="Token hit rate")
        chart.get_by_text("Figures of Token hit rate").click()
        chart.get_by_role("region", name="Figures of Token hit rate").get_by_text("50.0%").first.wait_for()
        with tab.expect_download() as download:
            chart.get_by_role("link", name="Download headstart-token-hit-rate.csv").click()
        header, *rows = download.value.path().read_text().splitlines()
        assert header == "time,hit rate"
        assert [float(value) for _, value in (row.split(",") for row in rows) if value][-1] == 0.5


def test_a_chosen_theme_is_kept(site: Site, browser: Any) -> None:
    with opened(browser, site.url) as tab:
        tab.get_by_role("button", name="Theme: as the system").click()
        tab.get_by_role("button", name="Theme: light").click()
        tab.get_by_role("button", name="Theme: dark").wait_for()
        tab.reload()
        assert tab.evaluate("document.documentElement.dataset.theme") == "dark"
        assert tab.evaluate(GROUND) == "rgb(13, 17, 22)"


def test_without_a_choice_the_theme_follows_the_system_charts_included(site: Site, browser: Any) -> None:
    site.record(4)
    with opened(browser, site.url) as tab:
        canvas = tab.get_by_role("figure").filter(has_text="Token hit rate").locator("canvas")
        drawn = canvas.evaluate("canvas => canvas.toDataURL()")
        assert tab.evaluate(GROUND) == "rgb(244, 246, 248)"
        tab.emulate_media(color_scheme="dark")
        tab.wait_for_function(f"() => {GROUND} === 'rgb(13, 17, 22)'")
        changed = "([canvas, before]) => canvas.toDataURL() !== before"
        tab.wait_for_function(changed, arg=[canvas.element_handle(), drawn])


def test_the_policy_is_switched_where_its_alternatives_are_shown(site: Site, browser: Any) -> None:
    site.record(4)
    site.whatif.on_ready(_replica("engine-0"), _info())
    rng = random.Random(1)
    for number in range(600):
        name = rng.randrange(5) if rng.random() < 0.5 else 100 + number
        keys = [hashlib.blake2b(b"%d %d" % (name, i), digest_size=16).digest() for i in range(20)]
        site.whatif.observe("engine-0", keys, 321, 0)
    with opened(browser, f"{site.url}#eviction") as tab:
        section = tab.get_by_role("region", name="Eviction what if, last hour").first
        section.get_by_text("Switch from lru to s3fifo").wait_for()
        section.get_by_role("columnheader", name="64 blocks (now)").wait_for()
        curves = tab.get_by_role("img", name=re.compile("^Hit rate by pool size by blocks in all pools; now: "))
        assert "lru (in force)" in (said := curves.get_attribute("aria-label"))
        assert said.endswith("now: lru, 64 blocks")
        assert section.get_by_role("button", name="Switch").is_disabled()
        section.get_by_label("Policy").select_option("s3fifo")
        section.get_by_role("button", name="Switch").click()
        section.get_by_text("Now s3fifo.").wait_for()
        section.get_by_role("rowheader", name="s3fifo (in force)").wait_for()
        tab.get_by_role("link", name="Overview").click()
        tab.get_by_role("img", name=re.compile("lru → s3fifo")).wait_for()


def _teach(site: Site) -> None:
    """Two templates: fields of two shapes, and a variant that stays where it is."""
    prompts = (
        "You are the help desk bot of Initech. Today is {now}. User: {user}. Answer by the documents, <b>{style}</b>.",
        "You compare two answers and name the better one. Trace: {trace}. Never tell which one came first.",
    )
    for number in range(40):
        user = f"{('Oz', 'Lux')[number % 2]} {number:03}"
        values = {"now": f"2026-03-02 08:00:{number:02}", "user": user, "trace": f"{number:032x}"}
        for prompt in prompts:
            text = prompt.format(style=("at length", "briefly")[number % 2], **values)
            site.learner.observe(Source("default", "m"), text)


def test_the_cause_of_a_miss_is_named_with_the_place_and_without_its_text(site: Site, browser: Any) -> None:
    site.record(2, missed={"volatile": 40, "never_seen": 10})
    site.examples["volatile", "support"] = KeptExample(time.time(), "system", 40, 7, (0,), (1,), (2,))
    with opened(browser, f"{site.url}#misses") as tab:
        causes = tab.get_by_role("region", name="Causes last 15 minutes; 100 of 200 prompt tokens missed").first
        row = causes.get_by_role("row").filter(has_text="Volatile field")
        row.get_by_role("cell", name="80.0%").wait_for()
        assert row.get_by_role("cell").all_inner_texts()[:3] == ["2", "80", "80.0%"]
        place = tab.get_by_role("article").filter(has_text="Volatile field")
        place.get_by_text("system, at token 7").wait_for()
        assert place.locator("mark").all_inner_texts() == ["00:00", "00:00"]
        assert "09:26" not in tab.locator("main").inner_text()
        tab.get_by_role("img", name=re.compile("Missed tokens over time; latest: .*Volatile field 80")).wait_for()


def test_it_is_shown_how_long_before_evicted_tokens_had_been_held_and_they_are_all_there(
    site: Site, browser: Any
) -> None:
    site.record(1, missed={"evicted": 50}, evicted_ages={3: 20, 9: 16})
    with opened(browser, f"{site.url}#misses") as tab:
        ages = tab.get_by_role("figure").filter(has_text="Evicted tokens asked for again")
        ages.wait_for()
        legend = ages.get_by_role("listitem").all_inner_texts()
        assert [line.split() for line in legend] == [
            ["up", "to", "17", "min", "16"],
            ["up", "to", "16", "s", "20"],
            ["not", "known", "14"],
        ]


@pytest.mark.parametrize("width", [1440, 390])
def test_found_fields_are_shown_with_their_evidence_and_switched(site: Site, browser: Any, width: int) -> None:
    site.record(4)
    with opened(browser, f"{site.url}#templates", width=width) as tab:
        section = tab.get_by_role("region", name="Volatile fields found in system prompts of no registered template")
        section.get_by_text("None in 0 prompts").wait_for()
        _teach(site)
        tab.reload()
        proposal = section.get_by_role("article").filter(has_text="help desk bot")
        proposal.get_by_text("time date-time: about").wait_for()
        assert proposal.locator("mark").all_inner_texts() == ["time", "user", "…"]
        assert "<b>" in proposal.locator("pre").inner_text()
        assert "2026-03-02" not in tab.locator("main").inner_text()
        proposal.get_by_role("button", name="Move the fields").click()
        section.get_by_role("status").get_by_text("moved from now on.").wait_for()
        proposal.get_by_text("moved", exact=True).wait_for()
        proposal.get_by_role("button", name="Leave it alone").click()
        proposal.get_by_text("left alone", exact=True).wait_for()
        assert {site.learner.decision(template.id) for _, template in site.learner.templates()} == {"off", None}
        assert tab.evaluate("document.documentElement.scrollWidth") == width


@pytest.mark.parametrize("width", [1440, 390])
def test_a_template_that_was_switched_off_says_why_and_is_switched_on_again(
    site: Site, browser: Any, width: int
) -> None:
    site.record(4)
    site.quality.judge("faq", Pair(0.0))
    for _ in range(30):
        site.quality.judge("support", Pair(0.9, 0.5, 1.0))
    with opened(browser, f"{site.url}#quality", width=width) as tab:
        judged = tab.get_by_role("article", name="Quality of support")
        judged.get_by_text("switched off, outside its bound").wait_for()
        judged.get_by_text(
            re.compile(r"Reordering was switched off: .* over \d+ compared requests, where 0\.05 is allowed\.")
        ).wait_for()
        judged.get_by_text("Gold answers lost").wait_for()
        tab.get_by_role("article", name="Quality of faq").get_by_text("reordered, undecided").wait_for()
        assert tab.evaluate("document.documentElement.scrollWidth") == width
        judged.get_by_role("button", name="Switch on again").click()
        judged.get_by_text("Reordered again; a new test has begun.").wait_for()
        judged.get_by_text("reordered, undecided").wait_for()
