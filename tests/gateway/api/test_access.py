"""Which routes need whose key, over HTTP."""

from __future__ import annotations

import asyncio
import hashlib
from typing import Any

import msgspec
import pytest
from litestar.routes import HTTPRoute

from gateway.app import create_app
from gateway.config import AdminConfig, ApiKey, ClassConfig, Config, LimitsConfig, TenantConfig
from gateway.service import Gateway

from .conftest import BASE, MODEL, Bench, Service


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


KEYED: Config = msgspec.structs.replace(
    BASE,
    keys={_digest("sk-a"): ApiKey("acme"), _digest("sk-b"): ApiKey("bolt", "batch")},
    classes={"batch": ClassConfig(priority=2, max_running=4)},
    admin=AdminConfig(key_sha256=_digest("sk-admin")),
)
PUBLIC = {"/", "/health", "/ready", "/version", "/dashboard", "/dashboard/static/{path:path}"}
OPERATOR = [
    ("GET", "/admin/stats"),
    ("GET", "/admin/misses"),
    ("GET", "/admin/documents"),
    ("GET", "/admin/prefixes"),
    ("GET", "/admin/requests"),
    ("GET", "/admin/replicas"),
    ("POST", "/admin/cache/reset"),
    ("GET", "/admin/policy"),
    ("PUT", "/admin/policy"),
    ("GET", "/admin/whatif"),
    ("GET", "/admin/templates"),
    ("GET", "/admin/quality"),
    ("GET", "/admin/pins"),
    ("GET", "/metrics"),
    ("GET", "/dashboard/events"),
]
TEMPLATES = [  # who may do what with them is told in test_templates.py
    ("GET", "/v1/templates"),
    ("GET", "/v1/templates/x"),
    ("POST", "/v1/templates"),
    ("DELETE", "/v1/templates/x"),
]
SWITCHES = [  # told in test_learned.py, test_quality.py and test_pins.py
    ("POST", "/admin/templates/x"),
    ("POST", "/admin/quality/x"),
    ("POST", "/admin/pins"),
    ("DELETE", "/admin/pins/x"),
]
REPLICAS = [  # what they do is told in test_membership.py
    ("POST", "/admin/replicas"),
    ("DELETE", "/admin/replicas/engine-0"),
    ("POST", "/admin/replicas/engine-0/drain"),
    ("POST", "/admin/replicas/engine-0/resume"),
]
TENANTS = [
    ("POST", "/v1/chat/completions", {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}),
    ("POST", "/v1/completions", {"model": MODEL, "prompt": "x", "max_tokens": 2}),
    ("GET", "/v1/models", None),
    ("GET", f"/v1/models/{MODEL}", None),
    ("POST", "/v1/explain", {"model": MODEL, "messages": [{"role": "user", "content": "x"}]}),
    ("POST", "/tokenize", {"prompt": "x"}),
    ("POST", "/detokenize", {"tokens": [1]}),
]


def _key(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def _status(service: Service, method: str, path: str, **options: Any) -> int:
    """The status alone: the event stream has no end. The one ``PUT`` gets the body it wants."""
    if method == "PUT":
        options["json"] = {"policy": "lru"}
    async with service.http.request(method, service.url + path, **options) as response:
        return response.status


def test_every_route_but_the_public_ones_refuses_a_stranger(bench: Bench) -> None:
    """Taken from the application itself, so that a new route cannot be forgotten here."""

    async def scenario(service: Service) -> None:
        app = create_app(Gateway(KEYED, model=MODEL, folder=bench.folder, replicas=[]))
        checked = set()
        for route in app.routes:
            if route.path in PUBLIC:
                continue
            methods = route.methods - {"OPTIONS"} if isinstance(route, HTTPRoute) else {"POST"}
            path = route.path_format.format(**dict.fromkeys(route.path_parameters, "x"))
            for method in methods:
                assert await _status(service, method, path) == 401, (method, path)
                checked.add((method, route.path))
        assert len(checked) == len(OPERATOR) + len(TENANTS) + len(TEMPLATES) + len(SWITCHES) + len(REPLICAS)

    bench.run(scenario, KEYED)


def test_the_public_routes_are_open_to_all_and_tell_their_heads_alone_as_well(bench: Bench) -> None:
    async def scenario(service: Service) -> None:
        for route in PUBLIC:
            path = route.replace("{path:path}", "dashboard.css")
            for key in ({}, _key("wrong"), _key("sk-a"), _key("sk-admin")):
                whole = await service.get(path, headers=key, allow_redirects=False)
                head = await service.ask("HEAD", path, headers=key, allow_redirects=False)
                assert whole.status == head.status == (307 if path == "/" else 200), path
                assert head.body == b""
                for name in ("content-length", "content-type", "cache-control", "etag", "location"):
                    assert head.headers.get(name) == whole.headers.get(name), (path, name)

    bench.run(scenario, KEYED)


def test_o4_the_operators_routes_tell_strangers_tenants_and_the_operator_apart(bench: Bench) -> None:
    async def scenario(service: Service) -> None:
        await service.complete("x" * 200, headers=_key("sk-a"))
        for method, path in OPERATOR:
            assert await _status(service, method, path) == 401
            assert await _status(service, method, path, headers=_key("wrong")) == 401
            assert await _status(service, method, path, headers=_key("sk-a")) == 403
        for method, path in REPLICAS:
            for key, status in (("wrong", 401), ("sk-a", 403)):
                assert await _status(service, method, path, headers=_key(key)) == status
        assert not service.gateway.router.view("engine-0").draining
        cached = (await service.complete("x" * 200, headers=_key("sk-a"))).cached
        assert cached > 0, "a refused reset has no effect"
        for method, path in OPERATOR:
            assert await _status(service, method, path, headers=_key("sk-admin")) == 200
        assert (await service.complete("x" * 200, headers=_key("sk-a"))).cached == 0

    bench.run(scenario, KEYED)


@pytest.mark.parametrize("config", [BASE, msgspec.structs.replace(KEYED, admin=AdminConfig())], ids=["open", "keys"])
def test_o4_without_an_admin_key_they_answer_this_machine_alone(bench: Bench, config: Config) -> None:
    async def scenario(service: Service) -> None:
        for method, path in OPERATOR:
            assert await _status(service, method, path) == 200
            for headers in (
                {"x-forwarded-for": "10.0.0.1"},
                {"host": "rebound.example.org"},
                {"origin": "https://example.org"},
            ):
                assert await _status(service, method, path, headers=headers) == 403

    bench.run(scenario, config)


def test_tenants_routes_need_a_tenants_key(bench: Bench) -> None:
    async def scenario(service: Service) -> None:
        for method, path, body in TENANTS:
            assert await _status(service, method, path, json=body) == 401
            assert await _status(service, method, path, json=body, headers=_key("sk-admin")) == 401
            assert await _status(service, method, path, json=body, headers=_key("sk-a")) == 200
        answer = await service.get("/v1/models")
        assert answer.json["error"]["code"] == "invalid_api_key"
        assert answer.headers["www-authenticate"] == "Bearer"

    bench.run(scenario, KEYED)


def test_without_keys_any_bearer_passes(bench: Bench) -> None:
    async def scenario(service: Service) -> None:
        for method, path, body in TENANTS:
            assert await _status(service, method, path, json=body, headers=_key("anything")) == 200
            assert await _status(service, method, path, json=body) == 200

    bench.run(scenario)


def test_o1_only_the_exact_key_passes(bench: Bench) -> None:
    values = ["", "Bearer", "Bearer ", "bearer sk-a", "Basic sk-a", "Bearer sk-ax", "Bearer SK-A", "Bearer sk-é"]

    async def scenario(service: Service) -> None:
        for value in values:
            assert (await service.chat(headers={"authorization": value})).status == 401
        assert (await service.chat(headers={"authorization": "Bearer sk-a"})).status == 200

    bench.run(scenario, KEYED)


_BODY = b'{"model":"scripted","messages":[{"role":"user","content":"x"}]}'
_POST = b"POST /v1/chat/completions HTTP/1.1\r\n"


DECEPTIVE_HEADS = [
    _POST + b"host: localhost/health?\r\n",
    _POST + b"host: localhost/metrics#\r\n",
    _POST + b"host: localhost\\@x\r\n",
    _POST + b"host: \r\n",
    _POST + b"host: a\r\nhost: b\r\n",
    _POST + b"host: x\r\nx-original-url: /health\r\nx-rewrite-url: /health\r\n",
    _POST + b"host: x\r\nx-forwarded-host: localhost/health?\r\n",
    _POST + b"host: x\r\nauthorization: Bearer sk-a\r\nauthorization: Bearer sk-a\r\n",
    _POST + b"host: x\r\nauthorization: Bearer sk-\xff\r\n",
    b"POST /v1/chat/completions HTTP/1.0\r\n",
    b"POST //v1/chat/completions HTTP/1.1\r\nhost: x\r\n",
    b"POST /health/../v1/chat/completions HTTP/1.1\r\nhost: x\r\n",
    b"POST /v1/chat/completions/ HTTP/1.1\r\nhost: x\r\n",
    b"POST /%76%31/chat/completions HTTP/1.1\r\nhost: x\r\n",
]


def test_o2_access_follows_the_route_and_no_header(bench: Bench) -> None:
    async def scenario(service: Service) -> None:
        host, port = service.url.removeprefix("http://").split(":")
        for head in DECEPTIVE_HEADS:
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(head + b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(_BODY) + _BODY)
            status = int((await reader.readline()).split()[1])
            writer.close()
            assert status in (400, 401, 404, 405), head
            assert service.replica.submitted == []

    bench.run(scenario, KEYED)


def test_n1_n2_tenants_share_no_blocks_and_each_reuses_its_own(bench: Bench) -> None:
    async def scenario(service: Service) -> None:
        prompt = bench.tokens(0, 100)

        async def cached(key: str, **fields: Any) -> int:
            return (await service.complete(prompt, headers=_key(key) | {"x-tenant": "acme"}, **fields)).cached

        assert [await cached("sk-a"), await cached("sk-a", cache_salt="abc")] == [0, 0]
        for salt in ("abc", "acme", "tenant:acme"):
            assert [await cached("sk-b", cache_salt=salt) for _ in range(2)] == [0, 96]
        assert [await cached("sk-b", user="acme", metadata={"tenant": "acme"}) for _ in range(2)] == [0, 96]
        assert [await cached("sk-a"), await cached("sk-a", cache_salt="abc")] == [96, 96]
        assert set(service.stats().tenants) == {"acme", "bolt"}

    bench.run(scenario, KEYED)


def test_a_keys_class_reaches_the_engine(bench: Bench) -> None:
    async def scenario(service: Service) -> None:
        for key, wanted in (("sk-a", (0, 0)), ("sk-b", (2, 4))):
            for ask in (service.chat, service.complete):
                assert (await ask("x", headers=_key(key))).status == 200
                submitted = service.replica.submitted[-1]
                assert (submitted.priority, submitted.class_limit) == wanted

    bench.run(scenario, KEYED)


def test_a_tenants_quota_holds_in_the_engine_and_takes_from_nobody_else(bench: Bench) -> None:
    async def scenario(service: Service) -> None:
        async def cached(key: str, prompt: str) -> int:
            return (await service.complete(prompt, headers=_key(key))).cached

        for name in ("acme", "bolt"):
            submitted = service.replica.submitted
            await cached("sk-a" if name == "acme" else "sk-b", f"{name} says hello")
            assert (submitted[-1].owner, submitted[-1].max_cached_blocks) == (name, 4 if name == "bolt" else 0)
        prompt = " ".join(f"w{i}" for i in range(120))
        await cached("sk-a", prompt)
        for word in ("one", "two", "three"):
            await cached("sk-b", f"{word} {prompt}")
        assert await cached("sk-b", f"three {prompt}") == 4 * 16
        assert await cached("sk-b", f"two {prompt}") == 0
        assert await cached("sk-a", prompt) > 4 * 16
        owners = (await service.replica.call("stats"))["owners"]
        assert owners == {"bolt": {"cached_blocks": 4, "max_cached_blocks": 4}}

    bench.run(scenario, msgspec.structs.replace(KEYED, tenants={"bolt": TenantConfig(max_cached_blocks=4)}))


def test_o7_callers_are_limited_by_who_they_are_and_not_by_what_they_claim(bench: Bench) -> None:
    async def scenario(service: Service) -> None:
        def claim(number: int) -> dict[str, str]:
            address = f"10.0.0.{number}"
            return {"x-forwarded-for": address, "x-real-ip": address, "forwarded": f"for={address}"}

        claimed = [(await service.chat(headers=claim(i) | _key("sk-a"))).status for i in range(100)]
        assert (claimed.count(200), claimed.count(429)) == (10, 90)
        refused = await service.chat(headers=_key("sk-a"))
        assert refused.json["error"]["code"] == "rate_limit_exceeded"
        assert 0 < int(refused.headers["retry-after"]) <= 60
        wrong = [
            await _status(service, "POST", "/tokenize", json={"model": MODEL, "prompt": "x"}, headers=_key(f"sk-{i}"))
            for i in range(100)
        ]
        assert (wrong.count(401), wrong.count(429)) == (10, 90)
        assert (await service.chat(headers=_key("sk-b"))).status == 200
        assert await _status(service, "GET", "/admin/stats", headers=_key("sk-admin")) == 200

    limits = LimitsConfig(requests_per_minute=10)
    bench.run(scenario, msgspec.structs.replace(KEYED, limits=limits))
