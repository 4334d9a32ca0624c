"""The demo's client and passes, against a server that is scripted to the byte."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from gateway.demo.client import Client, Outcome
from gateway.demo.passes import StatisticsMissing, run_pass
from gateway.demo.report import Report, pass_figures, table

Result = TypeVar("Result")


def event(value: object) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def delta(text: str) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}]}


USAGE = {
    "choices": [],
    "usage": {"prompt_tokens": 100, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 32}},
}


class Gateway:
    """Answers each completion with the next of ``replies`` (an SSE body, or a status with an error body)."""

    def __init__(self, *replies: bytes | tuple[int, bytes], counted: bool = True) -> None:
        self.replies = list(replies)
        self.counted = counted
        self.requests = 0
        self.resets = 0
        self.in_flight = self.most_in_flight = 0

    async def complete(self, request: web.Request) -> web.StreamResponse:
        await request.json()
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        await asyncio.sleep(0)
        reply = self.replies.pop(0)
        self.in_flight -= 1
        if isinstance(reply, tuple):
            return web.Response(status=reply[0], body=reply[1])
        self.requests += 1
        return web.Response(body=reply, content_type="text/event-stream")

    async def reset(self, _request: web.Request) -> web.Response:
        self.resets += 1
        return web.json_response({})

    async def stats(self, _request: web.Request) -> web.Response:
        done = self.requests if self.counted else 0
        totals = {"requests": done, "prefill_s": 0.5 * done, "saved_prefill_s": 0.25 * done}
        return web.json_response({"totals": totals})

    def run(self, act: Callable[[Client], Awaitable[Result]]) -> Result:
        async def main() -> Result:
            app = web.Application()
            app.router.add_post("/v1/chat/completions", self.complete)
            app.router.add_post("/admin/cache/reset", self.reset)
            app.router.add_get("/admin/stats", self.stats)
            async with TestServer(app) as server, Client(str(server.make_url("/"))) as client:
                return await act(client)

        return asyncio.run(main())


GOOD = event(delta("Use ")) + event(delta("json.load")) + event(USAGE) + b"data: [DONE]\n\n"


def test_an_answer_is_read_with_its_text_and_counts() -> None:
    heard: list[str] = []
    outcome = Gateway(GOOD).run(lambda client: client.complete({}, heard.append))
    assert (outcome.text, heard) == ("Use json.load", ["Use ", "json.load"])
    assert (outcome.prompt_tokens, outcome.cached_tokens, outcome.completion_tokens) == (100, 32, 2)
    assert outcome.failure is None
    assert outcome.ttft_s > 0


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        ((400, json.dumps({"error": {"message": "too long"}}).encode()), "HTTP 400: too long"),
        ((502, b"<html>bad gateway</html>"), "HTTP 502: <html>bad gateway</html>"),
        (event(delta("Use")) + event({"error": {"message": "replica lost"}}), "replica lost"),
        (event(delta("Use")), "the stream ended without its usage"),
        (b"data: {broken\n\n", "DecodeError"),
    ],
)
def test_whatever_is_not_a_whole_answer_is_a_failure(reply: bytes | tuple[int, bytes], reason: str) -> None:
    outcome = Gateway(reply).run(lambda client: client.complete({}))
    assert outcome.failure is not None
    assert reason in outcome.failure


def test_a_pass_starts_cold_and_takes_seconds_from_the_statistics() -> None:
    gateway = Gateway(GOOD, GOOD, (400, b"{}"), GOOD)
    seen: list[Outcome] = []
    figures, outcomes = gateway.run(
        lambda client: run_pass(client, [{}] * 4, concurrency=2, on_outcome=seen.append),
    )
    assert gateway.resets == 1
    assert gateway.most_in_flight <= 2
    assert (figures.requests, figures.failed, len(seen)) == (4, 1, 4)
    assert figures.token_hit_rate == 0.32
    assert (figures.prefill_s, figures.saved_prefill_s) == (1.5, 0.75)
    assert [outcome.failure is None for outcome in outcomes].count(True) == 3


def test_uncounted_requests_are_an_error_and_no_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.demo.passes._SETTLE_S", 0.0)
    with pytest.raises(StatisticsMissing, match="0 requests instead of 1"):
        Gateway(GOOD, counted=False).run(
            lambda client: run_pass(client, [{}], concurrency=1, on_outcome=lambda _outcome: None)
        )


def test_figures_without_a_basis_are_null() -> None:
    empty = pass_figures([Outcome(failure="lost")], prefill_s=0.0, saved_prefill_s=0.0)
    assert (empty.requests, empty.failed) == (1, 1)
    assert (empty.token_hit_rate, empty.ttft_p50_ms, empty.ttft_p95_ms) == (None, None, None)
    assert table(Report(as_is=empty, canonical=empty, model="m")).row_count == 2


def test_percentiles_and_hit_rate_are_over_successful_requests() -> None:
    outcomes = [Outcome(ttft_s=second, prompt_tokens=10, cached_tokens=second) for second in range(1, 5)]
    figures = pass_figures([*outcomes, Outcome(failure="lost")], prefill_s=1.0, saved_prefill_s=2.0)
    assert figures.token_hit_rate == 0.25
    assert figures.ttft_p50_ms == 2500.0
    assert figures.ttft_p95_ms == 3850.0
