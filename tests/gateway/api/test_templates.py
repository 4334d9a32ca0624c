"""Templates over HTTP: who may see and write them, and what requests make of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

from gateway.config import TemplateConfig

from .conftest import BASE, Bench, Service
from .test_access import KEYED

CONFIGURED = {"support": TemplateConfig("You help {user} at Acme.")}
OPERATOR = {"authorization": "Bearer sk-admin"}
TENANT = {"authorization": "Bearer sk-a"}
OPEN = msgspec.structs.replace(BASE, templates=CONFIGURED)
GUARDED = msgspec.structs.replace(KEYED, templates=CONFIGURED)
GREETING = {"name": "greeting", "system": "ZEBRA greets {user} on {day}.", "order": "canonical"}


def test_a_written_template_is_recognised_and_named_by_the_next_request(bench: Bench, tmp_path: Path) -> None:
    async def scenario(service: Service) -> None:
        written = (await service.post("/v1/templates", GREETING)).json
        assert (written["name"], written["version"], written["fields"]) == ("greeting", 1, ["user", "day"])
        turns = [
            {"role": "system", "content": "ZEBRA greets Ann on Monday."},
            {"role": "user", "content": "hello"},
        ]
        for _ in range(2):
            assert (await service.chat(turns)).status == 200
        named = {"template": "greeting", "fields": {"user": "Bob", "day": "Friday"}}
        assert (await service.chat(turns[1:], headstart=named)).cached > 0
        assert service.stats().templates["greeting"].requests == 3
        await service.post("/v1/templates", GREETING | {"system": "YAK greets {user}."})
        for name, values, status in (
            ("greeting", {"user": "Bob"}, 200),
            ("greeting@2", {"user": "Bob"}, 200),
            ("greeting@1", {"user": "Bob", "day": "Friday"}, 200),
            ("greeting@1", {"user": "Bob"}, 400),
            ("greeting@3", {"user": "Bob"}, 400),
        ):
            answer = await service.chat(turns[1:], headstart={"template": name, "fields": values})
            assert answer.status == status, name
        assert (await service.ask("DELETE", "/v1/templates/greeting")).status == 204
        assert (await service.chat(turns[1:], headstart=named)).json["error"]["param"] == "headstart.template"
        assert json.loads((tmp_path / "t.json").read_bytes())["templates"] == {}

    bench.run(scenario, msgspec.structs.replace(OPEN, templates_file=str(tmp_path / "t.json")))


def test_templates_are_listed_with_their_versions(bench: Bench) -> None:
    async def scenario(service: Service) -> None:
        for system in ("One {a}.", "Two {b}."):
            await service.post("/v1/templates", {"name": "greeting", "system": system})
        listed = (await service.get("/v1/templates")).json
        assert listed["persistent"] is False
        assert [(row["name"], row["source"], row.get("version")) for row in listed["data"]] == [
            ("greeting", "api", 2),
            ("support", "configuration", None),
        ]
        last = (await service.get("/v1/templates/greeting")).json
        assert (last["versions"], last["definition"]["system"]) == ([1, 2], "Two {b}.")
        first = (await service.get("/v1/templates/greeting@1")).json
        assert (first["version"], first["fields"], first["definition"]["system"]) == (1, ["a"], "One {a}.")
        for name in ("nobody", "greeting@3", "greeting@x", "greeting@", "greeting@99999999999"):
            for method in ("GET", "DELETE"):
                answer = await service.ask(method, f"/v1/templates/{name}")
                assert (answer.status, answer.json["error"]["code"]) == (404, "template_not_found"), (method, name)
        assert (await service.ask("DELETE", "/v1/templates/greeting@2")).status == 204
        assert (await service.get("/v1/templates/greeting")).json["versions"] == [1]

    bench.run(scenario, OPEN)


def test_tenants_read_names_and_fields_and_the_operator_alone_reads_texts_and_writes(bench: Bench) -> None:
    async def scenario(service: Service) -> None:
        assert (await service.post("/v1/templates", GREETING, headers=OPERATOR)).status == 201
        for path in ("/v1/templates", "/v1/templates/greeting", "/v1/templates/support"):
            assert (await service.get(path)).status == 401
            seen = await service.get(path, headers=TENANT)
            assert seen.status == 200
            assert b"fields" in seen.body
            assert b"ZEBRA" not in seen.body
            assert b"Acme" not in seen.body
            assert b"definition" in (await service.get(path, headers=OPERATOR)).body
        for headers, status in ((TENANT, 403), ({}, 401)):
            assert (await service.post("/v1/templates", GREETING, headers=headers)).status == status
            assert (await service.ask("DELETE", "/v1/templates/greeting", headers=headers)).status == status
        assert (await service.get("/v1/templates/greeting", headers=TENANT)).json["versions"] == [1]

    bench.run(scenario, GUARDED)


def test_a_template_of_the_configuration_is_read_only(bench: Bench) -> None:
    async def scenario(service: Service) -> None:
        for answer in (
            await service.post("/v1/templates", {"name": "support", "system": "Mine {x}."}),
            await service.ask("DELETE", "/v1/templates/support"),
        ):
            assert answer.status == 409
            assert "configuration" in answer.json["error"]["message"]
        assert (await service.get("/v1/templates/support")).json["definition"]["system"] == CONFIGURED["support"].system

    bench.run(scenario, OPEN)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"system": "T {x}."}, "name"),
        ({"name": "t"}, "system"),
        ({"name": "t", "system": "T {x"}, "system"),
        ({"name": "t t", "system": "T {x}."}, "name"),
        ({"name": "t", "system": "T {x}.", "order": "random"}, "order"),
        ({"name": "t", "system": "T {x}.", "ordr": "canonical"}, None),
    ],
)
def test_what_is_wrong_with_a_template_is_named(bench: Bench, body: dict[str, Any], param: str | None) -> None:
    async def scenario(service: Service) -> None:
        answer = await service.post("/v1/templates", body)
        assert (answer.status, answer.json["error"]["param"]) == (400, param)
        assert (await service.post("/v1/templates", body | {"system": "x" * 300_000})).status == 413

    bench.run(scenario)


def test_no_text_of_a_template_reaches_the_log(bench: Bench) -> None:
    async def scenario(service: Service) -> None:
        with capture_logs() as logs:
            await service.post("/v1/templates", GREETING)
            await service.ask("DELETE", "/v1/templates/greeting")
        assert [entry["event"] for entry in logs if "template" in entry] == ["template written", "template deleted"]
        assert "ZEBRA" not in repr(logs)

    bench.run(scenario)
