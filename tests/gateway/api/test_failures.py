"""Replicas that die, queues that fill, servers that stop: an error that says so, never a silent truncation."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec
import pytest

from engine.batch import Batch, ChunkResult
from engine.scripted import ScriptedRunner
from gateway.config import LimitsConfig, ServerConfig
from gateway.replicas.base import ReplicaState
from gateway.server import run

from ..conftest import until
from .conftest import BASE, MODEL, Answer, Bench, Service, with_limits


def _start(service: Service, **fields: Any) -> asyncio.Task[Answer]:
    body = {"prompt": "x", "max_tokens": 200, "ignore_eos": True, "stream": True} | fields
    return asyncio.create_task(service.complete(**body))


async def _first_event(service: Service, **fields: Any) -> Any:
    """A stream of which the first event has come; the response stays open."""
    body = {"model": MODEL, "prompt": "x", "max_tokens": 1500, "ignore_eos": True, "stream": True} | fields
    response = await service.http.post(service.url + "/v1/completions", json=body)
    await response.content.readuntil(b"\n\n")
    return response


def _last_event(body: bytes) -> Any:
    return json.loads(body.decode().strip().rpartition("data: ")[2])


def test_q4_a_request_without_a_token_yet_is_answered_by_another_replica(bench: Bench) -> None:
    async def scenario(service: Service) -> None:
        for replica in service.replicas:
            replica.hold()
        task = _start(service)
        await until(lambda: any(replica.submitted for replica in service.replicas))
        first = next(replica for replica in service.replicas if replica.submitted)
        other = next(replica for replica in service.replicas if replica is not first)
        first.lose()
        other.let_go()
        answer = await task
        assert answer.status == 200
        assert answer.headers["x-headstart-replica"] == other.id
        assert answer.events[-1] == "[DONE]"
        totals = service.stats().totals
        assert (totals.requests, totals.failed) == (1, 0)

    bench.run(scenario, replicas=2)


def test_q4_a_request_without_a_token_yet_waits_for_a_restart(bench: Bench) -> None:
    async def scenario(service: Service) -> None:
        service.replica.hold()
        task = _start(service)
        await until(lambda: len(service.replica.submitted) == 1)
        service.replica.lose()
        new = await service.complete("another")
        assert new.status == 503, "a new request is not made to wait"
        service.replica.let_go()
        service.replica.recover()
        answer = await task
        assert answer.status == 200
        assert answer.events[-1] == "[DONE]"

    bench.run(scenario)


def test_a_request_is_tried_again_once_only(bench: Bench) -> None:
    """One that kills every engine it meets must not go round for ever."""

    async def scenario(service: Service) -> None:
        service.replica.hold()
        task = _start(service)
        for attempt in (1, 2):
            await until(lambda attempt=attempt: len(service.replica.submitted) == attempt)
            service.replica.lose("died of this prompt")
            service.replica.recover()
        answer = await task
        assert answer.status == 502
        assert answer.json["error"]["code"] == "replica_lost"
        assert service.stats().totals.failed == 1

    bench.run(scenario)


@pytest.mark.parametrize("chat", [True, False])
def test_q4_a_replica_that_dies_in_mid_stream_ends_it_with_an_error_event(bench: Bench, chat: bool) -> None:
    async def scenario(service: Service) -> None:
        body = {"model": MODEL, "max_tokens": 1500, "ignore_eos": True, "stream": True}
        path = "/v1/chat/completions" if chat else "/v1/completions"
        body |= {"messages": [{"role": "user", "content": "x"}]} if chat else {"prompt": "x"}
        async with service.http.post(service.url + path, json=body) as response:
            head = await response.content.readuntil(b"\n\n")
            service.replica.lose()
            rest = await response.content.read()
        assert b"[DONE]" not in rest
        assert b'"finish_reason":"' not in head + rest
        assert _last_event(rest)["error"]["code"] == "replica_lost"
        assert len(service.replica.submitted) == 1, "what has begun is not begun again"
        assert service.stats().totals.failed == 1

    bench.run(scenario)


def test_a_replica_that_dies_in_mid_answer_is_an_error(bench: Bench) -> None:
    async def scenario(service: Service) -> None:
        task = _start(service, stream=False, max_tokens=1500)
        await until(lambda: service.replica.load is not None and service.replica.load.running == 1)
        service.replica.lose()
        answer = await task
        assert answer.status == 502
        assert answer.json["error"]["code"] == "replica_lost"

    bench.run(scenario)


def test_a_step_that_fails_is_tried_again_and_then_an_error(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    failures = 1
    execute = ScriptedRunner.execute

    def failing(runner: ScriptedRunner, batch: Batch) -> list[ChunkResult]:
        nonlocal failures
        failures -= 1
        if failures >= 0:
            raise RuntimeError("a fault of this test")
        return execute(runner, batch)

    monkeypatch.setattr(ScriptedRunner, "execute", failing)

    async def scenario(service: Service) -> None:
        nonlocal failures
        assert (await service.complete("x")).status == 200
        failures = 2
        answer = await service.complete("x")
        assert answer.status == 500
        assert answer.json["error"]["code"] == "engine_error"
        assert b"fault of this test" not in answer.body

    bench.run(scenario)


def test_without_a_replica_the_answer_is_503_at_once(bench: Bench) -> None:
    async def scenario(service: Service) -> None:
        service.replica.lose("out of memory")
        for answer in (await service.chat(), await service.complete("x"), await service.post("/admin/cache/reset")):
            assert answer.status == 503
            assert int(answer.headers["retry-after"]) >= 1
            assert answer.json["error"]["code"] == "no_replica"
        ready = await service.get("/ready")
        assert ready.status == 503
        assert "out of memory" in ready.json["degraded"][0] + ready.json["degraded"][-1]
        assert (await service.get("/health")).status == 200
        service.replica.recover()
        assert (await service.get("/ready")).status == 200
        assert (await service.chat()).status == 200

    bench.run(scenario)


def test_more_than_the_queue_holds_is_refused(bench: Bench) -> None:
    async def scenario(service: Service) -> None:
        service.replica.hold()
        tasks = [_start(service) for _ in range(3)]
        await until(lambda: service.gateway.dispatcher.active == 3)
        refused = await service.complete("x")
        assert refused.status == 503
        assert refused.json["error"]["code"] == "overloaded"
        assert refused.headers["retry-after"] == "1"
        metrics = (await service.get("/metrics")).body.decode().splitlines()
        assert 'headstart_refused_requests_total{code="overloaded"} 1.0' in metrics
        assert "headstart_requests_in_hand 3.0" in metrics
        assert "headstart_requests_limit 3.0" in metrics
        service.replica.let_go()
        assert [(await task).status for task in tasks] == [200] * 3
        assert (await service.complete("x")).status == 200
        assert (await service.complete(bench.tokens(0, 3000))).json["error"]["code"] == "context_length_exceeded"
        assert service.gateway.dispatcher.refused == {"overloaded": 1, "context_length_exceeded": 1}

    bench.run(scenario, with_limits(max_queue=3))


def test_a_request_that_takes_too_long_is_ended(bench: Bench) -> None:
    async def scenario(service: Service) -> None:
        service.replica.hold()
        late = await service.complete("x")
        assert late.status == 504
        assert late.json["error"]["code"] == "timeout"
        service.replica.let_go()
        response = await _first_event(service)
        service.replica.hold()
        assert _last_event(await response.content.read())["error"]["code"] == "timeout"
        service.replica.let_go()
        await until(lambda: service.replica.load is not None and service.replica.load.running == 0)
        assert service.stats().totals.failed == 2

    bench.run(scenario, with_limits(request_timeout_s=1.0))


def test_a_draining_gateway_takes_no_more(bench: Bench) -> None:
    async def scenario(service: Service) -> None:
        service.gateway.drain()
        for answer in (await service.chat(), await service.complete("x")):
            assert answer.status == 503
            assert answer.headers["retry-after"] == "1"
        ready = await service.get("/ready")
        assert ready.status == 503
        assert "shutting down" in ready.json["degraded"]

    bench.run(scenario)


def test_r1_what_runs_when_the_server_stops_comes_to_its_end(bench: Bench) -> None:
    async def main() -> None:
        async with bench.service() as service:
            service.replica.hold()
            tasks = [_start(service, max_tokens=100) for _ in range(8)]
            await until(lambda: len(service.replica.submitted) == 8)
            service.gateway.when_draining(service.replica.let_go)
        answers = [await task for task in tasks]
        assert all(answer.events[-1] == "[DONE]" for answer in answers)
        assert service.replica.state is ReplicaState.STOPPED
        assert service.stats().totals.requests == 8

    run(main())


def test_what_outlives_the_grace_ends_with_an_error_event(bench: Bench) -> None:
    config = msgspec.structs.replace(BASE, server=ServerConfig(port=0, drain_grace_s=0.0), limits=LimitsConfig())

    async def main() -> None:
        async with bench.service(config) as service:
            response = await _first_event(service)
            service.replica.hold()
            reading = asyncio.create_task(response.content.read())
            await asyncio.sleep(0)
            # The client of the fixture must outlive the server, so that it can read the end.
            await service.stop_server()
            assert _last_event(await reading)["error"]["code"] == "overloaded"

    run(main())


def test_a_reset_during_a_stream_says_what_it_could_not_drop(bench: Bench) -> None:
    async def scenario(service: Service) -> None:
        prompt = bench.tokens(0, 64)
        undisturbed = await service.complete(prompt, max_tokens=100)
        response = await _first_event(service, prompt=prompt, max_tokens=100)
        service.replica.hold()
        report = await service.post("/admin/cache/reset")
        assert report.status == 202
        assert report.json["status"] == "deferred"
        assert report.json["replicas"]["engine-0"]["kept"] > 0
        service.replica.let_go()
        assert b"[DONE]" in await response.content.read()
        assert (await service.post("/admin/cache/reset")).json["status"] == "done"
        again = await service.complete(prompt, max_tokens=100)
        assert again.cached == 0
        assert again.text == undisturbed.text

    bench.run(scenario)
