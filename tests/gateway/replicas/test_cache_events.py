"""A gateway in front of servers that tell of their caches as vLLM does."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gateway.config import ApiKey, IndexConfig
from gateway.server import run

from ..conftest import until
from .kv_publisher import Publisher, Sockets
from .openai_mock import CONFIG, DONE, MockServer, Remote, Talk, event, gateway_over, usage

SIZE = 4
KEY_HASHES = {
    "a": "ca978112ca1bbdcafac231b39a23dc4da786eff8147c4e72b9807785afee48bb",
    "b": "3e23e8160039594a33894f6564e1b1348bbd7a0088d42c4acb73eeaed59c009d",
}


class Vllm:
    """A mock server with a cache, of which it tells by events."""

    def __init__(self, server: MockServer, sockets: Sockets) -> None:
        self.server = server
        self.sockets = sockets
        self.publisher = sockets.publisher
        self.salts: list[str] = []
        self.told = 0
        """Messages that were sent."""
        self.lost = False
        """Whether messages are lost on their way."""
        server.behave = self.answer
        server.settings = {"events": sockets.endpoint, "events_replay": sockets.replay}
        server.metrics = (
            "# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig\n"
            f'vllm:cache_config_info{{block_size="{SIZE}",cache_dtype="auto",num_gpu_blocks="40",engine="0"}} 1.0\n'
        )

    async def answer(self, talk: Talk) -> None:
        salt, tokens = talk.body["cache_salt"], talk.body["prompt"]
        self.salts.append(salt)
        message = self.publisher.compute(bytes.fromhex(salt), tokens)
        cached = self.publisher.hits * SIZE
        if message is not None:
            self.told += 1
            if not self.lost:
                await self.sockets.send(message)
        await talk.write(event("x") + event(finish="stop") + usage(1, cached) + DONE)


Scenario = Callable[..., Awaitable[None]]


@pytest.fixture
def folder(model_folder: Callable[[str], Path]) -> Path:
    return model_folder("chatml")


def play(folder: Path, scenario: Scenario, *, servers: int = 1, **config: Any) -> None:
    """Play ``scenario(remote, vllm, ...)``."""

    async def main() -> None:
        async with AsyncExitStack() as stack:
            vllms = []
            for number in range(servers):
                server = await stack.enter_async_context(MockServer(folder))
                publisher = Publisher(random.Random(number), block_size=SIZE)
                vllms.append(Vllm(server, await stack.enter_async_context(Sockets(publisher))))
            settings = msgspec.structs.replace(CONFIG, **config)
            mocks = [vllm.server for vllm in vllms]
            remote = await stack.enter_async_context(gateway_over(folder, *mocks, config=settings))
            for replica in remote.gateway.replicas.values():
                await until(lambda replica=replica: replica.tells_events)  # type: ignore[misc]
            await scenario(remote, *vllms)

    run(main())


async def drained(remote: Remote, vllm: Vllm, id: str = "replica-0") -> None:
    """Wait until all that the server has told was heard."""
    replica = remote.gateway.replicas[id]
    await until(lambda: (health := replica.event_health) is not None and health.messages == vllm.told)


def words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choice(["cache", "block", "prefix", "token"]) for _ in range(count))


def test_what_is_predicted_is_what_the_server_had_cached(folder: Path) -> None:
    async def scenario(remote: Remote, *vllms: Vllm) -> None:
        rng = random.Random(3)
        texts = [words(rng, 12) for _ in range(6)]
        hits = 0
        for _ in range(60):
            prompt = " ".join(rng.sample(texts, 2)) + words(rng, 2)
            status, _, _ = await remote.complete(prompt=prompt, cache_salt=rng.choice(["x", "y"]))
            assert status == 200
            hits += sum(vllm.publisher.hits for vllm in vllms)
            for number, vllm in enumerate(vllms):
                await drained(remote, vllm, f"replica-{number}")
                assert set(remote.gateway.router.index.holds(f"replica-{number}")) == vllm.publisher.keys
        assert hits > 0
        assert sum(len(vllm.publisher.keys) for vllm in vllms) > 0
        for number, _ in enumerate(vllms):
            trust = remote.gateway.router.index.trust(f"replica-{number}")
            assert trust is not None
            assert (trust.source, trust.believed) == ("events", True)
            assert trust.precision in (None, 1.0)
            assert trust.recall in (None, 1.0)
        info = remote.gateway.replicas["replica-0"].info
        assert info is not None
        assert info.block_size == SIZE
        async with remote.http.get(f"{remote.url}/metrics") as response:
            scraped = await response.text()
        assert 'headstart_index_exact{replica="replica-0"} 1.0' in scraped
        assert 'headstart_cache_event_malformed_total{replica="replica-1"} 0.0' in scraped
        assert f'headstart_index_blocks{{replica="replica-0"}} {len(vllms[0].publisher.keys):.1f}' in scraped

    play(folder, scenario, servers=2)


def test_a_gateway_that_missed_a_servers_beginning_predicts_exactly_what_requests_have_found(folder: Path) -> None:
    async def scenario(remote: Remote, vllm: Vllm) -> None:
        vllm.publisher.algorithm = "sha256"
        vllm.publisher.log = deque(maxlen=3)
        replica, index, rng = remote.gateway.replicas["replica-0"], remote.gateway.router.index, random.Random(4)
        texts = [words(rng, 12) for _ in range(8)]

        async def ask() -> None:
            status, _, _ = await remote.complete(prompt=texts[0] + " ".join(rng.sample(texts[1:], 2)) + words(rng, 2))
            assert status == 200

        def exact() -> bool:
            health = replica.event_health
            return health is not None and health.exact

        for _ in range(10):
            await ask()
        await drained(remote, vllm)
        replica.resync()  # what is left to be had are the last three messages, as for a gateway that starts now
        vllm.told += len(vllm.publisher.log)
        await drained(remote, vllm)
        await until(lambda: "beginning of its life" in " ".join(replica.degraded))
        assert not replica.tells_events
        for _ in range(3):  # what a request has found may come before the events that tell how blocks are named
            await ask()
            await drained(remote, vllm)
        await until(lambda: bool(index.holds("replica-0")) and replica.tells_events)
        for _ in range(100):
            if exact():
                break
            await ask()
            await until(lambda: index.holds("replica-0") <= vllm.publisher.keys)
        await until(lambda: exact() and set(index.holds("replica-0")) == vllm.publisher.keys)
        trust = index.trust("replica-0")
        assert trust is not None
        assert (trust.source, trust.believed, trust.precision) == ("events", True, 1.0)
        await until(lambda: not replica.degraded)

    play(folder, scenario)


def test_n2_namespaces_go_out_as_salts_and_into_the_index(folder: Path) -> None:
    """Two tenants with one prompt, and one body's salt: the index never credits one with the blocks of the other."""
    keys = {KEY_HASHES[key]: ApiKey(tenant=f"tenant-{key}") for key in KEY_HASHES}

    async def scenario(remote: Remote, vllm: Vllm) -> None:
        async def ask(key: str, **fields: Any) -> int:
            body = {"model": "mock", "prompt": "cache block prefix " * 8, "max_tokens": 1, "stream": False} | fields
            headers = {"authorization": f"Bearer {key}"}
            async with remote.http.post(f"{remote.url}/v1/completions", json=body, headers=headers) as response:
                assert response.status == 200, await response.text()
                answer = await response.json()
            await drained(remote, vllm)
            return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

        assert [await ask("a"), await ask("b")] == [0, 0]
        assert await ask("a") > 0
        assert [await ask("a", cache_salt="s"), await ask("b", cache_salt="s")] == [0, 0]
        assert await ask("b", cache_salt="s") > 0
        assert len(set(vllm.salts)) == 4
        assert set(remote.gateway.router.index.holds("replica-0")) == vllm.publisher.keys

    play(folder, scenario, keys=keys)


def test_q1_lost_messages_cost_hits_for_a_moment_and_the_index_heals(folder: Path) -> None:
    async def scenario(remote: Remote, vllm: Vllm) -> None:
        vllm.lost = True
        for number in range(12):
            status, _, _ = await remote.complete(prompt=f"{words(random.Random(number), 20)}")
            assert status == 200
        vllm.lost = False
        await until(lambda: set(remote.gateway.router.index.holds("replica-0")) == vllm.publisher.keys)
        assert vllm.sockets.replays > 0

    play(folder, scenario)


def test_q2_a_server_that_was_replaced_is_credited_with_nothing(folder: Path) -> None:
    async def scenario(remote: Remote, vllm: Vllm) -> None:
        index, replica = remote.gateway.router.index, remote.gateway.replicas["replica-0"]
        await remote.complete(prompt=words(random.Random(1), 40))
        await drained(remote, vllm)
        assert index.holds("replica-0")
        await vllm.server.kill()
        await vllm.sockets.close()
        vllm.publisher.restart()
        await until(lambda: not index.holds("replica-0"))
        vllm.sockets.bind()
        await vllm.server.start()
        await remote.gateway.wait_ready(30.0)
        assert not index.holds("replica-0")
        await until(lambda: replica.tells_events)
        await remote.complete(prompt=words(random.Random(2), 40))
        await until(lambda: set(index.holds("replica-0")) == vllm.publisher.keys)
        assert index.holds("replica-0")

    play(folder, scenario)


def test_a_server_whose_cache_lies_loses_its_trust_and_is_asked_again(folder: Path) -> None:
    async def scenario(remote: Remote, vllm: Vllm) -> None:
        index, replica = remote.gateway.router.index, remote.gateway.replicas["replica-0"]
        prompt = words(random.Random(1), 60)

        async def lie(talk: Talk) -> None:
            await talk.write(event("x") + event(finish="stop") + usage(1, 0) + DONE)

        await remote.complete(prompt=prompt)
        await drained(remote, vllm)
        vllm.server.behave = lie
        before = vllm.sockets.replays
        for _ in range(10):
            await remote.complete(prompt=prompt)
        trust = index.trust("replica-0")
        assert trust is not None
        assert (trust.believed, trust.resyncs) == (False, 1)
        assert not index.holds("replica-0")
        await until(lambda: vllm.sockets.replays > before)
        vllm.server.behave = vllm.answer
        for number in range(40):
            await remote.complete(prompt=f"{prompt} {number % 4}")
            await until(
                lambda: (health := replica.event_health) is not None and health.blocks == len(vllm.publisher.keys)
            )
        trust = index.trust("replica-0")
        assert trust is not None
        assert trust.believed
        assert index.holds("replica-0")

    play(folder, scenario, index=IndexConfig(min_precision=0.6))


def test_events_that_never_come_are_said_in_ready_and_the_index_presumes(folder: Path) -> None:
    async def main() -> None:
        async with MockServer(folder) as server:
            server.settings = {"events": "tcp://127.0.0.1:1"}
            async with gateway_over(folder, server) as remote:
                replica = remote.gateway.replicas["replica-0"]
                await until(lambda: any("tcp://127.0.0.1:1" in words for words in replica.degraded))
                async with remote.http.get(f"{remote.url}/ready") as response:
                    assert "presumed" in await response.text()
                await remote.complete(prompt="cache block " * 20)
                trust = remote.gateway.router.index.trust("replica-0")
                assert trust is not None
                assert trust.source == "requests"
                assert trust.blocks > 0

    run(main())
