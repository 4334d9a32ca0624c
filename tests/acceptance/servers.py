"""Gateways with a real engine process each, for the acceptance cases at the level of HTTP.

A server runs on an event loop in a thread of its own; tests talk to it over its socket, and look inside (the engine's
counters, its invariants, the gateway's tasks) only to make sure that what a case is about has happened.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import msgspec
from tokenizers import Tokenizer
from uvicorn.loops.auto import auto_loop_factory

from gateway.config import Config, EngineConfig, RedisConfig, ServerConfig
from gateway.embedded_valkey import EmbeddedValkey
from gateway.replicas.engine import EngineReplica
from gateway.server import serving
from gateway.service import Gateway, configured_gateway

from ..gateway.api.conftest import Answer
from .models import START

__all__ = ["Client", "Server", "Stream", "tok", "words"]

_T = TypeVar("_T")

MODEL = "tiny"
START_TIMEOUT_S = 180.0
TIMEOUT_S = 500.0  # of a scenario on a busy machine; a hang is what it is for
NO_REDIS = RedisConfig(url="redis://127.0.0.1:1/0")  # refuses at once: the statistics are kept in the process


def tok(start: int, count: int) -> list[int]:
    """``TOK(start, count)`` of the cases, on the ids of words."""
    return [START + 1 + start + i for i in range(count)]


def words(start: int, count: int) -> str:
    """``W(start, count)`` of the cases."""
    return " ".join(f"w{start + i}" for i in range(count))


class Server:
    """A gateway and its engine. Owns the thread on which the gateway runs."""

    def __init__(self, folder: Path, *, with_valkey: bool = False, **engine: Any) -> None:
        """Serve the model in ``folder`` in float32 on one core; ``engine`` are fields of ``EngineConfig``.

        ``with_valkey`` keeps the statistics in a server of their own, at ``valkey.url``.
        """
        settings = EngineConfig(model=str(folder), served_name=MODEL, dtype="float32", threads=1, **engine)
        self._config = Config(server=ServerConfig(port=0, drain_grace_s=1.0), engine=settings, redis=NO_REDIS)
        self._folder = folder
        self._with_valkey = with_valkey
        self.valkey = EmbeddedValkey()
        self._loop = auto_loop_factory()()
        self._thread = threading.Thread(target=self._loop.run_forever, name="gateway")
        self._life = AsyncExitStack()
        self.tokenizer: Tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.gateway: Gateway
        self.url: str

    def start(self) -> Server:
        """Return as soon as it is on its way; ``wait_ready`` waits until it serves."""
        self._thread.start()
        self.call(self._start())
        return self

    def wait_ready(self) -> None:
        """Return when it serves."""
        self.call(self.gateway.wait_ready(START_TIMEOUT_S), START_TIMEOUT_S)

    def stop(self) -> None:
        """End everything."""
        self.call(self._life.aclose())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(TIMEOUT_S)
        self._loop.close()

    @property
    def replica(self) -> EngineReplica:
        """Its engine."""
        (replica,) = self.gateway.replicas.values()
        assert isinstance(replica, EngineReplica)
        return replica

    def call(self, work: Coroutine[Any, Any, _T], timeout_s: float = TIMEOUT_S) -> _T:
        """Do something on the gateway's event loop, from another thread."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout_s)

    async def inside(self, work: Coroutine[Any, Any, _T]) -> _T:
        """The same from another event loop."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    def run(self, scenario: Callable[[Client], Awaitable[None]], timeout_s: float = TIMEOUT_S) -> None:
        """Play a scenario from a cold cache; afterwards nothing is left of it in the engine."""

        async def main() -> None:
            async with asyncio.timeout(timeout_s), Client.of(self) as client:
                await client.reset()
                await scenario(client)
                await client.idle()
                assert await client.engine("check") == {"ok": True}

        asyncio.run(main())

    async def _start(self) -> None:
        config = self._config
        if self._with_valkey:
            await self.valkey.start()
            self._life.push_async_callback(self.valkey.stop)
            config = msgspec.structs.replace(config, redis=RedisConfig(url=self.valkey.url))
        self.gateway = configured_gateway(config, self._folder)
        self.url = await self._life.enter_async_context(serving(self.gateway))


class Client:
    """An HTTP client of one server. Made per scenario."""

    def __init__(self, server: Server, http: aiohttp.ClientSession) -> None:
        self.server = server
        self._http = http

    @classmethod
    @asynccontextmanager
    async def of(cls, server: Server) -> AsyncIterator[Client]:
        """A client for the length of the block."""
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as http:
            yield cls(server, http)

    # --- requests ----------------------------------------------------------------------------------------

    async def ask(self, method: str, path: str, **options: Any) -> Answer:
        """Any request."""
        async with self._http.request(method, self.server.url + path, **options) as response:
            return Answer(response.status, response.headers, await response.read())

    async def complete(self, prompt: Any, *, headers: dict[str, str] | None = None, **fields: Any) -> Answer:
        """``COMP`` of the cases."""
        return await self.ask("POST", "/v1/completions", json=_completion(prompt, fields), headers=headers)

    async def chat(self, content: Any, *, headers: dict[str, str] | None = None, **fields: Any) -> Answer:
        """``CHAT`` of the cases; ``content`` is that of one user message, or all messages."""
        return await self.ask("POST", "/v1/chat/completions", json=_chat(content, fields), headers=headers)

    @asynccontextmanager
    async def stream(self, prompt: Any, *, chat: bool = False, **fields: Any) -> AsyncIterator[Stream]:
        """The events of a completion or chat as they come; leaving the block closes the connection."""
        body = (_chat if chat else _completion)(prompt, fields | {"stream": True})
        path = "/v1/chat/completions" if chat else "/v1/completions"
        headers = {"x-request-id": fields["request_id"]} if "request_id" in fields else None
        async with self._http.post(self.server.url + path, json=body, headers=headers) as response:
            assert response.status == 200, await response.read()
            try:
                yield Stream(response)
            finally:
                response.close()

    # --- the server's state ------------------------------------------------------------------------------

    async def reset(self) -> Answer:
        """Empty the cache."""
        return await self.ask("POST", "/admin/cache/reset")

    async def load(self) -> dict[str, int]:
        """Queue and pool after the last step, as the operator sees them."""
        (row,) = (await self.ask("GET", "/admin/replicas")).json["replicas"]
        load: dict[str, int] = row["load"]
        return load

    async def engine(self, method: str) -> dict[str, Any]:
        """A control call to the engine: ``stats`` or ``check``."""
        return await self.server.inside(self.server.replica.call(method))

    async def until(self, condition: Callable[[dict[str, int]], bool]) -> None:
        """Poll the engine's load until it is as wanted; ends with the scenario's time."""
        while True:
            if condition(await self.load()):
                return
            await asyncio.sleep(0.01)

    async def poll(self, condition: Callable[[], bool]) -> None:
        """The same for anything else."""
        while True:
            if condition():
                return
            await asyncio.sleep(0.01)

    async def idle(self) -> None:
        """Wait until nothing runs or waits and no block is used."""
        await self.until(lambda load: load["running"] == load["waiting"] == load["used_blocks"] == 0)


class Stream:
    """The events of one answer, or of what is left of it: iterating goes on where the last one stopped."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response

    async def __aiter__(self) -> AsyncIterator[Any]:
        """Each event's JSON, without ``[DONE]``; fails when that does not come."""
        async for line in self._response.content:
            if line == b"data: [DONE]\n":
                return
            if line.strip():
                yield json.loads(line.removeprefix(b"data: "))
        raise AssertionError("the stream ended without [DONE]")

    async def take(self, count: int) -> str:
        """The text of the next ``count`` events."""
        text = ""
        async for event in self:
            text += _text(event)
            count -= 1
            if not count:
                return text
        raise AssertionError("the stream ended early")

    async def rest(self) -> str:
        """All the text that is still to come."""
        return "".join([_text(event) async for event in self])


def _text(event: Any) -> str:
    texts = [choice["text"] if "text" in choice else choice["delta"].get("content", "") for choice in event["choices"]]
    return "".join(texts)


def _completion(prompt: Any, fields: dict[str, Any]) -> dict[str, Any]:
    return {"model": MODEL, "prompt": prompt, "temperature": 0, "max_tokens": 16} | fields


def _chat(content: Any, fields: dict[str, Any]) -> dict[str, Any]:
    messages = content if isinstance(content, list) else [{"role": "user", "content": content}]
    return {"model": MODEL, "messages": messages, "temperature": 0, "max_tokens": 16} | fields
