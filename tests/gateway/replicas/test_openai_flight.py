"""What ends a request's connection to a remote server."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

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


def test_an_answer_that_is_waited_for_as_a_whole_is_not_given_up_while_it_comes() -> None:
    async def main() -> None:
        connection = Connection()
        client: Any = SimpleNamespace(waiting=lambda: connection)
        flight = Flight(0.02)
        await flight.open(client, b"", b"")
        flight.produced = True
        reading = asyncio.create_task(flight.read(1000))
        await until(lambda: connection.asked > 5)
        assert flight.loss is None
        connection.silent_since = asyncio.get_running_loop().time()
        with pytest.raises(ConnectionAbortedError):
            await reading
        assert flight.loss is not None
        flight.close()

    asyncio.run(main())
