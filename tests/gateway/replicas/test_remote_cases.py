"""The acceptance cases of a gateway in front of other servers, over real sockets at both ends."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from contextlib import AbstractContextManager, AsyncExitStack, nullcontext
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from gateway import generation
from gateway.replicas import openai_server
from gateway.replicas.base import ReplicaState
from gateway.routing.flight import FlightLog
from gateway.server import run

from ..conftest import until
from .openai_mock import (
    DONE,
    MODEL,
    Behaviour,
    MockServer,
    Remote,
    Talk,
    as_one,
    event,
    events_of,
    gateway_over,
    play,
    refusing,
    replying,
    saying,
    text_of,
    usage,
    whole,
)

PIECES = [
    "data: [DONE]",
    "\n\n",
    "👩‍👩‍👧‍👦",
    "\u2028",
    "a\r\n\r\nb",
    "é漢",
    'data: {"x": 1}\n\n',
    " ",
    "\u2029\x85\u000b",
    "word ",
]
TEXTS = [f"{i} {PIECES[i % len(PIECES)]}" for i in range(50)]


@pytest.fixture(scope="module")
def folder(model_folder: Callable[[str], Path]) -> Path:
    return model_folder("chatml")


# --- H9: events, not packets -----------------------------------------------------------------------------


def cut(data: bytes, size: int | random.Random) -> list[bytes]:
    pieces, at = [], 0
    while at < len(data):
        step = size if isinstance(size, int) else size.randint(1, 40)
        pieces.append(data[at : at + step])
        at += step
    return pieces


def in_pieces(data: bytes, size: int | random.Random) -> Behaviour:
    async def behave(talk: Talk) -> None:
        for piece in cut(data, size):
            await talk.write(piece)

    return behave


EVENTS = [*map(event, TEXTS), event(finish="stop"), usage(50), DONE]
LINE_FEEDS = b"".join(EVENTS)
CARRIAGE_RETURNS = b":ping\r\n\r\n".join([b"", *[b":ping\r\n" + item.replace(b"\n", b"\r\n") for item in EVENTS]])


@pytest.mark.parametrize("data", [LINE_FEEDS, CARRIAGE_RETURNS], ids=["lf", "crlf"])
@pytest.mark.parametrize("size", [1, 3, "random"])
def test_h9_a_proxy_reads_events_and_not_packets(folder: Path, data: bytes, size: Any) -> None:
    async def scenario(remote: Remote, server: MockServer) -> None:
        server.behave = in_pieces(data, random.Random(20) if size == "random" else size)
        for ask in (remote.complete, remote.chat):
            status, _, body = await ask(stream=True)
            assert status == 200
            events = events_of(body)
            deltas = [text for item in events[:-1] if (text := text_of(item["choices"][0]))]
            assert deltas == TEXTS
            assert [item for item in events if item == "[DONE]"] == [events[-1]] == ["[DONE]"]
            assert [item["choices"][0]["finish_reason"] for item in events[:-1]][-1] == "stop"
        status, _, body = await remote.complete()
        assert json.loads(body)["choices"][0]["text"] == "".join(TEXTS)

    play(folder, scenario)


# --- G2: a client that leaves ----------------------------------------------------------------------------

ENDLESS = 1500


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("told", [None, 0, 3], ids=["before-the-head", "before-a-token", "in-the-middle"])
def test_g2_leaving_closes_the_connection_to_the_server(folder: Path, stream: bool, told: int | None) -> None:
    """The server writes until its client is gone; a connection left open would get all its tokens."""

    async def behave(talk: Talk) -> None:
        if told is not None:
            await talk.start()
        if told:
            await talk.tell(ENDLESS, pause_s=0.002)
        else:
            await talk.wait_until_gone()

    async def scenario(remote: Remote, server: MockServer) -> None:
        server.behave = behave
        ask = asyncio.create_task(remote.complete(stream=stream, max_tokens=ENDLESS))
        await until(lambda: server.open == 1 and server.talks[0].tokens >= (told or 0))
        ask.cancel()
        await until(lambda: server.open == 0)
        assert server.talks[0].tokens < ENDLESS
        await until(lambda: remote.gateway.dispatcher.active == 0)
        assert remote.gateway.statistics.snapshot().totals.aborted == 1
        assert remote.gateway.replicas["replica-0"].state is ReplicaState.READY
        server.behave = saying(whole("next"))
        assert (await remote.complete())[0] == 200

    play(folder, scenario)


# --- Q4: a server that dies ------------------------------------------------------------------------------


def other(remote: Remote, servers: list[MockServer], server: MockServer) -> tuple[str, MockServer]:
    """The replica id of ``server``, and the other server."""
    index = servers.index(server)
    return f"replica-{index}", servers[1 - index]


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_q4_a_request_without_a_token_is_answered_by_another_server(folder: Path, stream: bool) -> None:
    async def scenario(remote: Remote, *servers: MockServer) -> None:
        for server in servers:
            server.behave = Talk.wait_until_gone
        ask = asyncio.create_task(remote.complete(stream=stream))
        await until(lambda: any(server.talks for server in servers))
        first = next(server for server in servers if server.talks)
        dead, second = other(remote, list(servers), first)
        second.behave = saying(whole("from ", "the other"))
        await first.kill()
        status, headers, body = await ask
        assert (status, headers["x-headstart-replica"] != dead) == (200, True)
        told = events_of(body)[:-1] if stream else [json.loads(body)]
        assert "".join(text_of(item["choices"][0]) for item in told) == "from the other"
        assert remote.gateway.replicas[dead].state is ReplicaState.DOWN
        totals = remote.gateway.statistics.snapshot().totals
        assert (totals.requests, totals.failed) == (1, 0)

    play(folder, scenario, servers=2)


@pytest.mark.parametrize("how", ["killed", "stalled"])
def test_q4_an_answer_that_has_begun_ends_with_an_error_and_is_not_begun_again(folder: Path, how: str) -> None:
    tokens = 40 if how == "killed" else 20

    async def behave(talk: Talk) -> None:
        await talk.tell(tokens)
        await talk.wait_until_gone()

    async def scenario(remote: Remote, *servers: MockServer) -> None:
        for server in servers:
            server.behave = behave
        ask = asyncio.create_task(remote.complete(stream=True, max_tokens=60))
        await until(lambda: any(talk.tokens == tokens for server in servers for talk in server.talks))
        first = next(server for server in servers if server.talks)
        lost, second = other(remote, list(servers), first)
        if how == "killed":
            await first.kill()
        else:
            first.stopped = True
        status, _, body = await ask
        *told, last = events_of(body)
        assert status == 200
        assert "".join(text_of(item["choices"][0]) for item in told) == "".join(f"t{i} " for i in range(tokens))
        assert all(item["choices"][0]["finish_reason"] is None for item in told)
        assert last["error"]["code"] == "replica_lost"
        assert not second.talks
        await until(lambda: remote.gateway.replicas[lost].state is ReplicaState.DOWN)
        totals = remote.gateway.statistics.snapshot().totals
        assert (totals.requests, totals.failed) == (1, 1)
        second.behave = saying(whole("next"))
        for _ in range(3):
            assert (await remote.complete())[1]["x-headstart-replica"] != lost

    play(folder, scenario, servers=2, idle_timeout_s=1.0)


def test_q4_a_request_that_waits_when_its_server_stops_is_answered_by_another(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is reset when a process is stopped; only looking at it tells."""
    monkeypatch.setattr(openai_server, "_PROBE_TIMEOUT_S", 1.0)

    async def scenario(remote: Remote, *servers: MockServer) -> None:
        for server in servers:
            server.behave = Talk.wait_until_gone
        ask = asyncio.create_task(remote.complete(stream=True))
        await until(lambda: any(server.talks for server in servers))
        first = next(server for server in servers if server.talks)
        first.stopped = True
        lost, second = other(remote, list(servers), first)
        second.behave = saying(whole("from the other"))
        status, headers, _ = await ask
        assert (status, headers["x-headstart-replica"] != lost) == (200, True)

    play(folder, scenario, servers=2)


# --- Q6: the caller's errors -----------------------------------------------------------------------------


def test_q6_what_the_caller_got_wrong_takes_no_server_out(folder: Path) -> None:
    async def scenario(remote: Remote, server: MockServer) -> None:
        replica = remote.gateway.replicas["replica-0"]
        assert replica.info is not None
        boot = replica.info.boot_id
        for turn in range(50):
            status = (400, 413, 422)[turn % 3]
            error = {"message": f"no, turn {turn}", "type": "BadRequestError", "param": "prompt", "code": status}
            server.behave = refusing(status, {"error": error})
            answer = await remote.complete(stream=turn % 2 == 0)
            assert answer[0] == status
            told = json.loads(answer[2])["error"]
            assert told == {"message": f"no, turn {turn}", "type": "BadRequestError", "param": "prompt", "code": None}
        server.behave = saying(whole("yes"))
        for _ in range(10):
            assert (await remote.complete())[0] == 200
        server.behave = refusing(429, {"error": {"message": "slowly"}}, **{"retry-after": "7"})
        status, headers, body = await remote.complete()
        assert (status, headers["retry-after"], json.loads(body)["error"]["message"]) == (429, "7", "slowly")
        assert replica.state is ReplicaState.READY
        assert replica.info.boot_id == boot, "it was never out"
        assert len(server.talks) == 61, "none was tried again"
        totals = remote.gateway.statistics.snapshot().totals
        assert (totals.requests, totals.failed) == (10, 0)

    play(folder, scenario)


def test_q6_an_error_in_the_place_of_the_first_event_is_the_callers_too(folder: Path) -> None:
    async def scenario(remote: Remote, server: MockServer) -> None:
        server.behave = saying(b'data: {"error": {"message": "too long", "code": 400}}\n\ndata: [DONE]\n\n')
        status, _, body = await remote.complete(stream=True)
        assert (status, json.loads(body)["error"]["message"]) == (400, "too long")
        assert remote.gateway.replicas["replica-0"].state is ReplicaState.READY

    play(folder, scenario)


# --- what is counted -------------------------------------------------------------------------------------


def test_counts_that_come_at_the_end_reach_usage_statistics_and_headers(folder: Path) -> None:
    async def scenario(remote: Remote, server: MockServer) -> None:
        server.behave = saying(b"".join([event("a"), event("b", finish="length"), usage(2, cached=1), DONE]))
        status, headers, body = await remote.complete()
        counts = json.loads(body)["usage"]
        assert (status, headers["x-headstart-cached-tokens"]) == (200, "1")
        assert (counts["completion_tokens"], counts["prompt_tokens_details"]) == (2, {"cached_tokens": 1})
        assert counts["total_tokens"] == counts["prompt_tokens"] + 2
        status, headers, body = await remote.complete(stream=True, stream_options={"include_usage": True})
        assert "x-headstart-cached-tokens" not in headers, "it is not known when the headers go out"
        assert events_of(body)[-2]["usage"] == counts
        totals = remote.gateway.statistics.snapshot().totals
        assert (totals.cached_prompt_tokens, totals.completion_tokens) == (2, 4)

    play(folder, scenario)


def test_plain_requests_are_asked_for_as_one_but_for_some_that_tell_their_time(folder: Path) -> None:
    async def behave(talk: Talk) -> web.Response | None:
        if talk.body["stream"]:
            await talk.write(whole("hello"))
            return None
        return web.json_response(as_one("hello"))

    async def scenario(remote: Remote, server: MockServer) -> None:
        server.behave = behave
        bodies = [json.loads((await remote.chat())[2]) for _ in range(40)]
        streamed = [talk.body["stream"] for talk in server.talks]
        assert all(streamed[:8])
        assert not all(streamed[8:])
        for body in bodies:
            assert (text_of(body["choices"][0]), body["usage"]["completion_tokens"]) == ("hello", 1)
        totals = remote.gateway.statistics.window(None).table.values()
        assert sum(sums.requests for sums in totals) == 40
        assert sum(sum(sums.ttft.values()) for sums in totals) == sum(streamed)

    play(folder, scenario)


@pytest.fixture
def _untimed(monkeypatch: pytest.MonkeyPatch) -> None:
    """No plain request is asked for in a stream to learn from its time."""
    monkeypatch.setattr(FlightLog, "asks", lambda _log, _now: False)


@pytest.mark.usefixtures("_untimed")
def test_a_plain_answer_has_no_time_to_first_token_wherever_it_is_told(folder: Path) -> None:
    async def scenario(remote: Remote, server: MockServer) -> None:
        server.behave = replying(as_one("hello"))
        assert (await remote.complete())[0] == 200
        server.behave = saying(whole("hello"))
        assert (await remote.complete(stream=True))[0] == 200
        async with remote.http.get(remote.url + "/admin/requests") as response:
            times = [each["ttft_s"] for each in (await response.json())["requests"]]
        assert sorted(time is None for time in times) == [False, True]
        async with remote.http.get(remote.url + "/metrics") as response:
            counts = [line for line in (await response.text()).splitlines() if "headstart_ttft_seconds_count" in line]
        assert [line.rpartition(" ")[2] for line in counts] == ["1.0"]
        async with remote.http.get(remote.url + "/admin/stats") as response:
            assert (await response.json())["totals"]["ttft_p50_s"] is not None

    play(folder, scenario)


@pytest.mark.usefixtures("_untimed")
def test_a_plain_answer_is_a_stage_of_its_own_in_a_trace(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stages: list[str] = []
    told: list[dict[str, Any]] = []

    def stage(name: str) -> AbstractContextManager[None]:
        stages.append(name)
        return nullcontext()

    monkeypatch.setattr(generation, "stage", stage)
    monkeypatch.setattr(generation, "describe", lambda attributes: told.append(attributes()))

    async def scenario(remote: Remote, server: MockServer) -> None:
        server.behave = replying(as_one("hello"))
        assert (await remote.complete())[0] == 200
        server.behave = saying(whole("hello"))
        assert (await remote.complete(stream=True))[0] == 200

    play(folder, scenario)
    assert stages == ["plan", "answer", "decode", "plan", "prefill", "decode"]
    assert ["headstart.ttft_s" in attributes for attributes in told] == [False, True]


@pytest.mark.usefixtures("_untimed")
def test_a_client_that_leaves_takes_its_plain_request_along(folder: Path) -> None:
    async def scenario(remote: Remote, server: MockServer) -> None:
        server.behave = Talk.wait_until_gone
        ask = asyncio.create_task(remote.complete())
        await until(lambda: server.open == 1)
        assert not server.talks[0].body["stream"]
        ask.cancel()
        await until(lambda: server.talks[0].gone and remote.gateway.dispatcher.active == 0)
        view = remote.gateway.router.view("replica-0")
        assert (view.in_flight, view.waiting_tokens, view.failures) == (0, 0, 0)
        assert remote.gateway.statistics.snapshot().totals.aborted == 1

    play(folder, scenario)


@pytest.mark.usefixtures("_untimed")
def test_plain_requests_of_a_server_that_dies_are_answered_by_another_once(folder: Path) -> None:
    goes_on = asyncio.Event()

    async def behave(talk: Talk) -> web.Response:
        await goes_on.wait()
        return web.json_response(as_one("hello"))

    async def scenario(remote: Remote, *servers: MockServer) -> None:
        for server in servers:
            server.behave = replying(as_one("warm"))
        for number in range(4):  # connections that are kept
            assert (await remote.complete(prompt=f"{number}"))[0] == 200
        for server in servers:
            server.behave, server.talks = behave, []
        asks = [asyncio.create_task(remote.complete(prompt=f"{number} x")) for number in range(8)]
        first, second = servers
        await until(lambda: first.open + second.open == 8)
        assert first.open
        asked = len(first.talks)
        await first.kill()
        await until(lambda: second.open == 8)
        goes_on.set()
        assert [(await ask)[0] for ask in asks] == [200] * 8
        assert len({str(talk.body["prompt"]) for talk in second.talks}) == len(second.talks) == 8
        assert len(first.talks) == asked
        assert not any(talk.body["stream"] for talk in (*first.talks, *second.talks))

    play(folder, scenario, servers=2)


@pytest.mark.usefixtures("_untimed")
def test_a_plain_request_that_outlives_the_grace_is_told_so(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with AsyncExitStack() as stack:
            server = await stack.enter_async_context(MockServer(folder))
            server.behave = Talk.wait_until_gone
            http = await stack.enter_async_context(aiohttp.ClientSession())
            async with gateway_over(folder, server) as remote:
                ask = asyncio.create_task(
                    http.post(remote.url + "/v1/completions", json={"model": MODEL, "prompt": "x"})
                )
                await until(lambda: server.open == 1)
            response = await ask
            assert (response.status, response.headers["retry-after"]) == (503, "1")
            assert (await response.json())["error"]["code"] == "overloaded"
            await until(lambda: server.open == 0)

    run(main())
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_alone_counts_no_token_that_nobody_asked_for(folder: Path, stream: bool) -> None:
    async def scenario(remote: Remote, server: MockServer) -> None:
        server.behave = saying(b"".join([event("a"), event(finish="length"), usage(1, cached=1), DONE]))
        options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        status, _, body = await remote.complete(prompt="said", echo=True, max_tokens=0, **options)
        assert status == 200
        events = [each for each in events_of(body) if each != "[DONE]"] if stream else [json.loads(body)]
        assert "".join(text_of(choice) for each in events for choice in each["choices"]) == "said"
        counts = events[-1]["usage"]
        assert (counts["completion_tokens"], counts["prompt_tokens_details"]) == (0, {"cached_tokens": 1})
        assert counts["total_tokens"] == counts["prompt_tokens"]
        totals = remote.gateway.statistics.snapshot().totals
        assert (totals.completion_tokens, totals.cached_prompt_tokens, totals.requests) == (0, 1, 1)

    play(folder, scenario)


def test_cached_tokens_that_are_never_told_are_null_and_not_zero(folder: Path) -> None:
    async def scenario(remote: Remote, server: MockServer) -> None:
        server.behave = saying(b"".join([event("a"), event(finish="stop"), usage(1, cached=None), DONE]))
        _, headers, body = await remote.complete()
        assert json.loads(body)["usage"]["prompt_tokens_details"] is None
        assert "x-headstart-cached-tokens" not in headers
        async with remote.http.get(remote.url + "/ready") as response:
            ready = await response.json()
        assert (response.status, len(ready["degraded"])) == (200, 2)
        assert "--enable-prompt-tokens-details" in ready["degraded"][0]

    play(folder, scenario)


@pytest.mark.parametrize("chat", [True, False])
def test_the_name_that_clients_use_is_ours_and_the_servers_is_its_own(folder: Path, chat: bool) -> None:
    async def scenario(remote: Remote, server: MockServer) -> None:
        server.cards[0]["id"] = "its/own-name"
        await until(lambda: remote.gateway.info is not None and remote.gateway.info.model == "its/own-name")
        await remote.gateway.wait_ready(30.0)
        _, _, body = await (remote.chat() if chat else remote.complete())
        assert json.loads(body)["model"] == MODEL
        assert server.talks[-1].body["model"] == "its/own-name"

    play(folder, scenario)


# --- the caller's trace ------------------------------------------------------------------------------------


def test_a_callers_trace_context_reaches_the_server(folder: Path) -> None:
    context = {"traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", "tracestate": "vendor=1"}

    async def scenario(remote: Remote, server: MockServer) -> None:
        body = {"model": MODEL, "prompt": "x", "max_tokens": 3}
        async with remote.http.post(f"{remote.url}/v1/completions", json=body, headers=context) as response:
            assert response.status == 200
        (talk,) = server.talks
        assert {name: talk.request.headers[name] for name in context} == context

    play(folder, scenario)
