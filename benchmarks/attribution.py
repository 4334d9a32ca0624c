"""What attribution costs the gateway: its processor time with all of it on, divided by that with it off.

    python -m benchmarks.attribution DATA/rag_xquad_en

Two gateways in one process, alike but for ``[attribution] enabled``, answer the same requests of a RAG log in turns, a
burst each at 200 requests a second, sent by a process of its own. Their replicas compute nothing: they remember blocks,
evict them, and answer with one token, so that nearly all the time is the gateway's. Prints one JSON object with the
median processor time per request of each, and the ratio.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from tokenizers import Tokenizer

from benchmarks.rag_log import log_config, read_bodies
from cache_policy.keys import chain_keys
from engine.wire import BlockRemoved, BlockStored, Output
from gateway.cli.terminal import fetch_model, print_json
from gateway.configuration import model_spec
from gateway.logs import configure_logging
from gateway.replicas.base import GenerationRequest
from gateway.replicas.scripted import ScriptedReplica, scripted_info
from gateway.server import run, serving
from gateway.service import Gateway

MOST_RATIO = 1.15


class RememberingReplica(ScriptedReplica):
    """Answers at once with one token. Owns the keys of the blocks that it would hold, the oldest of which leave."""

    def __init__(self, tokenizer: Tokenizer, *, blocks: int, root: str, model: str) -> None:
        info = scripted_info(tokenizer, num_blocks=blocks, root=root, model=model, max_model_len=8192)
        super().__init__("engine-0", tokenizer, info)
        self._held: OrderedDict[bytes, None] = OrderedDict()
        self._blocks = blocks

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Output, None]:
        """What the cache holds is told, what it lacks is stored."""
        keys = chain_keys(request.root, request.token_ids, 16)
        hit = next((index for index, key in enumerate(keys) if key not in self._held), len(keys))
        hit = min(hit, (len(request.token_ids) - 1) // 16)
        self._held.update(dict.fromkeys(keys))
        for key in keys:
            self._held.move_to_end(key)
        removed = [self._held.popitem(last=False)[0] for _ in range(len(self._held) - self._blocks)]
        events = (BlockStored(tuple(keys[hit:]), None, 16), BlockRemoved(tuple(removed)))
        for observer in self._observers:
            observer.on_events(self, events)
        seconds = 1e-3 * (len(request.token_ids) - 16 * hit)
        yield Output(0, "word", (5,), finish_reason="length", cached_tokens=16 * hit, prefill_s=seconds, queue_s=0.0)


async def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Alternate between both gateways and return the medians."""
    configure_logging("error")
    spent: dict[bool, list[float]] = {True: [], False: []}
    missed: dict[str, Any] = {}
    async with AsyncExitStack() as stack:
        urls = {}
        for enabled in spent:
            config = log_config(
                arguments.folder,
                model="smollm2-135m-instruct",
                kv_blocks=arguments.kv_blocks,
                attribution__enabled=enabled,
                server__log_level="error",
                redis__url="redis://127.0.0.1:1/0",
            )
            folder = fetch_model(model_spec(config.engine))
            tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
            replica = RememberingReplica(
                tokenizer, blocks=arguments.kv_blocks, root=str(folder), model="smollm2-135m-instruct"
            )
            gateway = Gateway(config, model="smollm2-135m-instruct", folder=folder, replicas=[replica])
            urls[enabled] = await stack.enter_async_context(serving(gateway))
        bursts = arguments.requests // arguments.burst
        sender = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "benchmarks.attribution", str(arguments.folder), "--send", "--requests",
            str(arguments.requests), "--burst", str(arguments.burst), "--rate", str(arguments.rate),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        assert sender.stdin is not None
        assert sender.stdout is not None
        await sender.stdout.readline()
        for burst in range(bursts):
            for enabled in (True, False) if burst % 2 else (False, True):
                started = time.process_time()
                sender.stdin.write(msgspec.json.encode([urls[enabled], burst]) + b"\n")
                answer = await sender.stdout.readline()
                if answer != b"done\n":
                    raise SystemExit(f"the sender says {answer!r}")
                spent[enabled].append((time.process_time() - started) / arguments.burst)
        sender.stdin.close()
        await sender.wait()
        async with aiohttp.ClientSession() as http, http.get(f"{urls[True]}/admin/stats") as response:
            totals = (await response.json())["totals"]
            missed = {cause: lost["tokens"] for cause, lost in totals["missed"].items()}
    on, off = (statistics.median(spent[enabled][1:]) for enabled in (True, False))
    ratios = [one / other for one, other in zip(spent[True][1:], spent[False][1:], strict=True)]
    return {
        "requests": totals["requests"],
        "token_hit_rate": totals["token_hit_rate"],
        "missed": missed,
        "missed_tokens": totals["missed_tokens"],
        "cpu_ms_per_request": {"on": 1e3 * on, "off": 1e3 * off},
        "ratio": on / off,
        "ratio_of_pairs": statistics.median(ratios),
        "met": statistics.median(ratios) <= MOST_RATIO,
    }


async def send(arguments: argparse.Namespace) -> None:
    """The sender: for each line ``[url, burst]`` on standard input sends that burst, and says when it is answered."""
    bodies = [
        {key: value for key, value in body.items() if not key.startswith("stream")}
        for body in read_bodies(arguments.folder, requests=arguments.requests, k=5, model="smollm2-135m-instruct")
    ]
    print("ready", flush=True)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:

        async def one(url: str, body: dict[str, Any], at: float) -> None:
            await asyncio.sleep(max(0.0, at - time.monotonic()))
            async with http.post(f"{url}/v1/chat/completions", json=body) as response:
                await response.read()
                response.raise_for_status()

        loop = asyncio.get_running_loop()
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            url, burst = msgspec.json.decode(line)
            first = time.monotonic()
            batch = bodies[burst * arguments.burst : (burst + 1) * arguments.burst]
            await asyncio.gather(*[one(url, body, first + i / arguments.rate) for i, body in enumerate(batch)])
            print("done", flush=True)


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the log's folder")
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--burst", type=int, default=200)
    parser.add_argument("--rate", type=float, default=200.0, help="requests a second")
    parser.add_argument("--kv-blocks", type=int, default=4096)
    parser.add_argument("--send", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.send:
        asyncio.run(send(arguments))
    else:
        print_json(run(measure(arguments)))


if __name__ == "__main__":
    main()
