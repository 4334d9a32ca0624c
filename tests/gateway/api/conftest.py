"""A gateway over scripted replicas, served on a real socket."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from tokenizers import Tokenizer

from gateway.config import Config, LimitsConfig, RedisConfig, ServerConfig
from gateway.replicas.scripted import ScriptedReplica, scripted_info
from gateway.server import run, serving
from gateway.service import Gateway

TIMEOUT_S = 60.0
MODEL = "scripted"
# Port 1 refuses at once: the statistics are kept in the process.
BASE = Config(server=ServerConfig(port=0, drain_grace_s=10.0), redis=RedisConfig(url="redis://127.0.0.1:1/0"))


class Answer:
    """A response that was read to its end."""

    def __init__(self, status: int, headers: Any, body: bytes) -> None:
        self.status = status
        self.headers = headers
        self.body = body

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def text(self) -> str:
        choice = self.json["choices"][0]
        return choice["message"]["content"] if "message" in choice else choice["text"]

    @property
    def cached(self) -> int:
        return self.json["usage"]["prompt_tokens_details"]["cached_tokens"]

    @property
    def events(self) -> list[Any]:
        """The events of a stream; the last one is ``"[DONE]"`` when it came to its end."""
        lines = self.body.decode().split("\n\n")
        assert lines.pop() == ""
        data = [line.removeprefix("data: ") for line in lines]
        return [item if item == "[DONE]" else json.loads(item) for item in data]


class Service:
    """A running gateway and a client for it."""

    def __init__(
        self,
        gateway: Gateway,
        replicas: list[ScriptedReplica],
        url: str,
        http: aiohttp.ClientSession,
        server: AsyncExitStack,
    ) -> None:
        self.gateway = gateway
        self.replicas = replicas
        self.url = url
        self.http = http
        self.stop_server = server.aclose

    @property
    def replica(self) -> ScriptedReplica:
        return self.replicas[0]

    async def ask(self, method: str, path: str, **options: Any) -> Answer:
        async with self.http.request(method, self.url + path, **options) as response:
            return Answer(response.status, response.headers, await response.read())

    async def get(self, path: str, **options: Any) -> Answer:
        return await self.ask("GET", path, **options)

    async def post(self, path: str, body: Any = None, **options: Any) -> Answer:
        return await self.ask("POST", path, json=body, **options)

    async def complete(self, prompt: Any, *, headers: dict[str, str] | None = None, **fields: Any) -> Answer:
        body = {"model": MODEL, "prompt": prompt, "temperature": 0, "max_tokens": 8} | fields
        return await self.post("/v1/completions", body, headers=headers)

    async def chat(self, content: Any = "hello", *, headers: dict[str, str] | None = None, **fields: Any) -> Answer:
        messages = content if isinstance(content, list) else [{"role": "user", "content": content}]
        body = {"model": MODEL, "messages": messages, "temperature": 0, "max_tokens": 8} | fields
        return await self.post("/v1/chat/completions", body, headers=headers)

    def stats(self) -> Any:
        return self.gateway.statistics.snapshot()


@pytest.fixture(scope="session")
def folder(model_folder: Callable[[str], Path]) -> Path:
    return model_folder("chatml")


class Bench:
    """Makes services. ``run`` plays one scenario on a fresh one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.vocab_size: int = self.tokenizer.get_vocab_size()

    def tokens(self, start: int, count: int) -> list[int]:
        """``TOK(start, count)`` of the acceptance cases, fitted to a small vocabulary."""
        return [10 + (7 * start + i) % (self.vocab_size - 20) for i in range(count)]

    @asynccontextmanager
    async def service(self, config: Config = BASE, *, replicas: int = 1, **info: Any) -> AsyncIterator[Service]:
        settings = {"model": MODEL, "root": str(self.folder), "num_blocks": 256, "max_model_len": 2048} | info
        doubles = [
            ScriptedReplica(f"engine-{index}", self.tokenizer, scripted_info(self.tokenizer, **settings))
            for index in range(replicas)
        ]
        gateway = Gateway(config, model=MODEL, folder=self.folder, replicas=doubles)
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as http, AsyncExitStack() as server:
            url = await server.enter_async_context(serving(gateway))
            yield Service(gateway, doubles, url, http, server)

    def run(self, scenario: Callable[[Service], Awaitable[None]], config: Config = BASE, **options: Any) -> None:
        async def main() -> None:
            async with asyncio.timeout(2 * TIMEOUT_S), self.service(config, **options) as service:
                await scenario(service)

        run(main())


@pytest.fixture(scope="session")
def bench(folder: Path) -> Bench:
    return Bench(folder)


def with_limits(**limits: Any) -> Config:
    """The base configuration with other limits."""
    return msgspec.structs.replace(BASE, limits=LimitsConfig(**limits))
