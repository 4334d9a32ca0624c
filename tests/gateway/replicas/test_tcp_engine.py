"""Engines on other machines: who is served, who is not used and why, and that no secret is told."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import structlog
from tokenizers import Tokenizer

from engine.detokenize import vocabulary_digest
from engine.wire import Sampling
from gateway.config import Config, EngineConfig, ReplicaConfig
from gateway.errors import ConfigError, ReplicaUnavailable
from gateway.redaction import redacted
from gateway.replicas import engine, remote_model
from gateway.replicas.base import GenerationRequest, Replica, ReplicaState
from gateway.replicas.engine import EngineReplica
from gateway.replicas.remote import RemoteReplicas
from gateway.replicas.remote_model import with_remote_model

from ..conftest import until
from .tcp_engine import SECRET, TcpEngine

TIMEOUT_S = 20.0
PROMPT = GenerationRequest([1, 2, 3], bytes(16), Sampling(max_tokens=4, temperature=0.0))


@pytest.fixture
def folder(tokenizer: Tokenizer, tmp_path: Path) -> Path:
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


async def _used(replica: Replica, use: Callable[[], Awaitable[None]]) -> None:
    await replica.start()
    try:
        async with asyncio.timeout(TIMEOUT_S):
            await use()
    finally:
        await replica.stop(0)


async def _text(replica: Replica) -> str:
    return "".join([output.text async for output in replica.generate(PROMPT)])


def _remotes(folder: Path, secret: str | None = SECRET) -> RemoteReplicas:
    return RemoteReplicas(folder, "scripted", engine_secret=secret)


def test_a_gateway_with_the_secret_is_served_also_after_the_engine_was_away(tokenizer: Tokenizer, folder: Path) -> None:
    async def scenario() -> None:
        async with TcpEngine(tokenizer, vocabulary=vocabulary_digest(tokenizer)) as engine:
            replica = _remotes(folder, None).connect(ReplicaConfig(engine.url, api_key=SECRET))

            async def use() -> None:
                await replica.wait_ready(TIMEOUT_S)
                assert replica.url == engine.url
                first = await _text(replica)
                await engine.stop()
                await until(lambda: replica.state is not ReplicaState.READY)
                with pytest.raises(ReplicaUnavailable) as refused:
                    await anext(replica.generate(PROMPT))
                assert str(engine.port) not in str(refused.value)  # callers are told no address
                await until(lambda: "answers" in (replica.down_reason or ""))
                told = (replica.down_reason or "").replace(engine.url, "the server")
                assert told == "no engine answers on the server (Connection refused)", "so can /ready hide it"
                await engine.listen()
                await replica.wait_ready(TIMEOUT_S)
                assert replica.forgiven
                assert await _text(replica) == first

            await _used(replica, use)

    asyncio.run(scenario())


def test_an_engine_that_is_away_for_long_is_looked_for_as_often_as_at_first(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "_LOOK_INTERVAL_S", 0.001)
    tries = 0

    async def open_none(_replica: EngineReplica, _socket: Any) -> Any:
        nonlocal tries
        tries += 1
        raise ConnectionRefusedError

    async def scenario() -> None:
        replica = _remotes(folder).connect(ReplicaConfig("tcp://127.0.0.1:9"))

        async def use() -> None:
            await until(lambda: tries >= 50)

        await _used(replica, use)

    monkeypatch.setattr(EngineReplica, "_open", open_none)
    asyncio.run(scenario())


@pytest.mark.parametrize("secret", ["", "correct-horse-batterz", SECRET * 2])
def test_a_wrong_secret_is_refused_in_words_that_do_not_tell_it(
    secret: str, tokenizer: Tokenizer, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with TcpEngine(tokenizer) as engine:
            remotes = _remotes(folder, None)
            if not secret:
                with pytest.raises(ConfigError, match=r"engine\.secret"):
                    remotes.connect(ReplicaConfig(engine.url))
                return
            replica = remotes.connect(ReplicaConfig(engine.url, api_key=secret))

            async def use() -> None:
                await until(lambda: replica.state is ReplicaState.DOWN)
                assert "does not accept our secret" in (replica.down_reason or "")
                assert replica.info is None

            await _used(replica, use)

    with structlog.testing.capture_logs() as lines:
        asyncio.run(scenario())
    if secret:
        first = next(line for line in lines if line["event"] == "replica down")
        assert "does not accept our secret: set engine.secret (HEADSTART__ENGINE__SECRET)" in first["reason"]
    told = f"{lines} {caplog.text}"
    assert SECRET not in told
    assert not secret or secret not in told


def test_what_is_no_engine_or_has_no_secret_itself_is_told_so(folder: Path) -> None:
    async def reason(greeting: bytes) -> str:
        async def impostor(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(greeting)
            await left.wait()
            writer.close()
            await writer.wait_closed()

        left = asyncio.Event()
        listener = await asyncio.start_server(impostor, "127.0.0.1", 0)
        port = listener.sockets[0].getsockname()[1]
        replica = _remotes(folder).connect(ReplicaConfig(f"tcp://127.0.0.1:{port}"))
        told = ""

        async def use() -> None:
            nonlocal told
            await until(lambda: replica.state is ReplicaState.DOWN)
            told = replica.down_reason or ""

        await _used(replica, use)
        left.set()
        listener.close()
        await listener.wait_closed()
        return told

    async def scenario() -> None:
        assert "no engine" in await reason(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        assert "does not know the secret" in await reason(b"HSENGINE1" + bytes(32) + b"\x01" + bytes(32))

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("told", "config", "reason"),
    [
        ({"vocabulary": "0" * 32}, {}, "has another tokenizer than"),
        ({"model": "other"}, {"model": "scripted"}, "serves 'other', not 'scripted'"),
        ({"model": "other"}, {}, "a gateway has one model"),
    ],
)
def test_an_engine_that_serves_something_else_is_not_used(
    told: dict[str, Any], config: dict[str, Any], reason: str, tokenizer: Tokenizer, folder: Path
) -> None:
    async def scenario() -> None:
        async with TcpEngine(tokenizer) as first, TcpEngine(tokenizer, **told) as second:
            remotes = _remotes(folder)
            good = remotes.connect(ReplicaConfig(first.url))
            bad = remotes.connect(ReplicaConfig(second.url, **config))

            async def use() -> None:
                await good.wait_ready(TIMEOUT_S)
                await bad.start()
                await until(lambda: bad.state is ReplicaState.DOWN)
                assert reason in (bad.down_reason or "")
                assert str(folder) not in redacted(bad.down_reason or "")
                assert bad.info is None
                await bad.stop(0)

            await _used(good, use)

    asyncio.run(scenario())


def test_the_model_is_taken_from_an_engine_whose_folder_is_here(tokenizer: Tokenizer, folder: Path) -> None:
    async def scenario() -> None:
        async with TcpEngine(tokenizer, root=str(folder)) as here, TcpEngine(tokenizer, root="/elsewhere") as elsewhere:

            def config(url: str) -> Config:
                return Config(engine=EngineConfig(secret=SECRET), replicas=(url,))

            found = await with_remote_model(config(here.url))
            assert (found.engine.model, found.engine.served_name) == (str(folder), "scripted")
            with pytest.raises(ConfigError, match=r"'/elsewhere'.*--model"):
                await with_remote_model(config(elsewhere.url))
        async with TcpEngine(tokenizer, root="/elsewhere", model="smollm2-135m-instruct") as known:
            assert (await with_remote_model(config(known.url))).engine.model == "smollm2-135m-instruct"

    asyncio.run(scenario())


def test_the_model_is_not_waited_for_where_the_secret_is_refused(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_model, "_ENGINE_TIMEOUT_S", 600.0)

    async def scenario() -> None:
        async with TcpEngine(tokenizer) as engine, asyncio.timeout(TIMEOUT_S):
            config = Config(engine=EngineConfig(secret="correct-horse-batterz"), replicas=(engine.url,))
            with pytest.raises(ConfigError, match="does not accept our secret"):
                await with_remote_model(config)

    asyncio.run(scenario())


def test_the_model_is_waited_for_where_no_engine_answers_yet(tokenizer: Tokenizer, folder: Path) -> None:
    async def scenario(lines: list[Any]) -> None:
        async with TcpEngine(tokenizer, root=str(folder)) as engine:
            await engine.stop()
            config = Config(engine=EngineConfig(secret=SECRET), replicas=(engine.url,))
            asking = asyncio.create_task(with_remote_model(config))
            await until(lambda: any(line["event"] == "replica down" for line in lines))
            await engine.listen()
            assert (await asking).engine.served_name == "scripted"

    with structlog.testing.capture_logs() as lines:
        asyncio.run(scenario(lines))
