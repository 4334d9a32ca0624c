"""The quality gate over HTTP, with an engine whose answers depend on every token before them."""

from __future__ import annotations

import hashlib

import msgspec

from gateway.config import AdminConfig, CanonicalConfig, QualityConfig

from ..conftest import until
from .conftest import BASE, Bench, Service

SAMPLED = msgspec.structs.replace(BASE, quality=QualityConfig(sample=1.0), canonical=CanonicalConfig(order="canonical"))
DOCUMENTS = [{"id": id, "text": f"About {id}."} for id in "CAB"]


async def until_compared(service: Service, pairs: int) -> None:
    await until(lambda: service.gateway.shadows.status.compared >= pairs)


def test_an_engine_that_reads_in_order_is_switched_back_and_on_again(bench: Bench) -> None:
    async def scenario(service: Service) -> None:
        assert (await service.get("/admin/quality")).json["templates"] == []
        for number in range(40):
            answer = await service.chat(f"Question {number}?", documents=DOCUMENTS, stream=number % 2 == 1)
            assert (answer.status, answer.headers["x-headstart-order"]) == (200, "canonical")
            assert "x-headstart-note" not in answer.headers
        await until(lambda: any(not row.reordering for row in service.gateway.quality.report()))
        answer = await service.chat("And now?", documents=DOCUMENTS)
        assert answer.headers["x-headstart-order"] == "preserve"
        assert "switched off" in answer.headers["x-headstart-note"]
        body = {"model": "scripted", "messages": [{"role": "user", "content": "And now?"}], "documents": DOCUMENTS}
        explained = (await service.post("/v1/explain", body)).json
        assert explained["note"] == answer.headers["x-headstart-note"]
        assert explained["candidates"][0]["documents"] == ["C", "A", "B"]
        scraped = (await service.get("/metrics")).body.decode()
        assert 'headstart_quality_reordering{template="unregistered"} 0.0' in scraped
        assert "headstart_quality_kept_bytes" in scraped
        report = (await service.get("/admin/quality")).json
        (row,) = report["templates"]
        assert (row["template"], row["reordering"], row["verdict"]) == ("unregistered", False, "harmful")
        assert row["switched"]["pairs"] >= 5
        assert set(row["metrics"]) == {"agreement", "logprob"}
        assert row["switched"]["excess"] > row["switched"]["bound"]
        assert (await service.get("/admin/stats")).json["totals"]["requests"] == 41

        switched = await service.post("/admin/quality/unregistered", {"reordering": True})
        assert (switched.status, switched.json["reordering"], switched.json["test"]) == (200, True, 2)
        answer = await service.chat("And now?", documents=DOCUMENTS)
        assert answer.headers["x-headstart-order"] == "canonical"

    bench.run(scenario, SAMPLED)


def test_gold_answers_are_taken_and_compared(bench: Bench) -> None:
    async def scenario(service: Service) -> None:
        asked = {"documents": DOCUMENTS, "headstart": {"gold": ["An answer that never comes"]}}
        assert (await service.chat("Why?", **asked)).status == 200
        await until_compared(service, 1)
        (row,) = (await service.get("/admin/quality")).json["templates"]
        assert row["metrics"]["gold"]["pairs"] == 1
        assert row["metrics"]["gold"]["excess"] == 0
        for gold in ("text", [1], ["x" * 2000], ["x"] * 100):
            refused = await service.chat("Why?", documents=DOCUMENTS, headstart={"gold": gold})
            assert refused.status == 400
            assert "gold" in refused.json["error"]["message"]

    bench.run(scenario, SAMPLED)


def test_what_cannot_be_switched_is_refused(bench: Bench) -> None:
    async def scenario(service: Service) -> None:
        assert (await service.post("/admin/quality/support", {"reordering": True})).status == 404
        for body in ({}, {"reordering": "yes"}, {"reordering": True, "why": "so"}, []):
            assert (await service.post("/admin/quality/support", body)).status == 400

    bench.run(scenario)


def test_the_switch_is_the_operators(bench: Bench) -> None:
    config = msgspec.structs.replace(BASE, admin=AdminConfig(key_sha256=hashlib.sha256(b"letmein").hexdigest()))

    async def scenario(service: Service) -> None:
        assert (await service.get("/admin/quality")).status == 401
        assert (await service.post("/admin/quality/support", {"reordering": True})).status == 401
        allowed = await service.get("/admin/quality", headers={"authorization": "Bearer letmein"})
        assert allowed.status == 200

    bench.run(scenario, config)


def test_the_hold_out_says_so_in_the_headers(bench: Bench) -> None:
    config = msgspec.structs.replace(SAMPLED, quality=QualityConfig(holdout=1.0))

    async def scenario(service: Service) -> None:
        answer = await service.chat("Why?", documents=DOCUMENTS)
        assert answer.headers["x-headstart-order"] == "preserve"
        assert answer.headers["x-headstart-note"].startswith("held out")
        (row,) = (await service.get("/admin/quality")).json["templates"]
        assert row["arms"]["preserved"]["requests"] == 1
        alone = await service.chat("Why?", documents=DOCUMENTS[:1])
        assert "x-headstart-note" not in alone.headers

    bench.run(scenario, config)
