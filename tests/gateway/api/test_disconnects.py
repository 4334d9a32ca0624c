"""A client that leaves ends its request at the engine; request ids are names, never keys."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from ..conftest import until
from .conftest import MODEL, Bench, Service


class RawClient:
    """One HTTP request on a socket of its own, to be closed at any moment."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def post(cls, service: Service, body: dict[str, Any], *, cut: int = 0) -> RawClient:
        host, port = service.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        data = json.dumps({"model": MODEL, "temperature": 0, **body}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n"
        writer.write(head.encode() + data[: len(data) - cut])
        return cls(reader, writer)

    async def events(self, count: int) -> None:
        for _ in range(count):
            await self.reader.readuntil(b"data: ")

    def close(self) -> None:
        self.writer.close()


def _idle(service: Service) -> bool:
    load = service.replica.load
    idle = load is not None and load.running == load.waiting == 0
    return idle and service.gateway.dispatcher.active == 0


def test_g1_closing_a_stream_ends_it_at_the_engine(bench: Bench) -> None:
    async def leave(service: Service, start: int) -> None:
        prompt = bench.tokens(start, 20)
        client = await RawClient.post(
            service, {"prompt": prompt, "stream": True, "max_tokens": 1500, "ignore_eos": True}
        )
        await client.events(3)
        client.close()

    async def scenario(service: Service) -> None:
        for batch in range(5):
            await asyncio.gather(*[leave(service, 8 * batch + i) for i in range(8)])
            await until(lambda: _idle(service))
        assert (await service.replica.call("stats"))["used_blocks"] == 0
        assert service.stats().totals.aborted == 40
        assert (await service.complete("next")).status == 200

    bench.run(scenario)


@pytest.mark.parametrize("held", [True, False])
def test_g2_leaving_without_a_stream_ends_it_too(bench: Bench, held: bool) -> None:
    """Before the engine has said anything, and while it is answering."""

    async def scenario(service: Service) -> None:
        if held:
            service.replica.hold()
        client = await RawClient.post(service, {"prompt": "x", "max_tokens": 1500, "ignore_eos": True})
        await until(lambda: len(service.replica.submitted) == 1)
        if not held:
            await until(lambda: service.replica.load is not None and service.replica.load.running == 1)
        client.close()
        await until(lambda: service.gateway.dispatcher.active == 0)
        service.replica.let_go()
        await until(lambda: _idle(service))
        assert service.stats().totals.aborted == 1

    bench.run(scenario)


def test_leaving_in_the_middle_of_a_body_starts_nothing(bench: Bench) -> None:
    async def scenario(service: Service) -> None:
        client = await RawClient.post(service, {"prompt": "x"}, cut=5)
        client.close()
        assert (await service.complete("next")).status == 200
        assert len(service.replica.submitted) == 1

    bench.run(scenario)


def test_g4_dropped_streams_leave_no_task_behind(bench: Bench) -> None:
    async def scenario(service: Service) -> None:
        assert (await service.complete("warm up")).status == 200
        await until(lambda: _idle(service))
        before = len(asyncio.all_tasks())
        for _ in range(30):
            client = await RawClient.post(service, {"prompt": "x", "stream": True, "max_tokens": 1500})
            await client.events(1)
            client.close()
        await until(lambda: _idle(service))
        await until(lambda: len(asyncio.all_tasks()) <= before + 2)

    bench.run(scenario)


def test_g6_equal_request_ids_do_not_meet(bench: Bench) -> None:
    async def scenario(service: Service) -> None:
        prompts = [bench.tokens(0, 50), bench.tokens(500, 50), bench.tokens(900, 30)]
        alone = [(await service.complete(prompt, max_tokens=100)).text for prompt in prompts]
        headers = {"x-request-id": "dup"}
        together = await asyncio.gather(
            *[service.complete(prompt, max_tokens=100, headers=headers, request_id="dup") for prompt in prompts]
        )
        assert [answer.text for answer in together] == alone
        assert {answer.headers["x-request-id"] for answer in together} == {"dup"}
        assert len({answer.json["id"] for answer in together}) == 3

    bench.run(scenario)


def test_g7_an_echoed_request_id_is_short_and_clean(bench: Bench) -> None:
    echoes = [
        ("trace-1:a/b", "trace-1:a/b"),
        ("x" * 8000, "x" * 128),
        ("a%0d%0aset-cookie: b=1", "a0d0aset-cookie:b=1"),
        ("é漢\x80", "req-"),
        ("", "req-"),
    ]

    async def scenario(service: Service) -> None:
        for given, echoed in echoes:
            headers = {"x-request-id": given}
            for answer in (
                await service.complete("x", stream=True, max_tokens=50, headers=headers),
                await service.get("/health", headers=headers),
                await service.get("/nothing", headers=headers),
            ):
                assert answer.headers["x-request-id"].startswith(echoed)
                assert len(answer.headers["x-request-id"]) <= 128
                assert "set-cookie" not in answer.headers
                assert len(answer.body) < 50_000

    bench.run(scenario)
