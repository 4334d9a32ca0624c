"""Over real HTTP: Valkey, ``/metrics``, ``/admin/stats`` and the dashboard equal the sum of the usage fields sent."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tokenizers import Tokenizer

from gateway.config import Config, RedisConfig, ServerConfig
from gateway.replicas.scripted import ScriptedReplica, scripted_info
from gateway.server import serving
from gateway.service import Gateway

Eventually = Callable[[Callable[[], bool]], Any]
MARKER = "zebra-7731"
COUNTS = ("prompt_tokens", "cached_prompt_tokens", "completion_tokens")
TABLES = ("templates", "tenants", "replicas", "models")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Usage:
    """Sums of the usage fields a client was sent."""

    def __init__(self) -> None:
        self.requests = 0
        self.sums = dict.fromkeys(COUNTS, 0)

    def add(self, usage: dict[str, Any]) -> None:
        self.requests += 1
        self.sums["prompt_tokens"] += usage["prompt_tokens"]
        self.sums["cached_prompt_tokens"] += usage["prompt_tokens_details"]["cached_tokens"]
        self.sums["completion_tokens"] += usage["completion_tokens"]


async def send(http: aiohttp.ClientSession, url: str, number: int, usage: Usage, max_tokens: int = 5) -> None:
    """One chat request of several that share a prefix, every other one streamed."""
    stream = number % 2 == 1
    body: dict[str, Any] = {
        "model": "scripted",
        "max_tokens": max_tokens,
        "documents": [{"id": f"d{number % 3}", "text": "Said once. " * 8}],
        "temperature": 0,
        "ignore_eos": True,
        "messages": [
            {"role": "system", "content": f"The same rules for all, {MARKER}. " * 12},
            {"role": "user", "content": f"{number}"},
        ],
        "stream": stream,
    }
    if stream:
        body["stream_options"] = {"include_usage": True}
    async with http.post(f"{url}/v1/chat/completions", json=body) as response:
        assert response.status == 200, await response.text()
        if not stream:
            usage.add((await response.json())["usage"])
            return
        events = [line[6:] for line in (await response.text()).split("\n\n") if line.startswith("data: {")]
        usage.add(json.loads(events[-1])["usage"])


def in_valkey(valkey: Any, index: str = "epochs", rows: str = "totals") -> dict[str, float]:
    """The sums of all rows, and the missed tokens of all causes."""
    sums = dict.fromkeys((*COUNTS, "requests", "preemptions", "evictions", "missed_tokens"), 0)
    with valkey.client() as client:
        for member in client.zrange(f"headstart:{index}", 0, -1):
            for field, value in client.hgetall(f"headstart:{rows}:{member.decode()}").items():
                row = json.loads(value) if field != b"flush" else {}
                for name in sums:
                    sums[name] += row.get(name, 0)
                sums["missed_tokens"] += sum(tokens for _, tokens, _ in row.get("missed", {}).values())
    return sums


def everything_in_valkey(valkey: Any) -> bytes:
    dump = b""
    with valkey.client() as client:
        read = {b"hash": client.hgetall, b"zset": lambda key: client.zrange(key, 0, -1), b"string": client.get}
        for key in client.scan_iter():
            dump += key + repr(read[client.type(key)](key)).encode()
    return dump


async def in_metrics(http: aiohttp.ClientSession, url: str) -> dict[str, float]:
    async with http.get(f"{url}/metrics") as response:
        families = text_string_to_metric_families(await response.text())
    samples = {}
    for family in families:
        for sample in family.samples:
            samples[sample.name] = samples.get(sample.name, 0) + sample.value
    assert samples["vllm:prefix_cache_queries_total"] == samples["headstart_prompt_tokens_total"]
    assert samples["vllm:prefix_cache_hits_total"] == samples["headstart_cached_prompt_tokens_total"]
    found = {name: samples[f"headstart_{name}_total"] for name in (*COUNTS, "requests", "preemptions", "evictions")}
    return found | {"missed_tokens": samples["headstart_missed_prompt_tokens_total"]}


def check_snapshot(stats: dict[str, Any], expected: dict[str, float]) -> None:
    """All its sums are as expected; what an engine counts by itself has no template, tenant or model."""
    assert {name: stats["totals"][name] for name in expected} == expected
    for table in TABLES:
        names = expected if table == "replicas" else expected.keys() - {"preemptions", "evictions"}
        sums = {name: sum(row[name] for row in stats[table].values()) for name in names}
        assert sums == {name: expected[name] for name in names}
        causes = [lost["tokens"] for row in stats[table].values() for lost in row["missed"].values()]
        assert sum(causes) == expected["missed_tokens"]


async def check_json(http: aiohttp.ClientSession, url: str, window: str, expected: dict[str, float]) -> None:
    """What ``/admin/stats`` and ``/admin/misses`` say of a window is as expected."""
    async with http.get(f"{url}/admin/stats", params={"window": window}) as response:
        stats = await response.json()
    check_snapshot(stats, expected)
    assert {name: sum(row[name] for row in stats["minutes"]) for name in expected} == expected
    async with http.get(f"{url}/admin/misses", params={"window": window}) as response:
        misses = await response.json()
    assert misses["missed_tokens"] == expected["missed_tokens"]
    assert sum(row["tokens"] for row in misses["rows"]) == expected["missed_tokens"]


async def check_feed(http: aiohttp.ClientSession, url: str, window: str, expected: dict[str, float]) -> None:
    """What the dashboard is told of a window, its figures and the points of its charts, is as expected."""
    async with http.get(f"{url}/dashboard/events", params={"window": window}) as response:
        event = await response.content.readuntil(b"\n\n")
    update = json.loads(event.partition(b"data: ")[2])
    assert update["ever"] == expected["requests"]
    check_snapshot(update["snapshot"], expected)
    series = update["series"]
    for name in ("requests", "prompt_tokens", "cached_prompt_tokens"):
        assert sum(series[name]) == expected[name]
    assert sum(map(sum, series["missed"].values())) == expected["missed_tokens"]


async def check_page(url: str, expected: dict[str, float]) -> None:
    """What stands on the dashboard in a browser is as expected; nothing where there is no browser."""
    if CHROMIUM is None:
        return
    playwright = pytest.importorskip("playwright.async_api", reason="playwright is not installed")
    async with playwright.async_playwright() as running:
        browser = await running.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        tab = await browser.new_page()
        tab.set_default_timeout(10_000)
        await tab.goto(f"{url}/dashboard")
        said = {name: f"{value:,}" for name, value in expected.items()}
        headline = tab.get_by_role("region", name="Headline figures, last 15 minutes")
        await headline.get_by_text(
            f"{said['cached_prompt_tokens']} of {said['prompt_tokens']} prompt tokens"
        ).wait_for()
        await headline.get_by_text(said["requests"], exact=True).wait_for()
        await headline.get_by_text(f"{said['completion_tokens']} tokens generated").wait_for()
        tables = await tab.locator("section.table table").evaluate_all(ROWS)
        await tab.goto(f"{url}/dashboard#templates")
        await tab.get_by_role("rowheader", name="unregistered").wait_for()
        tables += await tab.locator("section.table table.by-template").evaluate_all(ROWS)
        assert [rows[0][0] for rows in tables] == ["Tenant", "Template"]
        for rows in tables:
            for column, name in (("Requests", "requests"), ("Prompt tokens", "prompt_tokens")):
                place = rows[0].index(column)
                assert sum(int(row[place].replace(",", "")) for row in rows[1:]) == expected[name]
        await browser.close()


ROWS = "tables => tables.map(table => [...table.rows].map(row => [...row.cells].map(cell => cell.innerText)))"


def test_every_account_agrees_with_what_clients_were_told_also_after_retries_preemptions_and_lost_valkeys(
    valkey: Any, eventually: Eventually, model_folder: Callable[[str], Path]
) -> None:
    async def scenario() -> None:
        folder = model_folder("chatml")
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        replicas = [
            ScriptedReplica(f"engine-{i}", tokenizer, scripted_info(tokenizer, num_blocks=80, root=str(folder)))
            for i in range(2)
        ]
        config = Config(
            server=ServerConfig(port=0, drain_grace_s=5), redis=RedisConfig(url=valkey.url, flush_interval_s=0.02)
        )
        gateway = Gateway(config, model="scripted", folder=folder, replicas=replicas)
        usage = Usage()
        async with serving(gateway) as url, aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as http:
            await gateway.wait_ready(10)
            for outage in range(3):
                numbers = range(outage * 10, outage * 10 + 10)
                await asyncio.gather(*[send(http, url, number, usage, max_tokens=150) for number in numbers])
                if outage < 2:
                    valkey.kill()
                    await send(http, url, 1000 + outage, usage)
                    valkey.start()
            for replica in replicas:  # a request that is sent again counts once
                replica.hold()
            known = sum(len(replica.submitted) for replica in replicas)
            again = [asyncio.ensure_future(send(http, url, number, usage)) for number in range(4)]
            await eventually(lambda: sum(len(replica.submitted) for replica in replicas) == known + 4)
            for replica in replicas:
                replica.lose()
                replica.recover()
                replica.let_go()
            await asyncio.gather(*again)
            assert sum(len(replica.submitted) for replica in replicas) > known + 4
            expected = usage.sums | {"requests": usage.requests}
            expected["missed_tokens"] = expected["prompt_tokens"] - expected["cached_prompt_tokens"]
            assert expected["requests"] == 36
            assert expected["cached_prompt_tokens"] > 0
            totals = gateway.statistics.snapshot().totals
            assert totals.preemptions > 0
            assert totals.evictions > 0
            expected |= {"preemptions": totals.preemptions, "evictions": totals.evictions}
            for index, rows in (("epochs", "totals"), ("minutes", "minute"), ("hours", "hour")):
                await eventually(lambda index=index, rows=rows: in_valkey(valkey, index, rows) == expected)
            assert await in_metrics(http, url) == expected
            for window in ("all", "1h", "24h", "30d"):
                await check_json(http, url, window, expected)
            for window in ("15m", "1h", "24h", "all"):
                await check_feed(http, url, window, expected)
            await check_page(url, expected)
            laid_out = gateway.statistics.documents.report(None)
            assert sum(row.requests for row in laid_out.rows) == 36
        assert in_valkey(valkey) == expected

    asyncio.run(scenario())


def test_n5_no_text_of_a_prompt_reaches_valkey_metrics_statistics_or_the_dashboard(
    valkey: Any, eventually: Eventually, model_folder: Callable[[str], Path]
) -> None:
    async def scenario() -> None:
        folder = model_folder("chatml")
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        replica = ScriptedReplica("engine-0", tokenizer, scripted_info(tokenizer, root=str(folder)))
        config = Config(
            server=ServerConfig(port=0, drain_grace_s=5), redis=RedisConfig(url=valkey.url, flush_interval_s=0.02)
        )
        gateway = Gateway(config, model="scripted", folder=folder, replicas=[replica])
        async with serving(gateway) as url, aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as http:
            await gateway.wait_ready(10)
            await send(http, url, 1, Usage())
            await eventually(lambda: in_valkey(valkey)["requests"] == 1)
            dump = everything_in_valkey(valkey)
            for path in ("/metrics", "/admin/stats?by=template", "/admin/replicas", "/ready"):
                async with http.get(url + path) as response:
                    dump += await response.read()
            async with http.get(f"{url}/dashboard/events") as response:
                dump += await response.content.readuntil(b"\n\n")
        assert b"unregistered" in dump
        assert MARKER.encode() not in dump
        assert b"rules" not in dump

    asyncio.run(scenario())
