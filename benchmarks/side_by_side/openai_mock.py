"""A server that speaks OpenAI's dialect and computes nothing: what stands behind gateways that are measured.

    python -m benchmarks.side_by_side.openai_mock --port 8001 [--model FOLDER]

Without a model no time passes before the first token. With the folder of one it takes the time of an engine: prompts
queue for prefill, of which blocks in an exact LRU cache cost nothing, then tokens come one after the other. It says how
large that cache is, and tells of its blocks by events where it is given an address for them, both as vLLM does.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import uvloop
from aiohttp import web

from benchmarks.placement import BLOCK_SIZE, STEP_S, TOKEN_S, BlockLru
from benchmarks.side_by_side.kv_publisher import KvPublisher
from cache_policy.keys import chain_keys, token_bytes
from gateway.canonical.messages import Message
from gateway.prompt import PromptRenderer

__all__ = ["NAME"]

NAME: Final = "mock"
_CONTEXT: Final = 1 << 16


class _Engine:
    """What prefill costs at ``speed`` times the usual, and what the cache holds. Owned by the server."""

    def __init__(self, renderer: PromptRenderer, blocks: int, speed: float) -> None:
        self._renderer = renderer
        self._cache = BlockLru(blocks)
        self._speed = speed
        self._free_at = 0.0
        self.blocks = blocks
        self.publisher: KvPublisher | None = None

    def tokens(self, body: Any) -> list[int]:
        """The ids of a prompt, given as ids, text or messages."""
        if "messages" in body:
            messages = [Message(message["role"], message["content"]) for message in body["messages"]]
            return self._renderer.encode_prompt(self._renderer.render(messages))
        return body["prompt"] if isinstance(body["prompt"], list) else self._renderer.encode(body["prompt"])

    async def prefill(self, tokens: Sequence[int], salt: str) -> int:
        """Wait until a prompt is computed; return how many of its tokens were cached."""
        keys = chain_keys(salt.encode(), token_bytes(tokens), BLOCK_SIZE)
        readable = keys[: (len(tokens) - 1) // BLOCK_SIZE]
        hits, stored, removed = self._cache.request(readable)
        loop = asyncio.get_running_loop()
        takes_s = (STEP_S + TOKEN_S * (len(tokens) - hits * BLOCK_SIZE)) / self._speed
        self._free_at = max(loop.time(), self._free_at) + takes_s
        await asyncio.sleep(self._free_at - loop.time())
        if self.publisher is not None:
            await self.publisher.tell(readable, tokens, salt, stored, removed)
        return hits * BLOCK_SIZE


_PUBLISHES: Final = web.AppKey("publishes", tuple[_Engine, str, str])


class _Server:
    """The routes; ``in_flight`` is told at ``/load``."""

    def __init__(self, engine: _Engine | None, interval_s: float, renderer: PromptRenderer | None) -> None:
        """``renderer`` is what ``/tokenize`` reads text with; without one there is no such route."""
        self._engine = engine
        self._renderer = renderer
        self._interval_s = interval_s
        self._in_flight = 0

    def app(self) -> web.Application:
        """The application."""
        app = web.Application()
        app.router.add_get("/health", self._well)
        app.router.add_get("/load", self._load)
        app.router.add_get("/v1/models", self._models)
        if self._engine is not None:
            app.router.add_get("/metrics", self._metrics)
        if self._renderer is not None:
            app.router.add_post("/tokenize", self._tokenize)
        for path in ("/get_model_info", "/model_info", "/get_server_info", "/server_info"):
            app.router.add_get(path, self._info)
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_post("/v1/chat/completions", self._complete)
        return app

    async def _well(self, _request: web.Request) -> web.Response:
        return web.Response()

    async def _load(self, _request: web.Request) -> web.Response:
        return web.json_response({"in_flight": self._in_flight})

    async def _models(self, _request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": NAME, "max_model_len": _CONTEXT}]})

    async def _info(self, _request: web.Request) -> web.Response:
        return web.json_response({"model_path": NAME, "served_model_name": NAME, "is_generation": True})

    async def _metrics(self, _request: web.Request) -> web.Response:
        assert self._engine is not None, "the route is there for an engine only"
        labels = f'block_size="{BLOCK_SIZE}",num_gpu_blocks="{self._engine.blocks}"'
        return web.Response(text=f"vllm:cache_config_info{{{labels}}} 1.0\n")

    async def _tokenize(self, request: web.Request) -> web.Response:
        assert self._renderer is not None, "the route is there with one only"
        body = msgspec.json.decode(await request.read())
        if "messages" in body and self._engine is not None:  # vllm-router's kv_aware asks for those of a chat
            tokens = self._engine.tokens(body)
        else:
            tokens = self._renderer.encode(body["prompt"], add_special_tokens=body.get("add_special_tokens", True))
        return web.json_response({"tokens": tokens, "count": len(tokens), "max_model_len": _CONTEXT})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = msgspec.json.decode(await request.read())
        self._in_flight += 1
        try:
            return await self._answer(request, body)
        finally:
            self._in_flight -= 1

    async def _answer(self, request: web.Request, body: Any) -> web.StreamResponse:
        chat = "messages" in body
        count = body.get("max_tokens") or body.get("max_completion_tokens") or 16
        cached, prompt_tokens, interval_s = 0, 1, self._interval_s
        if self._engine is not None:
            tokens = self._engine.tokens(body)
            prompt_tokens = len(tokens)
            cached = await self._engine.prefill(tokens, body.get("cache_salt") or "")
        usage = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": count,
            "total_tokens": prompt_tokens + count,
            "prompt_tokens_details": {"cached_tokens": cached},
        }
        if not body.get("stream"):
            await asyncio.sleep(interval_s * count)
            return web.json_response(_body(chat, "word " * count, "length", usage))
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        with contextlib.suppress(ConnectionError):
            for index in range(count):
                finish = "length" if index == count - 1 else None
                await response.write(_event(_chunk(chat, "word ", finish)))
                if interval_s:
                    await asyncio.sleep(interval_s)
            await response.write(_event(_chunk(chat, None, None, usage)) + b"data: [DONE]\n\n")
            await response.write_eof()
        return response


def _event(body: Any) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


def _chunk(chat: bool, text: str | None, finish: str | None, usage: Any = None) -> Any:
    choices = []
    if text is not None:
        said: Any = {"delta": {"content": text}} if chat else {"text": text}
        choices = [{"index": 0, **said, "logprobs": None, "finish_reason": finish}]
    return {
        "id": "cmpl-0123456789abcdef",
        "object": "chat.completion.chunk" if chat else "text_completion",
        "created": 1700000000,
        "model": NAME,
        "choices": choices,
        "usage": usage,
    }


def _body(chat: bool, text: str, finish: str, usage: Any) -> Any:
    said: Any = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
    return {
        "id": "cmpl-0123456789abcdef",
        "object": "chat.completion" if chat else "text_completion",
        "created": 1700000000,
        "model": NAME,
        "choices": [{"index": 0, **said, "logprobs": None, "finish_reason": finish}],
        "usage": usage,
    }


async def _publishing(app: web.Application) -> AsyncIterator[None]:
    """Publish for as long as the application runs."""
    engine, events, replay = app[_PUBLISHES]
    engine.publisher = KvPublisher(events, replay, BLOCK_SIZE)
    yield
    await engine.publisher.close()


def main() -> None:
    """Serve until a signal."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--model", type=Path, help="take the time of an engine with this folder's tokenizer")
    parser.add_argument("--tokenizer", type=Path, help="show at /tokenize that text is read as by this folder's one")
    parser.add_argument("--blocks", type=int, default=1024, help="of its cache")
    parser.add_argument("--speed", type=float, default=1.0, help="of prefill, times the usual one")
    parser.add_argument("--interval", type=float, default=0.0, help="seconds from one token to the next")
    parser.add_argument("--events", help="ZeroMQ address at which cache events are published (with --model)")
    parser.add_argument("--events-replay", help="the one at which they are repeated")
    arguments = parser.parse_args()
    read_as = arguments.model or arguments.tokenizer
    renderer = None if read_as is None else PromptRenderer(read_as)
    engine = None
    if arguments.model is not None and renderer is not None:
        engine = _Engine(renderer, arguments.blocks, arguments.speed)
    app = _Server(engine, arguments.interval, renderer).app()
    if engine is not None and arguments.events:
        app[_PUBLISHES] = engine, arguments.events, arguments.events_replay
        app.cleanup_ctx.append(_publishing)
    uvloop.install()
    web.run_app(app, host="127.0.0.1", port=arguments.port, access_log=None, print=None)


if __name__ == "__main__":
    main()
