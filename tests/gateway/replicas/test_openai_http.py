"""A server that is somebody else's: what it serves, how it fails, and how it comes back."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web
from tokenizers import Tokenizer

from engine.wire import Output, Sampling
from gateway.config import ReplicaConfig
from gateway.errors import InvalidRequestError, NotSupportedByReplica, ReplicaLost, ReplicaRefusal, ReplicaUnavailable
from gateway.replicas import openai_flight, openai_http, openai_server
from gateway.replicas.base import CountedOutput, GenerationRequest, ReplicaState
from gateway.replicas.openai_http import OpenAIReplica
from gateway.replicas.openai_server import ModelCard, OpenAIServer, ServerGone, ServerUnfit
from gateway.replicas.tokenizer_proof import TokenizerProof
from gateway.server import run

from ..conftest import until
from .openai_mock import DONE, MODEL, MockServer, Talk, as_one, event, refusing, replying, saying, usage, whole

TIMEOUT_S = 60.0
ASK = GenerationRequest([1, 2, 3], bytes(16), Sampling(max_tokens=5))
AS_ONE = GenerationRequest([1, 2, 3], bytes(16), Sampling(max_tokens=5), n=2, whole=True)


@pytest.fixture(scope="module")
def folder(model_folder: Callable[[str], Path]) -> Path:
    return model_folder("chatml")


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers are looked at often, so that tests need not wait."""
    monkeypatch.setattr(openai_http, "_POLL_INTERVAL_S", 0.05)


Scenario = Callable[[OpenAIReplica, MockServer], Awaitable[None]]


def play(
    folder: Path,
    scenario: Scenario,
    *,
    prepare: Callable[[MockServer], Any] | None = None,
    wait: bool = True,
    **config: Any,
) -> None:
    """Play a scenario on a fresh server and a replica for it, by default one that is ready."""

    async def main() -> None:
        async with asyncio.timeout(2 * TIMEOUT_S), MockServer(folder) as server:
            if prepare is not None:
                prepare(server)
            replica = OpenAIReplica("r", ReplicaConfig(server.url, **config), TokenizerProof.of(folder), model=MODEL)
            await replica.start()
            try:
                if wait:
                    await replica.wait_ready(TIMEOUT_S)
                await scenario(replica, server)
            finally:
                await replica.stop(0)

    run(main())


async def answer(replica: OpenAIReplica, request: GenerationRequest = ASK) -> list[Output]:
    return [output async for output in replica.generate(request)]


# --- what it serves --------------------------------------------------------------------------------------


def test_a_server_introduces_itself(folder: Path) -> None:
    async def scenario(replica: OpenAIReplica, server: MockServer) -> None:
        assert replica.info is not None
        assert (replica.info.model, replica.info.root, replica.info.max_model_len) == (MODEL, "org/mock", 2048)
        assert replica.degraded == ()
        assert all("authorization" not in headers for headers in server.headers)

    play(folder, scenario)


def test_its_key_goes_with_every_request(folder: Path) -> None:
    async def scenario(replica: OpenAIReplica, server: MockServer) -> None:
        await answer(replica)
        assert {headers["authorization"] for headers in server.headers} == {"Bearer sk-1"}

    play(folder, scenario, api_key="sk-1")


def test_another_tokenizer_is_refused_by_name(folder: Path, model_folder: Callable[[str], Path]) -> None:
    def prepare(server: MockServer) -> None:
        server.tokenizer = Tokenizer.from_file(str(model_folder("headers") / "tokenizer.json"))

    async def scenario(replica: OpenAIReplica, server: MockServer) -> None:
        await until(lambda: replica.down_reason is not None)
        assert replica.state is not ReplicaState.READY
        assert "another tokenizer" in str(replica.down_reason)
        assert repr(MODEL) in str(replica.down_reason)
        with pytest.raises(ReplicaUnavailable):
            await answer(replica)
        server.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        await replica.wait_ready(TIMEOUT_S)

    play(folder, scenario, prepare=prepare, wait=False)


def test_a_server_whose_tokenizer_cannot_be_checked_gets_no_token_ids(folder: Path) -> None:
    def prepare(server: MockServer) -> None:
        server.tokenizer = None

    async def scenario(replica: OpenAIReplica, server: MockServer) -> None:
        assert any("/tokenize" in words for words in replica.degraded)
        with pytest.raises(NotSupportedByReplica, match="no token ids"):
            await answer(replica)
        assert server.talks == []

    play(folder, scenario, prepare=prepare)


@pytest.mark.parametrize(
    ("names", "config", "expected"),
    [
        (["a", "b"], {"model": "b"}, "b"),
        (["a", MODEL], {}, MODEL),
        (["a"], {}, "a"),
    ],
)
def test_the_model_is_the_configured_or_the_wanted_or_the_only_one(
    folder: Path, names: list[str], config: dict[str, str], expected: str
) -> None:
    def prepare(server: MockServer) -> None:
        server.cards = [{"id": name, "max_model_len": 64} for name in names]
        server.cards.append({"id": "adapter", "parent": names[0], "max_model_len": 64})

    async def scenario(replica: OpenAIReplica, server: MockServer) -> None:
        await answer(replica)
        assert server.talks[0].body["model"] == expected

    play(folder, scenario, prepare=prepare, **config)


@pytest.mark.parametrize(
    ("cards", "config", "words"),
    [
        ([{"id": "a"}, {"id": "b"}], {}, "which model"),
        ([{"id": "a"}], {"model": "c"}, "'c'"),
        ([], {}, "serves no model yet"),
        ([], {"model": "c"}, "serves no model yet"),
        ([{"id": MODEL}], {}, "context"),
        ("nonsense", {}, "OpenAI-compatible"),
    ],
)
def test_what_cannot_be_served_is_said_in_words(folder: Path, cards: Any, config: dict[str, str], words: str) -> None:
    def prepare(server: MockServer) -> None:
        server.cards = cards

    async def scenario(replica: OpenAIReplica, _server: MockServer) -> None:
        await until(lambda: replica.down_reason is not None)
        assert words in str(replica.down_reason)
        assert replica.state is ReplicaState.DOWN

    play(folder, scenario, prepare=prepare, wait=False, **config)


@pytest.mark.parametrize(
    ("loading", "words"),
    [
        ({"health": 503}, "is not ready: it answers 503 to /health"),
        ({"health": 500}, "answers 500 to /health"),
        ({"cards": []}, "serves no model yet"),
        # As a gateway none of whose engines is up, which is well itself and knows its model's name.
        ({"cards": [{"id": MODEL, "max_model_len": None}], "ready": 503}, "is not ready: it answers 503 to /ready"),
        ({"cards": [{"id": MODEL, "max_model_len": None}], "ready": 200}, "does not say how long a context"),
    ],
)
def test_a_server_that_still_loads_is_not_taken_for_one_that_is_at_fault(
    folder: Path, loading: dict[str, Any], words: str
) -> None:
    loaded: dict[str, Any] = {}

    def prepare(server: MockServer) -> None:
        for name, value in loading.items():
            loaded[name] = getattr(server, name)
            setattr(server, name, value)

    async def scenario(replica: OpenAIReplica, server: MockServer) -> None:
        await until(lambda: replica.down_reason is not None)
        assert str(replica.down_reason).startswith(f"{server.url} {words}")
        for name, value in loaded.items():
            setattr(server, name, value)
        await replica.wait_ready(TIMEOUT_S)

    play(folder, scenario, prepare=prepare, wait=False)


# --- how it fails ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [500, 503, 401, 403, 404, 302])
def test_a_server_that_cannot_answer_is_not_the_callers_fault(folder: Path, status: int) -> None:
    async def scenario(replica: OpenAIReplica, server: MockServer) -> None:
        server.behave = refusing(status, {"error": {"message": "the prompt was ZEBRA"}}, location="http://127.0.0.1:9/")
        with pytest.raises(ReplicaLost, match=str(status)) as caught:
            await answer(replica)
        assert not caught.value.produced
        assert "ZEBRA" not in caught.value.message
        server.behave = saying(whole("well"))
        await replica.wait_ready(TIMEOUT_S)
        assert len(await answer(replica)) == 2

    play(folder, scenario)


FAILURES = {
    "cut": event("a"),
    "done-without-an-end": event("a") + DONE,
    "no-json": event("a") + b"data: {\n\n",
    "an-error": event("a") + event(error={"message": "ZEBRA", "code": 500}),
    "given-up": event("a") + event(finish="abort"),
    "no-event": b"data: " + b"x" * 5_000_000,
}


@pytest.mark.parametrize("data", list(FAILURES.values()), ids=list(FAILURES))
def test_an_answer_that_does_not_come_to_its_end_is_a_loss(folder: Path, data: bytes) -> None:
    async def scenario(replica: OpenAIReplica, server: MockServer) -> None:
        server.behave = saying(data)
        produced = data.startswith(event("a"))
        outputs = replica.generate(ASK)
        if produced:
            assert await anext(outputs) == Output(0, "a")
        with pytest.raises(ReplicaLost) as caught:
            await anext(outputs)
        assert caught.value.produced == produced
        assert "ZEBRA" not in caught.value.message
        assert replica.state is ReplicaState.READY, "what one request gets is no reason to take it from all others"
        server.behave = saying(whole("well"))
        assert len(await answer(replica)) == 2

    play(folder, scenario)


def test_an_answer_that_is_no_stream_is_a_loss(folder: Path) -> None:
    async def scenario(replica: OpenAIReplica, server: MockServer) -> None:
        server.behave = replying(as_one("a"))
        with pytest.raises(ReplicaLost, match="not a completion"):
            await answer(replica)

    play(folder, scenario)


def test_an_answer_whose_end_is_told_needs_no_done(folder: Path) -> None:
    async def scenario(replica: OpenAIReplica, server: MockServer) -> None:
        server.behave = saying(event("a") + event(finish="stop") + usage(1))
        assert [output.finish_reason for output in await answer(replica)] == [None, "stop"]

    play(folder, scenario)


def test_a_server_that_does_not_tell_logprobs_is_no_loss(folder: Path) -> None:
    async def scenario(replica: OpenAIReplica, server: MockServer) -> None:
        with pytest.raises(InvalidRequestError, match="logprobs"):
            await answer(replica, GenerationRequest([1], bytes(16), Sampling(max_tokens=5, logprobs=1)))
        assert replica.state is ReplicaState.READY

    play(folder, scenario)


def test_what_is_wanted_as_one_is_asked_for_and_read_as_one(folder: Path) -> None:
    async def scenario(replica: OpenAIReplica, server: MockServer) -> None:
        server.behave = replying(as_one("a", "b", finish="length", cached=2))
        outputs = await answer(replica, AS_ONE)
        assert outputs == [
            Output(0, "a", finish_reason="length"),
            CountedOutput(0, "b", finish_reason="length", cached_tokens=2, index=1, completion_tokens=2),
        ]
        (talk,) = server.talks
        assert (talk.body["stream"], talk.request.headers["accept"]) == (False, "application/json")
        assert "stream_options" not in talk.body

    play(folder, scenario)


def test_one_that_streams_although_it_was_not_asked_to_is_understood(folder: Path) -> None:
    async def scenario(replica: OpenAIReplica, server: MockServer) -> None:
        server.behave = saying(whole("a", "b"))
        outputs = await answer(replica, msgspec.structs.replace(AS_ONE, n=1))
        assert "".join(output.text for output in outputs) == "ab"

    play(folder, scenario)


def test_logprobs_come_in_a_stream_for_the_sake_of_their_size(folder: Path) -> None:
    async def scenario(replica: OpenAIReplica, server: MockServer) -> None:
        with pytest.raises(InvalidRequestError, match="logprobs"):  # which this server does not tell
            await answer(replica, msgspec.structs.replace(AS_ONE, sampling=Sampling(max_tokens=5, logprobs=1)))
        assert server.talks[0].body["stream"]

    play(folder, scenario)


NO_ANSWERS = {
    "of-fewer-choices": as_one("a"),
    "without-an-end": {"choices": [{"index": index, "text": "a"} for index in range(2)]},
    "an-error": {"error": {"message": "ZEBRA", "code": 500}},
    "given-up": as_one("a", "b", finish="abort"),
    "no-object": ["ZEBRA"],
    "endless": as_one("x" * (2 * openai_flight._PIECE_BYTES), "b"),
}


@pytest.mark.parametrize("body", list(NO_ANSWERS.values()), ids=list(NO_ANSWERS))
def test_one_piece_that_is_no_whole_answer_is_a_loss(folder: Path, body: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openai_http, "_MAX_ANSWER_BYTES", openai_flight._PIECE_BYTES)

    async def scenario(replica: OpenAIReplica, server: MockServer) -> None:
        server.behave = replying(body)
        with pytest.raises(ReplicaLost) as caught:
            await answer(replica, AS_ONE)
        assert not caught.value.produced, "so that it may be tried elsewhere"
        assert "ZEBRA" not in caught.value.message
        assert replica.state is ReplicaState.READY, "what one request gets is no reason to take it from all others"
        server.behave = replying(as_one("well", "done"))
        assert len(await answer(replica, AS_ONE)) == 2

    play(folder, scenario)


@pytest.mark.parametrize("stalls", ["for-a-moment", "for-good"])
def test_an_answer_that_comes_as_one_outlives_a_server_that_stalls_for_a_moment(
    folder: Path, stalls: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openai_server, "_PROBE_TIMEOUT_S", 0.1)
    monkeypatch.setattr(openai_http, "_PATIENCE_S", TIMEOUT_S if stalls == "for-a-moment" else 0.5)
    goes_on = asyncio.Event()

    async def behave(talk: Talk) -> web.Response:
        await goes_on.wait()
        return web.json_response(as_one("a", "b"))

    async def scenario(replica: OpenAIReplica, server: MockServer) -> None:
        server.behave = behave
        waiting = asyncio.create_task(answer(replica, AS_ONE))
        await until(lambda: server.open == 1)
        server.stopped = True
        await until(lambda: replica.state is ReplicaState.DOWN)
        if stalls == "for-good":
            with pytest.raises(ReplicaLost, match="does not answer"):
                await waiting
            goes_on.set()
            return
        server.stopped = False
        await replica.wait_ready(TIMEOUT_S)
        goes_on.set()
        assert [output.text for output in await waiting] == ["a", "b"]

    play(folder, scenario)


def test_a_refusal_is_no_loss(folder: Path) -> None:
    async def scenario(replica: OpenAIReplica, server: MockServer) -> None:
        server.behave = refusing(422, {"error": {"message": "no"}})
        with pytest.raises(ReplicaRefusal, match="no"):
            await answer(replica)
        assert replica.state is ReplicaState.READY

    play(folder, scenario)


# --- its life --------------------------------------------------------------------------------------------


def test_an_unwell_server_gets_no_requests_until_it_is_well(folder: Path) -> None:
    async def scenario(replica: OpenAIReplica, server: MockServer) -> None:
        assert replica.info is not None
        first = replica.info.boot_id
        server.health = 503
        await until(lambda: replica.state is ReplicaState.DOWN)
        assert "503" in str(replica.down_reason)
        server.health = 200
        await replica.wait_ready(TIMEOUT_S)
        assert replica.info.boot_id != first

    play(folder, scenario)


def test_a_server_without_health_is_looked_at_otherwise(folder: Path) -> None:
    def prepare(server: MockServer) -> None:
        server.health = 404

    async def scenario(replica: OpenAIReplica, server: MockServer) -> None:
        assert len(await answer(replica)) == 2
        server.cards = []
        await until(lambda: replica.state is ReplicaState.DOWN)

    play(folder, scenario, prepare=prepare)


def test_a_stopped_server_loses_those_who_wait_but_not_those_who_hear(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openai_server, "_PROBE_TIMEOUT_S", 0.2)

    async def behave(talk: Talk) -> None:
        if talk is server_of[0].talks[0]:
            await talk.tell(1)
            await until(lambda: talk.body["model"] == "go on" or talk.gone)
            await talk.write(whole("the rest"))
        else:
            await talk.wait_until_gone()

    server_of: list[MockServer] = []

    async def scenario(replica: OpenAIReplica, server: MockServer) -> None:
        server_of.append(server)
        server.behave = behave
        hearing = replica.generate(ASK)
        assert (await anext(hearing)).text == "t0 "
        waiting = asyncio.create_task(answer(replica))
        await until(lambda: server.open == 2)
        assert replica.load is not None
        assert replica.load.running == 2
        server.stopped = True
        with pytest.raises(ReplicaLost, match="does not answer") as caught:
            await waiting
        assert not caught.value.produced
        assert replica.state is ReplicaState.DOWN
        server.talks[0].body["model"] = "go on"
        assert [output.finish_reason async for output in hearing] == [None, "stop"]
        assert replica.load.running == 0

    play(folder, scenario)


def test_silence_counts_only_while_somebody_waits(folder: Path) -> None:
    """A client that reads slowly is no reason to give the server up."""

    async def behave(talk: Talk) -> None:
        await talk.write(event("a"))
        await until(lambda: talk.body["model"] == "go on" or talk.gone)
        await talk.write(whole("c"))

    async def scenario(replica: OpenAIReplica, server: MockServer) -> None:
        server.behave = behave
        outputs = replica.generate(ASK)
        assert (await anext(outputs)).text == "a"
        rest = asyncio.create_task(anext(outputs))
        await asyncio.sleep(0)
        server.talks[0].body["model"] = "go on"
        assert (await rest).text == "c"
        await asyncio.sleep(1.1)  # not waiting for anything: letting more time pass than the server may be silent
        assert [output.finish_reason async for output in outputs] == ["stop"]

    play(folder, scenario, idle_timeout_s=1.0)


def test_events_that_come_together_go_on_together(folder: Path) -> None:
    async def behave(talk: Talk) -> None:
        await talk.write(event("a") + event("b", index=1) + event("c", index=1) + event("d", finish="length", index=1))
        await talk.write(event("e") + event(finish="stop") + usage(5) + DONE)

    async def scenario(replica: OpenAIReplica, server: MockServer) -> None:
        server.behave = behave
        outputs = await answer(replica, msgspec.structs.replace(ASK, n=2))
        said = [(output.index, output.text, output.finish_reason) for output in outputs]
        assert said == [(0, "a", None), (1, "bcd", "length"), (0, "e", None), (0, "", "stop")]

    play(folder, scenario)


def test_connections_are_used_again(folder: Path) -> None:
    async def scenario(replica: OpenAIReplica, server: MockServer) -> None:
        for _ in range(5):
            await answer(replica)
        peers = {talk.body["peer"] for talk in server.talks}
        assert len(peers) <= 2  # one may be busy with a look at the server

    async def behave(talk: Talk) -> None:
        assert talk.request.transport is not None
        talk.body["peer"] = talk.request.transport.get_extra_info("peername")
        await talk.write(whole("a"))

    def prepare(server: MockServer) -> None:
        server.behave = behave

    play(folder, scenario, prepare=prepare)


@pytest.mark.parametrize("says", [b"", b"HTTP/1.1 200 O"])
def test_a_kept_connection_that_the_server_has_closed_is_no_loss_of_the_server(folder: Path, says: bytes) -> None:
    async def scenario(replica: OpenAIReplica, server: MockServer) -> None:
        async def until_kept() -> None:
            while not closed:  # the first answer has to end before its connection can be used again
                assert len(await answer(replica)) == 2
                await asyncio.sleep(0.01)

        if says:  # it has begun to answer: what it did of the request nobody knows
            with pytest.raises(ReplicaLost):
                await until_kept()
            assert len(server.talks) == len(peers) + 1
            return
        await until_kept()
        assert len(server.talks) == len(peers) + 1, "the request was sent twice, by a new connection"
        assert replica.state is ReplicaState.READY
        assert replica.info is not None
        assert replica.info.boot_id == "1", "it was never thought to be down"

    async def behave(talk: Talk) -> web.Response | None:
        transport = talk.request.transport
        assert transport is not None
        if (peer := transport.get_extra_info("peername")) in peers:
            closed.append(peer)
            transport.write(says)
            transport.close()
            return web.Response()  # which goes nowhere
        peers.add(peer)
        await talk.write(whole("a"))
        return None

    peers: set[Any] = set()
    closed: list[Any] = []

    def prepare(server: MockServer) -> None:
        server.behave = behave

    play(folder, scenario, prepare=prepare)


def test_a_request_is_not_sent_again_to_a_server_that_had_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plain answer says nothing until its end: its connection may end after minutes without a byte of it."""
    monkeypatch.setattr(openai_flight, "_STALE_S", 0.05)

    async def behave(talk: Talk) -> web.Response | None:
        assert talk.request.transport is not None
        talk.body["peer"] = talk.request.transport.get_extra_info("peername")
        if len(talks) == 1:
            return web.json_response(as_one("a", "b"))
        begun = asyncio.get_running_loop().time()
        await until(lambda: asyncio.get_running_loop().time() > begun + 0.1)
        talk.abort()
        return None

    talks: list[Talk] = []

    async def scenario(replica: OpenAIReplica, server: MockServer) -> None:
        server.talks = talks
        server.behave = behave
        assert len(await answer(replica, AS_ONE)) == 2
        with pytest.raises(ReplicaLost):
            await answer(replica, AS_ONE)
        assert len(talks) == 2
        assert talks[0].body["peer"] == talks[1].body["peer"], "over the connection that was kept"

    play(folder, scenario)


def test_a_plain_answer_that_stops_in_the_middle_is_given_up(folder: Path) -> None:
    async def behave(talk: Talk) -> None:
        response = web.StreamResponse(headers={"content-type": "application/json"})
        await response.prepare(talk.request)
        await response.write(b'{"choices": [')
        await talk.wait_until_gone()

    async def scenario(replica: OpenAIReplica, server: MockServer) -> None:
        server.behave = behave
        with pytest.raises(ReplicaLost, match="nothing more came"):
            await answer(replica, AS_ONE)

    play(folder, scenario, idle_timeout_s=0.2)


def test_a_server_that_is_not_there_is_waited_for(folder: Path) -> None:
    async def main() -> None:
        async with MockServer(folder) as server:
            await server.kill()
            replica = OpenAIReplica("r", ReplicaConfig(server.url), TokenizerProof.of(folder), model=MODEL)
            await replica.start()
            try:
                await until(lambda: replica.state is ReplicaState.DOWN)
                assert server.url in str(replica.down_reason)
                with pytest.raises(ReplicaUnavailable, match="refused"):
                    await replica.wait_ready(0.01)
                await server.start()
                await replica.wait_ready(TIMEOUT_S)
                assert len(await answer(replica)) == 2
            finally:
                await replica.stop(0)

    run(main())


@pytest.mark.parametrize("how", ["refuses", "breaks off", "stalls", "is unwell", "serves nothing"])
def test_a_server_is_gone_when_it_takes_no_connection_and_not_when_it_is_slow_or_unwell(
    how: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openai_server, "_PROBE_TIMEOUT_S", 0.2 if how == "stalls" else TIMEOUT_S)

    async def break_off(_server: MockServer, request: web.Request) -> web.Response:
        Talk(request, None).abort()
        return web.Response()

    if how == "breaks off":
        monkeypatch.setattr(MockServer, "_health", break_off)

    async def main() -> None:
        async with MockServer(folder) as server:
            looking = OpenAIServer(ReplicaConfig(server.url))
            if how == "refuses":
                await server.kill()
            server.stopped, server.health = how == "stalls", 503 if how == "is unwell" else 200
            server.cards = [] if how == "serves nothing" else server.cards
            with pytest.raises(ServerUnfit) as caught:
                await looking.look(MODEL)
            assert isinstance(caught.value, ServerGone) == (how in ("refuses", "breaks off"))
            await looking.close()

    run(main())


def test_a_server_that_is_away_for_long_is_looked_at_as_often_as_at_first(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openai_http, "_POLL_INTERVAL_S", 0.001)
    looks = 0

    async def look(_server: OpenAIServer, _wanted: str) -> ModelCard:
        nonlocal looks
        looks += 1
        raise ServerGone("nobody is there")

    async def main() -> None:
        replica = OpenAIReplica("r", ReplicaConfig("http://a:1"), TokenizerProof.of(folder), model=MODEL)
        await replica.start()
        try:
            await until(lambda: looks >= 50)
        finally:
            await replica.stop(0)

    monkeypatch.setattr(OpenAIServer, "look", look)
    run(main())
