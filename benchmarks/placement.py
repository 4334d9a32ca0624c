"""Placement in virtual time: the gateway's own router over replicas that are block caches with a queue.

    python -m benchmarks.placement            # a table: hit rate, balance and TTFT at several loads

A replica prefills one prompt after the other and decodes all answers side by side, as engines do with chunked prefill
at low cost of decoding. Its cache is an exact LRU over blocks, of which it tells by events.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import random
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from engine.models.catalog import DEFAULT_MODEL, ensure_model
from engine.wire import BlockRemoved, BlockStored, EngineInfo, Load, StepTiming
from gateway.config import CanonicalConfig
from gateway.plan import Caller, Plan
from gateway.prompt import PromptRenderer
from gateway.replicas.base import ReplicaState
from gateway.request_path import RequestPath
from gateway.routing.router import Router
from gateway.schema import ChatRequest

__all__ = ["BLOCK_SIZE", "STEP_S", "TOKEN_S", "BlockLru", "Outcome", "Policy", "rag_bodies", "simulate"]

Policy = Literal["headstart", "round robin", "one cache"]
"""``one cache`` is a single replica with the memory and the speed of all."""

BLOCK_SIZE: Final = 16
STEP_S: Final = 0.01
TOKEN_S: Final = 0.0002
_DECODE_S: Final = 0.8
_CALLER: Final = Caller("default")


class BlockLru:
    """The keys of a prefix cache that holds ``blocks``; of what is equally old the end of a prompt leaves first."""

    def __init__(self, blocks: int) -> None:
        self._blocks = blocks
        self._keys: OrderedDict[bytes, None] = OrderedDict()

    def request(self, keys: Sequence[bytes]) -> tuple[int, list[bytes], list[bytes]]:
        """Ask for a chain: how many of its first blocks were held, the keys that came in, and those that left."""
        hits = next((index for index, key in enumerate(keys) if key not in self._keys), len(keys))
        stored = [key for key in keys[hits:] if key not in self._keys]
        for key in reversed(keys):
            self._keys[key] = None
            self._keys.move_to_end(key)
        removed = []
        while len(self._keys) > self._blocks:
            key, _ = self._keys.popitem(last=False)
            removed.append(key)
        return hits, stored, removed


class _Replica:
    """A simulated replica. Owned by the simulation; to the router it looks like one of ours."""

    def __init__(self, id: str, blocks: int, speed: float) -> None:
        self.id = id
        self.url: str | None = None
        self.restarts = True
        self.tells_events = True
        self.reads_tokens = True
        self.forgiven = True
        self.cache_blocks = blocks
        self.state = ReplicaState.READY
        self.load: Load | None = None
        self.down_reason: str | None = None
        self.degraded: tuple[str, ...] = ()
        self.cache = BlockLru(blocks)
        self.speed = speed
        self.free_at = 0.0
        self.in_flight = 0
        self.profile = tuple(StepTiming(n, n * n // 2, 0, 0, (STEP_S + n * TOKEN_S) / speed) for n in (64, 256, 1024))
        self.info: EngineInfo | None = EngineInfo(
            model="m",
            root="",
            fingerprint="w",
            boot_id="1",
            max_model_len=1 << 20,
            num_blocks=blocks,
            block_size=BLOCK_SIZE,
            dtype="",
            device="",
            vocab_size=1 << 20,
            eos_token_ids=(),
            policy="lru",
            max_batch_tokens=1 << 20,
            profile=self.profile,
        )


class _Curve:
    """The simulated cost of prefill, known exactly."""

    def __init__(self, speed: float) -> None:
        self._speed = speed

    def seconds(self, tokens: int, context: int) -> float:
        return (STEP_S + tokens * TOKEN_S) / self._speed if tokens else 0.0


class Outcome(msgspec.Struct, frozen=True):
    """What came of a simulation.

    ``balance`` is the requests in flight at the busiest replica over the mean of all, averaged over time each;
    ``ttft_s`` are sorted.
    """

    hit_rate: float
    balance: float
    ttft_s: list[float]

    def ttft(self, quantile: float) -> float:
        """Seconds to the first token that the share ``quantile`` of the requests did not exceed."""
        return self.ttft_s[min(len(self.ttft_s) - 1, int(quantile * len(self.ttft_s)))]


def rag_bodies(count: int, seed: int, *, corpus: int = 100, words: int = 120, documents: int = 5) -> list[ChatRequest]:
    """Chat requests with one system prompt, ``documents`` of a corpus by Zipf's law, and a question of their own."""
    rng = random.Random(seed)

    def text(size: int) -> str:
        return " ".join(
            [f"{rng.choice('bcdfgklmnprst')}{rng.choice('aeiou')}{rng.randrange(100)}" for _ in range(size)]
        )

    system = "Answer from the documents. " + text(words)
    texts = [text(words) for _ in range(corpus)]
    weights = [1 / rank for rank in range(1, corpus + 1)]
    bodies: list[Any] = []
    for number in range(count):
        drawn: dict[int, None] = {}
        while len(drawn) < documents:
            drawn[rng.choices(range(corpus), weights)[0]] = None
        messages = [{"role": "system", "content": system}, {"role": "user", "content": f"{number}: {text(8)}?"}]
        bodies.append(
            {"model": "m", "messages": messages, "documents": [{"id": f"d{i}", "text": texts[i]} for i in drawn]}
        )
    return [msgspec.convert(body, ChatRequest) for body in bodies]


def simulate(
    bodies: Sequence[ChatRequest],
    renderer: PromptRenderer,
    policy: Policy,
    *,
    replicas: int = 4,
    blocks: int = 1024,
    rate: float,
    seed: int = 1,
) -> Outcome:
    """Let ``bodies`` arrive at random, ``rate`` a second on average, at replicas of ``blocks`` each."""
    clock = _Clock()
    fleet = (
        [_Replica("one", blocks * replicas, float(replicas))]
        if policy == "one cache"
        else [_Replica(f"r{index}", blocks, 1.0) for index in range(replicas)]
    )
    by_id: Any = {replica.id: replica for replica in fleet}
    router = Router(lambda id: _Curve(by_id[id].speed), clock=clock, draw=random.Random(seed))
    path = RequestPath(
        model="m", secret=b"s" * 32, canonical=CanonicalConfig(), templates={}, renderer=renderer, router=router
    )
    for replica in by_id.values():
        router.on_ready(replica, replica.info)
    run = _Run(clock, router, path, by_id)
    rng = random.Random(seed)
    turns = itertools.cycle(by_id)
    at = 0.0
    for body in bodies:
        at += rng.expovariate(rate)
        run.until(at)
        avoid = by_id.keys() - {next(turns)} if policy == "round robin" else frozenset()
        run.send(path.plan_chat(body, _CALLER, avoid))
    run.until(float("inf"))
    return run.outcome()


class _Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class _Run:
    """One simulation: owns the events to come and the sums."""

    def __init__(self, clock: _Clock, router: Router, path: RequestPath, replicas: dict[str, Any]) -> None:
        self._clock = clock
        self._router = router
        self._path = path
        self._replicas = replicas
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers: Iterator[int] = itertools.count()
        self._hits = self._tokens = 0
        self._ttft: list[float] = []
        self._busy = dict.fromkeys(replicas, 0.0)

    def until(self, time: float) -> None:
        """Let happen what is due."""
        while self._due and self._due[0][0] <= time:
            at, _, happen = heapq.heappop(self._due)
            self._go_to(at)
            happen()
        if time != float("inf"):
            self._go_to(time)

    def send(self, plan: Plan) -> None:
        """A request arrives where it was placed."""
        if plan.sighting is not None:
            self._path.popularity.observe(plan.sighting)
        replica = self._replicas[plan.replica_id]
        replica.in_flight += 1
        block: AbstractContextManager[Any] = self._router.dispatch(plan)
        flight = block.__enter__()
        arrived = self._clock.now
        begins = max(arrived, replica.free_at)
        readable = plan.keys[: (len(plan.token_ids) - 1) // BLOCK_SIZE]
        # The cache is asked in the order of arrival, which is that of prefill; it tells when the prompt is computed.
        hits, stored, removed = replica.cache.request(readable)
        cached = hits * BLOCK_SIZE
        replica.free_at = begins + _Curve(replica.speed).seconds(len(plan.token_ids) - cached, cached)
        self._hits += cached
        self._tokens += len(plan.token_ids)

        def computed() -> None:
            self._ttft.append(self._clock.now - arrived)
            self._router.on_events(
                replica, (BlockStored(tuple(stored), None, BLOCK_SIZE), BlockRemoved(tuple(removed)))
            )
            flight.prefilled()
            flight.told(cached)

        def ended() -> None:
            replica.in_flight -= 1
            block.__exit__(None, None, None)

        self._at(replica.free_at, computed)
        self._at(replica.free_at + _DECODE_S, ended)

    def outcome(self) -> Outcome:
        """What came of it."""
        mean = sum(self._busy.values()) / len(self._busy)
        return Outcome(self._hits / self._tokens, max(self._busy.values()) / mean, sorted(self._ttft))

    def _at(self, time: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._due, (time, next(self._numbers), happen))

    def _go_to(self, time: float) -> None:
        for id, replica in self._replicas.items():
            self._busy[id] += replica.in_flight * (time - self._clock.now)
        self._clock.now = time


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--model", type=Path, help="folder with tokenizer and chat template (default: the default model)"
    )
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--blocks", type=int, default=1024, help="of each of the four replicas")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    renderer = PromptRenderer(arguments.model or ensure_model(DEFAULT_MODEL))
    bodies = rag_bodies(arguments.requests, arguments.seed)
    print(f"{'requests/s':>10}  {'policy':<12} {'hit rate':>8} {'busiest/mean':>12} {'TTFT p50':>9} {'p90':>9}")
    policies: tuple[Policy, ...] = ("headstart", "round robin", "one cache")
    for rate in (1.0, 4.0, 8.0, 12.0):
        for policy in policies:
            outcome = simulate(bodies, renderer, policy, blocks=arguments.blocks, rate=rate, seed=arguments.seed)
            print(
                f"{rate:>10g}  {policy:<12} {outcome.hit_rate:>8.1%} {outcome.balance:>12.2f} "
                f"{outcome.ttft(0.5) * 1e3:>6.0f} ms {outcome.ttft(0.9) * 1e3:>6.0f} ms"
            )


if __name__ == "__main__":
    main()
