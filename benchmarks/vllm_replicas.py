"""Hold the gateway's index against two real vLLM replicas: is what it predicts what vLLM had cached, to the token?

    python -m benchmarks.vllm_replicas --vllm ~/vllm/bin/python --model FOLDER   # benchmarks/README.md

Each request is explained first, then sent, one at a time, and the events it caused are waited for before the next. The
caches are small, so that blocks are evicted all the time. The gateway asks for every other answer as one. One replica
names blocks by ``xxhash_cbor``, the other by ``sha256``, vLLM's default; both names are computed here too. Then the
gateway forgets what it has heard, as if it had just been started. At the end one replica is killed under load. Exit
status 1 when anything is not as it should be.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Final

import aiohttp
import zmq
import zmq.asyncio

from benchmarks.side_by_side.peers import vllm_preload
from benchmarks.side_by_side.servers import free_port, running
from cache_policy.vllm_keys import VllmHash, event_hash, vllm_block_hashes
from gateway.config import Config, RedisConfig, ReplicaConfig, ServerConfig
from gateway.demo.corpus import read_corpus
from gateway.replicas.kv_messages import Stored, decode_events
from gateway.replicas.remote import RemoteReplicas, replica_id
from gateway.routing import flight
from gateway.server import run, serving
from gateway.service import Gateway

_HASHES: Final[tuple[VllmHash, ...]] = ("xxhash_cbor", "sha256")
_SEED: Final = "0"
_START_S: Final = 420.0
_REPEATED: Final = 5
"""So few of its messages a vLLM repeats that a gateway which asks late misses most of them."""

_REPEATS_S: Final = 5.0
"""So long after it has forgotten everything the gateway has what it can have."""

_QUIET_S: Final = 0.12
"""vLLM tells of a step when it has ended: so long after an answer everything has been told."""

_SYSTEM: Final = (
    "You are the documentation assistant of an engineering team that writes Python. Answer from the documentation "
    "excerpts that come with the question and from nothing else, in one sentence, and name the function that helps."
)
_HITS: Final = re.compile(r"^vllm:prefix_cache_hits_total\{[^}]*\} ([0-9.e+]+)$", re.MULTILINE)


class Audit:
    """Listens beside the gateway and computes each block's name by vLLM's rules, from the tokens that events tell."""

    def __init__(self, context: zmq.asyncio.Context, endpoint: str, algorithm: VllmHash) -> None:
        self.equal = self.different = self.messages = self.removed = 0
        self.heard_at = 0.0
        self._algorithm: VllmHash = algorithm
        self._prefixes: dict[object, tuple[list[int], str | None]] = {}
        self._socket = context.socket(zmq.SUB)
        self._socket.subscribe(b"")
        self._socket.connect(endpoint)

    async def listen(self) -> None:
        """Follow the events until cancelled."""
        while True:
            frames = await self._socket.recv_multipart()
            self.messages += 1
            self.heard_at = time.monotonic()
            for event in decode_events(frames[-1]):
                if isinstance(event, Stored):
                    self._compare(event)
                else:
                    self.removed += 1

    def _compare(self, event: Stored) -> None:
        tokens: list[int] = []
        salt = None
        if event.parent_block_hash is not None:
            if event.parent_block_hash not in self._prefixes:
                return  # stored before this listened
            tokens, salt = self._prefixes[event.parent_block_hash]
        elif event.extra_keys and event.extra_keys[0]:
            (salt,) = event.extra_keys[0]
        size = event.block_size
        whole = [*tokens, *event.token_ids]
        names = vllm_block_hashes(whole, size, self._algorithm, seed=_SEED, salt=salt)[-len(event.block_hashes) :]
        for index, (told, computed) in enumerate(zip(event.block_hashes, names, strict=True), 1):
            same = told == event_hash(computed)
            self.equal += same
            self.different += not same
            self._prefixes[told] = whole[: len(tokens) + index * size], salt


class Server:
    """One vLLM: how it is started, and what it says of itself."""

    def __init__(self, number: int, arguments: argparse.Namespace, folder: Path) -> None:
        self.algorithm = _HASHES[number]
        self.url = f"http://127.0.0.1:{free_port()}"
        self.events = f"ipc://{folder}/events-{number}"
        self.replay = f"ipc://{folder}/replay-{number}"
        self.group = 0
        self.id = replica_id(self.url)
        cores = sorted(os.sched_getaffinity(0))
        self.environment = os.environ | {
            "VLLM_CPU_OMP_THREADS_BIND": str(cores[number % len(cores)]),
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "PYTHONHASHSEED": _SEED,
            "LD_PRELOAD": arguments.vllm_preload or vllm_preload(arguments.vllm),
        }
        self.environment.pop("PYTHONPATH", None)
        kv_events = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": self.events,
            "replay_endpoint": self.replay,
            "buffer_steps": _REPEATED,
        }
        self.command = [str(arguments.vllm), "-P", "-m", "vllm.entrypoints.openai.api_server"]
        self.command += ["--model", str(arguments.model), "--served-model-name", "m", "--dtype", "bfloat16"]
        self.command += ["--host", "127.0.0.1", "--port", self.url.rpartition(":")[2]]
        self.command += ["--num-gpu-blocks-override", str(arguments.blocks), "--max-model-len", "2048"]
        self.command += ["--enable-prompt-tokens-details", "--prefix-caching-hash-algo", self.algorithm]
        self.command += ["--kv-events-config", json.dumps(kv_events), "--max-num-seqs", "8", "--enforce-eager"]

    async def hits(self, http: aiohttp.ClientSession) -> int:
        """Prompt tokens that it has found in its cache so far, by its own count."""
        async with http.get(f"{self.url}/metrics") as response:
            found = _HITS.findall(await response.text())
        return int(sum(map(float, found)))


def bodies(seed: int) -> Iterator[dict[str, Any]]:
    """RAG requests without end: some of few documents, by Zipf's law, and a question of its own each."""
    rng = random.Random(seed)
    passages = rng.sample(read_corpus(), 24)
    for number in range(10**9):
        weights = {index: 1 / (1 + index) for index in range(len(passages))}
        chosen = []
        for _ in range(rng.choice((2, 3, 4))):
            (index,) = rng.choices(list(weights), list(weights.values()))
            del weights[index]
            chosen.append(passages[index])
        yield {
            "model": "m",
            "max_tokens": 1,
            "temperature": 0,
            "messages": [
                {"role": "system", "content": _SYSTEM},
                {"role": "user", "content": f"Question {number}: what is {chosen[-1].title} for?"},
            ],
            "documents": [{"id": passage.id, "title": passage.title, "text": passage.text} for passage in chosen],
        }


class Comparison:
    """The gateway beside its replicas, and what has been found."""

    def __init__(self, gateway: Gateway, http: aiohttp.ClientSession, base: str, servers: list[Server]) -> None:
        self.gateway = gateway
        self.http = http
        self.base = base
        self.servers = servers
        self.audits: list[Audit] = []
        self.problems: list[str] = []
        self.placed: Counter[str] = Counter()
        self.begun: Counter[str] = Counter()
        """Streamed answers of which some text has come, by replica."""
        self.predicted = self.cached = self.prompt = self.counted = 0
        self.late_predicted = self.late_cached = 0

    async def post(self, path: str, body: dict[str, Any]) -> tuple[Any, Any]:
        """Headers and body of an answer of the gateway."""
        async with self.http.post(f"{self.base}{path}", json=body) as response:
            response.raise_for_status()
            return response.headers, await response.json()

    async def drained(self) -> None:
        """Wait until the replicas have told everything and the gateway has heard it."""
        asked = time.monotonic()
        while time.monotonic() - max(asked, *(audit.heard_at for audit in self.audits)) < _QUIET_S:  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    async def compare(self, body: dict[str, Any], alive: list[Server], *, late: bool = False) -> None:
        """Send one request and hold its prediction against the replica's two counts.

        A gateway that came ``late`` may predict too little, and is not counted with the others.
        """
        before = {server.id: await server.hits(self.http) for server in alive}
        _, explained = await self.post("/v1/explain", body)
        headers, answer = await self.post("/v1/chat/completions", body)
        replica = headers["x-headstart-replica"]
        (candidate,) = [row for row in explained["candidates"] if row["replica"] == replica]
        (server,) = [server for server in alive if server.id == replica]
        usage = answer["usage"]
        predicted, cached = candidate["cached_tokens"], usage["prompt_tokens_details"]["cached_tokens"]
        counted = await server.hits(self.http) - before[replica]
        await self.drained()
        where = f"{replica}, {'late' if late else f'request {self.placed.total() + 1}'}"
        if not (predicted == cached or (late and predicted < cached)) or cached != counted:
            self.problems.append(f"{where}: predicted {predicted}, usage {cached}, its counter {counted}")
        if usage["prompt_tokens"] != candidate["prompt_tokens"]:
            self.problems.append(f"{where}: {candidate['prompt_tokens']} tokens sent, {usage['prompt_tokens']} read")
        held = self.gateway.router.index.holds(replica)
        if missing := [key for key in candidate["keys"] if bytes.fromhex(key) not in held]:
            self.problems.append(f"{where}: {len(missing)} blocks of the prompt are not in the index afterwards")
        if late:
            self.late_predicted += predicted
            self.late_cached += cached
            return
        self.placed[replica] += 1
        self.predicted += predicted
        self.cached += cached
        self.counted += counted
        self.prompt += usage["prompt_tokens"]

    @property
    def came_as_one(self) -> int:
        """Answers that were not asked for in a stream: nobody knows when their first tokens came."""
        sums = self.gateway.statistics.window(None).table.values()
        return sum(each.requests - sum(each.ttft.values()) for each in sums)

    async def begin_late(self, source: Iterator[dict[str, Any]], count: int) -> None:
        """Forget what was heard, and learn again from what is repeated and from what requests find."""
        for replica in self.gateway.replicas.values():
            replica.resync()
        await asyncio.sleep(_REPEATS_S)
        before = self._exact()
        if self.exact(self.servers):
            self.problems.append("all events were repeated: nothing was shown of a late beginning")
        for _ in range(count):
            await self.compare(next(source), self.servers, late=True)
        print(f"{'begun late':>32}: {self.late_predicted} of {self.late_cached} cached tokens predicted in {count}")
        print(f"{'replicas known exactly':>32}: {before} at first, {self._exact()} in the end")

    def exact(self, servers: list[Server]) -> bool:
        """Whether all that these hold is known."""
        healths = [self.gateway.replicas[server.id].event_health for server in servers]
        return all(health is not None and health.exact for health in healths)

    def _exact(self) -> int:
        return sum(self.exact([server]) for server in self.servers)

    async def stream(self, body: dict[str, Any]) -> tuple[str, bool, int]:
        """One streamed answer: how it ended, whether any text had come, and how many tokens its usage says."""
        body = body | {"stream": True, "max_tokens": 48, "ignore_eos": True, "stream_options": {"include_usage": True}}
        began, ended, tokens = False, "cut", 0
        try:
            async with self.http.post(f"{self.base}/v1/chat/completions", json=body) as response:
                if response.status != 200:
                    return f"status {response.status}", False, 0
                async for line in response.content:
                    data = line.removeprefix(b"data: ").strip()
                    if data == b"[DONE]":
                        ended = "done" if ended == "length" else ended
                    elif line.startswith(b"data: "):
                        event = json.loads(data)
                        if "error" in event:
                            return "error", began, 0
                        tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
                        for choice in event["choices"]:
                            if not began and choice["delta"].get("content"):
                                began = True
                                self.begun[response.headers["x-headstart-replica"]] += 1
                            ended = choice["finish_reason"] or ended
        except aiohttp.ClientError as error:
            return type(error).__name__, began, 0
        return ended, began, tokens

    async def kill_one(self, source: Iterator[dict[str, Any]], count: int) -> tuple[Counter[str], list[Server]]:
        """Kill the replica that answers first while ``count`` answers are on their way.

        How they ended, and the servers that are left.
        """
        answers = [asyncio.create_task(self.stream(next(source))) for _ in range(count)]
        while not self.begun and not all(answer.done() for answer in answers):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        victim = next((server for server in self.servers if self.begun[server.id]), self.servers[0])
        os.killpg(victim.group, signal.SIGKILL)
        ends: Counter[str] = Counter()
        for how, began, tokens in await asyncio.gather(*answers):
            ends["whole" if how == "done" else f"{how}, after its first token" if began else how] += 1
            if how == "done" and tokens != 48:
                self.problems.append(f"an answer of {tokens} tokens instead of 48 ended as if it were whole")
            if how not in ("done", "error") or (how == "error" and not began):
                self.problems.append(
                    f"an answer ended with {how!r}, its first token {'had' if began else 'had not'} come"
                )
        if not self.begun[victim.id]:
            self.problems.append("no answer of the killed replica had begun: nothing was shown")
        if self.gateway.router.index.holds(victim.id):
            self.problems.append("the killed replica is still credited with blocks")
        return ends, [server for server in self.servers if server is not victim]


async def compare(arguments: argparse.Namespace) -> bool:
    """Run everything; whether all was as it should be."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="headstart-vllm-")))
        servers = [Server(number, arguments, folder) for number in range(2)]
        for server in servers:  # one after the other: starting is what takes most of the machine
            print(f"starting vLLM with {server.algorithm} …", file=sys.stderr)
            ready = f"{server.url}/health"
            process = await stack.enter_async_context(running(server.command, server.environment, ready, _START_S))
            server.group = process.pid
        remote = RemoteReplicas(arguments.model, "m")
        replicas = [
            remote.connect(ReplicaConfig(server.url, events=server.events, events_replay=server.replay))
            for server in servers
        ]
        config = Config(server=ServerConfig(port=0), redis=RedisConfig(url="redis://127.0.0.1:1/0"), secret="benchmark")
        gateway = Gateway(config, model="m", folder=arguments.model, replicas=replicas)
        context = zmq.asyncio.Context()
        stack.callback(context.destroy, 0)
        http = await stack.enter_async_context(aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=300)))
        base = await stack.enter_async_context(serving(gateway))
        await gateway.wait_ready(60.0)
        comparison = Comparison(gateway, http, base, servers)
        comparison.audits = [Audit(context, server.events, server.algorithm) for server in servers]
        listeners = [asyncio.create_task(audit.listen()) for audit in comparison.audits]
        while not all(replica.tells_events for replica in replicas):  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        source = bodies(arguments.seed)
        started = time.monotonic()
        for number in range(arguments.requests):
            # Requests that come so seldom would all be asked for in a stream; under load nearly all come as one.
            vars(flight)["_LEARNING_INTERVAL_S"] = math.inf if number % 2 else 0.0
            await comparison.compare(next(source), servers)
            if number % 20 == 19:
                print(f"{number + 1} requests, {time.monotonic() - started:.0f} s", file=sys.stderr)
        _report(comparison)
        if arguments.late:
            await comparison.begin_late(source, arguments.late)
        ends, left = await comparison.kill_one(source, arguments.streams)
        print(f"{'answers under the kill':>32}: {dict(ends)}")
        for _ in range(arguments.after):
            # What it held when all was forgotten may still be unknown.
            await comparison.compare(next(source), left, late=not comparison.exact(left))
        for listener in listeners:
            listener.cancel()
        for problem in comparison.problems:
            print(f"NOT AS IT SHOULD BE: {problem}")
        print(f"{'after the kill':>32}: {arguments.after} requests at the other replica")
        print(f"{'deviations':>32}: {len(comparison.problems)}")
        return not comparison.problems


def _report(comparison: Comparison) -> None:
    equal, different = (sum(getattr(audit, name) for audit in comparison.audits) for name in ("equal", "different"))
    if different or not equal:
        comparison.problems.append(f"{different} block names differ from those computed here, {equal} are equal")
    if not comparison.came_as_one:
        comparison.problems.append("no answer was asked for as one: nothing was shown of them")
    evicted = sum(audit.removed for audit in comparison.audits)
    if not evicted:
        comparison.problems.append("nothing was evicted: nothing was shown")
    for what, value in (
        ("requests per replica", dict(comparison.placed)),
        ("answers that came as one", comparison.came_as_one),
        ("prompt tokens", comparison.prompt),
        ("predicted to be cached", comparison.predicted),
        ("cached by usage", comparison.cached),
        ("cached by vLLM's counter", comparison.counted),
        ("block names computed = told", f"{equal} of {equal + different}"),
        ("blocks evicted", evicted),
        ("messages of events", sum(audit.messages for audit in comparison.audits)),
    ):
        print(f"{what:>32}: {value}")


def main() -> int:
    """Read the command line, run, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", type=Path, required=True, help="the Python of an environment with vLLM's CPU build")
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face folder of the model that is served")
    parser.add_argument("--vllm-preload", help="libraries that vLLM preloads (default: tcmalloc and libiomp5 if found)")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--blocks", type=int, default=40, help="KV blocks of each replica (128 tokens each)")
    parser.add_argument("--late", type=int, default=40, help="requests after the gateway has forgotten what it heard")
    parser.add_argument("--streams", type=int, default=8, help="answers on their way when a replica is killed")
    parser.add_argument("--after", type=int, default=10, help="requests after the kill")
    parser.add_argument("--seed", type=int, default=0)
    return 0 if run(compare(parser.parse_args())) else 1


if __name__ == "__main__":
    sys.exit(main())
