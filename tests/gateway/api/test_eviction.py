"""Switching the eviction policy and asking what others would give, over HTTP."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec

from cache_policy.policy import POLICY_NAMES
from cache_policy.traces import read_trace
from gateway.config import TraceConfig, WhatIfConfig

from ..conftest import until
from .conftest import BASE, Bench, Service


def test_the_policy_is_switched_on_every_replica_and_remembered(bench: Bench) -> None:
    async def scenario(service: Service) -> None:
        before = (await service.get("/admin/policy")).json
        assert (before["policy"], before["changes"]) == ("lru", [])
        assert before["policies"] == list(POLICY_NAMES)
        await service.complete(bench.tokens(0, 60))
        switched = await service.ask("PUT", "/admin/policy", json={"policy": "s3fifo"})
        assert (switched.status, switched.json) == (
            200,
            {"policy": "s3fifo", "replicas": {"engine-0": "ok", "engine-1": "ok"}},
        )
        assert (await service.complete(bench.tokens(0, 60))).cached == 48  # nothing was lost
        after = (await service.get("/admin/policy")).json
        assert after["policy"] == "s3fifo"
        assert [(change["before"], change["after"]) for change in after["changes"]] == [("lru", "s3fifo")]
        rows = (await service.get("/admin/replicas")).json["replicas"]
        assert [row["info"]["policy"] for row in rows] == ["s3fifo", "s3fifo"]

    bench.run(scenario, replicas=2)


def test_a_replica_that_comes_back_follows_the_policy_in_force(bench: Bench) -> None:
    async def scenario(service: Service) -> None:
        await service.ask("PUT", "/admin/policy", json={"policy": "arc"})
        service.replica.lose()
        service.replica.recover()
        await until(lambda: service.replica.info is not None and service.replica.info.policy == "arc")

    bench.run(scenario)


def test_what_is_no_policy_is_refused_with_those_there_are(bench: Bench) -> None:
    async def scenario(service: Service) -> None:
        for body in ({"policy": "psychic"}, {"policy": 7}, {}, {"policy": "lru", "size": 3}, ["lru"]):
            answer = await service.ask("PUT", "/admin/policy", json=body)
            assert answer.status == 400, body
        answer = await service.ask("PUT", "/admin/policy", json={"policy": "psychic"})
        assert "wtinylfu" in answer.json["error"]["message"]
        assert answer.json["error"]["param"] == "policy"
        service.replica.lose()
        assert (await service.ask("PUT", "/admin/policy", json={"policy": "arc"})).status == 503
        assert (await service.get("/admin/policy")).json["policy"] == "lru"

    bench.run(scenario)


def test_what_if_follows_the_traffic(bench: Bench) -> None:
    async def scenario(service: Service) -> None:
        for _ in range(3):
            await service.complete(bench.tokens(0, 65))
        await service.complete(bench.tokens(0, 65), headstart={"bypass": True})
        report = (await service.get("/admin/whatif")).json
        assert (report["requests"], report["prompt_tokens"]) == (3, 195)
        assert report["token_hit_rate"] == report["estimated_token_hit_rate"] == 128 / 195
        assert {row["blocks"] for row in report["rows"]} == {128, 256, 512}

    bench.run(scenario)


def test_without_ghost_caches_what_if_says_how_to_have_them(bench: Bench) -> None:
    async def scenario(service: Service) -> None:
        answer = await service.get("/admin/whatif")
        assert answer.status == 400
        assert "whatif.enabled" in answer.json["error"]["message"]

    bench.run(scenario, msgspec.structs.replace(BASE, whatif=WhatIfConfig(enabled=False)))


def test_the_traffic_is_recorded_without_its_text(bench: Bench, tmp_path: Path) -> None:
    async def scenario(service: Service) -> None:
        await service.chat("a ZEBRA-7731 " * 20)
        await service.complete(bench.tokens(0, 60))

    bench.run(scenario, msgspec.structs.replace(BASE, trace=TraceConfig(folder=str(tmp_path))))
    text = (tmp_path / "trace.jsonl").read_text()
    assert "ZEBRA" not in text
    lines = [json.loads(line) for line in text.splitlines()]
    assert [line["template"] for line in lines] == ["unregistered", "unregistered"]
    assert lines[1]["output_length"] == 8
    assert len(read_trace(tmp_path / "trace.jsonl").requests[1]) == 3


def test_a_recorder_that_has_stopped_shows_in_ready(bench: Bench, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    async def scenario(service: Service) -> None:
        ready = await service.get("/ready")
        assert ready.status == 200
        assert any("traffic is not recorded" in problem for problem in ready.json["degraded"])

    bench.run(scenario, msgspec.structs.replace(BASE, trace=TraceConfig(folder=str(tmp_path / "file" / "x"))))
