"""Requests that are passed on as they came, and answers that come back byte for byte."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web

from gateway.config import AdminConfig, ApiKey, Config, LimitsConfig
from gateway.foreign import ForeignRequest, foreign_request
from gateway.replicas import openai_http

from ..conftest import until
from .openai_mock import CONFIG, DONE, MODEL, MockServer, Remote, Talk, play

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
USER = {"role": "user", "content": "hello"}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"z": 1, "a": [1.0, 2e3]}}}
IMAGE = {"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/a"}}


@pytest.fixture(scope="module")
def folder(model_folder: Callable[[str], Path]) -> Path:
    return model_folder("chatml")


def chat(**fields: Any) -> bytes:
    return json.dumps({"model": MODEL, "messages": [USER]} | fields).encode()


@pytest.mark.parametrize(
    ("fields", "reasons"),
    [
        ({"tools": [TOOL]}, ("tools",)),
        ({"tools": [TOOL], "tool_choice": "required"}, ("tools",)),
        ({"response_format": {"type": "json_object"}}, ("response_format",)),
        ({"priority": 3, "reasoning_effort": "low"}, ("priority", "reasoning_effort")),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}, IMAGE]}]}, ("image_url part",)),
        ({"messages": [USER, {"role": "assistant", "content": "x", "reasoning_content": "y"}]}, ("reasoning_content",)),
    ],
)
def test_what_only_a_server_knows_is_found(fields: dict[str, Any], reasons: tuple[str, ...]) -> None:
    found = foreign_request(CHAT, chat(**fields))
    assert found is not None
    assert found.reasons == reasons


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"tools": [TOOL], "tool_choice": "none"},
        {"tools": [], "response_format": None},
        {"response_format": {"type": "text"}},
        {"metadata": {"a": "b"}, "store": False, "service_tier": "auto"},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}], "documents": [{"text": "y"}]},
        {"messages": "none"},
        {"messages": [1]},
    ],
)
def test_what_the_gateway_reads_or_refuses_itself_is_not_passed_on(fields: dict[str, Any]) -> None:
    assert foreign_request(CHAT, chat(**fields)) is None


def test_bodies_that_are_no_json_are_left_to_whoever_says_why() -> None:
    for data in (b"", b"[]", b"{", b"\xff", b'{"messages": [' + b"[" * 5000):
        assert foreign_request(CHAT, data) is None
    assert foreign_request("/v1/completions", b'{"prompt": "x", "suffix": "y"}') is not None


def test_everything_but_what_the_gateway_owns_keeps_its_bytes() -> None:
    data = (
        b'{"priority": 1.50, "model":"m", "messages":[{"role":"user" , "content":"\\u00e9\xc3\xa9"}],'
        b' "cache_salt": "mine", "headstart": {"bypass": false}, "seed": 12345678901234567890123,'
        b' "x": {"b":1, "a":[ ]}}'
    )
    request = foreign_request(CHAT, data)
    assert isinstance(request, ForeignRequest)
    body = request.body("theirs", b"\x01\x02", use_cache=True)
    for kept in (
        b"1.50",
        b'[{"role":"user" , "content":"\\u00e9\xc3\xa9"}]',
        b"12345678901234567890123",
        b'{"b":1, "a":[ ]}',
    ):
        assert kept in body
    told = json.loads(body)
    assert list(told) == ["priority", "model", "messages", "cache_salt", "seed", "x"]
    assert (told["model"], told["cache_salt"]) == ("theirs", "0102")
    salts = {json.loads(request.body("m", b"", use_cache=False))["cache_salt"] for _ in range(3)}
    assert len(salts) == 3, "a request that shall not use the cache has a namespace of its own"


# --- over HTTP -----------------------------------------------------------------------------------------------

ANSWER = (
    b'{ "id":"x", "choices":[{"message":{"role":"assistant","tool_calls":[ ]}}], "odd" : 1.0,'
    b' "usage":{"prompt_tokens":7,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":4}} }'
)
STREAM = [
    b': note\n\ndata: {"choices":[{"delta":{"reasoning_content":"h\xc3',
    b'\xa9"}}], "x" : 1}\r\n\r\n',
    b'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":2}}\n\n',
    DONE,
]


class Relayed(MockServer):
    """A server that also has chats, and remembers how it was asked."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.chats: list[tuple[Any, bytes]] = []
        self.answer: Callable[[web.Request, bytes], Any] = self._whole

    async def _whole(self, _request: web.Request, _body: bytes) -> web.StreamResponse:
        return web.Response(body=ANSWER, content_type="application/json", headers={"x-theirs": "kept"})

    async def _streamed(self, request: web.Request, _body: bytes) -> web.StreamResponse:
        talk = Talk(request, None)
        for piece in STREAM:
            await talk.write(piece)
        return await talk.end()

    def stream(self) -> None:
        self.answer = self._streamed

    async def _extend(self, app: web.Application) -> None:
        async def chats(request: web.Request) -> web.StreamResponse:
            body = await request.read()
            self.chats.append((request.headers, body))
            response: web.StreamResponse = await self.answer(request, body)
            return response

        app.router.add_post(CHAT, chats)


def run(folder: Path, scenario: Callable[..., Any], *, servers: int = 1, config: Config = CONFIG) -> None:
    play(folder, scenario, servers=servers, config=config, kind=Relayed)


async def post(remote: Remote, data: bytes, path: str = CHAT, **headers: str) -> tuple[int, Any, bytes]:
    given = {"content-type": "application/json"} | headers
    async with remote.http.post(remote.url + path, data=data, headers=given) as response:
        return response.status, response.headers, await response.read()


def test_an_answer_comes_back_byte_for_byte_with_its_headers(folder: Path) -> None:
    async def scenario(remote: Remote, server: Relayed) -> None:
        status, headers, body = await post(remote, chat(tools=[TOOL]))
        assert (status, body) == (200, ANSWER)
        assert headers["x-theirs"] == "kept"
        assert headers["x-headstart-replica"] == "replica-0"
        assert headers["x-headstart-note"] == "passed on as it is: tools"
        assert headers["content-length"] == str(len(ANSWER))
        server.stream()
        status, headers, body = await post(remote, chat(tools=[TOOL], stream=True))
        assert (status, body) == (200, b"".join(STREAM))
        assert headers["content-type"].startswith("text/event-stream")
        totals = remote.gateway.statistics.snapshot().totals
        assert (totals.requests, totals.prompt_tokens, totals.cached_prompt_tokens) == (2, 14, 4)
        async with remote.http.get(f"{remote.url}/admin/misses") as response:
            misses = await response.json()
        assert sum(row["tokens"] for row in misses["causes"].values()) == misses["missed_tokens"] == 10

    run(folder, scenario)


def test_headers_travel_but_for_keys_cookies_and_those_of_the_connection(folder: Path) -> None:
    async def scenario(remote: Remote, server: Relayed) -> None:
        await post(
            remote,
            chat(priority=1),
            authorization="Bearer sk-caller",
            cookie="a=b",
            traceparent="00-1-2-01",
            connection="keep-alive, X-Hop",
            **{"x-request-id": "mine", "OpenAI-Organization": "o", "x-hop": "1"},
        )
        ((headers, body),) = server.chats
        assert headers["traceparent"] == "00-1-2-01"
        assert headers["openai-organization"] == "o"
        assert headers["x-request-id"] == "mine"
        assert "authorization" not in headers
        assert "cookie" not in headers
        assert "x-hop" not in headers
        assert json.loads(body)["priority"] == 1

    run(folder, scenario)


def test_n2_the_namespace_of_a_request_that_is_passed_on_is_its_tenants(folder: Path) -> None:
    import hashlib

    keys = {hashlib.sha256(key.encode()).hexdigest(): ApiKey(key) for key in ("a", "b")}

    async def scenario(remote: Remote, server: Relayed) -> None:
        for key in ("a", "b", "a"):
            await post(remote, chat(priority=1, cache_salt="abc"), authorization=f"Bearer {key}")
        salts = [json.loads(body)["cache_salt"] for _, body in server.chats]
        assert salts[0] == salts[2] != salts[1]
        assert "abc" not in salts
        for salt in ("", "x" * 5000, 7):
            status, _, _ = await post(remote, chat(priority=1, cache_salt=salt), authorization="Bearer a")
            assert status == 400
        assert len(server.chats) == 3

    run(folder, scenario, config=msgspec.structs.replace(CONFIG, keys=keys))


def test_q6_a_refusal_comes_back_as_it_is_and_opens_no_breaker(folder: Path) -> None:
    async def scenario(remote: Remote, server: Relayed) -> None:
        async def refuse(_request: web.Request, _body: bytes) -> web.StreamResponse:
            return web.Response(status=422, body=b'{"odd":"words"}', content_type="application/json")

        server.answer = refuse
        for _ in range(5):
            status, _, body = await post(remote, chat(priority=1))
            assert (status, body) == (422, b'{"odd":"words"}')
        assert remote.gateway.router.view("replica-0").failures == 0

    run(folder, scenario)


def test_q4_a_server_that_fails_before_its_answer_is_followed_by_another(folder: Path) -> None:
    async def scenario(remote: Remote, *servers: Relayed) -> None:
        async def fail(request: web.Request, _body: bytes) -> web.StreamResponse:
            return web.Response(status=500)

        async def die(request: web.Request, _body: bytes) -> web.StreamResponse:
            Talk(request, None).abort()
            return web.Response()

        for broken in (fail, die):
            servers[0].answer = broken
            for number in range(8):  # some of them belong to the broken one
                messages = [{"role": "user", "content": f"{number}"}]
                status, headers, body = await post(remote, chat(priority=1, messages=messages))
                assert (status, body, headers["x-headstart-replica"]) == (200, ANSWER, "replica-1")
            assert servers[0].chats
            servers[0].chats.clear()
            remote.gateway.router.resume("replica-0")
            await until(lambda: remote.gateway.ready_replicas == 2)

    run(folder, scenario, servers=2)


def test_a_time_to_first_token_is_counted_of_what_is_streamed(folder: Path) -> None:
    """Of a plain answer the first byte is as late as the last one."""

    async def scenario(remote: Remote, server: Relayed) -> None:
        assert (await post(remote, chat(priority=1)))[0] == 200
        server.stream()
        assert (await post(remote, chat(priority=1, stream=True)))[0] == 200
        (sums,) = remote.gateway.statistics.window(None).table.values()
        assert (sums.requests, sum(sums.ttft.values())) == (2, 1)

    run(folder, scenario)


@pytest.mark.parametrize("stream", [False, True])
def test_a_plain_answer_that_is_under_way_outlives_a_server_that_stalls_for_a_moment(
    folder: Path, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openai_http, "_POLL_INTERVAL_S", 0.05)
    monkeypatch.setattr(openai_http, "_PATIENCE_S", 60.0)

    async def scenario(remote: Remote, server: Relayed) -> None:
        goes_on = asyncio.Event()

        async def wait(_request: web.Request, _body: bytes) -> web.StreamResponse:
            await goes_on.wait()
            return web.Response(body=ANSWER, content_type="application/json")

        server.answer = wait
        asked = asyncio.create_task(post(remote, chat(priority=1, stream=stream)))
        await until(lambda: len(server.chats) == 1)
        server.health = 503
        await until(lambda: remote.gateway.ready_replicas == 0)
        server.health = 200
        await until(lambda: remote.gateway.ready_replicas == 1)
        goes_on.set()
        status, _, body = await asked
        if stream:  # of which something would have come, as far as is known
            assert status == 502
        else:
            assert (status, body, len(server.chats)) == (200, ANSWER, 1)

    run(folder, scenario)


def test_a_server_that_never_answers_has_failed_the_request(folder: Path) -> None:
    async def scenario(remote: Remote, server: Relayed) -> None:
        async def wait(_request: web.Request, _body: bytes) -> web.StreamResponse:
            await asyncio.Event().wait()
            raise AssertionError

        server.answer = wait
        assert (await post(remote, chat(priority=1)))[0] == 504
        assert remote.gateway.router.view("replica-0").failures == 1
        totals = remote.gateway.statistics.snapshot().totals
        assert (totals.requests, totals.failed) == (1, 1)

    run(folder, scenario, config=msgspec.structs.replace(CONFIG, limits=LimitsConfig(request_timeout_s=1.0)))


def test_a_request_whose_last_server_has_gone_meanwhile_is_recorded_as_failed(folder: Path) -> None:
    async def scenario(remote: Remote, *servers: Relayed) -> None:
        async def fail(_request: web.Request, _body: bytes) -> web.StreamResponse:
            for id in ("replica-0", "replica-1"):
                remote.gateway.router.drain(id)
            return web.Response(status=500)

        for server in servers:
            server.answer = fail
        assert (await post(remote, chat(priority=1)))[0] == 503
        totals = remote.gateway.statistics.snapshot().totals
        assert (totals.requests, totals.failed) == (1, 1)

    run(folder, scenario, servers=2)


def test_q4_a_stream_that_breaks_off_ends_with_an_error_event(folder: Path) -> None:
    async def scenario(remote: Remote, server: Relayed) -> None:
        async def break_off(request: web.Request, _body: bytes) -> web.StreamResponse:
            talk = Talk(request, None)
            await talk.write(STREAM[0] + STREAM[1])
            return await talk.end()  # in order, but without its last event

        server.answer = break_off
        status, _, body = await post(remote, chat(priority=1, stream=True))
        assert status == 200
        assert body.startswith(STREAM[0])
        assert b"[DONE]" not in body
        assert json.loads(body.rpartition(b"data: ")[2])["error"]["code"] == "replica_lost"
        assert len(server.chats) == 1

    run(folder, scenario)


def test_g2_leaving_closes_the_connection_to_the_server(folder: Path) -> None:
    async def scenario(remote: Remote, server: Relayed) -> None:
        gone = asyncio.Event()

        async def wait(request: web.Request, _body: bytes) -> web.StreamResponse:
            await Talk(request, None).wait_until_gone()
            gone.set()
            return web.Response()

        server.answer = wait
        asked = asyncio.create_task(post(remote, chat(priority=1)))
        await until(lambda: len(server.chats) == 1)
        asked.cancel()
        await gone.wait()
        await until(lambda: remote.gateway.dispatcher.active == 0)
        assert remote.gateway.router.view("replica-0").in_flight == 0

    run(folder, scenario)


def test_a_text_stays_at_its_server_and_other_texts_go_elsewhere(folder: Path) -> None:
    async def scenario(remote: Remote, *servers: Relayed) -> None:
        homes = []
        for number in range(12):
            where = set()
            for turn in range(2):
                messages = [{"role": "user", "content": f"{number}"}, {"role": "assistant", "content": "x"}]
                _, headers, _ = await post(remote, chat(priority=1, messages=messages[: 1 + turn]))
                where.add(headers["x-headstart-replica"])
            assert len(where) == 1
            homes += where
        assert len(set(homes)) > 1

    run(folder, scenario, servers=3)


def test_o6_no_image_is_fetched_by_the_gateway(folder: Path) -> None:
    async def scenario(remote: Remote, server: Relayed) -> None:
        listener: list[Any] = []
        quiet = await asyncio.start_server(lambda reader, writer: listener.append(writer), "127.0.0.1", 0)
        port = quiet.sockets[0].getsockname()[1]
        for url in (f"http://127.0.0.1:{port}/a", f"http://allowed.example\\@127.0.0.1:{port}/", "file:///etc/passwd"):
            part = {"type": "image_url", "image_url": {"url": url}}
            status, _, _ = await post(remote, chat(messages=[{"role": "user", "content": [part]}]))
            assert status == 200
        assert listener == []
        quiet.close()
        await quiet.wait_closed()

    run(folder, scenario)


def test_another_model_and_a_missing_one_are_refused_here(folder: Path) -> None:
    async def scenario(remote: Remote, server: Relayed) -> None:
        assert (await post(remote, chat(priority=1, model="other")))[0] == 404
        assert (await post(remote, b'{"messages": [], "priority": 1}'))[0] == 400
        assert server.chats == []
        assert remote.gateway.dispatcher.refused["model_not_found"] == 1

    run(folder, scenario)


def test_a_server_whose_tokenizer_cannot_be_checked_gets_every_request_as_it_is(folder: Path) -> None:
    async def scenario(remote: Remote, server: Relayed) -> None:
        server.tokenizer = None
        await server.kill()
        await until(lambda: remote.gateway.ready_replicas == 0)
        await server.start()
        await until(lambda: remote.gateway.ready_replicas == 1 and remote.gateway.forwarder.only_text)
        status, headers, body = await post(remote, chat(documents=[{"id": "d", "text": "t"}]))
        assert (status, body) == (200, ANSWER)
        assert headers["x-headstart-note"] == "passed on as it is: unchecked tokenizer"
        told = json.loads(server.chats[-1][1])
        assert (told["messages"], told["documents"]) == ([USER], [{"id": "d", "text": "t"}])
        status, _, body = await post(remote, json.dumps({"model": MODEL, "prompt": "as text"}).encode(), COMPLETIONS)
        assert status == 200
        assert server.talks[-1].body["prompt"] == "as text"
        named = await post(remote, chat(headstart={"template": "support", "fields": {}}))
        assert (named[0], json.loads(named[2])["error"]["param"]) == (400, "headstart.template")
        broken = await post(remote, b'{"model": 1')
        assert broken[0] == 400
        async with remote.http.get(f"{remote.url}/ready") as response:
            assert any("gets no token ids" in words for words in (await response.json())["degraded"])

    run(folder, scenario)


def test_token_ids_go_to_the_servers_that_read_them_as_we_do_and_the_others_get_the_rest(folder: Path) -> None:
    async def scenario(remote: Remote, proved: Relayed, other: Relayed) -> None:
        other.tokenizer = None
        await other.kill()
        await until(lambda: remote.gateway.ready_replicas == 1)
        await other.start()
        replica = remote.gateway.replicas["replica-1"]
        await until(lambda: remote.gateway.ready_replicas == 2 and not replica.reads_tokens)
        for number in range(8):
            asked = json.dumps({"model": MODEL, "prompt": f"{number} is a question of its own"}).encode()
            status, headers, _ = await post(remote, asked, COMPLETIONS)
            assert (status, headers["x-headstart-replica"]) == (200, "replica-0")
        tools = [await post(remote, chat(tools=[TOOL], prompt_cache_key=f"k{number}")) for number in range(16)]
        assert {headers["x-headstart-replica"] for _, headers, _ in tools} == {"replica-0", "replica-1"}

    run(folder, scenario, servers=2)


def test_only_the_operator_is_told_addresses(folder: Path) -> None:
    key = hashlib.sha256(b"sk-admin").hexdigest()
    config = msgspec.structs.replace(CONFIG, admin=AdminConfig(key_sha256=key))

    async def scenario(remote: Remote, server: Relayed) -> None:
        await server.kill()
        await until(lambda: remote.gateway.ready_replicas == 0)
        for headers, told in (({}, False), ({"authorization": "Bearer sk-admin"}, True)):
            async with remote.http.get(f"{remote.url}/ready", headers=headers) as response:
                body = await response.text()
            assert (server.url in body) is told
            assert "replica-0 is down: " in body
            assert ("127.0.0.1" in body) is told

    run(folder, scenario, config=config)


def test_emptying_the_cache_says_of_each_replica_what_became_of_it(folder: Path) -> None:
    async def scenario(remote: Remote, server: Relayed) -> None:
        async with remote.http.post(f"{remote.url}/admin/cache/reset") as response:
            report = await response.json()
        assert (response.status, report["status"]) == (200, "incomplete")
        assert report["replicas"]["replica-0"]["status"] == "not_supported"
        assert "ask it there" in report["replicas"]["replica-0"]["error"]

    run(folder, scenario)
