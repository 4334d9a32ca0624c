"""The one client that all servers are measured with: streamed completions over HTTP."""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

import aiohttp
import msgspec

__all__ = ["Answer", "CompletionClient"]

_TIMEOUT_S: Final = 600.0


class Answer(msgspec.Struct, frozen=True):
    """What one request came to; times in seconds from when it was sent. ``failure`` is None when it succeeded.

    ``arrivals`` are those of the pieces of text. ``cached_tokens`` is None where the server does not tell.
    """

    text: str = ""
    arrivals: tuple[float, ...] = ()
    seconds: float = 0.0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int | None = None
    failure: str | None = None

    @property
    def ttft_s(self) -> float:
        """Time to the first piece of text."""
        return self.arrivals[0]

    def decode_s(self) -> float:
        """The median time between two pieces."""
        return statistics.median(later - earlier for earlier, later in itertools.pairwise(self.arrivals))


class CompletionClient:
    """Asks ``/v1/completions`` of one server. An asynchronous context manager that owns its connections."""

    def __init__(self, base_url: str, fields: Mapping[str, Any]) -> None:
        """``fields`` go into the body of each request."""
        self._fields = fields
        self._session = aiohttp.ClientSession(
            base_url,
            timeout=aiohttp.ClientTimeout(total=_TIMEOUT_S),
            # A new connection each time: some servers close idle ones in the moment in which they are used again.
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
        )

    async def __aenter__(self) -> CompletionClient:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._session.close()

    async def token_ids(self, text: str) -> list[int] | None:
        """What the server makes of a text, by its ``/tokenize``; None where it has none."""
        async with self._session.post("/tokenize", json={"model": self._fields["model"], "prompt": text}) as response:
            if response.status != 200:
                return None
            tokens: list[int] = (await response.json())["tokens"]
            return tokens

    async def complete(self, prompt: str, max_tokens: int) -> Answer:
        """Send one prompt, and read its answer of exactly ``max_tokens`` tokens to the end."""
        body = {"prompt": prompt, "max_tokens": max_tokens, "stream": True, "temperature": 0, **self._fields}
        started = time.perf_counter()
        try:
            async with self._session.post("/v1/completions", json=body) as response:
                if response.status != 200:
                    return Answer(failure=f"HTTP {response.status}: {(await response.text())[:300]}")
                answer = await _read(response.content, started)
        except (aiohttp.ClientError, TimeoutError, msgspec.DecodeError, KeyError) as error:
            return Answer(failure=f"{type(error).__name__}: {error}")
        if answer.failure is None and answer.completion_tokens != max_tokens:
            return Answer(failure=f"{answer.completion_tokens} tokens came, {max_tokens} were asked for")
        return answer

    async def complete_all(self, prompts: Sequence[str], max_tokens: int, concurrency: int) -> list[Answer]:
        """Send all prompts in order, ``concurrency`` of them in flight: each user waits for his answer."""
        answers = [Answer()] * len(prompts)
        waiting = iter(enumerate(prompts))

        async def user() -> None:
            for index, prompt in waiting:
                answers[index] = await self.complete(prompt, max_tokens)

        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(user())
        return answers


async def _read(stream: aiohttp.StreamReader, started: float) -> Answer:
    pieces: list[str] = []
    arrivals: list[float] = []
    usage: dict[str, Any] | None = None
    async for line in stream:
        data = line.removeprefix(b"data: ").strip()
        if not line.startswith(b"data: ") or data == b"[DONE]":
            continue
        event: dict[str, Any] = msgspec.json.decode(data)
        if "error" in event:
            return Answer(failure=str(event["error"]))
        usage = event.get("usage") or usage
        for choice in event.get("choices", ()):
            if choice.get("text"):
                arrivals.append(time.perf_counter() - started)
                pieces.append(choice["text"])
    if usage is None or not pieces:
        return Answer(failure="the stream ended without text or usage")
    return Answer(
        text="".join(pieces),
        arrivals=tuple(arrivals),
        seconds=time.perf_counter() - started,
        prompt_tokens=usage["prompt_tokens"],
        completion_tokens=usage["completion_tokens"],
        cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens"),
    )
