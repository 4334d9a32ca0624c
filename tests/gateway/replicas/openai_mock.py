"""An OpenAI-compatible server under a test's control, and a gateway in front of some of them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import aiohttp
from aiohttp import web
from tokenizers import Tokenizer

from gateway.config import Config, LimitsConfig, RedisConfig, ReplicaConfig, ServerConfig
from gateway.replicas.openai_http import OpenAIReplica
from gateway.replicas.tokenizer_proof import TokenizerProof
from gateway.server import run, serving
from gateway.service import Gateway

MODEL = "mock"
TIMEOUT_S = 60.0
# Port 1 refuses at once: the statistics are kept in the process.
CONFIG = Config(
    server=ServerConfig(port=0, drain_grace_s=1.0),
    redis=RedisConfig(url="redis://127.0.0.1:1/0"),
    limits=LimitsConfig(request_timeout_s=TIMEOUT_S),
)


def event(text: str | None = None, *, finish: str | None = None, index: int = 0, **fields: Any) -> bytes:
    """One event of a stream: some text of a choice, or its end, or (with neither) none of a choice."""
    choices = [] if text is finish is None else [{"index": index, "text": text or "", "finish_reason": finish}]
    body = {"id": "cmpl-1", "object": "text_completion", "choices": choices} | fields
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n".encode()


def usage(completion: int, cached: int | None = 0) -> bytes:
    """The event that counts, as vLLM sends it."""
    details = None if cached is None else {"cached_tokens": cached}
    counts = {"prompt_tokens": 9, "completion_tokens": completion, "prompt_tokens_details": details}
    return event(usage=counts)


DONE = b"data: [DONE]\n\n"


def whole(*texts: str, finish: str = "stop") -> bytes:
    """A complete answer."""
    return b"".join([*map(event, texts), event(finish=finish), usage(len(texts)), DONE])


def as_one(*texts: str, finish: str = "stop", cached: int | None = 0) -> Any:
    """The body of an answer that is not streamed, with so many choices of one token each."""
    choices = [{"index": index, "text": text, "finish_reason": finish} for index, text in enumerate(texts)]
    details = None if cached is None else {"cached_tokens": cached}
    counts = {"prompt_tokens": 9, "completion_tokens": len(texts), "prompt_tokens_details": details}
    return {"id": "cmpl-1", "object": "text_completion", "choices": choices, "usage": counts}


class Talk:
    """One request for a completion, and the stream that answers it."""

    def __init__(self, request: web.Request, body: Any) -> None:
        self.request = request
        self.body = body
        self.tokens = 0
        """Tokens that were written."""
        self.open = True
        """Whether the server still works on it."""
        self._response: web.StreamResponse | None = None

    @property
    def gone(self) -> bool:
        """Whether the client has closed the connection."""
        transport = self.request.transport
        return transport is None or transport.is_closing()

    async def start(self) -> None:
        """Send the head."""
        self._response = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8"})
        await self._response.prepare(self.request)

    async def write(self, data: bytes) -> None:
        """Send some bytes in a packet of their own."""
        if self._response is None:
            await self.start()
        assert self._response is not None
        await self._response.write(data)
        await asyncio.sleep(0)

    async def tell(self, count: int, *, pause_s: float = 0.0) -> None:
        """Write ``count`` tokens, t0, t1, ..."""
        for _ in range(count):
            await self.write(event(f"t{self.tokens} "))
            self.tokens += 1
            await asyncio.sleep(pause_s)

    async def wait_until_gone(self) -> None:
        """Say nothing (more) until the client leaves."""
        while not self.gone:  # noqa: ASYNC110 - nothing but the transport knows
            await asyncio.sleep(0.002)

    def abort(self) -> None:
        """Reset the connection."""
        if self.request.transport is not None:
            self.request.transport.abort()

    async def end(self) -> web.StreamResponse:
        """The response, ended."""
        if self._response is None:
            await self.start()
        assert self._response is not None
        if not self.gone:
            await self._response.write_eof()
        return self._response


Behaviour = Callable[[Talk], Awaitable[web.StreamResponse | None]]


def saying(data: bytes) -> Behaviour:
    """Answers each request with ``data``."""

    async def behave(talk: Talk) -> None:
        await talk.write(data)

    return behave


def replying(body: Any, status: int = 200, **headers: str) -> Behaviour:
    """Answers each request with some JSON."""

    async def behave(_talk: Talk) -> web.Response:
        return web.json_response(body, status=status, headers=headers)

    return behave


def refusing(status: int, body: Any = None, **headers: str) -> Behaviour:
    """Answers each request with an error."""
    return replying(body, status, **headers)


class MockServer:
    """Serves ``MODEL`` on a port of its own, the same one after each ``kill``; ``behave`` is how it answers."""

    def __init__(self, folder: Path) -> None:
        self.behave: Behaviour = saying(whole("hello"))
        self.health = 200
        self.ready = 404
        """What it answers to ``/ready``, which only some servers have."""
        self.stopped = False
        """Takes connections and says nothing, like a process that was stopped."""
        self.tokenizer: Tokenizer | None = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.metrics: str | None = None
        self.cards: list[dict[str, Any]] = [{"id": MODEL, "root": "org/mock", "max_model_len": 2048}]
        self.settings: dict[str, Any] = {}
        """What else is configured for it as a replica."""
        self.talks: list[Talk] = []
        self.headers: list[Any] = []
        self._port = 0
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    @property
    def open(self) -> int:
        """Requests that it works on."""
        return sum(talk.open for talk in self.talks)

    async def start(self) -> None:
        """Take connections (again)."""
        app = web.Application(middlewares=[self._notice])
        app.router.add_get("/health", self._health)
        app.router.add_get("/ready", self._ready)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_post("/v1/completions", self._complete)
        await self._extend(app)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self._port, reuse_address=True)
        await site.start()
        self._port = self._runner.addresses[0][1]

    async def kill(self) -> None:
        """Die with everything in flight."""
        for talk in self.talks:
            talk.abort()
        if self._runner is not None:
            runner, self._runner = self._runner, None
            await runner.cleanup()

    async def __aenter__(self) -> MockServer:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.kill()

    async def _extend(self, app: web.Application) -> None:
        """Add further routes."""

    # --- routes ------------------------------------------------------------------------------------------

    @web.middleware
    async def _notice(self, request: web.Request, handler: Any) -> web.StreamResponse:
        self.headers.append(request.headers)
        if self.stopped:
            await Talk(request, None).wait_until_gone()
        response: web.StreamResponse = await handler(request)
        return response

    async def _health(self, _request: web.Request) -> web.Response:
        return web.Response(status=self.health)

    async def _ready(self, _request: web.Request) -> web.Response:
        return web.Response(status=self.ready)

    async def _models(self, _request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": self.cards})

    async def _metrics(self, _request: web.Request) -> web.Response:
        if self.metrics is None:
            raise web.HTTPNotFound
        return web.Response(text=self.metrics)

    async def _tokenize(self, request: web.Request) -> web.Response:
        if self.tokenizer is None:
            raise web.HTTPNotFound
        body = await request.json()
        ids = self.tokenizer.encode(body["prompt"], add_special_tokens=body["add_special_tokens"]).ids
        return web.json_response({"count": len(ids), "max_model_len": 2048, "tokens": ids})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        talk = Talk(request, await request.json())
        self.talks.append(talk)
        try:
            return await self.behave(talk) or await talk.end()
        except ConnectionError:
            return await talk.end()
        finally:
            talk.open = False


class Remote:
    """A gateway in front of mock servers, and a client of it."""

    def __init__(self, gateway: Gateway, url: str, http: aiohttp.ClientSession) -> None:
        self.gateway = gateway
        self.url = url
        self.http = http

    async def post(self, path: str, **fields: Any) -> tuple[int, Any, bytes]:
        """Status, headers and body of an answer."""
        body = {"model": MODEL, "temperature": 0, "max_tokens": 100} | fields
        async with self.http.post(self.url + path, json=body) as response:
            return response.status, response.headers, await response.read()

    async def complete(self, **fields: Any) -> tuple[int, Any, bytes]:
        return await self.post("/v1/completions", **{"prompt": "x"} | fields)

    async def chat(self, **fields: Any) -> tuple[int, Any, bytes]:
        return await self.post("/v1/chat/completions", messages=[{"role": "user", "content": "x"}], **fields)


@asynccontextmanager
async def gateway_over(
    folder: Path, *servers: MockServer, idle_timeout_s: float = TIMEOUT_S, config: Config = CONFIG
) -> AsyncIterator[Remote]:
    proof = TokenizerProof.of(folder)
    replicas = [
        OpenAIReplica(
            f"replica-{i}",
            ReplicaConfig(server.url, idle_timeout_s=idle_timeout_s, **server.settings),
            proof,
            model=MODEL,
        )
        for i, server in enumerate(servers)
    ]
    gateway = Gateway(config, model=MODEL, folder=folder, replicas=replicas)
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as http, serving(gateway) as url:
        await gateway.wait_ready(TIMEOUT_S)
        yield Remote(gateway, url, http)


def play(
    folder: Path,
    scenario: Callable[..., Awaitable[None]],
    *,
    servers: int = 1,
    kind: Callable[[Path], MockServer] = MockServer,
    **options: Any,
) -> None:
    """Play ``scenario(remote, server, ...)`` on fresh mock servers with a gateway in front of them."""

    async def main() -> None:
        async with asyncio.timeout(2 * TIMEOUT_S), AsyncExitStack() as stack:
            mocks = [await stack.enter_async_context(kind(folder)) for _ in range(servers)]
            remote = await stack.enter_async_context(gateway_over(folder, *mocks, **options))
            await scenario(remote, *mocks)

    run(main())


def events_of(body: bytes) -> list[Any]:
    """The events of a whole stream as its client reads them; ``"[DONE]"`` for the end."""
    lines = body.decode().split("\n\n")
    assert lines.pop() == ""
    data = [line.removeprefix("data: ") for line in lines]
    return [item if item == "[DONE]" else json.loads(item) for item in data]


def text_of(choice: Any) -> str:
    """The text of a choice of either route, streamed or not."""
    if "text" in choice:
        return str(choice["text"])
    return str(choice.get("message", choice.get("delta", {})).get("content") or "")
