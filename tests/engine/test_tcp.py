"""Engines on TCP: the handshake, and that strangers get nothing and hold nothing up."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Awaitable, Callable, Sequence

import pytest

from engine import server as server_module
from engine import worker
from engine.core import EngineCore
from engine.errors import ProtocolError, WorkerError
from engine.scripted import ScriptedRunner
from engine.server import EngineServer
from engine.tcp import REPLY_BYTES, GatewayHandshake, bind_tcp_socket, challenge, parse_endpoint, verdict
from engine.wire import EngineInfo, decode_from_engine, read_frame

SECRET = b"correct-horse-battery"
INFO = EngineInfo("m", "", "w", "1", 256, 16, 16, "none", "none", 500, (), "lru", 64)


class _NoText:
    def push(self, token_id: int) -> tuple[str, bool]:
        return "", False

    def finish(self) -> str:
        return ""


def _shaken(engine: bytes, gateway: bytes, *, cut: int = 0) -> bool:
    """Whether both ends, with a secret each, are content; the gateway gets its bytes in pieces of ``cut``."""
    asked, handshake, buffer = challenge(), GatewayHandshake(gateway), bytearray()

    def give(data: bytes) -> bytes:
        answers = b""
        for at in range(0, len(data), cut or len(data)):
            buffer.extend(data[at : at + (cut or len(data))])
            answers += handshake.take(buffer)
        return answers

    reply = give(asked)
    assert len(reply) == REPLY_BYTES
    assert engine not in reply
    admitted, told = verdict(engine, asked, reply)
    give(told + b"first frame")
    assert bytes(buffer) == (b"first frame" if cut == 0 else b"")
    return admitted and handshake.done


def test_ends_with_the_same_secret_are_content() -> None:
    assert _shaken(SECRET, SECRET)


def test_ends_with_different_secrets_are_not() -> None:
    for other in (b"", b"correct-horse-batterx", SECRET + b"x"):
        with pytest.raises(ProtocolError, match="does not accept our secret"):
            _shaken(SECRET, other)


def test_a_challenge_may_come_in_pieces() -> None:
    asked, handshake, buffer = challenge(), GatewayHandshake(SECRET), bytearray()
    answers = []
    for byte in asked:
        buffer.append(byte)
        answers.append(handshake.take(buffer))
    assert [bool(answer) for answer in answers] == [False] * (len(asked) - 1) + [True]
    _, told = verdict(SECRET, asked, answers[-1])
    for byte in told:
        assert not handshake.done
        buffer.append(byte)
        assert handshake.take(buffer) == b""
    assert handshake.done


def test_a_recorded_answer_and_the_other_ends_own_words_do_not_serve() -> None:
    asked, handshake = challenge(), GatewayHandshake(SECRET)
    reply = handshake.take(bytearray(asked))
    admitted, told = verdict(SECRET, asked, reply)
    assert admitted
    assert not verdict(SECRET, challenge(), reply)[0]
    assert not verdict(SECRET, asked, reply[:32] + told[1:])[0]
    with pytest.raises(ProtocolError, match="does not know the secret"):
        handshake.take(bytearray(b"\x01" + reply[32:]))


@pytest.mark.parametrize(
    ("text", "endpoint"),
    [("localhost:80", ("localhost", 80)), ("[::1]:0", ("::1", 0)), ("0.0.0.0:65535", ("0.0.0.0", 65535))],
)
def test_an_endpoint_is_host_and_port(text: str, endpoint: tuple[str, int]) -> None:
    assert parse_endpoint(text) == endpoint


@pytest.mark.parametrize("text", ["", "80", "host", "host:", ":80", "::1:80", "[h]:80", "host:65536", "host:-1", "h:x"])
def test_what_is_no_endpoint_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"HOST:PORT|no port"):
        parse_endpoint(text)


def test_a_port_that_is_taken_is_told() -> None:
    with bind_tcp_socket("127.0.0.1", 0) as first:
        first.listen()
        with pytest.raises(WorkerError, match="cannot listen on 127"):
            bind_tcp_socket("127.0.0.1", first.getsockname()[1])


def _serve(scenario: Callable[[int], Awaitable[None]], kept: Sequence[asyncio.StreamWriter] = ()) -> None:
    """Play it against a server; the connections ``kept`` are still open when that ends."""

    async def main() -> None:
        core = EngineCore(ScriptedRunner(16, 16, vocab_size=500, eos=()), INFO, detokenizer=lambda _: _NoText())
        listener = bind_tcp_socket("127.0.0.1", 0)
        server = EngineServer(core, listener, secret=SECRET)
        listener.listen()
        serving = asyncio.create_task(server.serve())
        try:
            async with asyncio.timeout(60):
                await scenario(listener.getsockname()[1])
        finally:
            server.stop()
            await asyncio.wait_for(serving, 60)
            for writer in kept:
                writer.close()
                with contextlib.suppress(ConnectionError):
                    await writer.wait_closed()

    asyncio.run(main())


def test_strangers_hear_a_challenge_and_no_more(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "_HANDSHAKE_SECONDS", 0.2)

    async def scenario(port: int) -> None:
        for sent in (b"", b"GET / HTTP/1.1\r\n\r\n", b"x" * 10_000):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(sent)
            heard = await _all(reader)
            writer.close()
            # The challenge, and after a whole answer that it was wrong.
            assert heard[41:] in (b"", bytes(33))
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        handshake, buffer = GatewayHandshake(SECRET), bytearray()
        while not handshake.done:
            buffer += await reader.readexactly(1)
            writer.write(handshake.take(buffer))
        assert decode_from_engine(await read_frame(reader)) == INFO
        writer.close()

    with caplog.at_level(logging.INFO):
        _serve(scenario)
    assert caplog.text.count("refusing a connection from 127.0.0.1") == 3
    assert SECRET.decode() not in caplog.text


def test_no_more_strangers_are_heard_at_once_than_can_do_harm_and_they_keep_no_gateway_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server_module, "_MAX_STRANGERS", 3)
    kept: list[asyncio.StreamWriter] = []

    async def scenario(port: int) -> None:
        strangers = []
        for _ in range(3):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            assert len(await reader.readexactly(41)) == 41
            kept.append(writer)
            strangers.append(reader)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(GatewayHandshake(SECRET).take(bytearray(await reader.readexactly(41))))
        assert (await reader.readexactly(33))[:1] == b"\x01"
        kept.append(writer)
        assert await _all(strangers[0]) == b"", "the longest silent one was cut"
        assert not strangers[1].at_eof()

    _serve(scenario, kept)


async def _all(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.read()
    except ConnectionError:  # reset, because not all that was sent had been read
        return b""


def test_a_tcp_socket_is_never_served_without_a_secret() -> None:
    core = EngineCore(ScriptedRunner(16, 16, vocab_size=500, eos=()), INFO, detokenizer=lambda _: _NoText())
    with bind_tcp_socket("127.0.0.1", 0) as listener, pytest.raises(ValueError, match="secret"):
        EngineServer(core, listener)
    with socket.socket(socket.AF_UNIX) as listener, pytest.raises(ValueError, match="secret"):
        EngineServer(core, listener, secret=SECRET)


@pytest.mark.parametrize(("secret", "reason"), [(None, "is not set"), ("short", "has fewer than 16 characters")])
def test_a_worker_needs_a_secret_for_tcp(
    secret: str | None, reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if secret is None:
        monkeypatch.delenv("A_SECRET", raising=False)
    else:
        monkeypatch.setenv("A_SECRET", secret)
    options = ["--tcp", "127.0.0.1:0", "--secret-env", "A_SECRET", "--model", "/none", "--served-name", "m"]
    assert worker.main(options) == 1
    assert f"A_SECRET {reason}" in caplog.text
    assert "short" not in caplog.text
