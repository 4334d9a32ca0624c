"""HTTP/1.1 on the way of every request: answers however they are framed and cut, connections that are used again."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from gateway.replicas import http_client
from gateway.replicas.http_client import AnswerCut, HttpClient, HttpConnection, header_lines
from gateway.server import run

from ..conftest import until

LENGTH = b"HTTP/1.1 200 OK\r\nContent-Type: Text/Event-Stream; charset=utf-8\r\nContent-Length: 5\r\n\r\nhello"
CHUNKS = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nhe\r\n3;x=y\r\nllo\r\n0\r\nx-last: 1\r\n\r\n"
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
CLOSED = b"HTTP/1.1 200 OK\r\n\r\nhello"

Answer = Callable[[asyncio.StreamWriter, bytes], Awaitable[None]]


class Server:
    """Answers each request with ``answer``; ``requests`` are what it was sent, ``connections`` how many there were."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.requests: list[bytes] = []
        self.connections = 0
        self.gone = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0])
                self.requests.append(head + await reader.readexactly(length))
                await self.answer(writer, self.requests[-1])
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.gone += 1
            writer.close()


@asynccontextmanager
async def client_of(answer: Answer, *, keep_alive_s: float = 30.0) -> AsyncIterator[tuple[HttpClient, Server]]:
    server = Server(answer)
    async with asyncio.timeout(30), await asyncio.start_server(server.serve, "127.0.0.1", 0) as listener:
        port = listener.sockets[0].getsockname()[1]
        client = HttpClient(
            f"http://127.0.0.1:{port}/base", {"x-key": "k"}, connect_timeout_s=10, keep_alive_s=keep_alive_s
        )
        try:
            yield client, server
        finally:
            client.close()
            await until(lambda: server.gone == server.connections)


def saying(*pieces: bytes, close: bool = False) -> Answer:
    async def answer(writer: asyncio.StreamWriter, _request: bytes) -> None:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)
        if close:
            writer.close()

    return answer


async def ask(client: HttpClient, body: bytes = b"question") -> HttpConnection:
    connection = client.waiting() or await client.connect()
    connection.send(client.head("/route", {"accept": "x"}.items()), body)
    await connection.head()
    return connection


async def body_of(connection: HttpConnection) -> bytes:
    pieces = []
    while data := await connection.read():
        pieces.append(data)
    return b"".join(pieces)


def test_a_connection_on_which_nothing_comes_for_minutes_is_kept_alive() -> None:
    async def main() -> None:
        async with client_of(saying(LENGTH)) as (client, _server):
            connection = await ask(client)
            assert connection._transport is not None
            under = connection._transport.get_extra_info("socket")
            assert under.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            if hasattr(socket, "TCP_KEEPIDLE"):
                assert under.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) < 60
            connection.close()

    run(main())


def test_a_request_is_one_post_with_its_headers_and_its_length() -> None:
    async def main() -> None:
        async with client_of(saying(LENGTH)) as (client, server):
            connection = await ask(client)
            assert (connection.status, connection.content_type) == (200, "text/event-stream")
            assert await body_of(connection) == b"hello"
            connection.release()
            head, _, body = server.requests[0].partition(b"\r\n\r\n")
            assert body == b"question"
            first, *rest = head.split(b"\r\n")
            assert first == b"POST /base/route HTTP/1.1"
            assert rest[0].startswith(b"host: 127.0.0.1:")
            assert rest[1:] == [b"x-key: k", b"accept: x", b"content-length: 8"]

    run(main())


@pytest.mark.parametrize("data", [LENGTH, CHUNKS, CONTINUE + CHUNKS], ids=["length", "chunks", "100"])
def test_an_answer_is_the_same_wherever_it_is_cut_and_its_connection_is_used_again(data: bytes) -> None:
    async def main() -> None:
        pieces = [data[at : at + 1] for at in range(len(data))]
        async with client_of(saying(*pieces)) as (client, server):
            for _ in range(3):
                connection = await ask(client)
                assert (connection.status, await body_of(connection)) == (200, b"hello")
                connection.release()
            assert (server.connections, len(server.requests)) == (1, 3)

    run(main())


def test_a_body_that_comes_with_the_end_of_its_head_is_none_of_it() -> None:
    body = bytes(http_client._MAX_HEAD_BYTES)
    head = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n" % len(body)

    async def main() -> None:
        async with client_of(saying()) as (client, _server):
            connection = await client.connect()
            connection.send(client.head("/route", ()), b"")
            for data in (CONTINUE, head, b"\r\n" + body):
                connection.data_received(data)
            await connection.head()
            assert len(await body_of(connection)) == len(body)
            connection.close()

    run(main())


def test_an_answer_without_a_length_ends_with_its_connection() -> None:
    async def main() -> None:
        async with client_of(saying(CLOSED, close=True)) as (client, server):
            for _ in range(2):
                connection = await ask(client)
                assert await body_of(connection) == b"hello"
                connection.release()
            assert server.connections == 2

    run(main())


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"", ConnectionResetError),
        (b"HTTP/1.1 200 OK\r\ncontent-le", ConnectionResetError),
        (LENGTH[:-1], AnswerCut),
        (CHUNKS[:-2], AnswerCut),
        (b"SSH-2.0-x\r\n\r\n", AnswerCut),
        (b"HTTP/1.1 200 OK\r\nx: " + b"y" * 300_000, AnswerCut),
    ],
)
def test_what_is_no_whole_answer_is_an_error_and_its_connection_is_not_used_again(
    data: bytes, error: type[OSError]
) -> None:
    async def main() -> None:
        async with client_of(saying(data, close=True)) as (client, _server):
            connection = client.waiting() or await client.connect()
            connection.send(client.head("/route", ()), b"")
            with pytest.raises(error):  # noqa: PT012 - where it comes depends on how the network cuts it
                await connection.head()
                await body_of(connection)
            connection.release()
            assert client.waiting() is None

    run(main())


def test_who_wants_all_of_an_answer_is_not_woken_before_it_is_there() -> None:
    go_on = asyncio.Event()

    async def answer(writer: asyncio.StreamWriter, _request: bytes) -> None:
        writer.write(CHUNKS[:-20])
        await go_on.wait()
        writer.write(CHUNKS[-20:])

    async def main() -> None:
        async with client_of(answer) as (client, _server):
            connection = await ask(client)
            reading = asyncio.create_task(connection.read(1000))
            first = connection.heard_at
            await asyncio.sleep(0)
            assert not reading.done()
            go_on.set()
            assert await reading == b"hello"
            assert connection.heard_at >= first > 0
            assert await connection.read() == b""
            connection.release()

    run(main())


def test_a_connection_is_not_used_again_before_its_answer_was_read() -> None:
    async def main() -> None:
        async with client_of(saying(LENGTH)) as (client, server):
            connection = await ask(client)
            connection.release()
            assert client.waiting() is None
            await until(lambda: server.gone == 1)

    run(main())


def test_a_connection_whose_answer_is_ending_is_used_again_when_it_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = asyncio.Event()

    async def answer(writer: asyncio.StreamWriter, request: bytes) -> None:
        writer.write(CHUNKS[:-7])
        await go_on.wait()
        if request.endswith(b"ends"):
            writer.write(CHUNKS[-7:])

    async def main() -> None:
        async with client_of(answer) as (client, server):
            connection = await ask(client, b"ends")
            assert await connection.read()
            connection.release(ending=True)
            assert client.waiting() is None
            go_on.set()
            while (again := client.waiting()) is None:  # noqa: ASYNC110 - nothing tells but the pool itself
                await asyncio.sleep(0.001)
            assert again is connection
            connection.release(ending=True)
            monkeypatch.setattr(http_client, "_ENDING_TIMEOUT_S", 0.01)
            connection = await ask(client, b"goes on")
            await connection.read()
            connection.release(ending=True)
            assert len(client) == 1, "it is waited for"
            await until(lambda: server.gone == 1)
            assert client.waiting() is None
            await until(lambda: not len(client))

    run(main())


@pytest.mark.parametrize("waits", [False, True])
def test_a_connection_that_is_lost_before_it_is_used_is_an_error_of_the_connection(waits: bool) -> None:
    async def main() -> None:
        async with client_of(saying(LENGTH)) as (client, _server):
            connection = await client.connect()
            connection.close()
            for _ in range(10 * waits):  # until the loop has closed what was aborted
                await asyncio.sleep(0)
            connection.send(client.head("/route", ()), b"")
            with pytest.raises(ConnectionAbortedError):
                await connection.head()
            connection.release()

    run(main())


def test_idle_connections_are_closed_after_a_while() -> None:
    async def main() -> None:
        async with client_of(saying(LENGTH), keep_alive_s=0.05) as (client, server):
            connection = await ask(client)
            await body_of(connection)
            connection.release()
            await until(lambda: server.gone == 1)
            assert client.waiting() is None

    run(main())


@pytest.mark.parametrize("late", [False, True])
def test_a_connection_over_which_comes_more_than_its_answer_is_not_used_again(late: bool) -> None:
    released = asyncio.Event()

    async def answer(writer: asyncio.StreamWriter, _request: bytes) -> None:
        writer.write(LENGTH + (b"" if late else LENGTH))
        await released.wait()
        writer.write(LENGTH if late else b"")

    async def main() -> None:
        async with client_of(answer) as (client, server):
            connection = await ask(client)
            assert await body_of(connection) == b"hello"
            connection.release()
            released.set()
            await until(lambda: server.gone == 1)
            assert client.waiting() is None

    run(main())


def test_what_nobody_reads_is_not_taken_in() -> None:
    size = 64 * 1024 * 1024

    async def answer(writer: asyncio.StreamWriter, _request: bytes) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size)
        for _ in range(size // 65536):
            writer.write(bytes(65536))
            await writer.drain()
            written.append(65536)

    written: list[int] = []

    async def main() -> None:
        async with client_of(answer) as (client, _server):
            connection = await ask(client)
            before = -1
            while before != len(written):  # until the server is stuck
                before = len(written)
                await asyncio.sleep(0.1)
            assert sum(written) < size // 2
            assert len(await body_of(connection)) == size
            connection.release()

    run(main())


def test_a_header_is_never_several_lines() -> None:
    assert header_lines({"a": "b c", "d": "é"}.items()) == b"a: b c\r\nd: \xe9\r\n"
    for name, value in (("a", "b\r\nc: d"), ("a\nb", "c"), ("a", "b\0")):
        with pytest.raises(ValueError, match="line break"):
            header_lines([(name, value)])


def test_who_waits_for_an_answer_hears_that_it_was_ended() -> None:
    async def answer(_writer: asyncio.StreamWriter, _request: bytes) -> None:
        await asyncio.Event().wait()

    async def main() -> None:
        async with client_of(saying()) as (client, server):
            connection = await client.connect()
            connection.send(client.head("/route", ()), b"")
            waiting = asyncio.create_task(connection.head())
            await until(lambda: len(server.requests) == 1)
            connection.close()
            with pytest.raises(ConnectionAbortedError):
                await waiting

    run(main())
