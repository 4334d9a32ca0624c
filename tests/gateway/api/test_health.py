"""The small routes: alive, ready, which version, and what kind of text each answer is."""

from __future__ import annotations

import gateway

from .conftest import Bench, Service


def test_alive_ready_and_version_are_public_and_short(bench: Bench) -> None:
    async def scenario(service: Service) -> None:
        assert (await service.get("/health")).json == {"status": "ok"}
        assert (await service.get("/version")).json == {"version": gateway.__version__}
        ready = await service.get("/ready")
        assert ready.status == 200
        assert ready.json["ready"] is True
        assert ready.json["replicas"] == {"engine-0": "ready", "engine-1": "ready"}
        service.replicas[1].lose("out of memory")
        degraded = await service.get("/ready")
        assert degraded.status == 200
        assert any("engine-1 is down: out of memory" in problem for problem in degraded.json["degraded"])

    bench.run(scenario, replicas=2)


def test_paths_are_told_to_the_operator_alone(bench: Bench) -> None:
    async def scenario(service: Service) -> None:
        service.replica.lose("the engine process ended: '/srv/the models/m' is not complete")
        assert "/srv/the models/m" in (await service.get("/ready")).json["degraded"][0]
        stranger = {"x-forwarded-for": "192.0.2.1"}
        told = (await service.get("/ready", headers=stranger)).json["degraded"][0]
        assert told == "engine-0 is down: the engine process ended: a local path is not complete"
        refused = await service.complete("x", headers=stranger)
        assert "a local path is not complete" in refused.json["error"]["message"]
        assert b"/srv" not in refused.body

    bench.run(scenario)


def test_replicas_are_listed_with_what_they_serve_and_their_load(bench: Bench) -> None:
    async def scenario(service: Service) -> None:
        await service.complete(bench.tokens(0, 40))
        (row,) = (await service.get("/admin/replicas")).json["replicas"]
        assert (row["id"], row["state"], row["down_reason"]) == ("engine-0", "ready", None)
        assert row["info"]["num_blocks"] == 256
        assert row["load"]["cached_blocks"] == 2
        assert "profile" not in row["info"]

    bench.run(scenario)


def test_media_types_are_said_once(bench: Bench) -> None:
    expected = {
        "/health": "application/json",
        "/v1/models": "application/json",
        "/nothing": "application/json",
        "/metrics": "text/plain; version=0.0.4; charset=utf-8",
        "/dashboard": "text/html; charset=utf-8",
    }

    async def scenario(service: Service) -> None:
        for path, media_type in expected.items():
            assert (await service.get(path)).headers["content-type"] == media_type

    bench.run(scenario)
