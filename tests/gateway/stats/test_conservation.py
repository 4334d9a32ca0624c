"""Over real HTTP: Valkey, ``/metrics`` and ``/admin/stats`` equal the sum of the usage fields sent to clients."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families
from tokenizers import Tokenizer

from gateway.config import Config, RedisConfig, ServerConfig
from gateway.replicas.scripted import ScriptedReplica, scripted_info
from gateway.server import serving
from gateway.service import Gateway

Eventually = Callable[[Callable[[], bool]], Any]
MARKER = "zebra-7731"
COUNTS = ("prompt_tokens", "cached_prompt_tokens", "completion_tokens")


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


async def send(http: aiohttp.ClientSession, url: str, number: int, usage: Usage) -> None:
    """One chat request of several that share a prefix, every other one streamed."""
    stream = number % 2 == 1
    body: dict[str, Any] = {
        "model": "scripted",
        "max_tokens": 5,
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


def in_valkey(valkey: Any) -> dict[str, float]:
    sums = dict.fromkeys((*COUNTS, "requests"), 0)
    with valkey.client() as client:
        for epoch in client.zrange("headstart:epochs", 0, -1):
            for field, value in client.hgetall(f"headstart:totals:{epoch.decode()}").items():
                for name in sums if field != b"flush" else ():
                    sums[name] += json.loads(value).get(name, 0)
    return sums


def everything_in_valkey(valkey: Any) -> bytes:
    dump = b""
    with valkey.client() as client:
        for key in client.scan_iter():
            dump += (
                key + repr(client.hgetall(key) if client.type(key) == b"hash" else client.zrange(key, 0, -1)).encode()
            )
    return dump


async def in_metrics(http: aiohttp.ClientSession, url: str) -> dict[str, float]:
    async with http.get(f"{url}/metrics") as response:
        families = text_string_to_metric_families(await response.text())
    samples = {}
    for family in families:
        for sample in family.samples:
            samples[sample.name] = samples.get(sample.name, 0) + sample.value
    return {name: samples[f"headstart_{name}_total"] for name in (*COUNTS, "requests")}


def test_every_account_agrees_with_what_clients_were_told_also_after_valkey_was_killed(
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
                await asyncio.gather(*[send(http, url, number, usage) for number in numbers])
                if outage < 2:
                    valkey.kill()
                    await send(http, url, 1000 + outage, usage)
                    valkey.start()
            expected = usage.sums | {"requests": usage.requests}
            assert expected["requests"] == 32
            assert expected["cached_prompt_tokens"] > 0
            await eventually(lambda: in_valkey(valkey) == expected)
            assert await in_metrics(http, url) == expected
            async with http.get(f"{url}/admin/stats") as response:
                stats = await response.json()
        assert {name: stats["totals"][name] for name in expected} == expected
        for table in ("templates", "tenants", "replicas"):
            assert {name: sum(row[name] for row in stats[table].values()) for name in expected} == expected
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
