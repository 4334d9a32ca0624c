"""Learned templates over HTTP: proposed with evidence, switched by the operator alone, told without their text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from structlog.testing import capture_logs

from gateway.canonical.volatile import REFERENCE
from gateway.config import CanonicalConfig

from .conftest import BASE, Bench, Service
from .test_access import KEYED, _key

SYSTEM = (
    "You are the help desk bot of Initech {{beta}}.\nToday is {now}. Trace: {trace}. Answer from the documents alone."
)


async def ask(service: Service, number: int, **options: Any) -> Any:
    system = SYSTEM.format(now=f"2026-03-02 08:00:{number:02}", trace=f"ab{number:06x}")
    answer = await service.chat([{"role": "system", "content": system}, {"role": "user", "content": "Why?"}], **options)
    assert answer.status == 200
    return answer


async def learn(service: Service, **options: Any) -> Any:
    for number in range(20):
        await ask(service, number, **options)
    return (await service.get("/admin/templates", headers=_key("sk-admin"))).json


def prompt(service: Service) -> str:
    """What the replica was sent last."""
    return service.gateway.renderer.decode(service.replica.submitted[-1].token_ids)


def test_fields_are_proposed_with_their_evidence(bench: Bench) -> None:
    async def scenario(service: Service) -> None:
        listed = await learn(service)
        assert listed["hoist"] == "suggest"
        assert listed["learning"]["observed"] == 20
        assert listed["learning"]["held_tokens"] > 0
        (proposal,) = listed["proposals"]
        assert (proposal["hoist"], proposal["decided"], proposal["tenant"]) == ("suggest", False, "default")
        assert [(field["name"], field["shape"]) for field in proposal["fields"]] == [
            ("time", "date-time"),
            ("trace", "hex-id"),
        ]
        assert all(field["volatile"] and field["distinct"] == field["requests"] for field in proposal["fields"])
        assert proposal["literals"][0] == "You are the help desk bot of Initech {beta}.\nToday is "
        assert proposal["system"] == SYSTEM.replace("{now}", "{time}")
        assert "2026-03-02" not in str(listed)
        await ask(service, 30)
        assert "2026-03-02 08:00:30" in prompt(service).partition("Why?")[0]

    bench.run(scenario)


def test_a_proposal_is_switched_and_the_log_tells_it_without_text(bench: Bench) -> None:
    async def scenario(service: Service) -> None:
        (proposal,) = (await learn(service))["proposals"]
        path = f"/admin/templates/{proposal['id']}"
        with capture_logs() as logs:
            switched = await service.post(path, {"hoist": "apply"})
        assert (switched.status, switched.json["hoist"], switched.json["decided"]) == (200, "apply", True)
        (line,) = (entry for entry in logs if entry["event"] == "learned template switched")
        assert {key: line[key] for key in ("template", "before", "after")} == {
            "template": proposal["id"],
            "before": "suggest",
            "after": "apply",
        }
        assert "Initech" not in str(logs)
        first = await ask(service, 30)
        text = prompt(service)
        assert f"Today is {REFERENCE}. Trace: {REFERENCE}. Answer" in text
        assert "Metadata: time=2026-03-02 08:00:30; trace=ab00001e\n\nWhy?" in text
        assert (await ask(service, 31)).cached > first.cached
        assert f"learned-{proposal['id']}" in service.stats().templates
        await service.post(path, {"hoist": "off"})
        await ask(service, 32)
        assert REFERENCE not in prompt(service)

    bench.run(scenario)


def test_apply_by_default_needs_no_switch(bench: Bench) -> None:
    async def scenario(service: Service) -> None:
        (proposal,) = (await learn(service))["proposals"]
        assert (proposal["hoist"], proposal["decided"]) == ("apply", False)
        await ask(service, 30)
        assert f"Today is {REFERENCE}." in prompt(service)

    bench.run(scenario, msgspec.structs.replace(BASE, canonical=CanonicalConfig(hoist="apply")))


def test_what_is_no_proposal_or_no_switch_is_refused(bench: Bench) -> None:
    async def scenario(service: Service) -> None:
        (proposal,) = (await learn(service))["proposals"]
        assert (await service.post("/admin/templates/0123456789ab", {"hoist": "apply"})).status == 404
        for body in ({"hoist": "declared"}, {"hoist": 1}, {}, {"hoist": "apply", "x": 1}, ["apply"]):
            answer = await service.post(f"/admin/templates/{proposal['id']}", body)
            assert answer.status == 400, body
        assert (await service.get("/admin/templates")).json["proposals"][0]["decided"] is False

    bench.run(scenario)


def test_only_the_operator_sees_and_switches_proposals(bench: Bench) -> None:
    async def scenario(service: Service) -> None:
        (proposal,) = (await learn(service, headers=_key("sk-a")))["proposals"]
        assert proposal["tenant"] == "acme"
        for key, status in (("sk-a", 403), ("sk-b", 403), ("wrong", 401)):
            assert (await service.get("/admin/templates", headers=_key(key))).status == status
            path = f"/admin/templates/{proposal['id']}"
            assert (await service.post(path, {"hoist": "apply"}, headers=_key(key))).status == status
        await ask(service, 30, headers=_key("sk-a"))
        assert REFERENCE not in prompt(service)

    bench.run(scenario, KEYED)


def test_tenants_learn_apart(bench: Bench) -> None:
    async def scenario(service: Service) -> None:
        await learn(service, headers=_key("sk-a"))
        await ask(service, 30, headers=_key("sk-b"))
        assert REFERENCE not in prompt(service)
        await ask(service, 31, headers=_key("sk-a"))
        assert REFERENCE in prompt(service)

    bench.run(scenario, msgspec.structs.replace(KEYED, canonical=CanonicalConfig(hoist="apply")))


def test_what_learning_holds_is_in_the_metrics(bench: Bench) -> None:
    async def scenario(service: Service) -> None:
        await learn(service)
        text = (await service.get("/metrics")).body.decode()
        assert "headstart_learning_templates 1.0" in text
        assert "headstart_learning_texts_total 20.0" in text
        assert "headstart_learning_tokens " in text
        assert "Initech" not in text

    bench.run(scenario)


def test_bypass_teaches_nothing(bench: Bench) -> None:
    async def scenario(service: Service) -> None:
        listed = await learn(service, headstart={"bypass": True})
        assert (listed["learning"]["observed"], listed["proposals"]) == (0, [])

    bench.run(scenario)


def test_a_decision_outlasts_the_gateway_where_there_is_a_file(bench: Bench, tmp_path: Path) -> None:
    config = msgspec.structs.replace(KEYED, learned_file=str(tmp_path / "learned.json"))

    async def first(service: Service) -> None:
        (proposal,) = (await learn(service, headers=_key("sk-a")))["proposals"]
        path = f"/admin/templates/{proposal['id']}"
        assert (await service.post(path, {"hoist": "apply"}, headers=_key("sk-admin"))).status == 200
        assert (tmp_path / "learned.json").exists(), "it does not wait for the end"

    async def second(service: Service) -> None:
        listed = (await service.get("/admin/templates", headers=_key("sk-admin"))).json
        (proposal,) = listed["proposals"]
        assert (proposal["hoist"], proposal["decided"]) == ("apply", True)
        await ask(service, 30, headers=_key("sk-a"))
        assert "2026-03-02 08:00:30" not in prompt(service).partition("Metadata:")[0]

    bench.run(first, config)
    bench.run(second, config)
