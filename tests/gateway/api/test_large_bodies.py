"""Large bodies are read and planned in a thread of their own: nobody else waits for them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

from gateway.large_bodies import LARGE_BODY_BYTES

from .conftest import MODEL, TIMEOUT_S, Answer, Bench, Service

PADDING = "x" * LARGE_BODY_BYTES
"""In a field that nobody knows, it makes a body large and its prompt no longer."""

DOCUMENTS = [{"id": f"kb-{number}", "text": f"Rule {number} of the house, in many words" * 4} for number in range(4)]


async def eventually(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while not holds():  # noqa: ASYNC110 - counts tell nobody when they change
            await asyncio.sleep(0.005)


class Held:
    """A large request whose reading and planning wait for a word each."""

    def __init__(self, service: Service) -> None:
        self.large, self.dispatcher = service.gateway.large, service.gateway.dispatcher
        self.reads, self.plans = threading.Event(), threading.Event()
        self.answer: asyncio.Task[Answer]

    async def ask(self, service: Service) -> None:
        ahead = asyncio.create_task(self.large.run(self.reads.wait))
        self.answer = asyncio.create_task(service.chat("hello", padding=PADDING))
        await eventually(lambda: self.large.waiting == 2)
        between = asyncio.create_task(self.large.run(self.plans.wait))
        await eventually(lambda: self.large.waiting == 3)
        self.others = asyncio.gather(ahead, between)

    async def read(self) -> None:
        self.reads.set()
        await eventually(lambda: self.dispatcher.active == 1 and self.large.waiting == 2)

    def release(self) -> None:
        self.reads.set()
        self.plans.set()


def test_others_are_answered_while_a_large_body_is_read_and_while_it_is_planned(bench: Bench) -> None:
    async def scenario(service: Service) -> None:
        held = Held(service)
        try:
            await held.ask(service)
            assert (await service.chat("hello")).status == 200
            assert held.dispatcher.active == 0, "it is not read yet"
            await held.read()
            small = await service.chat("hello")
            assert small.status == 200
            assert not held.answer.done()
        finally:
            held.release()
        answer = await held.answer
        assert (answer.status, answer.text) == (200, small.text)
        await held.others
        assert held.large.waiting == 0

    bench.run(scenario)


def test_a_large_request_whose_replica_has_gone_meanwhile_can_be_sent_again(bench: Bench) -> None:
    async def scenario(service: Service) -> None:
        held, replicas = Held(service), service.gateway.membership.replicas
        try:
            await held.ask(service)
            await held.read()
            gone = replicas.pop("engine-0")
        finally:
            held.release()
        assert (await held.answer).status == 503
        await held.others
        replicas["engine-0"] = gone
        assert (await service.chat("hello", padding=PADDING)).status == 200

    bench.run(scenario)


def test_a_large_body_is_placed_as_a_small_one(bench: Bench) -> None:
    async def scenario(service: Service) -> None:
        first = await service.chat("Which rule?", documents=DOCUMENTS)
        again = await service.chat("Which rule?", documents=DOCUMENTS[::-1], padding=PADDING)
        assert (again.status, again.text) == (200, first.text)
        prompt_tokens = again.json["usage"]["prompt_tokens"]
        assert first.cached == 0
        assert again.cached == 16 * ((prompt_tokens - 1) // 16), "the thread's path knows what is held, and its order"
        whole = await service.complete(bench.tokens(0, 48))
        assert whole.cached == 0
        assert (await service.complete(bench.tokens(0, 48), padding=PADDING)).cached == 32

    bench.run(scenario)


def test_what_is_wrong_with_a_large_body_is_said_as_of_a_small_one(bench: Bench) -> None:
    async def scenario(service: Service) -> None:
        async def refusal(**fields: Any) -> tuple[int, Any]:
            answer = await service.chat(**fields)
            return answer.status, answer.json["error"]

        for fields in ({"temperature": "hot"}, {"documents": [{"id": "a"}]}, {"headstart": {"template": "none"}}):
            assert await refusal(**fields, padding=PADDING) == await refusal(**fields)
        status, error = await refusal(content="word " * 100_000)
        assert (status, error["code"]) == (400, "context_length_exceeded")
        headers = {"content-type": "application/json"}
        cut = await service.ask("POST", "/v1/chat/completions", data=b'{"model": "' + PADDING.encode(), headers=headers)
        assert cut.status == 400
        assert (await service.post("/v1/chat/completions", {"model": MODEL, "padding": PADDING})).status == 400

    bench.run(scenario)
