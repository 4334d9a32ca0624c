"""``/v1/explain`` says what the gateway would do, and changes nothing by saying so."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from gateway.config import ApiKey, Config, TemplateConfig

from .conftest import BASE, MODEL, Answer, Bench, Service

SYSTEM = "You are the support assistant. It is {now}.\nAnswer from the documents only, and name them."
CONFIG: Config = msgspec.structs.replace(BASE, templates={"support": TemplateConfig(SYSTEM)})
DOCUMENTS = [
    {"id": f"d{index}", "text": f"Document number {index} says: " + f"word{index} " * 20 + "end."} for index in range(4)
]


def body(now: str, question: str, documents: list[Any] | None = None, **fields: Any) -> dict[str, Any]:
    return {
        "model": MODEL,
        "messages": [
            {"role": "system", "content": SYSTEM.format(now=now)},
            {"role": "user", "content": question},
        ],
        "documents": DOCUMENTS[:3] if documents is None else documents,
        "max_tokens": 2,
        **fields,
    }


async def explained(service: Service, request: dict[str, Any], **options: Any) -> dict[str, Any]:
    answer = await service.post("/v1/explain", request, **options)
    assert answer.status == 200, answer.body
    found: dict[str, Any] = answer.json
    return found


async def sent(service: Service, request: dict[str, Any]) -> Answer:
    answer = await service.post("/v1/chat/completions", request)
    assert answer.status == 200, answer.body
    return answer


def test_it_says_what_was_moved_and_laid_out(bench: Bench) -> None:
    async def scenario(service: Service) -> None:
        found = await explained(service, body("10:00", "why?"))
        assert found["template"] == "support"
        assert found["fields"] == {"now": "10:00"}
        assert found["metadata"] == "Metadata: now=10:00"
        assert found["note"] is None
        assert {change["step"] for change in found["changes"]} == {"volatile", "layout"}
        (candidate,) = found["candidates"]
        assert candidate["replica"] == found["replica"] == "engine-0"
        assert (candidate["order"], candidate["documents"]) == ("cache-aware", ["d0", "d1", "d2"])
        assert candidate["cached_tokens"] == 0
        assert candidate["expected_seconds"] > 0
        assert candidate["divergence"]["token"] == 0
        assert candidate["divergence"]["here"].startswith("<|im_start|>system\nYou are")

    bench.run(scenario, CONFIG)


def test_what_it_predicts_is_what_happens(bench: Bench) -> None:
    async def scenario(service: Service) -> None:
        await sent(service, body("10:00", "why?"))
        request = body("10:01", "and how?", [DOCUMENTS[3], *DOCUMENTS[2::-1]])
        found = await explained(service, request)
        (candidate,) = found["candidates"]
        assert candidate["documents"] == ["d0", "d1", "d2", "d3"]
        assert any("stand at another place" in change["what"] for change in found["changes"])
        answer = await sent(service, request)
        assert candidate["cached_tokens"] == answer.cached > 0
        assert candidate["prompt_tokens"] == int(answer.headers["x-headstart-prompt-tokens"])

    bench.run(scenario, CONFIG)


def test_the_first_divergent_token_is_told_with_the_callers_text_alone(bench: Bench) -> None:
    async def scenario(service: Service) -> None:
        await sent(service, body("10:00", "the secret of somebody else"))
        divergence = (await explained(service, body("10:00", "the question of mine")))["candidates"][0]["divergence"]
        assert divergence["reason"] in ("new", "tail")
        shown = divergence["text_before"] + divergence["here"]
        assert "question of mine" in shown
        other = (await explained(service, body("10:00", "why?", DOCUMENTS[:2])))["candidates"][0]
        assert other["divergence"]["reason"] == "new"
        assert other["divergence"]["token"] >= other["cached_tokens"]
        assert other["divergence"]["token"] < other["cached_tokens"] + 16
        assert "secret" not in str((divergence, other))

    bench.run(scenario, CONFIG)


def test_it_tells_an_evicted_prefix_from_a_new_one(bench: Bench) -> None:
    async def scenario(service: Service) -> None:
        await sent(service, body("10:00", "why?"))
        await service.post("/admin/cache/reset")
        divergence = (await explained(service, body("10:00", "why?")))["candidates"][0]["divergence"]
        assert (divergence["token"], divergence["reason"]) == (0, "not_resident")

    bench.run(scenario, CONFIG)


def test_a_prompt_that_is_held_but_for_its_end_says_so(bench: Bench) -> None:
    async def scenario(service: Service) -> None:
        await sent(service, body("10:00", "why?"))
        (candidate,) = (await explained(service, body("10:00", "why?")))["candidates"]
        assert candidate["divergence"]["reason"] == "tail"
        assert candidate["divergence"]["token"] == candidate["cached_tokens"]

    bench.run(scenario, CONFIG)


def test_every_replica_is_weighed_the_best_first(bench: Bench) -> None:
    async def scenario(service: Service) -> None:
        first = await sent(service, body("10:00", "why?"))
        found = await explained(service, body("10:01", "how?"))
        assert found["replica"] == first.headers["x-headstart-replica"]
        best, other = found["candidates"]
        assert best["replica"] == found["replica"]
        assert best["cached_tokens"] > other["cached_tokens"] == 0
        assert best["expected_seconds"] < other["expected_seconds"]

    bench.run(scenario, CONFIG, replicas=2)


def test_what_is_remembered_is_bounded_and_in_the_metrics(bench: Bench) -> None:
    async def scenario(service: Service) -> None:
        await sent(service, body("10:00", "why?"))
        text = (await service.get("/metrics")).body.decode()
        assert "# HELP headstart_remembered_prompt_tokens Tokens of recent prompts; at most 4000000." in text
        assert f"headstart_remembered_prompt_tokens {float(service.gateway.prompts.tokens)}" in text
        assert service.gateway.prompts.tokens > 0

    bench.run(scenario, CONFIG)


def test_explaining_generates_and_counts_nothing(bench: Bench) -> None:
    async def scenario(service: Service) -> None:
        for _ in range(3):
            await explained(service, body("10:00", "why?"))
        assert service.replica.submitted == []
        assert service.stats().totals.requests == 0
        assert service.gateway.prompts.tokens == 0

    bench.run(scenario, CONFIG)


def test_a_bypass_finds_nothing_cached(bench: Bench) -> None:
    async def scenario(service: Service) -> None:
        await sent(service, body("10:00", "why?"))
        found = await explained(service, body("10:00", "why?", headstart={"bypass": True}))
        (candidate,) = found["candidates"]
        assert (candidate["order"], candidate["cached_tokens"]) == ("preserve", 0)
        assert candidate["divergence"]["reason"] == "new"

    bench.run(scenario, CONFIG)


def test_tenants_see_nothing_of_each_others_prompts(bench: Bench) -> None:
    keys = {hashlib.sha256(f"sk-{name}".encode()).hexdigest(): ApiKey(name) for name in ("acme", "bolt")}

    async def scenario(service: Service) -> None:
        acme, bolt = ({"authorization": f"Bearer sk-{name}"} for name in ("acme", "bolt"))
        answer = await service.post("/v1/chat/completions", body("10:00", "why?"), headers=acme)
        assert answer.status == 200
        own = (await explained(service, body("10:00", "why?"), headers=acme))["candidates"][0]
        foreign = (await explained(service, body("10:00", "why?"), headers=bolt))["candidates"][0]
        assert own["cached_tokens"] > foreign["cached_tokens"] == 0
        assert (foreign["divergence"]["token"], foreign["divergence"]["reason"]) == (0, "new")
        assert (await service.post("/v1/explain", body("10:00", "why?"))).status == 401

    bench.run(scenario, msgspec.structs.replace(CONFIG, keys=keys))


def test_errors_are_those_of_a_chat(bench: Bench) -> None:
    async def scenario(service: Service) -> None:
        wrong = [
            (body("10:00", "why?") | {"model": "other"}, 404, "model"),
            (body("10:00", "why?", [{"id": "a"}]), 400, "documents[0].text"),
            (body("10:00", "why?", temperature=3), 400, "temperature"),
            (body("10:00", "word " * 5000), 400, "messages"),
        ]
        for request, status, param in wrong:
            for path in ("/v1/explain", "/v1/chat/completions"):
                answer = await service.post(path, request)
                assert (answer.status, answer.json["error"]["param"]) == (status, param), path

    bench.run(scenario, CONFIG)
