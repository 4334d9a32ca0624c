"""The same requests to every server, one server at a time, in turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence

import msgspec

from benchmarks.side_by_side.client import Answer, CompletionClient
from benchmarks.side_by_side.servers import ServerError
from benchmarks.side_by_side.workload import OUTPUT_TOKENS, Workload

__all__ = [
    "CONCURRENCY",
    "ClosedLoop",
    "FirstTokens",
    "LoadSize",
    "agreement",
    "check_tokens",
    "first_tokens",
    "serve_closed_loop",
    "warm_up",
]

CONCURRENCY = 8
_DECODES = 9  # tokens of an answer whose first one is timed


class LoadSize(msgspec.Struct, frozen=True):
    """Requests of a closed loop, and of each kind of first token in a round."""

    requests: int = 64
    first_tokens: int = 4


class FirstTokens(msgspec.Struct, frozen=True):
    """Medians of one server's lone requests in seconds: to the first token, and per decode step behind a warm one."""

    name: str
    cold_s: float
    warm_s: float
    repeated_s: float
    decode_s: float
    prompt_tokens: int
    cached_tokens: int | None

    def warm_steps(self) -> float:
        """The warm first token in decode steps."""
        return self.warm_s / self.decode_s


class ClosedLoop(msgspec.Struct, frozen=True):
    """One server's closed loop: seconds, what of the prompts was cached as a share of 1, and what was answered."""

    name: str
    requests: int
    seconds: float
    requests_per_s: float
    ttft_p50_s: float
    ttft_p95_s: float
    tpot_p50_s: float
    prompt_tokens: float
    cached_share: float | None
    texts: tuple[str, ...]


async def check_tokens(client: CompletionClient, name: str, text: str, expected: Sequence[int]) -> None:
    """Make sure that the server reads ``text`` as everyone else does.

    Raises:
        ServerError: it takes other or fewer tokens, or does not answer at all.
    """
    tokens = await client.token_ids(text)
    if tokens is not None and tokens != list(expected):
        raise ServerError(f"{name} makes other tokens of a prompt")
    (answer,) = _good(name, [await client.complete(text, 1 + 1)])
    if answer.prompt_tokens != len(expected):
        raise ServerError(f"{name} counts {answer.prompt_tokens} tokens in a prompt of {len(expected)}")


async def warm_up(client: CompletionClient, name: str, workload: Workload, requests: int) -> None:
    """Serve some of a workload that is not measured, one request alone and then several at a time."""
    await serve_closed_loop(client, name, workload, 1)
    await serve_closed_loop(client, name, workload, requests)


async def first_tokens(client: CompletionClient, name: str, workload: Workload, count: int) -> FirstTokens:
    """Lone requests: a prompt that is new from its first token on, then others like it, each of those twice."""
    (cold,) = _good(name, [await client.complete(workload.prompt(0).text, _DECODES)])
    warm: list[Answer] = []
    repeated: list[Answer] = []
    for index in range(1, count + 1):
        prompt = workload.prompt(index, like=0).text
        for answers in (warm, repeated):
            answers += _good(name, [await client.complete(prompt, _DECODES)])
    return FirstTokens(
        name=name,
        cold_s=cold.ttft_s,
        warm_s=statistics.median(answer.ttft_s for answer in warm),
        repeated_s=statistics.median(answer.ttft_s for answer in repeated),
        decode_s=statistics.median(answer.decode_s() for answer in warm),
        prompt_tokens=warm[0].prompt_tokens,
        cached_tokens=warm[0].cached_tokens,
    )


async def serve_closed_loop(client: CompletionClient, name: str, workload: Workload, requests: int) -> ClosedLoop:
    """The engine workload at concurrency 8, in the order of its prompts."""
    prompts = [prompt.text for prompt in workload.prompts(requests)]
    started = time.perf_counter()
    answers = _good(name, await client.complete_all(prompts, OUTPUT_TOKENS, CONCURRENCY))
    seconds = time.perf_counter() - started
    ttfts = sorted(answer.ttft_s for answer in answers)
    cached = [answer.cached_tokens for answer in answers if answer.cached_tokens is not None]
    tokens = sum(answer.prompt_tokens for answer in answers)
    return ClosedLoop(
        name=name,
        requests=requests,
        seconds=seconds,
        requests_per_s=requests / seconds,
        ttft_p50_s=statistics.median(ttfts),
        ttft_p95_s=ttfts[min(len(ttfts) - 1, round(0.95 * len(ttfts)))],
        tpot_p50_s=statistics.median(
            (answer.arrivals[-1] - answer.arrivals[0]) / (answer.completion_tokens - 1) for answer in answers
        ),
        prompt_tokens=tokens / requests,
        cached_share=sum(cached) / tokens if len(cached) == len(answers) else None,
        texts=tuple(answer.text for answer in answers),
    )


def agreement(loops: Mapping[str, ClosedLoop], name: str, other: str) -> float:
    """The share of requests to which two servers gave the same answer."""
    pairs = zip(loops[name].texts, loops[other].texts, strict=True)
    return statistics.mean(one == two for one, two in pairs)


def _good(name: str, answers: list[Answer]) -> list[Answer]:
    for answer in answers:
        if answer.failure is not None:
            raise ServerError(f"{name}: {answer.failure}")
    return answers
