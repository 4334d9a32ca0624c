"""Nobody's answer shows what somebody else has sent (S3 of the scorecard): 200 prompts, each with a private marker,
16 at a time, in a pool so small that their blocks are evicted and taken from one another all the while.

Prompts share a beginning and what comes after the marker, so that a key which forgot what is in front, a block that
was read after its eviction, or a batch that mixed its rows would give one request the keys and values of another.

Two proofs. With random weights an answer says nothing in words, but it depends on every token in front: it has to be
the very answer, to the log-probability, that the prompt gets alone and without a cache, on another server. With the
default model, which repeats what it is told, no answer may name a foreign marker, and a sample of the prompts has the
same answers alone. (``HEADSTART_CONTAMINATION=1 python -m pytest tests/acceptance/test_contamination.py -rP`` prints
what happened, after two to four minutes on one core.)
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from engine.models.catalog import DEFAULT_MODEL, ensure_model

from .servers import Client, Server, tok

COUNT = 200
SAMPLE = 20
TOLERANCE = 1e-3
LONG_TIMEOUT_S = 1500.0


async def _sixteen_at_a_time(ask: Callable[[Any], Any], prompts: list[Any]) -> list[Any]:
    places = asyncio.Semaphore(16)

    async def one(prompt: Any) -> Any:
        async with places:
            return await ask(prompt)

    return await asyncio.gather(*map(one, prompts))


def test_s3_no_answer_depends_on_another_ones_private_part(roomy: Server, pool32: Server) -> None:
    rng = random.Random(6)
    beginnings = [tok(500 * i, 48) for i in range(3)]
    tail = tok(3000, 47)
    prompts = [beginnings[i % 3] + tok(4000 + 20 * i, 16) + tail for i in range(COUNT)]
    order = rng.sample(range(COUNT), COUNT)
    # A fifth of them live long and grow, so that others are admitted beside them and have to give way.
    limits = [48 if i % 5 == 0 else 6 for i in range(COUNT)]
    alone: list[tuple[str, list[float]]] = []

    def told(answer: Any) -> tuple[str, list[float]]:
        return answer.text, answer.json["choices"][0]["logprobs"]["token_logprobs"]

    async def ask(client: Client, i: int, **fields: Any) -> Any:
        return await client.complete(prompts[i], max_tokens=limits[i], ignore_eos=True, logprobs=0, **fields)

    async def one_by_one(client: Client) -> None:
        for i in range(COUNT):
            alone.append(told(await ask(client, i, headstart={"bypass": True})))

    async def together(client: Client) -> None:
        before = await client.load()
        answers = await _sixteen_at_a_time(lambda i: ask(client, i), order)
        after = await client.load()
        assert after["evictions"] - before["evictions"] > COUNT
        assert after["preemptions"] > before["preemptions"]
        assert sum(answer.cached > 0 for answer in answers) > COUNT // 2
        for i, answer in zip(order, answers, strict=True):
            text, logprobs = told(answer)
            assert text == alone[i][0]
            assert logprobs == pytest.approx(alone[i][1], abs=TOLERANCE)

    roomy.run(one_by_one)
    assert len({text for text, _ in alone}) == COUNT, "the private part does not show in the answer"
    firsts = sorted({round(logprobs[0], 6) for _, logprobs in alone})
    assert sum(b - a > TOLERANCE for a, b in pairwise(firsts)) > COUNT // 2
    pool32.run(together)


@pytest.mark.model
@pytest.mark.timeout(2 * LONG_TIMEOUT_S)
@pytest.mark.skipif(
    os.environ.get("HEADSTART_CONTAMINATION") != "1", reason="takes minutes: set HEADSTART_CONTAMINATION=1"
)
def test_s3_no_answer_names_a_foreign_marker(start_server: Callable[..., Server]) -> None:
    rng = random.Random(7)
    animals = ("ZEBRA", "FALCON", "OTTER", "BADGER", "HERON")
    markers = [f"{animals[i % 5]}-{number}" for i, number in enumerate(rng.sample(range(1000, 10_000), COUNT))]
    rules = (
        "You keep code words for people. Answer in one short sentence and tell the code word exactly as it is.\n" * 3
    )
    chats = [
        [
            {"role": "system", "content": f"Desk {i % 3}. {rules}"},
            {"role": "user", "content": f"My code word is {marker}. Please say it again. What is my code word?"},
        ]
        for i, marker in enumerate(markers)
    ]
    server = start_server(ensure_model(DEFAULT_MODEL), kv_blocks=40, max_batch_tokens=256)
    server.wait_ready()

    async def ask(client: Client, i: int, **fields: Any) -> Any:
        return await client.chat(chats[i], max_tokens=40 if i % 5 == 0 else 24, ignore_eos=True, **fields)

    async def scenario(client: Client) -> None:
        order = rng.sample(range(COUNT), COUNT)
        before = await client.load()
        answers = dict(zip(order, await _sixteen_at_a_time(lambda i: ask(client, i), order), strict=True))
        after = await client.load()
        hits = sum(answer.cached > 0 for answer in answers.values())
        evictions, preemptions = (after[name] - before[name] for name in ("evictions", "preemptions"))
        named = [(markers[i], other) for i in order for other in markers if other in answers[i].text]
        foreign = [pair for pair in named if pair[0] != pair[1]]
        own = len(named) - len(foreign)
        print(
            f"{COUNT} prompts: {own} answers name their own marker, {len(foreign)} times a foreign one is named; ",
            end="",
        )
        print(f"{hits} prompts hit the cache, {evictions} evictions, {preemptions} preemptions")
        assert foreign == []
        assert own > COUNT // 2, "the model does not say its own marker: it would hardly say another one"
        assert evictions > COUNT
        assert preemptions > 0
        assert hits > COUNT // 2
        for i in rng.sample(order, SAMPLE):
            alone = await ask(client, i, headstart={"bypass": True})
            assert (alone.cached, alone.text) == (0, answers[i].text)

    server.run(scenario, LONG_TIMEOUT_S)
