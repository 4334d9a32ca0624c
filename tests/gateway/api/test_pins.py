"""Pinned prefixes over HTTP: what they cover, that they stay, that they are warm, and what cannot be pinned."""

from __future__ import annotations

import asyncio
import hashlib
import io
from pathlib import Path
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

from gateway.config import ApiKey, Config, LimitsConfig, PinConfig, TemplateConfig, TenantConfig, TraceConfig
from gateway.errors import ConfigError
from gateway.replicas.base import BACKGROUND_PRIORITY
from gateway.service import Gateway

from ..conftest import until
from .conftest import BASE, MODEL, Answer, Bench, Service

SYSTEM = "You are the support assistant. It is {now}.\nAnswer from the documents only. " + "Be kind. " * 20
HANDBOOK = {"id": "handbook", "title": "The handbook", "text": "Everything that is certain. " * 12 + "The end."}
OTHERS = [{"id": f"d{index}", "text": f"Document {index}: " + f"word{index} " * 20 + "end."} for index in range(3)]
TEMPLATES = {"support": TemplateConfig(SYSTEM), "pasted": TemplateConfig("From: {context}", documents="langchain")}
CONFIG: Config = msgspec.structs.replace(BASE, templates=TEMPLATES)


def having(**changes: Any) -> Config:
    return msgspec.structs.replace(CONFIG, **changes)


async def pinned(service: Service, wish: dict[str, Any], *, status: int = 201, **options: Any) -> Any:
    answer = await service.post("/admin/pins", wish, **options)
    assert answer.status == status, answer.body
    return answer.json


async def rows(service: Service, **options: Any) -> list[Any]:
    found: list[Any] = (await service.get("/admin/pins", **options)).json["pins"]
    return found


async def warm(service: Service) -> None:
    """Wait until every pin is resident wherever it is to be."""
    report = service.gateway.pins.report
    await until(lambda: all(row.state == "resident" for row in report().pins))


async def ask(service: Service, now: str, question: str, documents: Any = None, **options: Any) -> Answer:
    messages = [{"role": "system", "content": SYSTEM.format(now=now)}, {"role": "user", "content": question}]
    answer = await service.chat(messages, documents=documents, max_tokens=2, **options)
    assert answer.status == 200, answer.body
    return answer


async def flood(service: Service, bench: Bench) -> None:
    """Push out of the caches what can be pushed out."""
    for index in range(12):
        await service.complete([(7 * index + i * (index + 1)) % (bench.vocab_size - 20) + 10 for i in range(400)])


def test_a_template_pin_is_what_all_its_requests_begin_with(bench: Bench) -> None:
    async def scenario(service: Service) -> None:
        row = await pinned(service, {"template": "support"})
        assert (row["kind"], row["source"], row["tenant"], row["problem"]) == ("template", "api", "default", None)
        here = row["replicas"]["engine-0"]
        assert here["tokens"] == 16 * here["blocks"] <= row["tokens"] < here["tokens"] + 16
        assert here["share"] == here["blocks"] / 256
        await warm(service)
        assert (await ask(service, "10:00", "why?")).cached == here["tokens"]
        assert (await ask(service, "now is later", "and how?", OTHERS)).cached == here["tokens"]
        text = service.gateway.renderer.decode(service.replica.submitted[0].token_ids)
        assert text.startswith("<|im_start|>system\nYou are the support assistant. It is (see metadata).")

    bench.run(scenario, CONFIG)


def test_a_document_pin_leads_wherever_an_application_has_the_document(bench: Bench) -> None:
    async def scenario(service: Service) -> None:
        template = await pinned(service, {"template": "support"})
        row = await pinned(service, {"template": "support", "documents": [HANDBOOK]})
        assert (row["kind"], row["documents"]) == ("documents", ["handbook"])
        blocks = row["replicas"]["engine-0"]["blocks"]
        assert blocks > template["replicas"]["engine-0"]["blocks"]
        summary = (await service.get("/admin/pins")).json["replicas"]["engine-0"]
        assert (summary["pinned_blocks"], summary["num_blocks"]) == (blocks, 256)  # what both share counts once
        await warm(service)
        assert (await ask(service, "1:00", "why?", [HANDBOOK])).cached >= 16 * blocks
        assert (await ask(service, "2:00", "how?", [*OTHERS, HANDBOOK])).cached >= 16 * blocks

    bench.run(scenario, CONFIG)


def test_pins_survive_what_pushes_out_everything_else_until_they_are_given_up(bench: Bench) -> None:
    async def scenario(service: Service) -> None:
        row = await pinned(service, {"template": "support"})
        await warm(service)
        await ask(service, "1:00", "why?", OTHERS)
        await flood(service, bench)
        assert service.replica.load is not None
        assert service.replica.load.evictions > 0
        again = await ask(service, "1:00", "why?", OTHERS)
        assert again.cached == row["replicas"]["engine-0"]["tokens"]  # and nothing of the documents
        assert (await service.replica.call("check")) == {"ok": True}
        assert (await service.ask("DELETE", f"/admin/pins/{row['id']}")).status == 204
        assert await rows(service) == []
        assert (await service.replica.call("pins")) == {"pins": []}
        await flood(service, bench)
        assert (await ask(service, "1:00", "why?", OTHERS)).cached == 0
        assert (await service.ask("DELETE", f"/admin/pins/{row['id']}")).status == 404

    bench.run(scenario, CONFIG, num_blocks=64)


def test_a_restarted_engine_is_told_again_and_warmed_at_no_users_account(bench: Bench, tmp_path: Path) -> None:
    async def scenario(service: Service) -> None:
        await pinned(service, {"template": "support", "documents": [HANDBOOK]})
        await warm(service)
        service.replica.lose()
        (row,) = await rows(service)
        assert (row["state"], row["replicas"]["engine-0"]["pinned"]) == ("waiting", False)
        service.replica.recover()
        await warm(service)
        (told,) = (await service.replica.call("pins"))["pins"]
        assert told["resident"] == told["blocks"] > 0
        assert {request.priority for request in service.replica.submitted} == {BACKGROUND_PRIORITY}
        totals = (await service.get("/admin/stats")).json["totals"]
        assert (totals["requests"], totals["prompt_tokens"], totals["saved_prefill_s"]) == (0, 0, 0)
        assert (tmp_path / "trace.jsonl").read_text() == ""
        assert (await service.get("/admin/whatif")).json["requests"] == 0
        metrics = (await service.get("/metrics")).body.decode().splitlines()
        tokens = 16 * told["blocks"]
        assert f'headstart_pinned_blocks{{replica="engine-0",state="resident"}} {float(told["blocks"])}' in metrics
        assert f'headstart_warmed_tokens_total{{replica="engine-0"}} {float(2 * tokens)}' in metrics
        assert 'headstart_pins{state="resident"} 1.0' in metrics

    bench.run(scenario, having(trace=TraceConfig(folder=str(tmp_path))))


def test_warming_up_makes_room_for_a_users_request_and_goes_on_behind_it(bench: Bench) -> None:
    async def scenario(service: Service) -> None:
        service.replica.hold()
        await pinned(service, {"template": "support", "documents": [HANDBOOK]})
        await until(lambda: len(service.replica.submitted) == 1)
        assert [row["state"] for row in await rows(service)] == ["warming"]
        answer = asyncio.create_task(service.complete(bench.tokens(0, 40)))
        await until(lambda: len(service.replica.submitted) == 2)
        await until(lambda: service.gateway.pins.report().pins[0].state == "waiting")  # it was ended at once
        service.replica.let_go()
        assert (await answer).status == 200
        await warm(service)
        priorities = [request.priority for request in service.replica.submitted]
        assert priorities == [BACKGROUND_PRIORITY, 0, BACKGROUND_PRIORITY]

    bench.run(scenario, CONFIG)


def test_the_same_wish_is_the_same_pin_with_a_new_end(bench: Bench) -> None:
    async def scenario(service: Service) -> None:
        wish = {"template": "support", "documents": [HANDBOOK, OTHERS[0]]}
        first = await pinned(service, {**wish, "ttl_s": 3600})
        assert first["expires"] == pytest.approx(first["created"] + 3600)
        again = await pinned(service, {**wish, "tenant": "default"}, status=200)
        assert (again["id"], again["created"], again["expires"]) == (first["id"], first["created"], None)
        assert len(await rows(service)) == 1
        other = await pinned(service, {"template": "support", "documents": [OTHERS[0], HANDBOOK]})
        assert other["id"] != first["id"]

    bench.run(scenario, CONFIG)


def test_keys_that_explain_lists_can_be_pinned(bench: Bench) -> None:
    async def scenario(service: Service) -> None:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "Of no template at all. " * 30}]}
        (candidate,) = (await service.post("/v1/explain", body)).json["candidates"]
        keys = candidate["keys"]
        assert len(keys) == candidate["prompt_tokens"] // 16 > 3
        row = await pinned(service, {"keys": keys[:3]})
        assert (row["kind"], row["tokens"], row["state"]) == ("keys", None, "not_resident")  # whose tokens nobody knows
        await service.post("/v1/chat/completions", {**body, "max_tokens": 2})
        assert (await rows(service))[0]["state"] == "resident"
        await flood(service, bench)
        assert (await rows(service))[0]["replicas"]["engine-0"]["resident_blocks"] == 3
        assert (await service.post("/v1/explain", body)).json["candidates"][0]["cached_tokens"] == 48

    bench.run(scenario, CONFIG, num_blocks=64)


def test_what_takes_too_much_of_the_cache_is_refused_and_says_by_how_much(bench: Bench) -> None:
    async def scenario(service: Service) -> None:
        first = await pinned(service, {"template": "support"})
        blocks = first["replicas"]["engine-0"]["blocks"]
        answer = await service.post("/admin/pins", {"template": "support", "documents": [HANDBOOK, *OTHERS]})
        assert (answer.status, answer.json["error"]["code"]) == (409, "conflict")
        message = answer.json["error"]["message"]
        wanted = int(message.partition("would take ")[2].partition(" ")[0])
        assert f"{wanted - 25} more than the 25 of 256" in message
        assert wanted > 25 >= blocks
        assert "max_pinned_share = 0.1" in message
        assert [row["id"] for row in await rows(service)] == [first["id"]]
        assert len((await service.replica.call("pins"))["pins"]) == 1

    bench.run(scenario, having(limits=LimitsConfig(max_pinned_share=0.1)))


def test_a_tenants_quota_bounds_its_pins(bench: Bench) -> None:
    async def scenario(service: Service) -> None:
        answer = await service.post("/admin/pins", {"template": "support"})
        assert answer.status == 409
        assert "max_cached_blocks of 4" in answer.json["error"]["message"]

    bench.run(scenario, having(tenants={"default": TenantConfig(max_cached_blocks=4)}))


HOSTILE: list[tuple[Any, str | None]] = [
    ({}, None),
    ({"template": "unknown"}, "template"),
    ({"template": "support@9"}, "template"),
    ({"template": 7}, "template"),
    ({"template": "support", "tenant": "nobody"}, "tenant"),
    ({"template": "support", "documents": [{"id": "x"}]}, "documents[0].text"),
    ({"template": "support", "documents": [{"id": "x", "text": " "}]}, "documents[0].text"),
    ({"template": "support", "documents": [HANDBOOK, {"id": "handbook", "text": "other"}]}, "documents[1].id"),
    ({"template": "support", "documents": "text"}, "documents"),
    ({"template": "pasted", "documents": [HANDBOOK]}, "documents"),
    ({"template": "support", "tools": [{"type": "function"}]}, "tools"),
    ({"template": "support", "ttl_s": 0}, "ttl_s"),
    ({"template": "support", "ttl_s": 1e300}, "ttl_s"),
    ({"template": "support", "ttl": 5}, None),
    ({"template": "support", "keys": ["00" * 16]}, "template"),
    ({"keys": []}, None),
    ({"keys": ["xyz"]}, "keys[0]"),
    ({"keys": ["00" * 16, "AB" * 16]}, "keys[1]"),
    ({"keys": ["00" * 16, "11" * 16, "00" * 16]}, "keys[2]"),
    ({"keys": ["00" * 16], "tenant": "default"}, "tenant"),
    ([], None),
]


def test_what_cannot_be_pinned_is_refused_by_name(bench: Bench) -> None:
    async def scenario(service: Service) -> None:
        for wish, param in HOSTILE:
            answer = await service.post("/admin/pins", wish)
            assert (answer.status, answer.json["error"]["param"]) == (400, param), (wish, answer.body)
        assert await rows(service) == []

    bench.run(scenario, CONFIG)


def test_a_prefix_that_no_prompt_could_have_and_a_body_without_end_are_refused(bench: Bench) -> None:
    async def scenario(service: Service) -> None:
        long = {"template": "support", "documents": [{"id": "x", "text": "word " * 30_000}]}
        answer = await service.post("/admin/pins", long)
        assert answer.status == 409
        assert "prompts at most 2047" in answer.json["error"]["message"]
        answer = await service.ask("POST", "/admin/pins", data=io.BytesIO(b'{"template": "' + b"x" * 3_000_000))
        assert answer.status == 413
        deep = b'{"template": "support", "documents": [{"text": "x", "y": ' + b"[" * 100_000 + b"]" * 100_000 + b"}]}"
        assert (await service.ask("POST", "/admin/pins", data=deep)).status == 400

    bench.run(scenario, CONFIG)


def test_a_pin_is_of_one_tenant_alone(bench: Bench) -> None:
    keys = {name: f"sk-{name}" for name in ("blue", "green", "operator")}
    digests = {name: hashlib.sha256(key.encode()).hexdigest() for name, key in keys.items()}
    headers = {name: {"authorization": f"Bearer {key}"} for name, key in keys.items()}
    config = having(
        keys={digests["blue"]: ApiKey("blue"), digests["green"]: ApiKey("green")},
        admin=msgspec.structs.replace(CONFIG.admin, key_sha256=digests["operator"]),
    )

    async def scenario(service: Service) -> None:
        operator = headers["operator"]
        answer = await service.post("/admin/pins", {"template": "support"}, headers=operator)
        assert (answer.status, answer.json["error"]["param"]) == (400, "tenant")
        assert "blue, green" in answer.json["error"]["message"]
        for path, method in (("/admin/pins", "GET"), ("/admin/pins", "POST"), ("/admin/pins/x", "DELETE")):
            assert (await service.ask(method, path, headers=headers["blue"])).status == 403
            assert (await service.ask(method, path)).status == 401
        row = await pinned(service, {"template": "support", "tenant": "blue"}, headers=operator)
        await warm(service)
        assert (await ask(service, "1:00", "why?", headers=headers["green"])).cached == 0
        assert (await ask(service, "1:00", "why?", headers=headers["blue"])).cached >= row["tokens"] // 16 * 16
        salted = await ask(service, "1:00", "why?", headers=headers["blue"], cache_salt="s")
        assert salted.cached == 0

    bench.run(scenario, config)


def test_configured_pins_are_there_from_the_start_and_cannot_be_taken_back(bench: Bench) -> None:
    async def scenario(service: Service) -> None:
        await warm(service)
        (row,) = await rows(service)
        assert (row["source"], row["kind"]) == ("configuration", "documents")
        assert len(service.replica.submitted) == 1
        answer = await service.ask("DELETE", f"/admin/pins/{row['id']}")
        assert answer.status == 409
        wish = {"template": "support", "documents": [HANDBOOK]}
        assert (await pinned(service, wish, status=200))["id"] == row["id"]
        assert (await service.post("/admin/pins", {**wish, "ttl_s": 5})).status == 409

    bench.run(scenario, having(pins=(PinConfig("support", (HANDBOOK,)),)))


@pytest.mark.parametrize(
    ("wish", "words"),
    [
        (PinConfig("nobody"), r"pins\[1\]: template: there is no template 'nobody'"),
        (PinConfig("support", tenant="other"), r"pins\[1\]: there is no tenant 'other'"),
        (PinConfig(), r"pins\[1\]: Give either"),
        (PinConfig(keys=("00" * 16,)), r"pins\[1\]: keys need a secret"),
    ],
)
def test_a_configured_pin_that_cannot_be_is_told_before_anything_starts(
    bench: Bench, wish: PinConfig, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        Gateway(having(pins=(PinConfig("support"), wish)), model=MODEL, folder=bench.folder, replicas=[])


def test_a_pin_follows_its_template_and_says_when_that_is_gone(bench: Bench) -> None:
    async def scenario(service: Service) -> None:
        text = "You are brief. " * 10
        await service.post("/v1/templates", {"name": "brief", "system": text + "{a}"})
        row = await pinned(service, {"template": "brief"})
        await service.post("/v1/templates", {"name": "brief", "system": text + text + "{a}"})
        await service.gateway.pins.expire()
        (longer,) = await rows(service)
        assert longer["tokens"] > row["tokens"] + 50
        assert len((await service.replica.call("pins"))["pins"]) == 1
        await warm(service)
        await service.ask("DELETE", "/v1/templates/brief")
        await service.gateway.pins.expire()
        (gone,) = await rows(service)
        assert "there is no template 'brief'" in gone["problem"]
        assert (gone["state"], gone["replicas"]) == ("not_resident", {})
        assert (await service.replica.call("pins")) == {"pins": []}
        assert any("1 pins" in words for words in (await service.get("/ready")).json["degraded"])

    bench.run(scenario, CONFIG)


def test_pins_are_on_every_replica(bench: Bench) -> None:
    async def scenario(service: Service) -> None:
        row = await pinned(service, {"template": "support"})
        assert sorted(row["replicas"]) == ["engine-0", "engine-1"]
        await warm(service)
        assert [len((await replica.call("pins"))["pins"]) for replica in service.replicas] == [1, 1]

    bench.run(scenario, CONFIG, replicas=2)


def test_the_log_tells_of_pins_without_their_text(bench: Bench) -> None:
    async def scenario(service: Service) -> None:
        document = {"id": "secret-7", "text": "ZEBRA-7731 " * 9}
        with capture_logs() as lines:
            row = await pinned(service, {"template": "support", "documents": [document]})
            await warm(service)
            await until(lambda: "pinned prefixes warmed" in [line["event"] for line in lines])
            await service.ask("DELETE", f"/admin/pins/{row['id']}")
        (warmed,) = (line for line in lines if line["event"] == "pinned prefixes warmed")
        assert (warmed["prefixes"], warmed["tokens"]) == (1, row["replicas"]["engine-0"]["tokens"])
        assert [line["pin"] for line in lines if line["event"] in ("pinned", "unpinned")] == [row["id"]] * 2
        assert not any(word in repr(lines) for word in ("ZEBRA", "secret-7"))

    bench.run(scenario, CONFIG)
