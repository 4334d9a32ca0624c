"""The acceptance cases of kind router over HTTP: many servers behind a gateway, some of them slow or failing."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.placement import BlockLru
from cache_policy.keys import chain_keys
from gateway.replicas.base import ReplicaState
from gateway.replicas.supervisor import RestartDelay

from ..conftest import until
from .openai_mock import DONE, Behaviour, MockServer, Remote, Talk, event, play, refusing, saying, usage, whole


@pytest.fixture(scope="module")
def folder(model_folder: Callable[[str], Path]) -> Path:
    return model_folder("chatml")


class Slots:
    """Answers after ``service_s`` each and ``token_s`` per token that its cache does not hold, ``slots`` at a time."""

    def __init__(self, service_s: float, token_s: float = 0.0, slots: int = 4) -> None:
        self._service_s = service_s
        self._token_s = token_s
        self._free = asyncio.Semaphore(slots)
        self._cache = BlockLru(4096)

    async def __call__(self, talk: Talk) -> None:
        tokens = talk.body["prompt"]
        keys = chain_keys(bytes.fromhex(talk.body["cache_salt"]), tokens, 16)
        cached, _, _ = self._cache.request(keys[: (len(tokens) - 1) // 16])
        async with self._free:
            await asyncio.sleep(self._service_s + self._token_s * (len(tokens) - 16 * cached))
        await talk.write(event("hello") + event(finish="stop") + usage(1, 16 * cached) + DONE)


SYSTEM = [{"role": "system", "content": "You answer in one word. " * 60}]


async def ask(remote: Remote, number: int, **fields: Any) -> tuple[int, str]:
    messages = [*SYSTEM, {"role": "user", "content": f"question {number}"}]
    status, headers, _ = await remote.post("/v1/chat/completions", messages=messages, **fields)
    return status, headers.get("x-headstart-replica", "")


async def flood(remote: Remote, requests: int, concurrent: int) -> tuple[Counter[str], list[float]]:
    """How many each replica got, and how much busier than the mean the busiest was whenever an answer came."""
    counts: Counter[str] = Counter()
    busiest: list[float] = []
    numbers = iter(range(requests))

    async def client() -> None:
        for number in numbers:
            status, replica = await ask(remote, number)
            assert status == 200
            counts[replica] += 1
            loads = [remote.gateway.router.view(id).in_flight for id in remote.gateway.replicas]
            if number < requests - concurrent:  # then no more come, and whoever is slower is busier
                busiest.append(max(loads) * len(loads) / max(1, sum(loads)))

    await asyncio.gather(*[client() for _ in range(concurrent)])
    return counts, busiest


@pytest.mark.parametrize(("requests", "warm"), [(240, 0), (64, 16)], ids=["shared-system-prompt", "burst"])
def test_q7_affinity_makes_no_hot_spot(folder: Path, requests: int, warm: int) -> None:
    async def scenario(remote: Remote, *servers: MockServer) -> None:
        for server in servers:
            server.behave = Slots(0.05)
        await flood(remote, warm, 16)
        counts, busiest = await flood(remote, requests, 64)
        assert len(counts) == 4
        assert max(counts.values()) / (requests / 4) <= 1.5
        assert sorted(busiest)[len(busiest) * 99 // 100 :] <= [1.5] * len(busiest)

    play(folder, scenario, servers=4)


def test_q7_a_slow_server_gets_little(folder: Path) -> None:
    async def scenario(remote: Remote, *servers: MockServer) -> None:
        for server in servers:
            server.behave = Slots(0.03)
        servers[2].behave = Slots(0.3)
        counts, _ = await flood(remote, 200, 16)
        assert counts["replica-2"] < 20

    play(folder, scenario, servers=4)


def test_q7_under_light_load_a_prefix_stays_where_it_is(folder: Path) -> None:
    async def scenario(remote: Remote, *servers: MockServer) -> None:
        for server in servers:
            server.behave = Slots(0.0, token_s=1e-4)
        counts, _ = await flood(remote, 60, 2)
        assert sum(count for _, count in counts.most_common(2)) >= 54

    play(folder, scenario, servers=4)


NO_CACHE = {"bypass": True}  # so that the servers take turns


def closing(state: dict[str, bool]) -> Behaviour:
    """Accepts and closes at once, until ``state["healed"]``."""

    async def behave(talk: Talk) -> None:
        if not state["healed"]:
            talk.abort()
            return
        await talk.write(whole("hello"))

    return behave


def test_q8_a_server_that_fails_every_request_gets_few_and_then_traffic_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(remote: Remote, bad: MockServer, good: MockServer) -> None:
        monkeypatch.setattr(RestartDelay, "after", lambda delay, served_s: 0.0)  # its state is seen again at once
        clock = [time.monotonic()]
        router = remote.gateway.router
        for timed in (router, *(state.breaker for state in router._states.values())):
            monkeypatch.setattr(timed, "_clock", lambda: clock[0])
        state = {"healed": False}
        bad.behave = closing(state)
        for number in range(120):
            clock[0] += 0.05  # 20 requests a second, whatever this machine does
            assert (await ask(remote, number, headstart=NO_CACHE))[0] == 200
            if number % 5 == 0:
                await until(lambda: remote.gateway.replicas["replica-0"].state is ReplicaState.READY)
        failed = len(bad.talks)
        assert 3 <= failed <= 3 + 4, "three open the breaker, then come probes: after 1, 2 and 4 seconds"
        state["healed"] = True
        waited = 0.0
        while len(bad.talks) - failed < 5:
            clock[0] += 0.25
            waited += 0.25
            await until(lambda: remote.gateway.replicas["replica-0"].state is ReplicaState.READY)
            assert (await ask(remote, 0, headstart=NO_CACHE))[0] == 200
            assert waited < 60

    play(folder, scenario, servers=2)


def end_no_pause(remote: Remote, monkeypatch: pytest.MonkeyPatch) -> None:
    """Circuit breakers that have opened stay so; states are seen again at once."""
    monkeypatch.setattr(RestartDelay, "after", lambda delay, served_s: 0.0)
    for state in remote.gateway.router._states.values():
        monkeypatch.setattr(state.breaker, "_clock", lambda: 0.0)


async def burst(remote: Remote) -> Counter[int]:
    """How often each status came."""
    return Counter(status for status, _ in await asyncio.gather(*[ask(remote, number) for number in range(20)]))


def test_a_burst_is_served_at_once_by_a_sole_server_that_has_crashed_and_is_back(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(remote: Remote, server: MockServer) -> None:
        end_no_pause(remote, monkeypatch)
        replica = remote.gateway.replicas["replica-0"]

        async def hold(talk: Talk) -> None:
            await talk.wait_until_gone()

        server.behave = hold
        running = asyncio.create_task(burst(remote))
        await until(lambda: len(server.talks) == 20)
        await server.kill()
        assert set(await running) <= {502, 503}
        await until(lambda: "cannot be reached" in str(replica.down_reason))
        assert remote.gateway.router.view("replica-0").breaker == "open"
        server.behave = saying(whole("hello"))
        await server.start()
        await until(lambda: replica.state is ReplicaState.READY)
        assert await burst(remote) == {200: 20}

    play(folder, scenario, servers=1)


def test_q8_a_sole_server_that_was_only_unwell_is_not_believed_to_be_another(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(remote: Remote, server: MockServer) -> None:
        end_no_pause(remote, monkeypatch)
        replica = remote.gateway.replicas["replica-0"]
        server.behave = refusing(500)
        assert 502 in await burst(remote)
        for status, state in ((503, ReplicaState.DOWN), (200, ReplicaState.READY)):
            server.health = status
            await until(lambda state=state: replica.state is state)  # type: ignore[misc]
        assert await burst(remote) == {503: 20}

    play(folder, scenario, servers=1)


def test_q8_with_all_servers_down_the_answer_is_503_at_once(folder: Path) -> None:
    async def scenario(remote: Remote, *servers: MockServer) -> None:
        for server in servers:
            await server.kill()
        for number in range(3):
            began = time.monotonic()
            status, headers, _ = await remote.post(
                "/v1/chat/completions", messages=[{"role": "user", "content": f"{number}"}]
            )
            assert status in (502, 503)
            if number:
                assert (status, int(headers["retry-after"]) >= 1) == (503, True)
            assert time.monotonic() - began < 30, "nobody waits for servers that are not ours to start"

    play(folder, scenario, servers=2)


def test_q8_no_request_is_sent_to_the_same_server_twice(folder: Path) -> None:
    async def scenario(remote: Remote, *servers: MockServer) -> None:
        for server in servers:
            server.behave = closing({"healed": False})
        status, _, _ = await remote.complete()
        assert status == 502
        assert [len(server.talks) for server in servers] == [1, 1]

    play(folder, scenario, servers=2)


def test_q6_refusals_open_no_breaker_and_reach_the_caller(folder: Path) -> None:
    async def scenario(remote: Remote, server: MockServer) -> None:
        for number, status in enumerate([400, 413, 422] * 16):
            server.behave = refusing(status, {"error": {"message": f"too long {number}", "type": "bad", "code": "x"}})
            answered, _, body = await remote.complete()
            assert (answered, f"too long {number}".encode() in body) == (status, True)
        server.behave = refusing(429, {"error": {"message": "later"}}, **{"retry-after": "7"})
        for _ in range(5):
            answered, headers, _ = await remote.complete()
            assert (answered, headers["retry-after"]) == (429, "7")
        assert remote.gateway.router.view("replica-0").failures == 0
        server.behave = Slots(0.0)
        for _ in range(10):
            assert (await remote.complete())[0] == 200

    play(folder, scenario)


def test_a_server_that_fails_probes_is_named_in_the_readiness(folder: Path) -> None:
    async def scenario(remote: Remote, bad: MockServer, good: MockServer) -> None:
        bad.behave = refusing(500)
        for number in range(12):
            assert (await ask(remote, number, headstart=NO_CACHE))[0] == 200
            await until(lambda: remote.gateway.ready_replicas == 2)
        async with remote.http.get(remote.url + "/ready") as response:
            readiness: Any = await response.json()
        assert response.status == 200
        assert "replica-0: left alone after 3 failures in a row" in readiness["degraded"]

    play(folder, scenario, servers=2)
