"""Hold the adaptive policy against LRU and the optimum on traces that it was not made with.

    python -m benchmarks.held_out DATA --seeds 7,8

Series of the RAG log with other numbers of documents, and made-up traffic of five kinds, each with several seeds:
popularity that drifts, popular prompts amid a scan, a loop over a little more than the cache, tenants of different
kinds together, coding sessions. Token hit rates in percent under prefix semantics. The last column is what `adaptive`
loses to LRU where it does worst; no more than 0.2 points are allowed at any size of 2 % and more.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.policies import load
from cache_policy.replay import replay
from cache_policy.traces import Trace
from gateway.cli.terminal import progress_bar

PERCENTS = (2, 5, 10, 20)
SERIES = ("rag_hoisted_k3", "rag_hoisted_k10", "rag_as_is", "claude_code_A")
Part = tuple[object, int]
"""What a part of a prompt says, and how many blocks it has."""


def trace_of(name: str, requests: Iterable[Sequence[Part]]) -> Trace:
    """Prompts as chains of numbered blocks; equal beginnings are equal blocks."""
    numbers: dict[tuple[int, object, int], int] = {}
    parents: list[int] = []
    chains = []
    for parts in requests:
        parent, chain = -1, []
        for content, blocks in parts:
            for place in range(blocks):
                key = (parent, content, place)
                if key not in numbers:
                    numbers[key] = len(parents)
                    parents.append(parent)
                parent = numbers[key]
                chain.append(parent)
        chains.append(tuple(chain))
    return Trace(name, tuple(chains), tuple(16 * len(chain) for chain in chains), tuple(parents), 16)


def zipf(count: int, exponent: float) -> list[float]:
    """Cumulative weights of so many ranks."""
    return list(accumulate((rank + 1) ** -exponent for rank in range(count)))


def drift(rng: random.Random) -> Iterator[list[Part]]:
    """Documents by Zipf's law; every 20 requests a forgotten one becomes the most popular."""
    ranks = list(range(400))
    lengths = [rng.randint(6, 16) for _ in ranks]
    weights = zipf(len(ranks), 0.9)
    for number in range(3000):
        if number % 20 == 0:
            ranks.insert(0, ranks.pop(rng.randrange(len(ranks) // 2, len(ranks))))
        documents = dict.fromkeys(rng.choices(ranks, cum_weights=weights, k=3))
        yield [(("system", number % 3), 10), *((d, lengths[d]) for d in documents), (("question", number), 2)]


def scan(rng: random.Random) -> Iterator[list[Part]]:
    """Popular prompts, and every now and then a batch that reads a hundred documents once."""
    weights = zipf(150, 1.0)
    left = 0
    for number in range(3500):
        if not left and rng.random() < 0.01:
            left = 100
        if left:
            left -= 1
            yield [("batch", 8), (("once", number), 20)]
        else:
            (prompt,) = rng.choices(range(150), cum_weights=weights)
            yield [("chat", 8), (("prompt", prompt), 18), (("question", number), 1)]


def loop(rng: random.Random) -> Iterator[list[Part]]:
    """The same documents over and over in the same order, now and then fewer or more of them."""
    count = 60
    place = 0
    for number in range(3000):
        if place >= count:
            place, count = 0, rng.choice((30, 60, 120))
        yield [("system", 12), (("document", place), 20), (("question", number), 1)]
        place += 1


def tenants(rng: random.Random) -> Iterator[list[Part]]:
    """One asks about few documents, one about many, one chats, and one sends what nobody sends twice."""
    few, many = zipf(20, 0.6), zipf(600, 0.8)
    chats: list[list[int]] = []
    for number in range(3000):
        tenant = rng.choices(range(4), (40, 30, 20, 10))[0]
        head: Part = (("tenant", tenant), 9)
        if tenant == 0:
            yield [head, (("few", rng.choices(range(20), cum_weights=few)[0]), 15), (("question", number), 2)]
        elif tenant == 1:
            documents = dict.fromkeys(rng.choices(range(600), cum_weights=many, k=4))
            yield [head, *((("many", d), 9) for d in documents), (("question", number), 2)]
        elif tenant == 2:
            if not chats or rng.random() < 0.2:
                chats.append([])
            chat = chats[-1 - min(len(chats) - 1, int(rng.expovariate(0.2)))]
            chat.append(number)
            yield [head, *((("turn", turn), 4) for turn in chat)]
        else:
            yield [head, (("once", number), rng.randint(10, 60))]


def coding(rng: random.Random) -> Iterator[list[Part]]:
    """Sessions whose prompts grow turn by turn, some in bursts, some resumed late, and now and then cut back."""
    sessions: list[list[Part]] = [[] for _ in range(12)]
    active = 0
    for number in range(2500):
        if rng.random() < 0.15:
            active = rng.randrange(len(sessions))
        turns = sessions[active]
        if len(turns) > 40 or rng.random() < 0.01:
            turns.clear()
        elif turns and rng.random() < 0.05:
            del turns[rng.randrange(len(turns)) :]
        turns.append((("turn", number), rng.randint(1, 8)))
        yield [("tools", 30), (("project", active % 5), 20), *turns]


KINDS: dict[str, Callable[[random.Random], Iterator[list[Part]]]] = {
    made.__name__: made for made in (drift, scan, loop, tenants, coding)
}


def traces(data: Path | None, seeds: Sequence[int]) -> Iterator[Trace]:
    """All of them; the series only where their data is."""
    for name in SERIES if data is not None else ():
        assert data is not None
        trace = load(data, name)
        yield Trace(name, trace.requests, trace.lengths, trace.parents, trace.block_size)
    for name, made in KINDS.items():
        for seed in seeds:
            yield trace_of(f"{name}, seed {seed}", made(random.Random(seed)))


def main() -> None:
    """Print a table of all traces."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "data", type=Path, nargs="?", help="folder of the reference data; without it, made-up traces only"
    )
    parser.add_argument("--seeds", default="7,8", help="of the made-up traces (default: 7,8)")
    arguments = parser.parse_args()
    seeds = [int(seed) for seed in arguments.seeds.split(",")]
    table = Table("trace", *(f"{percent} %" for percent in PERCENTS), "mean gap closed", "worst against LRU")
    table.title = "adaptive (LRU, optimum)"
    with progress_bar() as bar:
        task = bar.add_task("", total=len(KINDS) * len(seeds) + (len(SERIES) if arguments.data else 0))
        for trace in traces(arguments.data, seeds):
            bar.update(task, description=trace.name)
            cells, gaps, leads = [], [], []
            for percent in PERCENTS:
                blocks = max(1, round(trace.unique_blocks * percent / 100))
                low, own, high = (replay(trace, name, blocks).token_hit_rate for name in ("lru", "adaptive", "opt"))
                cells.append(f"{100 * own:.2f} ({100 * low:.2f}, {100 * high:.2f})")
                leads.append(own - low)
                if high - low > 0.001:
                    gaps.append((own - low) / (high - low))
            mean = f"{100 * sum(gaps) / len(gaps):.0f} %" if gaps else ""
            table.add_row(trace.name, *cells, mean, f"{100 * min(leads):+.2f}")
            bar.advance(task)
    Console(width=130).print(table)


if __name__ == "__main__":
    main()
