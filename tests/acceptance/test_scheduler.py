"""Cases of the kind scheduler: what fits is served, whatever else runs, and in the same words."""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any

from engine.wire import CacheEvent, EngineInfo, Load, StepTiming
from gateway.replicas.base import Replica

from .servers import Client, Server, tok


class Steps:
    """An observer that writes the steps down."""

    def __init__(self) -> None:
        self.timings: list[StepTiming] = []

    def on_ready(self, replica: Replica, info: EngineInfo) -> None: ...

    def on_down(self, replica: Replica, reason: str) -> None: ...

    def on_events(self, replica: Replica, events: tuple[CacheEvent, ...]) -> None: ...

    def on_step(self, replica: Replica, timing: StepTiming, load: Load) -> None:
        self.timings.append(timing)


def test_e1_what_can_never_fit_is_refused_at_once(pool32: Server) -> None:
    """Instead of within a second: while the small requests are still running."""

    async def scenario(client: Client) -> None:
        fields = {"max_tokens": 100, "ignore_eos": True}
        small = [asyncio.create_task(client.complete(tok(100 * i, 16), **fields)) for i in range(4)]
        await client.until(lambda load: load["running"] == 4)
        refused = await client.complete(tok(0, 600), max_tokens=1)
        assert not any(task.done() for task in small)
        assert refused.status == 400
        error = refused.json["error"]
        assert (error["type"], error["code"]) == ("invalid_request_error", "context_length_exceeded")
        assert "512" in error["message"]
        for answer in await asyncio.gather(*small):
            assert answer.json["usage"]["completion_tokens"] == 100
        await client.idle()

    pool32.run(scenario)


def test_e2_the_end_of_the_pool_is_a_limit_of_length(pool32: Server) -> None:
    async def scenario(client: Client) -> None:
        answer = await client.complete(tok(0, 480), max_tokens=200, ignore_eos=True)
        assert answer.status == 200
        assert answer.json["choices"][0]["finish_reason"] == "length"
        assert answer.json["usage"]["completion_tokens"] == 512 - 480

    pool32.run(scenario)


def test_e4_requests_that_preempt_one_another_all_get_on(pool48: Server) -> None:
    """Time is counted in steps of the engine: they are what a standstill would be made of."""
    prompts = [tok(1000 * i, 200) for i in range(8)]
    fields = {"max_tokens": 150, "ignore_eos": True}
    steps = Steps()
    pool48.replica.observe(steps)

    async def scenario(client: Client) -> None:
        alone = [(await client.complete(prompt, **fields, headstart={"bypass": True})).text for prompt in prompts]
        one_by_one = len(steps.timings)
        before = (await client.load())["preemptions"]
        together = await asyncio.gather(*[client.complete(prompt, **fields) for prompt in prompts])
        assert [answer.text for answer in together] == alone
        assert [answer.json["usage"]["completion_tokens"] for answer in together] == [150] * 8
        preemptions = (await client.load())["preemptions"] - before
        assert 0 < preemptions <= 8 * 8
        timings = steps.timings[one_by_one:]
        assert 0 < len(timings) <= 5 * one_by_one
        idle = [len(run) for run in "".join("d" if timing.decode_tokens else " " for timing in timings).split("d")]
        assert max(idle) <= 5 * len(prompts), "for as many steps no answer has grown"

    pool48.run(scenario)


def test_e5_scheduling_does_not_show_in_the_text(roomy: Server, pool32: Server, pool48: Server) -> None:
    """34 prompts without a cache in a roomy pool, then in two pools that preempt, one of them in steps of 48 tokens."""
    rng = random.Random(5)
    shared = tok(0, 100)
    prompts = [shared + tok(200 + 60 * i, 10 + rng.randrange(50)) for i in range(10)]
    prompts += [tok(1000 + 200 * i, 100 + rng.randrange(60)) for i in range(24)]
    texts: list[list[str]] = []

    def run(server: Server, **fields: Any) -> dict[str, int]:
        loads: list[dict[str, int]] = []

        async def scenario(client: Client) -> None:
            loads.append(await client.load())
            asked = [client.complete(prompt, max_tokens=30, ignore_eos=True, **fields) for prompt in prompts]
            answers = await asyncio.gather(*asked)
            assert [answer.json["usage"]["completion_tokens"] for answer in answers] == [30] * 34
            texts.append([answer.text for answer in answers])
            loads.append(await client.load())
            hits = sum(answer.cached for answer in answers)
            assert hits > 0 or "headstart" in fields

        server.run(scenario)
        before, after = loads
        return {name: after[name] - before[name] for name in ("preemptions", "evictions")}

    assert run(roomy, headstart={"bypass": True})["preemptions"] == 0
    assert run(pool32)["preemptions"] > 0
    assert run(pool48)["preemptions"] > 0
    assert texts[1] == texts[0]
    assert texts[2] == texts[0]
    assert len(set(texts[0])) == 34


def test_e6_a_long_prefill_stops_neither_a_stream_nor_a_short_prompt(roomy: Server) -> None:
    """Gaps are counted in steps: each step of the long prefill has at most the budget of tokens, the stream's among
    them. What they are in milliseconds is for the benchmarks.
    """
    budget, steps = 256, Steps()
    roomy.replica.observe(steps)

    async def first_token(client: Client, prompt: list[int]) -> float:
        async with client.stream(prompt, max_tokens=2, ignore_eos=True) as stream:
            await stream.take(1)
            at = time.monotonic()
            await stream.rest()
        return at

    async def scenario(client: Client) -> None:
        async with client.stream(tok(0, 20), max_tokens=200, ignore_eos=True) as stream:
            await stream.take(20)
            start = len(steps.timings)
            long = asyncio.create_task(first_token(client, tok(1000, 20 * budget)))
            await client.until(lambda load: 0 < load["queued_tokens"] < 19 * budget)
            short = asyncio.create_task(first_token(client, tok(7000, 10)))
            assert await short < await long
            prefill = [timing for timing in steps.timings[start:] if timing.prefill_tokens]
            await stream.rest()
        assert len(prefill) >= 20
        assert sum(timing.prefill_tokens for timing in prefill) == 20 * budget + 10
        for timing in prefill:
            assert timing.decode_tokens >= 1, "a step of the prefill did without the stream"
            assert timing.prefill_tokens + timing.decode_tokens <= budget

    roomy.run(scenario)


def test_e8_prompts_beyond_the_limit_are_refused_and_the_limit_is_the_announced_one(pool48: Server) -> None:
    async def scenario(client: Client) -> None:
        (card,) = (await client.ask("GET", "/v1/models")).json["data"]
        limit = card["max_model_len"]
        assert limit == 48 * 16
        for count in (limit, limit + 1, 10 * limit):
            answer = await client.complete(tok(0, count))
            assert answer.status == 400
            assert answer.json["error"]["code"] == "context_length_exceeded"
            assert str(limit) in answer.json["error"]["message"]
        longest = await client.complete(tok(0, limit - 1), ignore_eos=True)
        assert longest.status == 200
        assert longest.json["usage"]["completion_tokens"] == 1
        assert (await client.complete(tok(0, 10))).status == 200

    pool48.run(scenario)
