"""The page over a live run: a gateway in a process of its own answers a RAG log while a browser watches.

The log is made here, with causes planted in it. ``HEADSTART_DASHBOARD_REQUESTS=500`` sends so many requests of the
reference log as well, as applications would send them.
"""

from __future__ import annotations

import datetime
import http.client
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from .conftest import opened

ROOT = Path(__file__).resolve().parents[3]
LOG = (ROOT / os.environ.get("HEADSTART_REFERENCE_DATA", "../shared/data")).resolve() / "rag_xquad_en"
REQUESTS = int(os.environ.get("HEADSTART_DASHBOARD_REQUESTS", "0"))
TIMEOUT_S = 60.0

GATEWAY = textwrap.dedent("""
    import sys
    from pathlib import Path
    from tokenizers import Tokenizer
    from gateway.config import Config, RedisConfig, ServerConfig, TemplateConfig
    from gateway.logs import configure_logging
    from gateway.replicas.scripted import ScriptedReplica, scripted_info
    from gateway.server import run, serve
    from gateway.service import Gateway

    configure_logging("error")
    folder = Path(sys.argv[1])
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    async def main():
        info = scripted_info(tokenizer, model="scripted", num_blocks=4096, max_model_len=8192)
        config = Config(
            server=ServerConfig(port=int(sys.argv[2])),
            redis=RedisConfig(url="redis://127.0.0.1:1/0"),  # refuses at once
            templates={"support": TemplateConfig("You are the support desk of a library. Answer in one sentence.")},
        )
        replica = ScriptedReplica("engine-0", tokenizer, info)
        await serve(Gateway(config, model="scripted", folder=folder, replicas=[replica]))

    run(main())
""")

AS_WRITTEN = {"order": "preserve"}
DATED = (
    "You are the help desk of the city library. It is {now} now. Answer the reader by the passages alone, in one "
    "sentence, and name the passage that the answer stands in. Say so where none of them has it."
)
TOPICS = ("borrowing", "returning", "reserving", "reading rooms", "fees", "membership", "lost books", "opening hours")
PASSAGES = [
    {"id": f"p{number}", "text": f"On {topic}: " + " ".join(f"rule {number}.{line} of {topic}." for line in range(9))}
    for number, topic in enumerate(TOPICS)
]


def _body(system: str, passages: Sequence[dict[str, str]], question: str) -> dict[str, Any]:
    return {
        "model": "scripted",
        "max_tokens": 2,
        "messages": [{"role": "system", "content": system}, {"role": "user", "content": question}],
        "documents": list(passages),
        "headstart": AS_WRITTEN,
    }


def dated(count: int) -> list[dict[str, Any]]:
    """Requests whose system prompt has the time in its first line; passages of a topic come in one order."""
    start = datetime.datetime(2026, 3, 2, 8, 0, 0)
    rng = random.Random(5)
    bodies = []
    for number in range(count):
        first = rng.randrange(0, len(PASSAGES), 4)
        now = start + datetime.timedelta(seconds=37 * number)
        bodies.append(_body(DATED.format(now=now), PASSAGES[first : first + 4], f"Question {number}?"))
    return bodies


def shuffled(count: int) -> list[dict[str, Any]]:
    """Requests with the same passages, each time in another order."""
    rng = random.Random(6)
    return [_body("You answer members.", rng.sample(PASSAGES, 6), f"Question {number}?") for number in range(count)]


class LiveGateway:
    """A gateway in a process of its own, at one address however often it is started."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port: int = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self._port}/dashboard"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Return when it serves."""
        self._process = subprocess.Popen(
            [sys.executable, "-c", GATEWAY, str(self._folder), str(self._port)],
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            try:
                if self._exchange("GET", "/ready", None)[0] == 200:
                    return
            except OSError:
                pass
            assert self._process.poll() is None, "the gateway has ended"
            assert time.monotonic() < deadline, "the gateway did not start"
            time.sleep(0.05)

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Return when it has ended."""
        if self._process is not None:
            self._process.send_signal(number)
            self._process.wait(TIMEOUT_S)
            self._process = None

    def renew(self) -> None:
        """Let it have nothing counted, by a new start where that is needed."""
        if self.ask("GET", "/admin/stats?minutes=0")["totals"]["requests"] > 0:
            self.stop()
            self.start()

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        """What it answers, which must be good news."""
        status, answer = self._exchange(method, path, body)
        assert status in (200, 201), answer
        return json.loads(answer)

    def answer(self, bodies: Sequence[dict[str, Any]]) -> None:
        """Let it answer chat requests, one after the other."""
        for body in bodies:
            self.ask("POST", "/v1/chat/completions", body)

    def _exchange(self, method: str, path: str, body: Any) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=TIMEOUT_S)
        try:
            data = None if body is None else json.dumps(body)
            connection.request(method, path, data, {"content-type": "application/json"})
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()


@pytest.fixture(scope="module")
def gateway(browser: Any, model_folder: Callable[[str], Path]) -> Iterator[LiveGateway]:
    gateway = LiveGateway(model_folder("chatml"))
    gateway.start()
    yield gateway
    gateway.stop()


def _moves(tab: Any, gateway: LiveGateway, first: list[dict[str, Any]], rest: list[dict[str, Any]]) -> None:
    """All charts of the overview are drawn anew, and told anew, while requests are answered."""
    gateway.answer(first)
    tab.get_by_role("region", name="Headline figures, last 15 minutes").wait_for()
    requests = tab.locator(".figure").filter(has_text="Requests").locator(".value")
    requests.get_by_text(f"{len(first):,}", exact=True).wait_for()
    charts = tab.get_by_role("figure")
    assert charts.count() == 4
    canvases = [chart.locator("canvas") for chart in charts.all()]
    pictures = [canvas.evaluate("canvas => canvas.toDataURL()") for canvas in canvases]
    told = [chart.get_by_role("img").get_attribute("aria-label") for chart in charts.all()]
    gateway.answer(rest)
    requests.get_by_text(f"{len(first) + len(rest):,}", exact=True).wait_for()
    for canvas, picture in zip(canvases, pictures, strict=True):
        changed = "([canvas, before]) => canvas.toDataURL() !== before"
        tab.wait_for_function(changed, arg=[canvas.element_handle(), picture])
    now = [chart.get_by_role("img").get_attribute("aria-label") for chart in charts.all()]
    assert [before != after for before, after in zip(told, now, strict=True)][:2] == [True, True]
    assert now[3] != told[3]  # the time to a first token may stay what it was


def _view(tab: Any, name: str) -> None:
    tab.get_by_role("navigation", name="Views").get_by_role("link", name=name).click()


def _causes(tab: Any) -> dict[str, int]:
    """The causes on the page, with their tokens."""
    causes = {}
    for row in tab.locator("table.causes tbody tr").all():
        name, explained = row.get_by_role("rowheader"), row.locator("small")
        tokens = row.get_by_role("cell").nth(1).inner_text()
        causes[name.inner_text().removesuffix(explained.inner_text()).strip()] = int(tokens.replace(",", ""))
    return causes


def test_charts_move_and_planted_causes_are_named_over_a_live_run(gateway: LiveGateway, browser: Any) -> None:
    gateway.renew()
    with opened(browser, gateway.url) as tab:
        tab.get_by_role("heading", name="Waiting for the first request").wait_for()
        bodies = dated(40)
        _moves(tab, gateway, bodies[:8], [*bodies[8:], *bodies[:8]])
        _view(tab, "Misses")
        tab.get_by_role("rowheader", name="Volatile field").wait_for()
        causes = _causes(tab)
        assert causes["Volatile field"] == max(causes.values())
        assert "Document order" not in causes
        place = tab.get_by_role("article").filter(has_text="Volatile field")
        place.get_by_text("value of time, at token").wait_for()
        assert "00:00" in place.locator("mark").first.inner_text()
        assert "2026" not in tab.locator("main").inner_text()
        gateway.answer(shuffled(20))
        tab.get_by_role("rowheader", name="Document order").wait_for()
        assert _causes(tab)["Volatile field"] >= causes["Volatile field"]
        assert gateway.ask("GET", "/admin/misses?window=15m")["causes"]["document_order"]["tokens"] > 1000


def test_what_the_page_switches_is_switched_in_the_gateway(gateway: LiveGateway, browser: Any) -> None:
    gateway.answer(shuffled(3))
    with opened(browser, f"{gateway.url}#eviction") as tab:
        tab.get_by_role("img", name=re.compile("now: lru, 4,096 blocks")).wait_for()
        tab.get_by_label("Policy").select_option("s3fifo")
        tab.get_by_role("button", name="Switch").click()
        tab.get_by_text("Now s3fifo.").wait_for()
        report = gateway.ask("GET", "/admin/policy")
        assert (report["policy"], report["changes"][-1]["after"]) == ("s3fifo", "s3fifo")
        tab.get_by_role("img", name=re.compile("now: s3fifo, 4,096 blocks")).wait_for()
    gateway.ask("PUT", "/admin/policy", {"policy": "lru"})


def test_a_replica_is_drained_and_resumed_where_its_pool_is_shown(gateway: LiveGateway, browser: Any) -> None:
    gateway.answer(shuffled(3))

    def draining() -> bool:
        (replica,) = gateway.ask("GET", "/admin/replicas")["replicas"]
        return bool(replica["draining"])

    with opened(browser, f"{gateway.url}#replicas") as tab:
        pool = re.compile(r"^Block pool of engine-0: 0 used, [\d,]+ cached, [\d,]+ free of 4,096 blocks$")
        tab.get_by_role("img", name=pool).wait_for()
        trust = tab.get_by_role("region", name=re.compile("^Index trust")).first.get_by_role("row").nth(1)
        assert trust.get_by_role("cell").first.inner_text() == "yes"
        tab.get_by_role("button", name="Drain engine-0").click()
        tab.get_by_text("engine-0 gets no new requests.").wait_for()
        assert draining()
        tab.get_by_role("button", name="Resume engine-0").click()
        tab.get_by_text("engine-0 gets requests again.").wait_for()
        assert not draining()


def test_a_pin_is_shown_in_the_pool_and_given_up(gateway: LiveGateway, browser: Any) -> None:
    pin = gateway.ask("POST", "/admin/pins", {"template": "support"})
    gateway.answer([_body("You answer members.", PASSAGES[:1], "Is it open?")])
    with opened(browser, f"{gateway.url}#replicas") as tab:
        tab.get_by_role("img", name=re.compile("Block pool of engine-0: .* of them pinned")).wait_for()
        _view(tab, "Eviction")
        tab.get_by_role("article", name=f"Pin {pin['id']}").get_by_text("resident").wait_for()
        tab.get_by_role("button", name="Unpin support").click()
        tab.get_by_text(f"{pin['id']} is pinned no more.").wait_for()
        assert gateway.ask("GET", "/admin/pins")["pins"] == []
        tab.get_by_text("Nothing is pinned.").wait_for()


def test_a_gateway_that_was_killed_is_found_again_and_every_empty_view_says_what_to_do(
    gateway: LiveGateway, browser: Any
) -> None:
    gateway.answer(shuffled(1))
    with opened(browser, gateway.url) as tab:
        tab.get_by_role("region", name="Headline figures, last 15 minutes").wait_for()
        gateway.stop(signal.SIGKILL)
        tab.get_by_text("Disconnected since").wait_for()
        gateway.start()
        tab.get_by_text("Live", exact=True).wait_for()
        tab.get_by_role("heading", name="Waiting for the first request").wait_for()
        for view, sentence in {
            "Misses": "No request in this window: choose a longer one, or send some",
            "Templates": "No request in this window: choose a longer one, or name your system prompts",
            "Documents": "send the retrieved passages as documents in the body",
            "Replicas": "0 used, 0 cached, 4,096 free of 4,096 blocks",
            "Eviction": "Send requests: ghost caches follow them",
            "Quality": "Nothing was measured yet: [quality] in the configuration says",
            "Requests": "send one, and it shows within five seconds.",
        }.items():
            _view(tab, view)
            tab.get_by_text(sentence).wait_for()
        gateway.answer(shuffled(2))
        _view(tab, "Overview")
        tab.get_by_role("region", name="Headline figures, last 15 minutes").wait_for()


@pytest.mark.skipif(not LOG.is_dir(), reason="reference data is absent; HEADSTART_REFERENCE_DATA names its folder")
@pytest.mark.skipif(REQUESTS < 2, reason="the long form: HEADSTART_DASHBOARD_REQUESTS says how many requests")
@pytest.mark.timeout(3600)
def test_the_reference_log_is_followed_and_its_causes_are_named(
    browser: Any, model_folder: Callable[[str], Path]
) -> None:
    from benchmarks.reference_log import read_log

    requests, _ = read_log(LOG, REQUESTS, 5)
    own = {"model": "scripted", "max_tokens": 2, "headstart": AS_WRITTEN}
    bodies = [json.loads(msgspec.json.encode(request)) | own for request in requests]
    gateway = LiveGateway(model_folder("chatml"))
    gateway.start()
    try:
        with opened(browser, gateway.url) as tab:
            _moves(tab, gateway, bodies[: REQUESTS // 2], bodies[REQUESTS // 2 :])
            _view(tab, "Misses")
            tab.get_by_role("rowheader", name="Volatile field").wait_for()
            causes = _causes(tab)
            report = gateway.ask("GET", "/admin/misses?window=15m")
            assert sum(causes.values()) == report["missed_tokens"]
            assert causes["Volatile field"] == report["causes"]["volatile"]["tokens"]
    finally:
        gateway.stop()
