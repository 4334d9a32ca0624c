"""What ends a request's connection to a remote server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from gateway.replicas.openai_completion import BrokenAnswer
from gateway.replicas.openai_flight import Flight

from ..conftest import until


class Connection:
    """Says nothing to who reads it; ``heard_at`` is when something has come all the same."""

    def __init__(self) -> None:
        self.silent_since: float | None = None
        self.asked = 0
        self._closed = asyncio.Event()

    @property
    def heard_at(self) -> float:
        self.asked += 1
        return asyncio.get_running_loop().time() if self.silent_since is None else self.silent_since

    async def head(self) -> None:
        pass

    def send(self, *_arguments: Any) -> None:
        pass

    async def read(self, _least: int) -> bytes:
        await self._closed.wait()
        raise ConnectionAbortedError

    def close(self) -> None:
        self._closed.set()

    def release(self, **_how: bool) -> None:
        pass


def stream(flight: Flight) -> asyncio.Task[bytes]:
    flight.produced = True
    return asyncio.create_task(flight.read(1000))


def plain(flight: Flight) -> asyncio.Task[bytes]:
    flight.begun = True
    return asyncio.create_task(flight.read(1000))


@pytest.mark.parametrize("read", [stream, plain])
def test_an_answer_that_has_begun_is_given_up_when_it_stops_to_come(read: Callable[[Flight], Any]) -> None:
    async def main() -> None:
        connection = Connection()
        client: Any = SimpleNamespace(waiting=lambda: connection)
        flight = Flight(0.02)
        await flight.open(client, b"", b"")
        reading = read(flight)
        await until(lambda: connection.asked > 5)
        assert flight.loss is None
        connection.silent_since = asyncio.get_running_loop().time()
        with pytest.raises(ConnectionAbortedError):
            await reading
        assert flight.loss is not None
        flight.close()

    asyncio.run(main())


def test_of_an_answer_that_is_too_long_no_more_is_taken_in_than_that() -> None:
    piece = bytes(300 * 1024)  # more may have come than was asked for
    taken = 0

    async def read(_least: int) -> bytes:
        nonlocal taken
        taken += len(piece)
        return piece

    async def main() -> None:
        connection: Any = Connection()
        connection.read = read
        client: Any = SimpleNamespace(waiting=lambda: connection)
        flight = Flight(60.0, whole=True)
        await flight.open(client, b"", b"")
        with pytest.raises(BrokenAnswer, match="too long"):
            await flight.read_all(10 * len(piece))
        assert flight.begun
        flight.close()

    asyncio.run(main())
    assert taken == 11 * len(piece)
