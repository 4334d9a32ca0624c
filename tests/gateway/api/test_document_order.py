"""Document order over HTTP: what is popular stands together, limits hold, and what is held for it is told."""

from __future__ import annotations

import asyncio

import pytest

from .conftest import MODEL, Bench, Service


def documents(*ids: str) -> list[dict[str, str]]:
    return [{"id": id, "text": f"All about {id}. " * 20} for id in ids]


def test_requests_that_were_answered_make_documents_popular(bench: Bench) -> None:
    async def scenario(service: Service) -> None:
        for _ in range(4):
            await asyncio.gather(*[service.chat(documents=documents("d", "b")) for _ in range(8)])
        body = {
            "model": MODEL,
            "messages": [{"role": "user", "content": "What?"}],
            "documents": documents("a", "d", "c", "b"),
            "headstart": {"order": "popularity", "keep_last": 0},
        }
        explained = (await service.post("/v1/explain", body)).json
        assert explained["candidates"][0]["documents"] == ["b", "d", "a", "c"]
        assert explained["changes"][-1]["what"].endswith("all by popularity snapshot 1")
        scraped = (await service.get("/metrics")).body.decode()
        assert "headstart_ordering_documents 2.0" in scraped, "explaining counts nothing"
        assert "headstart_ordering_pairs 1.0" in scraped
        assert "headstart_ordering_resident_blocks" in scraped

    bench.run(scenario)


@pytest.mark.parametrize("field", ["keep_first", "keep_last", "max_displacement"])
def test_a_limit_that_is_no_count_is_refused_by_name(bench: Bench, field: str) -> None:
    async def scenario(service: Service) -> None:
        for value in (-1, 1.5, "two"):
            answer = await service.chat(documents=documents("a", "b"), headstart={field: value})
            assert answer.status == 400
            assert field in answer.json["error"]["param"]

    bench.run(scenario)
