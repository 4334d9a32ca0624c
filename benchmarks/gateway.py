"""The gateway in front of other servers, side by side with other routers: what it costs, and where requests go.

    python -m benchmarks.gateway --peers ~/routers/bin              # both parts
    python -m benchmarks.gateway --only overhead --rounds 1         # Headstart alone
    python -m benchmarks.gateway --only placement --peers ~/routers/bin --rate 1 --one-cache

See the README beside this file for what is measured.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Final

import aiohttp
import msgspec
from rich.console import Console
from rich.table import Table

from benchmarks.placement import rag_bodies
from benchmarks.side_by_side.openai_mock import NAME
from benchmarks.side_by_side.routers import Mock, Peer, one_cache, overhead_peers, placement_peers
from benchmarks.side_by_side.servers import RunningServer, free_port, running
from engine.models.catalog import DEFAULT_MODEL, ensure_model
from gateway.canonical.messages import Message
from gateway.prompt import PromptRenderer

_START_S: Final = 60.0
_CHUNKS: Final = 32
_INTERVAL_S: Final = 0.002
_CONCURRENCY: Final = 32
_REPLICAS: Final = 4
_BLOCKS: Final = 1024
_TOKEN_INTERVAL_S: Final = 0.02
_ANSWER_TOKENS: Final = 16
_CORES: Final = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0]
_MOCK_CORE, _GATEWAY_CORE = _CORES[0], _CORES[-1]


class Overhead(msgspec.Struct, frozen=True):
    """CPU seconds of the router per 1,000 requests, and what it adds to the median at one connection (seconds)."""

    plain_cpu_s: float
    streamed_cpu_s: float
    added_plain_s: float
    added_first_s: float
    failed: int


class PlacementResult(msgspec.Struct, frozen=True):
    """Of one router: the share of prompt tokens that were cached, the busiest replica over the mean, TTFT in s."""

    hit_rate: float
    balance: float
    ttft_p50: float
    ttft_p90: float
    failed: int


def _on_core(core: int, command: Sequence[str]) -> list[str]:
    """Held to one core, where the machine has more."""
    pin = f"import os, sys; os.sched_setaffinity(0, {{{core}}}); os.execvp(sys.argv[1], sys.argv[1:])"
    return [sys.executable, "-c", pin, *command] if len(_CORES) > 1 else list(command)


@asynccontextmanager
async def _mocks(count: int, *options: str, events: bool = False) -> AsyncIterator[list[Mock]]:
    """So many servers; with ``events`` they tell of their caches."""
    async with AsyncExitStack() as stack:
        mocks = []
        for _ in range(count):
            port = free_port()
            mock = Mock(f"http://127.0.0.1:{port}")
            command = [sys.executable, "-m", "benchmarks.side_by_side.openai_mock", "--port", str(port), *options]
            if events:
                mock = Mock(mock.url, *[f"tcp://127.0.0.1:{free_port()}" for _ in range(2)])
                command += ["--events", mock.events, "--events-replay", mock.replay]
            await stack.enter_async_context(
                running(_on_core(_MOCK_CORE, command), _environment(), f"{mock.url}/health", _START_S)
            )
            mocks.append(mock)
        yield mocks


@asynccontextmanager
async def _serving(peer: Peer, replicas: Sequence[Mock]) -> AsyncIterator[tuple[RunningServer, str]]:
    with tempfile.TemporaryDirectory(prefix="headstart-benchmark-") as folder:
        config = Path(folder) / "config.toml"
        if peer.config is not None:
            config.write_text(peer.config(replicas))
        port, other = free_port(), free_port()
        command = [part.format(port=port, other=other, config=config) for part in peer.command]
        command += [] if peer.urls is None else [peer.urls, *[mock.url for mock in replicas]]
        command += [part.format(**msgspec.structs.asdict(mock)) for mock in replicas for part in peer.each]
        url = f"http://127.0.0.1:{port}"
        async with running(_on_core(_GATEWAY_CORE, command), _environment(), url + peer.ready, _START_S) as server:
            yield server, url


def _environment() -> dict[str, str]:
    package_root = str(Path(__file__).resolve().parent.parent)
    path = os.pathsep.join(part for part in (package_root, os.environ.get("PYTHONPATH", "")) if part)
    return {
        **os.environ,
        "PYTHONPATH": path,
        "HEADSTART__SERVER__LOG_LEVEL": "error",
        "HEADSTART__ENGINE__SERVED_NAME": NAME,
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # it asks the net for prices otherwise
        "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",  # none of the others has a key either
    }


# --- overhead ------------------------------------------------------------------------------------------------


def _small(number: int, *, stream: bool) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"Say it, for the {number}th time."}]
    body: dict[str, Any] = {"model": NAME, "messages": messages, "max_tokens": _CHUNKS, "temperature": 0}
    return body | ({"stream": True} if stream else {})


async def _ask(http: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> tuple[float, float, bytes]:
    """Seconds to the first bytes and to the last, and all of them. Raises ``aiohttp.ClientError``."""
    began = time.perf_counter()
    async with http.post(f"{url}/v1/chat/completions", json=body) as response:
        first = await response.content.readany()
        at_first = time.perf_counter() - began
        rest = await response.content.read()
        response.raise_for_status()
        return at_first, time.perf_counter() - began, first + rest


async def _load(http: aiohttp.ClientSession, url: str, requests: int, *, stream: bool) -> int:
    """Send so many at the set concurrency; how many failed."""
    numbers, failed = iter(range(requests)), 0

    async def client() -> None:
        nonlocal failed
        for number in numbers:
            try:
                _, _, body = await _ask(http, url, _small(number, stream=stream))
                failed += b"[DONE]" not in body if stream else b"word" not in body
            except aiohttp.ClientError:
                failed += 1

    await asyncio.gather(*[client() for _ in range(_CONCURRENCY)])
    return failed


async def _median(http: aiohttp.ClientSession, url: str, count: int, *, stream: bool) -> float:
    """The median of one request after the other: to its end, or streamed to its first bytes."""
    taken = [await _ask(http, url, _small(number, stream=stream)) for number in range(count)]
    return statistics.median([first if stream else whole for first, whole, _ in taken])


async def _overhead(peer: Peer, model: Path, requests: int) -> Overhead:
    requests = max(1, requests // peer.share)
    interval = ("--interval", str(_INTERVAL_S))
    timeout = aiohttp.ClientTimeout(total=60)
    async with AsyncExitStack() as stack:
        # Headstart sends token ids only to servers that were shown to read them as it does.
        proved = ("--tokenizer", str(model))
        paced = await stack.enter_async_context(_mocks(1, *interval, *proved))
        quick = await stack.enter_async_context(_mocks(1, *proved))
        http = await stack.enter_async_context(aiohttp.ClientSession(timeout=timeout))
        cpu = []
        failed = 0
        async with _serving(peer, paced) as (server, url):
            for stream in (False, True):
                await _load(http, url, 100, stream=stream)
                before = server.cpu_seconds()
                failed += await _load(http, url, requests, stream=stream)
                cpu.append((server.cpu_seconds() - before) * 1000 / requests)
        added = []
        async with _serving(peer, quick) as (_, url):
            for stream in (False, True):
                await _median(http, url, 50, stream=stream)
                rounds = [
                    await _median(http, url, 100, stream=stream) - await _median(http, quick[0].url, 100, stream=stream)
                    for _ in range(3)
                ]
                added.append(statistics.median(rounds))
    return Overhead(cpu[0], cpu[1], added[0], added[1], failed)


def _tokenization(renderer: PromptRenderer) -> float:
    """CPU seconds per 1,000 requests that rendering and tokenizing the prompts of ``_small`` takes."""
    began = time.process_time()
    for number in range(1000):
        message = _small(number, stream=False)["messages"][0]
        renderer.encode_prompt(renderer.render([Message(message["role"], message["content"])]))
    return time.process_time() - began


# --- placement -----------------------------------------------------------------------------------------------


def _rag(peer: Peer, count: int, seed: int) -> list[dict[str, Any]]:
    bodies = []
    for request in rag_bodies(count, seed):
        system, user = (str(message.content) for message in request.messages)
        documents = request.documents or []
        body: dict[str, Any] = {"model": NAME, "max_tokens": _ANSWER_TOKENS, "temperature": 0, "stream": True}
        body["stream_options"] = {"include_usage": True}
        if peer.documents:
            body |= {"documents": documents, "headstart": {"order": peer.order} if peer.order else {}}
        else:
            pasted = "".join([f"\n\n[Document {document['id']}] \n{document['text']}" for document in documents])
            user = f"{pasted}\n\nQuestion: {user}"
        bodies.append(body | {"messages": [{"role": "system", "content": system}, {"role": "user", "content": user}]})
    return bodies


async def _placement(
    peer: Peer, model: Path, requests: int, rate: float, seed: int, joined: int = 1
) -> PlacementResult:
    """Send the trace at so many requests a second. ``joined`` is how many replicas' memory and speed each one has."""
    bodies = _rag(peer, requests, seed)
    rng = random.Random(seed)
    times: list[float] = []
    cached = prompt = failed = 0
    replicas = _REPLICAS // joined
    busy = [0.0] * replicas
    cache = ("--model", str(model), "--blocks", str(_BLOCKS * joined))
    pace = ("--speed", str(joined), "--interval", str(_TOKEN_INTERVAL_S))
    timeout = aiohttp.ClientTimeout(total=120)
    async with AsyncExitStack() as stack:
        mocks = await stack.enter_async_context(_mocks(replicas, *cache, *pace, events=True))
        _, url = await stack.enter_async_context(_serving(peer, mocks))
        connector = aiohttp.TCPConnector(limit=0)
        http = await stack.enter_async_context(aiohttp.ClientSession(timeout=timeout, connector=connector))

        async def one(body: dict[str, Any]) -> None:
            nonlocal cached, prompt, failed
            try:
                first, _, data = await _ask(http, url, body)
                usage = [u for line in data.split(b"\n\n") if (u := _usage(line)) is not None][-1]
            except (aiohttp.ClientError, IndexError, TimeoutError):
                failed += 1
                return
            times.append(first)
            prompt += usage["prompt_tokens"]
            cached += (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0

        async def watch() -> None:
            while True:
                for index, mock in enumerate(mocks):
                    async with http.get(f"{mock.url}/load") as response:
                        busy[index] += (await response.json())["in_flight"]
                await asyncio.sleep(0.1)

        watcher = asyncio.create_task(watch())
        tasks = []
        for body in bodies:
            tasks.append(asyncio.create_task(one(body)))
            await asyncio.sleep(rng.expovariate(rate))
        await asyncio.gather(*tasks)
        watcher.cancel()
    times.sort()
    return PlacementResult(
        cached / max(1, prompt),
        max(busy) * replicas / max(1.0, sum(busy)),
        times[len(times) // 2],
        times[int(0.9 * len(times))],
        failed,
    )


def _usage(line: bytes) -> Any:
    if not line.startswith(b"data: {"):
        return None
    return msgspec.json.decode(line.removeprefix(b"data: ")).get("usage")


# --- the command ---------------------------------------------------------------------------------------------


async def _measure(options: argparse.Namespace) -> dict[str, Any]:
    model = options.model or ensure_model(DEFAULT_MODEL)
    console = Console(stderr=True)
    results: dict[str, Any] = {}
    if options.only != "placement":
        renderer = PromptRenderer(model)
        results["tokenization_cpu_s"] = _tokenization(renderer)
        overheads: dict[str, list[Overhead]] = {}
        for _ in range(options.rounds):
            for peer in _chosen(overhead_peers(model, options.peers), options.name):
                console.print(f"overhead: {peer.name}")
                overheads.setdefault(peer.name, []).append(await _overhead(peer, model, options.requests))
        results["overhead"] = overheads
    if options.only != "overhead":
        placements: dict[str, list[PlacementResult]] = {}
        for round in range(options.rounds):
            measured = [(peer, 1) for peer in _chosen(placement_peers(model, options.peers), options.name)]
            if options.one_cache:
                measured.append((one_cache(model), _REPLICAS))
            for peer, joined in measured:
                console.print(f"placement: {peer.name}")
                result = await _placement(peer, model, options.trace, options.rate, 1 + round, joined)
                placements.setdefault(peer.name, []).append(result)
        results["placement"] = placements
    return results


def _chosen(peers: list[Peer], names: list[str]) -> list[Peer]:
    """Those whose names begin with one of ``names``; all of them where none is named."""
    return [peer for peer in peers if not names or peer.name.startswith(tuple(names))]


def _table(title: str, rows: dict[str, list[Any]], columns: dict[str, tuple[str, float]]) -> Table:
    table = Table(title=title)
    table.add_column("router")
    for heading, _ in columns.values():
        table.add_column(heading, justify="right")
    for name, rounds in rows.items():
        values = [statistics.median([getattr(result, field) for result in rounds]) for field in columns]
        scales = [scale for _, scale in columns.values()]
        table.add_row(name, *[f"{value * scale:.4g}" for value, scale in zip(values, scales, strict=True)])
    return table


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", choices=("overhead", "placement"))
    parser.add_argument("--peers", type=Path, help="folder with the commands vllm-router, sglang-router and litellm")
    parser.add_argument("--name", action="append", default=[], help="only routers whose names begin so (repeatable)")
    parser.add_argument(
        "--model", type=Path, help="folder with tokenizer and chat template (default: the default model)"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=1000, help="of the overhead, plain and streamed each")
    parser.add_argument("--trace", type=int, default=200, help="requests of the placement")
    parser.add_argument("--rate", type=float, default=8.0, help="of the placement, requests a second")
    parser.add_argument("--one-cache", action="store_true", help="place also on one replica that is as large as all")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if len(_CORES) > 1:
        os.sched_setaffinity(0, {_MOCK_CORE})
    results = asyncio.run(_measure(options))
    console = Console(stderr=options.json, width=120)
    if "overhead" in results:
        console.print(
            _table(
                "Overhead, medians",
                results["overhead"],
                {
                    "plain_cpu_s": ("CPU s / 1,000 plain", 1),
                    "streamed_cpu_s": (f"/ 1,000 streamed ({_CHUNKS} chunks)", 1),
                    "added_plain_s": ("added p50, ms", 1e3),
                    "added_first_s": ("to the first chunk, ms", 1e3),
                    "failed": ("failed", 1),
                },
            )
        )
        console.print(f"Of Headstart's, tokenization: {results['tokenization_cpu_s']:.2f} CPU s / 1,000 requests.")
    if "placement" in results:
        console.print(
            _table(
                f"Placement on {_REPLICAS} replicas, medians",
                results["placement"],
                {
                    "hit_rate": ("tokens from the cache, %", 100),
                    "balance": ("busiest / mean", 1),
                    "ttft_p50": ("TTFT p50, ms", 1e3),
                    "ttft_p90": ("p90, ms", 1e3),
                    "failed": ("failed", 1),
                },
            )
        )
    if options.json:
        sys.stdout.write(msgspec.json.encode(results).decode() + "\n")


if __name__ == "__main__":
    main()
