"""A client as applications have one: streams chat completions over HTTP and times the first token."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import aiohttp
import msgspec

__all__ = ["Client", "Outcome"]

_REQUEST_TIMEOUT_S = 300.0


class Outcome(msgspec.Struct, frozen=True):
    """What one request came to. ``failure`` is None when it succeeded; token counts are those of its usage field."""

    text: str = ""
    ttft_s: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    failure: str | None = None


class Client:
    """Talks to one gateway at ``base_url``. An asynchronous context manager that owns its connections."""

    def __init__(self, base_url: str) -> None:
        self._session = aiohttp.ClientSession(base_url, timeout=aiohttp.ClientTimeout(total=_REQUEST_TIMEOUT_S))

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._session.close()

    async def get_json(self, path: str) -> Any:
        """The decoded body of a GET. Raises ``aiohttp.ClientError`` unless it succeeds."""
        async with self._session.get(path) as response:
            response.raise_for_status()
            return await response.json()

    async def reset_cache(self) -> None:
        """Make the cache cold. Raises ``aiohttp.ClientError`` unless it succeeds."""
        async with self._session.post("/admin/cache/reset") as response:
            response.raise_for_status()

    async def complete(self, body: dict[str, Any], on_text: Callable[[str], None] | None = None) -> Outcome:
        """Send one streamed chat completion and read it to its end; ``on_text`` hears the answer as it comes."""
        started = time.perf_counter()
        try:
            async with self._session.post("/v1/chat/completions", json=body) as response:
                if response.status != 200:
                    return Outcome(failure=f"HTTP {response.status}: {_message(await response.read())}")
                return await _collect(_events(response.content), started, on_text)
        except (aiohttp.ClientError, TimeoutError, msgspec.DecodeError, KeyError) as error:
            return Outcome(failure=f"{type(error).__name__}: {error}")

    async def complete_all(
        self, bodies: Sequence[dict[str, Any]], concurrency: int, on_outcome: Callable[[Outcome], None]
    ) -> list[Outcome]:
        """Send all ``bodies`` in order with ``concurrency`` in flight, as that many users would (a closed loop)."""
        outcomes: list[Outcome] = [Outcome()] * len(bodies)
        waiting = iter(enumerate(bodies))

        async def user() -> None:
            for index, body in waiting:
                outcomes[index] = await self.complete(body)
                on_outcome(outcomes[index])

        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(user())
        return outcomes


async def _collect(
    events: AsyncIterator[dict[str, Any]], started: float, on_text: Callable[[str], None] | None
) -> Outcome:
    parts: list[str] = []
    ttft: float | None = None
    usage: dict[str, Any] | None = None
    async for event in events:
        if "error" in event:
            return Outcome(failure=str(event["error"].get("message", "error in the stream")))
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            if text := choice["delta"].get("content"):
                ttft = ttft if ttft is not None else time.perf_counter() - started
                parts.append(text)
                if on_text is not None:
                    on_text(text)
    if usage is None:
        return Outcome(failure="the stream ended without its usage")
    return Outcome(
        text="".join(parts),
        # An answer without visible text is an end-of-sequence token at once: the end is its first token.
        ttft_s=ttft if ttft is not None else time.perf_counter() - started,
        prompt_tokens=usage["prompt_tokens"],
        cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
        completion_tokens=usage["completion_tokens"],
    )


async def _events(stream: aiohttp.StreamReader) -> AsyncIterator[dict[str, Any]]:
    async for line in stream:
        data = line.removeprefix(b"data: ").strip()
        if line.startswith(b"data: ") and data != b"[DONE]":
            yield msgspec.json.decode(data)


def _message(body: bytes) -> str:
    try:
        return str(msgspec.json.decode(body)["error"]["message"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return body[:200].decode(errors="replace")
