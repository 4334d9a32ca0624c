"""Cases of the kind abort: a client that leaves takes its request along, and ids are names only."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from redis.asyncio import Redis

from .servers import Client, Server, tok, words


async def _totals(client: Client) -> Any:
    """The gateway's own count, in which a request that was cut off has what it had cost."""

    async def totals() -> Any:
        return client.server.gateway.statistics.snapshot().totals

    return await client.server.inside(totals())


def test_g1_closing_a_stream_ends_it_at_the_engine(roomy: Server) -> None:
    """Instead of within a second: after a fraction of the tokens that it would have generated. Nothing is left then
    that could make the next request slower than on an idle server.
    """

    async def leave(client: Client, i: int) -> None:
        async with client.stream(words(100 * i, 20), chat=True, max_tokens=1500, ignore_eos=True) as stream:
            await stream.take(3)

    async def scenario(client: Client) -> None:
        before = await _totals(client)
        for batch in range(5):
            await asyncio.gather(*[leave(client, 8 * batch + i) for i in range(8)])
            await client.idle()
        after = await _totals(client)
        assert after.aborted - before.aborted == 40
        assert after.completion_tokens - before.completion_tokens < 40 * 300
        assert (await client.engine("stats"))["used_blocks"] == 0
        assert (await client.chat(words(0, 20), max_tokens=4)).status == 200

    roomy.run(scenario)


def test_g2_leaving_without_a_stream_ends_it_too(roomy: Server) -> None:
    """On the engine of our own. Instead of after 300 ms the client leaves when the engine has begun."""

    async def scenario(client: Client) -> None:
        before = await _totals(client)
        for _ in range(3):
            request = asyncio.create_task(client.complete(tok(0, 20), max_tokens=1500, ignore_eos=True))
            await client.until(lambda load: load["running"] == 1)
            request.cancel()
            with pytest.raises(asyncio.CancelledError):
                await request
            await client.idle()
        after = await _totals(client)
        assert after.aborted - before.aborted == 3
        assert after.completion_tokens - before.completion_tokens < 3 * 500

    roomy.run(scenario)


def test_g4_dropped_streams_leave_nothing_behind(roomy: Server) -> None:
    async def tasks() -> int:
        return len(asyncio.all_tasks())

    async def scenario(client: Client) -> None:
        async with Redis.from_url(roomy.valkey.url) as redis:

            async def counts() -> tuple[int, int]:
                return len(await redis.client_list()), await roomy.inside(tasks())

            async def drop(i: int) -> None:
                async with client.stream(tok(10 * i, 20), max_tokens=1500, ignore_eos=True) as stream:
                    await stream.take(1)

            await drop(0)
            await client.idle()
            before = await counts()
            for batch in range(25):
                await asyncio.gather(*[drop(8 * batch + i) for i in range(8)])
            await client.idle()
            while any(after > count + 2 for after, count in zip(await counts(), before, strict=True)):
                await client.idle()

    roomy.run(scenario)


def test_g6_equal_request_ids_do_not_meet(roomy: Server) -> None:
    prompts = [words(0, 50), words(500, 50), words(900, 30)]
    fields = {"max_tokens": 200, "ignore_eos": True}

    async def scenario(client: Client) -> None:
        alone = [(await client.chat(prompt, **fields)).text for prompt in prompts]
        assert len(set(alone)) == 3
        dup = {"headers": {"x-request-id": "dup"}}
        together = await asyncio.gather(
            client.chat(prompts[0], **fields, **dup),
            client.chat(prompts[1], **fields, **dup),
            client.chat(prompts[2], **fields, request_id="dup"),
        )
        assert [answer.text for answer in together] == alone
        assert [answer.headers["x-request-id"] for answer in together[:2]] == ["dup", "dup"]
        assert len({answer.json["id"] for answer in together}) == 3
        others = [asyncio.create_task(client.chat(prompt, **fields, **dup)) for prompt in prompts[1:]]
        async with client.stream(prompts[0], chat=True, request_id="dup", **fields) as stream:
            await stream.take(3)
        assert [(await other).text for other in others] == alone[1:]

    roomy.run(scenario)


@pytest.mark.parametrize(
    ("given", "echoed"),
    [("x" * 8000, "x" * 128), ("a%0d%0aset-cookie: b=1", "a0d0aset-cookie:b=1"), ("é漢\x80", "req-")],
    ids=["long", "escaped", "not-ascii"],
)
def test_g7_an_echoed_request_id_is_short_and_clean(
    roomy: Server, given: str, echoed: str, capfd: pytest.CaptureFixture[str]
) -> None:
    async def scenario(client: Client) -> None:
        headers = {"x-request-id": given}
        answer = await client.chat(words(0, 5), stream=True, max_tokens=200, ignore_eos=True, headers=headers)
        assert answer.status == 200
        assert len(answer.events) > 3  # how many depends on how fast they are read
        assert answer.headers["x-request-id"].startswith(echoed)
        assert len(answer.headers["x-request-id"]) <= 128
        assert "set-cookie" not in answer.headers
        assert len(answer.body) < 200_000

    roomy.run(scenario)
    written = capfd.readouterr()
    assert given not in written.out + written.err
