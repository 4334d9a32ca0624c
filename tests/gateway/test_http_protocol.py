"""Limits on the head of a request, against uvicorn on a real socket."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
import uvicorn

from gateway import http_protocol
from gateway.api.exchange import ClientGone, Exchange
from gateway.http_protocol import MAX_HEAD_BYTES, MAX_HEADERS, LimitedHttpProtocol

from .conftest import until

TIMEOUT_S = 60.0
_GET = b"GET / HTTP/1.1\r\nhost: x\r\n"
_POST = b"POST / HTTP/1.1\r\nhost: x\r\n"

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Connect = Callable[[], Awaitable[Connection]]


async def _echo(scope: Any, receive: Any, send: Any) -> None:
    size = 0
    while (message := await receive()).get("more_body"):
        size += len(message["body"])
    body = str(size + len(message.get("body", b""))).encode()
    headers = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


@asynccontextmanager
async def _server(application: Any, keep_alive_s: float) -> AsyncIterator[Connect]:
    config = uvicorn.Config(
        application, port=0, http=LimitedHttpProtocol, lifespan="off", log_config=None, access_log=False
    )
    config.timeout_keep_alive = keep_alive_s  # type: ignore[assignment]
    server = uvicorn.Server(config)
    running = asyncio.create_task(server._serve())
    while not server.started:
        await asyncio.wait([running], timeout=0.001)
    port = server.servers[0].sockets[0].getsockname()[1]

    async def connect() -> Connection:
        return await asyncio.open_connection("127.0.0.1", port)

    try:
        async with asyncio.timeout(TIMEOUT_S):
            yield connect
    finally:
        server.should_exit = True
        await running


async def _answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    length = int(head.partition("content-length: ")[2].partition("\r\n")[0])
    return int(head.split()[1]), await reader.readexactly(length)


def _play(
    scenario: Callable[[Connect], Awaitable[None]], application: Any = _echo, *, keep_alive_s: float = TIMEOUT_S
) -> None:
    async def main() -> None:
        async with _server(application, keep_alive_s) as connect:
            await scenario(connect)

    asyncio.run(main())


LONG_HEADS = [
    _GET + b"a: " + b"x" * 2**20 + b"\r\n\r\n",
    _GET + b"".join(b"h%d: x\r\n" % i for i in range(10_000)) + b"\r\n",
    b"GET /" + b"x" * (MAX_HEAD_BYTES + 1) + b" HTTP/1.1\r\nhost: x\r\n\r\n",
]


@pytest.mark.parametrize("head", LONG_HEADS, ids=["one long header", "ten thousand headers", "long request line"])
def test_i2_a_head_that_is_too_long_is_cut_off(head: bytes) -> None:
    async def scenario(connect: Connect) -> None:
        reader, writer = await connect()
        writer.write(head)
        answer = b""
        with suppress(ConnectionError):  # what was not read resets the connection, maybe before its last words
            answer = await reader.read()
        assert answer == b"" or answer.startswith(b"HTTP/1.1 431 ")
        writer.close()
        reader, writer = await connect()
        writer.write(_GET + b"\r\n")
        assert (await _answer(reader))[0] == 200
        writer.close()

    _play(scenario)


def test_i2_one_header_too_many_is_refused_in_openais_shape() -> None:
    async def scenario(connect: Connect) -> None:
        for count, expected in ((MAX_HEADERS - 1, 200), (MAX_HEADERS, 431)):  # and the host
            reader, writer = await connect()
            writer.write(_GET + b"".join(b"h%d: x\r\n" % i for i in range(count)) + b"\r\n")
            status, body = await _answer(reader)
            assert status == expected
            assert status == 200 or json.loads(body)["error"]["type"] == "invalid_request_error"
            writer.close()

    _play(scenario)


@pytest.mark.parametrize("noise", [b"GARBAGE\r\n\r\n", _POST + b"transfer-encoding: chunked\r\n\r\nzz\r\n"])
def test_what_is_no_http_is_refused_in_openais_shape(noise: bytes) -> None:
    async def scenario(connect: Connect) -> None:
        reader, writer = await connect()
        writer.write(noise)
        status, body = await _answer(reader)
        assert status == 400
        assert json.loads(body)["error"]["type"] == "invalid_request_error"
        assert await reader.read() == b""
        writer.close()

    _play(scenario)


def test_i2_a_head_that_grows_for_ever_is_cut() -> None:
    async def scenario(connect: Connect) -> None:
        reader, writer = await connect()
        writer.write(_GET)
        sent = 0
        while not reader.at_eof() and sent < 10 * MAX_HEAD_BYTES:
            writer.write(b"h: " + b"x" * 1000 + b"\r\n")
            sent += 1005
            try:
                await writer.drain()
            except ConnectionError:
                break
            await asyncio.sleep(0)
        assert sent < 10 * MAX_HEAD_BYTES
        writer.close()

    _play(scenario)


@pytest.mark.parametrize("drip", [b"", _GET, _GET + b"a: b\r\n"])
def test_i12_a_head_that_drips_is_given_up(monkeypatch: pytest.MonkeyPatch, drip: bytes) -> None:
    monkeypatch.setattr(http_protocol, "HEAD_TIMEOUT_S", 0.05)

    async def scenario(connect: Connect) -> None:
        reader, writer = await connect()
        writer.write(drip)
        answer = await reader.read()
        assert answer == b"" if not drip else answer.startswith(b"HTTP/1.1 408 ")
        writer.close()

    _play(scenario)


def test_bodies_and_further_requests_do_not_count_as_head(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "HEAD_TIMEOUT_S", 1.0)
    size = 5 * MAX_HEAD_BYTES

    async def scenario(connect: Connect) -> None:
        reader, writer = await connect()
        for _ in range(3):
            writer.write(_POST + b"content-length: %d\r\n\r\n" % size + b"x" * size)
            assert await _answer(reader) == (200, str(size).encode())
        for _ in range(200):
            writer.write(_GET + b"pad: " + b"x" * 1000 + b"\r\n\r\n")
            assert (await _answer(reader))[0] == 200
        # A body may take longer than a head.
        writer.write(_POST + b"content-length: 2\r\n\r\na")
        await asyncio.sleep(1.1)
        writer.write(b"b")
        assert await _answer(reader) == (200, b"2")
        writer.close()

    _play(scenario)


def test_r3_a_client_that_takes_nothing_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "STALLED_WRITE_TIMEOUT_S", 0.1)
    cut = asyncio.Event()

    async def generous(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(30):
            await send({"type": "http.response.body", "body": bytes(1_000_000), "more_body": True})
        assert (await receive())["type"] == "http.disconnect"
        cut.set()

    async def scenario(connect: Connect) -> None:
        _, writer = await connect()
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(_GET + b"\r\n")
        await cut.wait()
        writer.transport.abort()

    _play(scenario, generous)


class _SlowTransport(asyncio.Transport):
    """Has so many bytes left to write each time it is asked."""

    def __init__(self, *left: int) -> None:
        super().__init__()
        self.left = [*left]
        self.aborted = asyncio.Event()

    def get_write_buffer_size(self) -> int:
        return self.left.pop(0)

    def abort(self) -> None:
        self.aborted.set()

    def close(self) -> None:
        self.aborted.set()


def test_r3_a_client_that_takes_an_answer_slowly_is_given_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "STALLED_WRITE_TIMEOUT_S", 0.001)

    async def main() -> None:
        config = uvicorn.Config(_echo, log_config=None, lifespan="off")
        config.load()
        protocol = LimitedHttpProtocol(config, uvicorn.server.ServerState(), {})
        transport = _SlowTransport(5000, 4000, 3999, 3999)
        protocol.connection_made(transport)
        protocol.pause_writing()
        await transport.aborted.wait()
        assert transport.left == [], "it was given up while it still took some"
        protocol.connection_lost(None)

    asyncio.run(asyncio.wait_for(main(), TIMEOUT_S))


class _Slow:
    """Answers when it is told to; knows whether a client has left before that."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.go_on = asyncio.Event()
        self.left = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        while (await receive()).get("more_body"):
            pass
        self.asked.set()
        gone, told = asyncio.ensure_future(receive()), asyncio.ensure_future(self.go_on.wait())
        await asyncio.wait([gone, told], return_when=asyncio.FIRST_COMPLETED)
        if gone.done():
            self.left += 1
            told.cancel()
            return
        gone.cancel()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"6")]})
        for half in (b"who", b"le\n"):
            await send({"type": "http.response.body", "body": half, "more_body": half == b"who"})


@pytest.mark.parametrize("requests", [1, 2])
def test_a_client_that_shuts_its_side_after_its_requests_gets_all_answers(
    requests: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_protocol, "FIRST_PROBE_S", 0.01)
    monkeypatch.setattr(http_protocol, "PROBE_S", 0.01)
    application = _Slow()

    async def scenario(connect: Connect) -> None:
        reader, writer = await connect()
        writer.write((_POST + b"content-length: 2\r\n\r\nhi") * requests)
        writer.write_eof()
        await application.asked.wait()
        if requests == 1:  # it is asked again and again whether it is still there
            for _ in range(3):
                assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        application.go_on.set()
        heard = (await reader.read()).replace(b"HTTP/1.1 100 Continue\r\n\r\n", b"")
        writer.close()
        assert heard.count(b"HTTP/1.1 200 OK") == heard.count(b"whole\n") == requests
        assert heard.endswith(b"whole\n")
        assert application.left == 0

    _play(scenario, application)


@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
def test_a_client_that_has_left_is_noticed_before_its_answer_begins(version: bytes) -> None:
    application = _Slow()

    async def scenario(connect: Connect) -> None:
        _, writer = await connect()
        writer.write(_GET.replace(b"1.1", version) + b"\r\n")
        await application.asked.wait()
        writer.close()
        await until(lambda: application.left == 1)

    _play(scenario, application)


@pytest.mark.parametrize(
    "requests",
    [
        _POST + b"content-length: 1\r\n\r\nx",
        _POST + b"content-length: 300000\r\n\r\n" + b"x" * 300_000,  # reading pauses behind so much
    ],
    ids=["short", "long"],
)
@pytest.mark.parametrize("early", [False, True])
def test_a_watched_block_ends_when_the_client_leaves(requests: bytes, early: bool) -> None:
    read, left, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def application(scope: Any, receive: Any, send: Any) -> None:
        exchange = Exchange(scope, receive, send)
        await exchange.body(2**20)
        read.set()
        if early:  # it has left before it is watched
            await left.wait()
            for _ in range(1000):  # behind a long body nobody reads of its end, so there is nothing to wait for
                await asyncio.sleep(0)
        with pytest.raises(ClientGone):
            async with exchange.watch():
                await asyncio.Event().wait()
        ended.set()

    async def scenario(connect: Connect) -> None:
        _, writer = await connect()
        writer.write(requests)
        await read.wait()
        writer.transport.abort()
        left.set()
        await ended.wait()

    _play(scenario, application)


def test_who_shuts_its_side_in_the_middle_of_a_request_has_left() -> None:
    application = _Slow()

    async def scenario(connect: Connect) -> None:
        reader, writer = await connect()
        writer.write(_POST + b"content-length: 20\r\n\r\nhi")
        writer.write_eof()
        assert await reader.read() == b""
        writer.close()

    _play(scenario, application)
    assert not application.go_on.is_set()


def test_a_block_that_was_left_hears_nothing_more() -> None:
    async def application(scope: Any, receive: Any, send: Any) -> None:
        exchange = Exchange(scope, receive, send)
        await exchange.body(100)
        async with exchange.watch():
            await exchange.answer([], b"1")
        ended.set()
        await left.wait()
        await asyncio.sleep(0)
        done.set()

    ended, left, done = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def scenario(connect: Connect) -> None:
        reader, writer = await connect()
        writer.write(_POST + b"content-length: 1\r\n\r\nx")
        assert (await _answer(reader))[0] == 200
        writer.transport.abort()
        left.set()
        await done.wait()

    _play(scenario, application)


@pytest.mark.parametrize("protocol", [b"Upgrade, HTTP2-Settings\r\nupgrade: h2c", b"Upgrade\r\nupgrade: websocket"])
@pytest.mark.parametrize("split", [False, True])
def test_a_body_is_read_behind_the_offer_of_another_protocol(protocol: bytes, split: bool) -> None:
    offer = _POST + b"connection: " + protocol + b"\r\n"

    async def scenario(connect: Connect) -> None:
        reader, writer = await connect()
        for head, body, size in [
            (offer + b"content-length: 4\r\n", b"body", b"4"),
            (offer + b"transfer-encoding: chunked\r\n", b"3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n", b"5"),
            (offer, b"", b"0"),
            (_POST + b"content-length: 1\r\n", b"x", b"1"),
        ]:
            if split:
                writer.write(head + b"\r\n")
                await asyncio.sleep(0.01)  # or the kernel joins them
                writer.write(body)
            else:
                writer.write((head + b"\r\n" + body) * 2)
                assert await _answer(reader) == (200, size)
            assert await _answer(reader) == (200, size)
        writer.close()

    _play(scenario)


def test_an_answer_to_head_goes_out_without_the_body_that_it_tells_of() -> None:
    async def application(scope: Any, receive: Any, send: Any) -> None:
        await Exchange(scope, receive, send).answer([], b"{}", 405)

    async def scenario(connect: Connect) -> None:
        reader, writer = await connect()
        for _ in range(2):
            writer.write(b"HEAD / HTTP/1.1\r\nhost: x\r\n\r\n")
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 405 ")
            assert b"content-length: 2\r\n" in head
        writer.close()

    _play(scenario, application)


def test_events_wait_for_a_client_that_does_not_read_and_all_arrive() -> None:
    sent: list[int] = []
    size, count = 100_000, 300

    async def application(scope: Any, receive: Any, send: Any) -> None:
        exchange = Exchange(scope, receive, send)
        await exchange.body(100)
        exchange.start_events([])
        for number in range(count):
            await exchange.send_events(bytes([65 + number % 26]) * size)
            sent.append(number)
        await exchange.end_events(b"")

    async def scenario(connect: Connect) -> None:
        reader, writer = await connect()
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(_POST + b"content-length: 1\r\n\r\nx")
        before = -1
        while before != len(sent) or not sent:  # until it is stuck
            before = len(sent)
            await asyncio.sleep(0.05)
        assert len(sent) < count
        writer.transport.resume_reading()  # type: ignore[attr-defined]
        await reader.readuntil(b"\r\n\r\n")
        for number in range(count):
            assert int(await reader.readuntil(b"\r\n"), 16) == size
            assert await reader.readexactly(size + 2) == bytes([65 + number % 26]) * size + b"\r\n"
        assert await reader.readexactly(5) == b"0\r\n\r\n"
        writer.close()

    _play(scenario, application)


def test_pipelined_requests_are_answered_in_their_order_whole_or_in_chunks() -> None:
    """All of them have come when the first one is answered."""

    async def application(scope: Any, receive: Any, send: Any) -> None:
        exchange = Exchange(scope, receive, send)
        name = await exchange.body(100)
        await asyncio.sleep(0.01)  # the others have come by then
        if name in b"bd":
            exchange.start_events([])
            assert not exchange.send_at_once(name), "the head goes out with the first of it"
            await exchange.send_events(name)
            assert not exchange.send_at_once(b""), "a chunk of nothing would end the answer"
            assert exchange.send_at_once(name)
            await exchange.end_events(b"")
        else:
            await exchange.answer([(b"x-name", name)], name)

    async def scenario(connect: Connect) -> None:
        reader, writer = await connect()
        writer.write(b"".join([_POST + b"content-length: 1\r\n\r\n" + name for name in (b"a", b"b", b"c", b"d")]))
        for name in (b"a", b"b", b"c", b"d"):
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 OK\r\n")
            assert (b"x-name: " + name in head) == (name in b"ac")
            chunks = b"1\r\n%b\r\n1\r\n%b\r\n0\r\n\r\n" % (name, name)
            body = chunks if b"transfer-encoding: chunked" in head else name
            assert await reader.readexactly(len(body)) == body
        writer.close()

    _play(scenario, application)


def test_a_connection_that_is_to_end_with_its_answer_says_so_and_ends() -> None:
    async def application(scope: Any, receive: Any, send: Any) -> None:
        exchange = Exchange(scope, receive, send)
        await exchange.body(100)
        await exchange.answer([], b"{}")

    async def scenario(connect: Connect) -> None:
        for version, close in ((b"1.0", b""), (b"1.1", b"connection: close\r\n")):
            reader, writer = await connect()
            writer.write(_POST.replace(b"1.1", version) + close + b"content-length: 1\r\n\r\nx")
            assert b"\r\nconnection: close\r\n" in await reader.readuntil(b"\r\n\r\n")
            assert await reader.read() == b"{}"
            writer.close()

    _play(scenario, application)


@pytest.mark.parametrize("value", [b"a\r\nset-cookie: b", b"a\nb", b"a\rset-cookie: b"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_header_of_several_lines_is_a_fault_and_no_header(value: bytes, stream: bool) -> None:
    async def application(scope: Any, receive: Any, send: Any) -> None:
        exchange = Exchange(scope, receive, send)
        await exchange.body(100)
        if stream:
            exchange.start_events([(b"x-note", value)])
            await exchange.send_events(b"x")
        else:
            await exchange.answer([(b"x-note", value)], b"{}")

    async def scenario(connect: Connect) -> None:
        reader, writer = await connect()
        writer.write(_POST + b"content-length: 1\r\n\r\nx")
        assert await _answer(reader) == (500, b"Internal Server Error")
        writer.close()

    _play(scenario, application)


def test_a_connection_is_kept_as_long_as_it_is_used_often_enough() -> None:
    keep_s, pauses = 1.0, iter([0, 1.2, 0, 0])

    async def application(scope: Any, receive: Any, send: Any) -> None:
        exchange = Exchange(scope, receive, send)
        await exchange.body(100)
        await asyncio.sleep(next(pauses))
        await exchange.answer([], b"{}")

    async def scenario(connect: Connect) -> None:
        loop = asyncio.get_running_loop()
        reader, writer = await connect()
        for _ in range(4):
            writer.write(_POST + b"content-length: 1\r\n\r\nx")
            assert (await _answer(reader))[0] == 200
            answered = loop.time()
            await asyncio.sleep(0.4 * keep_s)
        assert await reader.read() == b""
        assert loop.time() - answered >= 0.5 * keep_s
        writer.close()

    _play(scenario, application, keep_alive_s=keep_s)


def test_a_body_that_nobody_reads_keeps_no_connection_open() -> None:
    async def application(scope: Any, receive: Any, send: Any) -> None:
        await Exchange(scope, receive, send).answer([], b"{}", 413)

    async def scenario(connect: Connect) -> None:
        reader, writer = await connect()
        writer.write(_POST + b"content-length: 99999999\r\n\r\n")
        assert await _answer(reader) == (413, b"{}")
        writer.write(b"x")
        assert await reader.read() == b""
        writer.close()

    async def in_time(connect: Connect) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            await scenario(connect)

    _play(in_time, application, keep_alive_s=0.2)
