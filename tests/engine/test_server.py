"""The engine on its socket: what each connection hears, and that none can harm another or the step loop."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import stat
import tempfile
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from cache_policy.keys import token_bytes
from engine.batch import Batch, ChunkResult
from engine.core import EngineCore
from engine.errors import EngineError, WorkerError
from engine.scripted import ScriptedRunner, scripted_continuation
from engine.server import EngineServer, bind_unix_socket
from engine.wire import (
    MAX_FRAME_BYTES,
    Abort,
    BlockStored,
    Call,
    EngineInfo,
    FromEngine,
    Output,
    Reply,
    Sampling,
    StepReport,
    Submit,
    ToEngine,
    decode_from_engine,
    frame,
    read_frame,
)

VOCABULARY = 500
ROOT = b"namespace-number"
DEADLINE = 60.0
ENDLESS = 30_000  # tokens: the scripted runner would need many minutes


class NoText:
    def push(self, token_id: int) -> tuple[str, bool]:
        return f"{token_id} ", False

    def finish(self) -> str:
        return ""


class Broken(ScriptedRunner):
    def execute(self, batch: Batch) -> list[ChunkResult]:
        raise RuntimeError("broken")


class Client:
    """One connection, reading what comes in order."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def send(self, *messages: ToEngine) -> None:
        self.writer.write(b"".join(map(frame, messages)))

    async def receive(self) -> FromEngine:
        return decode_from_engine(await read_frame(self.reader))

    async def greeting(self) -> tuple[EngineInfo, StepReport]:
        info, snapshot = await self.receive(), await self.receive()
        assert isinstance(info, EngineInfo)
        assert isinstance(snapshot, StepReport)
        return info, snapshot

    async def outputs(self) -> AsyncIterator[Output]:
        while True:
            message = await self.receive()
            if isinstance(message, StepReport):
                for output in message.outputs:
                    yield output

    async def finish(self, *ids: int) -> dict[int, list[int]]:
        """Read until these requests have ended; their tokens."""
        tokens: dict[int, list[int]] = {id: [] for id in ids}
        left = set(ids)
        async for output in self.outputs():
            tokens[output.id] += output.token_ids
            if output.finish_reason is not None:
                left.remove(output.id)
                if not left:
                    break
        return tokens

    async def call(self, id: int, method: str) -> Reply:
        self.send(Call(id, method))
        while True:
            message = await self.receive()
            if isinstance(message, Reply):
                assert message.id == id
                return message

    async def read_to_the_end(self) -> None:
        """Raises when the other side has closed the connection."""
        while True:
            await self.receive()

    async def close(self) -> None:
        self.writer.close()
        with contextlib.suppress(ConnectionError):
            await self.writer.wait_closed()


@pytest.fixture
def path() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:  # short, as a socket's path must be
        yield Path(folder) / "engine.sock"


def make_core(runner: type[ScriptedRunner] = ScriptedRunner) -> EngineCore:
    info = EngineInfo("m", "", "f", "boot", 32_768, 2048, 16, "none", "cpu", VOCABULARY, (), "lru", 128)
    return EngineCore(runner(2048, 16, vocab_size=VOCABULARY), info, detokenizer=lambda stop: NoText())


def serving(
    path: Path,
    scenario: Callable[[Callable[[], Awaitable[Client]]], Awaitable[None]],
    **options: int,
) -> None:
    """Run a scenario against a server; it gets a function that connects. The server must end in order."""

    async def main() -> None:
        server = EngineServer(make_core(), listening(path), **options)
        task = asyncio.create_task(server.serve())
        clients: list[Client] = []

        async def connect() -> Client:
            client = Client(*await asyncio.open_unix_connection(path))
            clients.append(client)
            return client

        try:
            await asyncio.wait_for(scenario(connect), DEADLINE)
        finally:
            server.stop()
            for client in clients:
                await client.close()
            await asyncio.wait_for(task, DEADLINE)

    asyncio.run(main())


def listening(path: Path) -> socket.socket:
    """A socket to which clients can connect before anybody serves it."""
    listener = bind_unix_socket(path)
    listener.listen()
    return listener


@asynccontextmanager
async def greeted(connect: Callable[[], Awaitable[Client]]) -> AsyncIterator[Client]:
    client = await connect()
    await client.greeting()
    yield client
    await client.close()


def submit(id: int, prompt: list[int], count: int, n: int = 1) -> Submit:
    return Submit(id, token_bytes(prompt), ROOT, Sampling(max_tokens=count, temperature=0), n=n)


def expected(prompt: list[int], count: int) -> list[int]:
    return scripted_continuation(prompt, count, vocab_size=VOCABULARY)


async def idle(client: Client) -> dict[str, int]:
    """Ask until nothing runs any more."""
    for id in itertools.count(1000):
        reply = await client.call(id, "stats")
        if reply.result["running"] == reply.result["waiting"] == 0:
            return reply.result
    raise AssertionError


def test_a_connection_hears_who_serves_and_then_its_own_answers(path: Path) -> None:
    async def scenario(connect: Callable[[], Awaitable[Client]]) -> None:
        client = await connect()
        info, snapshot = await client.greeting()
        assert info.model == "m"
        assert snapshot.events == ()
        client.send(submit(7, list(range(40)), 9), submit(8, list(range(100, 130)), 3))
        assert await client.finish(7, 8) == {
            7: expected(list(range(40)), 9),
            8: expected(list(range(100, 130)), 3),
        }

    serving(path, scenario)


def test_a_late_connection_hears_what_is_resident(path: Path) -> None:
    async def scenario(connect: Callable[[], Awaitable[Client]]) -> None:
        async with greeted(connect) as first:
            first.send(submit(1, list(range(40)), 1))
            await first.finish(1)
        late = await connect()
        _, snapshot = await late.greeting()
        (event,) = snapshot.events
        assert isinstance(event, BlockStored)
        assert len(event.block_hashes) == 2
        assert snapshot.load.cached_blocks == 2

    serving(path, scenario)


def test_g6_ids_belong_to_their_connection(path: Path) -> None:
    async def scenario(connect: Callable[[], Awaitable[Client]]) -> None:
        async with greeted(connect) as one, greeted(connect) as two:
            one.send(submit(1, list(range(20)), 60))
            two.send(submit(1, list(range(300, 350)), 60), Abort((1, 2)), submit(3, [5], 2))
            assert await one.finish(1) == {1: expected(list(range(20)), 60)}
            tokens = await two.finish(1, 3)
            assert len(tokens[1]) < 60
            assert tokens[3] == expected([5], 2)

    serving(path, scenario)


def test_an_id_is_free_again_when_every_choice_has_ended(path: Path) -> None:
    async def scenario(connect: Callable[[], Awaitable[Client]]) -> None:
        async with greeted(connect) as client:
            for n in (3, 0, 1000, 2):  # none and a thousand are refused
                client.send(submit(7, [1, 2, 3], 5, n))
                ended: list[int] = []
                async for output in client.outputs():
                    if output.finish_reason is not None:
                        ended.append(output.index)
                    if output.error is not None or len(ended) == n:
                        break
                assert ended == ([*range(n)] if n in (2, 3) else [0])

    serving(path, scenario)


def test_g1_a_closed_connection_aborts_its_requests(path: Path) -> None:
    async def scenario(connect: Callable[[], Awaitable[Client]]) -> None:
        async with greeted(connect) as stays:
            for _ in range(5):
                leaves = await connect()
                await leaves.greeting()
                leaves.send(submit(1, list(range(200)), ENDLESS))
                async for output in leaves.outputs():
                    assert output.token_ids
                    break
                await leaves.close()
                stats = await idle(stays)
                assert stats["used_blocks"] == 0

    serving(path, scenario)


async def ask_forever(connection: socket.socket) -> None:
    """Have the engine answer all the time, and read nothing of it."""
    questions = frame(submit(1, [1], ENDLESS))
    while True:
        await asyncio.get_running_loop().sock_sendall(connection, questions)
        questions = frame(Call(1, "stats")) * 100


def test_r4_a_reader_that_stops_is_cut_and_holds_up_nobody(path: Path) -> None:
    async def scenario(connect: Callable[[], Awaitable[Client]]) -> None:
        async with greeted(connect) as reads:
            stuck = socket.socket(socket.AF_UNIX)
            stuck.setblocking(False)
            stuck.connect(str(path))
            with pytest.raises(OSError, match=r"reset|[Bb]roken pipe"):
                await ask_forever(stuck)
            stuck.close()
            reads.send(submit(1, list(range(30)), 50))
            assert await reads.finish(1) == {1: expected(list(range(30)), 50)}
            await idle(reads)

    serving(path, scenario, max_unsent_bytes=100_000)


@pytest.mark.parametrize(
    "nonsense",
    [
        b"\0\0\0\3\1\2\3",
        frame(Abort((1,)))[:-2] + b"zz",
        (MAX_FRAME_BYTES + 1).to_bytes(4, "big"),
        frame(Reply(1)),
        frame(submit(1, [1], ENDLESS)) * 2,
    ],
    ids=["no-msgpack", "torn", "too-long", "wrong-direction", "id-in-use"],
)
def test_a_broken_protocol_closes_that_connection_alone(path: Path, nonsense: bytes) -> None:
    async def scenario(connect: Callable[[], Awaitable[Client]]) -> None:
        async with greeted(connect) as good:
            bad = await connect()
            await bad.greeting()
            bad.writer.write(nonsense)
            with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
                await bad.read_to_the_end()
            good.send(submit(1, [1, 2, 3], 5))
            assert await good.finish(1) == {1: expected([1, 2, 3], 5)}
            await idle(good)

    serving(path, scenario)


def test_calls_are_answered_between_steps(path: Path) -> None:
    async def scenario(connect: Callable[[], Awaitable[Client]]) -> None:
        async with greeted(connect) as client:
            client.send(submit(1, list(range(40)), 1))
            await client.finish(1)
            assert (await client.call(1, "check")).result == {"ok": True}
            assert (await client.call(2, "reset_cache")).result == {"dropped": 2, "kept": 0}
            refused = await client.call(3, "fly")
            assert refused.error is not None
            assert "unknown method" in refused.error

    serving(path, scenario)


def test_steps_run_in_the_thread_in_which_the_core_was_made(path: Path) -> None:
    threads: dict[str, int] = {}

    class Watched(ScriptedRunner):
        def __init__(self, *arguments: int, vocab_size: int) -> None:
            super().__init__(*arguments, vocab_size=vocab_size)
            threads["made"] = threading.get_ident()

        def execute(self, batch: Batch) -> list[ChunkResult]:
            threads["computing"] = threading.get_ident()
            return super().execute(batch)

    async def main() -> None:
        with ThreadPoolExecutor(1) as thread:
            core = thread.submit(make_core, Watched).result()
            server = EngineServer(core, listening(path), thread=thread)
            task = asyncio.create_task(server.serve())
            client = Client(*await asyncio.open_unix_connection(path))
            client.send(submit(1, [1], 4))
            await client.finish(1)
            await client.close()
            server.stop()
            await asyncio.wait_for(task, DEADLINE)

    asyncio.run(main())
    assert threads["computing"] == threads["made"] != threading.get_ident()


def test_a_shutdown_call_is_answered_and_ends_the_server(path: Path) -> None:
    async def main() -> None:
        task = asyncio.create_task(EngineServer(make_core(), listening(path)).serve())
        client = Client(*await asyncio.open_unix_connection(path))
        await client.greeting()
        client.send(submit(1, [1], ENDLESS))
        assert (await client.call(5, "shutdown")).error is None
        await asyncio.wait_for(task, DEADLINE)
        with pytest.raises(asyncio.IncompleteReadError):
            await client.read_to_the_end()
        await client.close()

    asyncio.run(main())


def test_an_engine_that_fails_again_and_again_is_given_up_after_telling_its_clients(path: Path) -> None:
    async def main() -> None:
        task = asyncio.create_task(EngineServer(make_core(Broken), listening(path)).serve())
        client = Client(*await asyncio.open_unix_connection(path))
        await client.greeting()
        for id in range(3):
            client.send(submit(id, [1], 4))
            async for output in client.outputs():
                assert output.error is not None
                assert output.error[0] == "engine_error"
                break
        with pytest.raises(EngineError, match="3 steps in a row"):
            await asyncio.wait_for(task, DEADLINE)
        await client.close()

    asyncio.run(main())


# --- the socket ------------------------------------------------------------------------------------------


def test_only_this_user_can_connect(path: Path) -> None:
    with bind_unix_socket(path):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_stale_socket_is_replaced_and_a_served_one_is_not(path: Path) -> None:
    bind_unix_socket(path).close()
    with bind_unix_socket(path) as served:
        served.listen()
        with pytest.raises(WorkerError, match="another process"):
            bind_unix_socket(path)


def test_other_files_are_left_alone(path: Path) -> None:
    path.write_text("precious")
    with pytest.raises(WorkerError, match="not a socket"):
        bind_unix_socket(path)
    assert path.read_text() == "precious"


def test_a_path_that_cannot_be_bound_is_named(path: Path) -> None:
    path.write_text("a file, no folder")
    for wrong in (path.with_name("x" * 300), path.parent / "absent" / "engine.sock", path / "engine.sock"):
        with pytest.raises(WorkerError, match="cannot listen"):
            bind_unix_socket(wrong)
