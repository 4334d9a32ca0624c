"""The eviction policy of a real engine process is switched over and over while requests run: nobody notices.

A few seconds by default. ``HEADSTART_SWITCH_SECONDS=60`` is the long form: a switch every second for a minute.
"""

from __future__ import annotations

import asyncio
import os
import random
from itertools import cycle
from pathlib import Path
from typing import Any

import aiohttp

from cache_policy.policy import POLICY_NAMES
from gateway.config import Config, EngineConfig, RedisConfig, ServerConfig
from gateway.replicas.engine import EngineReplica
from gateway.replicas.supervisor import EngineLauncher, engine_command
from gateway.server import serving
from gateway.service import Gateway

SECONDS = float(os.environ.get("HEADSTART_SWITCH_SECONDS", "0"))
TIMEOUT_S = SECONDS + 120.0
SWITCHES, ANSWERS_BETWEEN = 2 * len(POLICY_NAMES), 5
"""The short form: so many switches, each after so many more answers."""

ENGINE = EngineConfig(dtype="float32", kv_blocks=64, max_batch_tokens=64, threads=1)
PROMPTS = [
    [10 + (97 * head + i) % 440 for i in range(80)] + [10 + (31 * tail + 7 * i) % 440 for i in range(20 + 9 * tail)]
    for head in range(4)
    for tail in range(5)
]
"""Together more blocks than the pool has, so that every policy has to evict."""


def test_a_policy_switched_under_load_fails_no_request_and_changes_no_token(tiny_model: Path) -> None:
    async def main() -> None:
        replica = EngineReplica("engine-0", EngineLauncher(engine_command(ENGINE, tiny_model, "tiny")))
        config = Config(server=ServerConfig(port=0), redis=RedisConfig(url="redis://127.0.0.1:1/0"))
        gateway = Gateway(config, model="tiny", folder=tiny_model, replicas=[replica])
        async with asyncio.timeout(TIMEOUT_S), serving(gateway) as url, aiohttp.ClientSession(url) as http:
            await replica.wait_ready(TIMEOUT_S)

            async def answer(prompt: list[int], **fields: Any) -> tuple[list[str], int]:
                body = {"model": "tiny", "prompt": prompt, "temperature": 0, "max_tokens": 16, "ignore_eos": True}
                async with http.post("/v1/completions", json=body | {"logprobs": 1} | fields) as response:
                    assert response.status == 200, await response.text()
                    result = await response.json()
                cached = result["usage"]["prompt_tokens_details"]["cached_tokens"]
                return result["choices"][0]["logprobs"]["tokens"], cached

            # A salt of its own makes every block of a prompt new to the cache.
            expected = [await answer(prompt, cache_salt=f"cold {i}") for i, prompt in enumerate(PROMPTS)]
            assert [cached for _, cached in expected] == [0] * len(PROMPTS)

            answers = hits = 0
            answered, done = asyncio.Event(), asyncio.Event()

            async def client(seed: int) -> None:
                nonlocal answers, hits
                rng = random.Random(seed)
                while not done.is_set():
                    index = rng.randrange(len(PROMPTS))
                    tokens, cached = await answer(PROMPTS[index])
                    assert tokens == expected[index][0]
                    answers += 1
                    hits += cached > 0
                    answered.set()

            async def switch() -> None:
                try:
                    names = cycle(reversed(POLICY_NAMES))
                    for count in range(round(SECONDS) or SWITCHES):
                        if SECONDS:
                            await asyncio.sleep(1)
                        while not SECONDS and answers < ANSWERS_BETWEEN * count:
                            answered.clear()
                            await answered.wait()
                        name = next(names)
                        async with http.put("/admin/policy", json={"policy": name}) as response:
                            assert response.status == 200, await response.text()
                            assert (await response.json())["replicas"] == {"engine-0": "ok"}
                        await replica.call("check", {})  # raises when the pool has lost a block or a reference
                finally:
                    done.set()

            async with asyncio.TaskGroup() as group:
                for seed in range(4):
                    group.create_task(client(seed))
                group.create_task(switch())

            await replica.call("check", {})
            stats = await replica.call("stats", {})
            assert stats["evictions"] > len(PROMPTS)
            assert hits > answers / 4
            print(f"{answers} answers, {hits} with a hit, {stats['evictions']} evictions, {gateway.eviction.policy}")

    asyncio.run(main())
