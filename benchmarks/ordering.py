"""Document orders on a request log: token hit rate by cache size and cost, side by side with ContextPilot.

    python -m benchmarks.ordering DATA [--peer ~/contextpilot/bin/python]

The folder holds ``rag_xquad_en`` and, for comparison, ``ORACLES.json`` (see its README). Every cache is replayed with
the orders that are chosen for what it holds. ``us`` is the processor time of an order per request in microseconds,
with all that belongs to it: fingerprints of the documents, the search, popularity, and counting. Between two orders a
request is simulated, which empties the processor's caches as a real one would.

The second part is the cost in a corpus of 100,000 documents, for 5, 10 and 20 documents per request: each of them has
been sent twice and is cached, then requests drawn by Zipf's law are timed. The prompt's block keys, which a request
needs anyway, are timed beside it: ``keys_us`` as they are made behind an order, which has hashed some of them, and
``keys_us_alone`` as they are made without; ``added_us`` is what the order adds to a request, all three together.
With ``--peer``, contexts of the same corpus are fed to one index until
ContextPilot fails or its time is up.
Prints one JSON object.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence, Set
from pathlib import Path
from typing import Any, Final

from rich.progress import MofNCompleteColumn

from benchmarks.rag_trace import RagPrompt, rag_prompts
from cache_policy.keys import TOKEN_BYTES, chain_keys
from gateway.analysis.cache import SimulatedFleet
from gateway.canonical.batch_order import BatchRequest, batch_orders
from gateway.canonical.documents import Document, read_documents
from gateway.canonical.popularity import Popularity, ranking
from gateway.canonical.resident import ResidentPath, ResidentPaths
from gateway.canonical.sighting import Scope, Sighting
from gateway.cli.terminal import fetch_model, print_json, progress_bar

BLOCK_SIZE: Final = 16
SIZES: Final = (512, 1024, 2048, 4096, 8192, None)
"""Blocks of the caches; None never forgets."""

CORPUS: Final = 100_000
WIDTHS: Final = (5, 10, 20)
"""Documents per request in the second part."""

_ROOT: Final = b"benchmark root.."
_STRIDE: Final = BLOCK_SIZE * TOKEN_BYTES
_LABEL: Final = bytes(4 * TOKEN_BYTES)
"""What every document of the corpus begins with."""

_LAST: Final = 100
"""Contexts at the end of the peer's run that are timed."""

Order = Callable[[RagPrompt, Set[bytes]], Sequence[int]]
"""(request, resident keys) -> its documents' indexes, first to last."""


class OnlineOrder:
    """The gateway's ``cache-aware`` or ``popularity`` with the state that its request path keeps."""

    def __init__(self, mode: str = "cache-aware") -> None:
        self.paths: Final = ResidentPaths()
        self.popularity: Final = Popularity()
        self.seconds: Final[list[float]] = []
        self._walks: Final = mode == "cache-aware"

    def __call__(self, prompt: RagPrompt, resident: Set[bytes]) -> Sequence[int]:
        """Choose for one cache, count the request, and note the time."""
        return self.choose(prompt, resident)[0]

    def choose(self, prompt: RagPrompt, resident: Set[bytes]) -> tuple[Sequence[int], ResidentPath]:
        """The order, and what of the prompt was found resident."""
        documents = _documents(prompt.documents, prompt.blocks)
        for document in documents:
            _ = document.block
        path = ResidentPath()
        started = time.process_time()
        fingerprints = tuple([document.fingerprint for document in documents])
        scope = Scope("default", prompt.template)
        snapshot = self.popularity.snapshot(scope)
        if self._walks:
            asked = snapshot.asked(fingerprints)
            data = (prompt.head, prompt.blocks, _ROOT, BLOCK_SIZE, resident)
            path = self.paths.longest(*data, preferred=ranking(asked))
            order = snapshot.order(fingerprints, path.documents, asked=asked)
        else:
            order = snapshot.order(fingerprints, ranks=_ranks(prompt))
        self.popularity.observe(Sighting(scope, fingerprints))
        self.seconds.append(time.process_time() - started)
        return order, path


def _documents(names: Sequence[str], blocks: Sequence[bytes]) -> tuple[Document, ...]:
    """Documents with some text instead of the real one, which is shorter: it only has to be read."""
    return read_documents([{"id": name, "text": data.hex()} for name, data in zip(names, blocks, strict=True)])[0]


def as_retrieved(prompt: RagPrompt, resident: Set[bytes]) -> Sequence[int]:
    """The caller's order."""
    return range(len(prompt.documents))


def by_id(prompt: RagPrompt, resident: Set[bytes]) -> Sequence[int]:
    """Sorted by id."""
    return sorted(range(len(prompt.documents)), key=prompt.documents.__getitem__)


def known_in_advance(prompts: Sequence[RagPrompt]) -> Order:
    """The order of a batch: it has seen all of ``prompts`` before the first of them is sent."""
    orders = iter(
        batch_orders(
            [BatchRequest(prompt.template, prompt.documents, tuple(map(len, prompt.blocks))) for prompt in prompts]
        )
    )
    return lambda prompt, resident: next(orders)


def _ranks(prompt: RagPrompt) -> list[int]:
    return sorted(range(len(prompt.documents)), key=by_id(prompt, set()).__getitem__)


def replay(prompts: Sequence[RagPrompt], order: Order, blocks: int | None) -> float:
    """Token hit rate of an LRU cache of so many blocks, which is asked for all ``prompts`` in this order."""
    (cache,) = SimulatedFleet((blocks,), "lru", BLOCK_SIZE, 1).caches
    hits = tokens = 0
    for prompt in prompts:
        hits += BLOCK_SIZE * cache.request(_keys(prompt, order(prompt, cache.resident)))
        tokens += (len(prompt.head) + sum(map(len, prompt.blocks)) + len(prompt.tail)) // TOKEN_BYTES
    return hits / tokens


def _keys(prompt: RagPrompt, order: Sequence[int]) -> list[bytes]:
    """The block keys of a prompt with its documents in ``order``."""
    return chain_keys(_ROOT, _tokens(prompt, order), BLOCK_SIZE)


def _tokens(prompt: RagPrompt, order: Sequence[int]) -> bytes:
    return b"".join((prompt.head, *(prompt.blocks[index] for index in order), prompt.tail))


class PeerOrders:
    """What ContextPilot makes of contexts, one by one; it does not look at the cache."""

    def __init__(self, python: str, contexts: Sequence[tuple[str, tuple[str, ...]]], limit_s: float) -> None:
        self.orders: list[tuple[str, ...]] = []
        self.seconds: list[float] = []
        self.failed: list[int] = []
        self.failure: str | None = None
        script = Path(__file__).with_name("contextpilot_orders.py")
        lines = "".join(json.dumps([index, list(context)]) + "\n" for index, context in contexts)
        try:
            run = subprocess.run([python, script], input=lines, capture_output=True, text=True, timeout=limit_s)
            output = run.stdout
            if run.returncode:
                self.failure = run.stderr.strip().splitlines()[-1]
        except subprocess.TimeoutExpired as expired:
            output = (expired.stdout or b"").decode() if isinstance(expired.stdout, bytes) else expired.stdout or ""
            self.failure = f"stopped after {limit_s:.0f} s"
        for line in output.splitlines()[: len(contexts)]:
            answer = json.loads(line) if line.endswith(("]", '"')) else "cut off"
            if isinstance(answer, str):
                self.failure = self.failure or answer
                self.failed.append(len(self.orders))
                self.orders.append(contexts[len(self.orders)][1])
                continue
            self.seconds.append(answer[0])
            self.orders.append(tuple(answer[1]))

    def order(self) -> Order:
        """Replay its orders from the first request on; where it failed, as retrieved."""
        upcoming = iter(self.orders)

        def choose(prompt: RagPrompt, resident: Set[bytes]) -> Sequence[int]:
            names = next(upcoming, prompt.documents)
            return [prompt.documents.index(name) for name in names]

        return choose


def log_figures(folder: Path, tokenizer: Path, k: int, peer: str | None) -> dict[str, Any]:
    """Token hit rates of all orders by cache size on the log, and the time per request of those that are computed."""
    prompts = [*rag_prompts(folder / "rag_xquad_en", tokenizer, hoist=True, documents=k)]
    orders: dict[str, Callable[[], Order]] = {
        "relevance": lambda: as_retrieved,
        "doc_id": lambda: by_id,
        "popularity": lambda: OnlineOrder("popularity"),
        "cache-aware": OnlineOrder,
        "batch (knows what comes)": lambda: known_in_advance(prompts),
    }
    figures: dict[str, Any] = {"requests": len(prompts), "k": k, "best_online_reference": _reference(folder, k)}
    if peer is not None:
        answers = PeerOrders(peer, [(prompt.template, prompt.documents) for prompt in prompts], 1800)
        orders["contextpilot"] = answers.order
        figures["contextpilot"] = {"us": _microseconds(answers.seconds), "failure": answers.failure}
        figures["contextpilot"]["failed_requests"] = len(answers.failed)
    with progress_bar(MofNCompleteColumn()) as progress:
        for name, blocks in progress.track([*itertools.product(orders, SIZES)]):
            order = orders[name]()
            row = figures.setdefault(name, {})
            row[str(blocks or "inf")] = round(replay(prompts, order, blocks), 5)
            if isinstance(order, OnlineOrder):
                row.setdefault("us", {})[str(blocks or "inf")] = _microseconds(order.seconds)
    return figures


def _reference(folder: Path, k: int) -> dict[str, float]:
    """The best that an order without foresight reached in the reference measurements, by cache size."""
    path = folder / "ORACLES.json"
    if not path.is_file():
        return {}
    rows = json.loads(path.read_text())["rag_order"]["xquad_en"]
    rows = [row for row in rows if row["k"] == k and row["hoist"] and "lru" in row and row["order"] != "pop_static"]
    best = {size: max(row["lru"][size] for row in rows) for size in rows[0]["lru"]}
    return best | {"inf": max(row["inf_token_hit"] for row in rows)}


def contexts(count: int, width: int = 5, seed: int = 0) -> Iterator[tuple[str, ...]]:
    """Contexts of ``width`` documents of ``CORPUS``, drawn by Zipf's law."""
    chance = random.Random(seed)
    weights = [*itertools.accumulate(1 / rank for rank in range(1, CORPUS + 1))]
    for _ in range(count):
        drawn: dict[int, None] = {}
        while len(drawn) < width:
            drawn.update(dict.fromkeys(chance.choices(range(CORPUS), cum_weights=weights, k=width)))
        yield tuple(f"doc-{number}" for number in [*drawn][:width])


def cost_figures(count: int, width: int) -> dict[str, Any]:
    """Microseconds per request of so many contexts, when all documents of the corpus have been sent before."""
    chance = random.Random(1)
    data_of = {f"doc-{number}": _LABEL + chance.randbytes(196 * TOKEN_BYTES) for number in range(CORPUS)}
    everything = chance.sample([*data_of], CORPUS)
    known = [tuple(everything[start : start + width]) for start in range(0, CORPUS, width)]
    ours = OnlineOrder()
    resident: set[bytes] = set()
    behind: list[float] = []
    alone: list[float] = []
    for context in [*known, *known, *contexts(count, width)]:
        blocks = tuple([data_of[name] for name in context])
        prompt = RagPrompt("all", _ROOT * 48, context, blocks, chance.randbytes(40 * TOKEN_BYTES))
        order, path = ours.choose(prompt, resident)
        tokens = _tokens(prompt, order)
        started = time.process_time()
        found = path.keys
        keys = [
            *found,
            *chain_keys(found[-1] if found else _ROOT, tokens[len(found) * _STRIDE :], BLOCK_SIZE),
        ]
        keyed = time.process_time()
        if keys != chain_keys(_ROOT, tokens, BLOCK_SIZE):
            raise AssertionError("an order's keys are not those of its prompt")
        alone.append(time.process_time() - keyed)
        behind.append(keyed - started)
        resident.update(keys)
    corpus = _documents([*data_of], [*data_of.values()])
    asked = ours.popularity.snapshot(Scope("default", "all")).asked([document.fingerprint for document in corpus])
    added = [order + later - before for order, later, before in zip(ours.seconds, behind, alone, strict=True)]
    return {
        "us": _microseconds(ours.seconds[-count:]),
        "added_us": _microseconds(added[-count:]),
        "keys_us": _microseconds(behind[-count:]),
        "keys_us_alone": _microseconds(alone[-count:]),
        "requests": count,
        "documents_sent_before": CORPUS,
        "blocks_cached": len(resident),
        "documents_known": sum(map(bool, asked)),
        "documents_counted": ours.popularity.documents,
        "pairs_counted": ours.popularity.pairs,
        "keys_remembered": ours.paths.remembered,
    }


def peer_figures(count: int, peer: str, limit_s: float) -> dict[str, Any]:
    """Microseconds per context at the end of as many as ContextPilot survives, of at most ``count``."""
    drawn = [*contexts(count)]
    answers = PeerOrders(peer, [("all", context) for context in drawn], limit_s)
    survived = answers.failed[0] if answers.failed else len(answers.orders)
    last = answers.seconds[max(0, survived - _LAST) : survived]
    return {"contexts": survived, "us": _microseconds(last), "failure": answers.failure}


def _microseconds(seconds: Sequence[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    if not ordered:
        return {}
    middle, high = ordered[len(ordered) // 2], ordered[len(ordered) * 99 // 100]
    return {
        "mean": round(1e6 * sum(ordered) / len(ordered), 1),
        "p50": round(1e6 * middle, 1),
        "p99": round(1e6 * high, 1),
    }


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the reference data")
    parser.add_argument("--k", type=int, default=5, help="documents per request")
    parser.add_argument("--peer", metavar="PYTHON", help="a Python that has ContextPilot")
    parser.add_argument("--contexts", type=int, default=5000, help="of the second part")
    parser.add_argument("--peer-seconds", type=float, default=300, help="time of the peer in the second part")
    parser.add_argument("--only", choices=("log", "cost"))
    parser.add_argument("--model", default="smollm2-135m-instruct", help="whose tokenizer counts the log's tokens")
    arguments = parser.parse_args()
    figures: dict[str, Any] = {}
    if arguments.only != "cost":
        tokenizer = fetch_model(arguments.model, for_engine=False) / "tokenizer.json"
        figures["log"] = log_figures(arguments.folder, tokenizer, arguments.k, arguments.peer)
    if arguments.only != "log":
        figures["cost"] = {str(width): cost_figures(arguments.contexts, width) for width in WIDTHS}
        if arguments.peer is not None:
            figures["cost"]["contextpilot"] = peer_figures(arguments.contexts, arguments.peer, arguments.peer_seconds)
    print_json(figures)


if __name__ == "__main__":
    main()
