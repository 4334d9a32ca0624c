"""What the servers of the engine's benchmark are measured with: the client, and processes that are gone at the end."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web

from benchmarks.side_by_side.client import CompletionClient
from benchmarks.side_by_side.rounds import agreement, check_tokens, first_tokens, serve_closed_loop
from benchmarks.side_by_side.servers import ServerError, free_port, running
from benchmarks.side_by_side.workload import OUTPUT_TOKENS, Workload

DEADLINE = 60.0

SERVER = """
import http.server, os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
print("child", child.pid, flush=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/ready" else 404)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


class Server:
    """Answers completions as OpenAI's API does, a word for a token; remembers the bodies and how many came at once."""

    def __init__(self, *, missing: int = 0, tells_cached: bool = True) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.most = 0
        self._missing = missing
        self._tells_cached = tells_cached
        self._running = 0

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self._running += 1
        self.most = max(self.most, self._running)
        response = web.StreamResponse()
        await response.prepare(request)
        count = body["max_tokens"] - self._missing
        for number in range(count):
            await _send(response, {"choices": [{"text": f" {number}"}]})
            await asyncio.sleep(0)
        usage: dict[str, Any] = {"prompt_tokens": len(body["prompt"].split()), "completion_tokens": count}
        if self._tells_cached:
            usage["prompt_tokens_details"] = {"cached_tokens": usage["prompt_tokens"] // 2}
        await _send(response, {"choices": [], "usage": usage})
        await response.write(b"data: [DONE]\n\n")
        self._running -= 1
        return response

    async def tokenize(self, request: web.Request) -> web.Response:
        body = await request.json()
        return web.json_response({"tokens": [len(word) for word in body["prompt"].split()]})


async def _send(response: web.StreamResponse, event: dict[str, Any]) -> None:
    await response.write(f"data: {json.dumps(event)}\n\n".encode())


def asking(server: Server, scenario: Callable[[CompletionClient], Awaitable[None]]) -> None:
    """Run a scenario with a client of the server."""

    async def main() -> None:
        app = web.Application()
        app.router.add_post("/v1/completions", server.complete)
        app.router.add_post("/tokenize", server.tokenize)
        runner = web.AppRunner(app)
        await runner.setup()
        port = free_port()
        try:
            await web.TCPSite(runner, "127.0.0.1", port).start()
            async with CompletionClient(f"http://127.0.0.1:{port}", {"model": "m", "extra": 1}) as client:
                await asyncio.wait_for(scenario(client), DEADLINE)
        finally:
            await runner.cleanup()

    asyncio.run(main())


def workload() -> Workload:
    return Workload(1, lambda text: len(text.split()))


def test_a_closed_loop_asks_every_prompt_once_with_eight_in_flight() -> None:
    server = Server()

    async def scenario(client: CompletionClient) -> None:
        loop = await serve_closed_loop(client, "it", workload(), 20)
        assert loop.requests_per_s == pytest.approx(20 / loop.seconds)
        assert loop.cached_share == pytest.approx(0.5, abs=0.01)
        assert loop.ttft_p50_s <= loop.ttft_p95_s <= loop.seconds
        assert loop.texts == ("".join(f" {number}" for number in range(OUTPUT_TOKENS)),) * 20

    asking(server, scenario)
    assert sorted(body["prompt"] for body in server.bodies) == sorted(each.text for each in workload().prompts(20))
    assert server.most == 8
    for body in server.bodies:
        assert (body["max_tokens"], body["temperature"], body["stream"], body["extra"]) == (OUTPUT_TOKENS, 0, True, 1)


def test_first_tokens_are_of_a_cold_prompt_then_of_others_like_it_each_twice() -> None:
    server = Server(tells_cached=False)

    async def scenario(client: CompletionClient) -> None:
        first = await first_tokens(client, "it", workload(), 2)
        assert first.cached_tokens is None
        assert first.warm_steps() == pytest.approx(first.warm_s / first.decode_s)

    asking(server, scenario)
    prompts = [body["prompt"] for body in server.bodies]
    cold, *warm = [workload().prompt(0).text, *(workload().prompt(index, like=0).text for index in (1, 2))]
    assert prompts == [cold, warm[0], warm[0], warm[1], warm[1]]


def test_an_answer_of_another_length_ends_the_measurement() -> None:
    async def scenario(client: CompletionClient) -> None:
        with pytest.raises(ServerError, match="it: 31 tokens came, 32 were asked for"):
            await serve_closed_loop(client, "it", workload(), 1)

    asking(Server(missing=1), scenario)


def test_a_server_that_reads_other_tokens_is_not_measured() -> None:
    async def scenario(client: CompletionClient) -> None:
        await check_tokens(client, "it", "so it is", [2, 2, 2])
        with pytest.raises(ServerError, match="other tokens"):
            await check_tokens(client, "it", "so it is", [1, 2, 3])

    asking(Server(), scenario)


def test_agreement_is_the_share_of_equal_answers() -> None:
    async def scenario(client: CompletionClient) -> None:
        one = await serve_closed_loop(client, "it", workload(), 4)
        other = msgspec.structs.replace(one, texts=(*one.texts[:3], "else"))
        assert agreement({"a": one, "b": other}, "a", "b") == 0.75

    asking(Server(), scenario)


def test_a_server_is_waited_for_and_gone_at_the_end_with_all_it_has_started() -> None:
    async def main() -> int:
        port = free_port()
        command = [sys.executable, "-c", SERVER, str(port)]
        async with running(command, os.environ, f"http://127.0.0.1:{port}/ready", DEADLINE) as server:
            _, child = server.last_lines().splitlines()[0].split()
            assert alive(int(child))
            return int(child)

    child = asyncio.run(main())
    deadline = time.monotonic() + DEADLINE
    while alive(child):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def alive(process: int) -> bool:
    """Whether a process runs; one that has ended and waits for its parent does not."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{process}/stat")
    return not (status.is_file() and status.read_text().rpartition(")")[2].split()[0] == "Z")


def test_a_server_that_does_not_come_up_is_told_with_its_last_lines() -> None:
    async def main() -> None:
        command = [sys.executable, "-c", "import sys; print('no such model'); sys.exit(3)"]
        async with running(command, os.environ, f"http://127.0.0.1:{free_port()}/ready", DEADLINE):
            pass

    with pytest.raises(ServerError, match=r"status 3:\nno such model"):
        asyncio.run(main())
