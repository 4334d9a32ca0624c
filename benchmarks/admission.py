"""Is it worth admitting who hits most of the cache first, instead of who came first?

    python -m benchmarks.admission DATA                          # everything: six minutes on one quiet core
    python -m benchmarks.admission DATA --workloads engine --depths 128 --patience 8

Requests go through the engine's scheduler and block manager without a model: all figures are steps or tokens, the same
in every run. As many requests as the queue is deep run or wait at any time, 32 of them may run; each generates 32
tokens. Pools are a share of the workload's different blocks.

``prefix K``: of those that wait, the one with the longest prefix in the cache is admitted first; but who has been
overtaken K times is first in any case, and so nobody starves. Waiting for what another one computes is as ever.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections import Counter
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

from benchmarks.policies import load
from benchmarks.side_by_side.workload import Workload
from cache_policy.keys import token_bytes
from engine.batch import Batch, ChunkResult
from engine.core import EngineCore
from engine.scheduler import Scheduler
from engine.sequence import Sequence
from engine.wire import EngineInfo, Sampling, Submit
from gateway.cli.terminal import fetch_model, progress_bar

WORKLOADS: Final = ("engine", "rag_hoisted", "rag_as_is")
BLOCK: Final = 16
OUTPUT_TOKENS: Final = 32
MAX_BATCH_TOKENS: Final = 512


class PrefixFirst(Scheduler):
    """Admits who has the longest prefix in the cache, unless somebody of its class has been overtaken too often."""

    def __init__(self, scheduler: Scheduler, patience: float) -> None:
        """In place of ``scheduler``, before it has any work."""
        super().__init__(scheduler._blocks, max_batch_tokens=MAX_BATCH_TOKENS, max_running=scheduler.max_running)
        self._patience = patience
        self._overtaken: Counter[int] = Counter()

    def _next_waiting(self) -> Sequence | None:
        first = super()._next_waiting()
        if first is None or self._overtaken[first.id] >= self._patience:
            return first
        best, longest = first, self._blocks.lookup(first.table)
        for sequence in self.waiting:
            if sequence.urgency != first.urgency or not self._has_place(sequence) or self._shall_wait(sequence):
                continue
            if self._overtaken[sequence.id] >= self._patience:
                return sequence
            hits = self._blocks.lookup(sequence.table)
            if hits > longest:
                best, longest = sequence, hits
        return best

    def _admit(self, sequence: Sequence) -> bool:
        if not super()._admit(sequence):
            return False
        self._overtaken.update(other.id for other in self.waiting if other.turn < sequence.turn)
        return True


class CountingRunner:
    """Computes nothing; notes in which step each request came first."""

    def __init__(self) -> None:
        self.steps = 0
        self.first_step: dict[int, int] = {}

    def execute(self, batch: Batch) -> list[ChunkResult]:
        """Answer every request with tokens that are in nobody else's text."""
        self.steps += 1
        for chunk in batch.chunks:
            self.first_step.setdefault(chunk.request_id, self.steps)
        return [ChunkResult(chunk.request_id if chunk.sample else None) for chunk in batch.chunks]


class NoText:
    """A detokenizer where there is no text."""

    def push(self, token_id: int) -> tuple[str, bool]:
        """No text, no stop."""
        return "", False

    def finish(self) -> str:
        """No text."""
        return ""


def prompts(data: Path, workload: str, requests: int) -> list[list[int]]:
    """The tokens of each request. Those of a trace are made up, the same for the same block."""
    if workload == "engine":
        tokenizer = Tokenizer.from_file(str(fetch_model("smollm2-135m-instruct") / "tokenizer.json"))
        made = Workload(100, lambda text: len(tokenizer.encode(text).ids)).prompts(requests)
        return [tokenizer.encode(prompt.text).ids for prompt in made]
    trace = load(data, workload)
    return [
        [block for block in blocks for _ in range(BLOCK)] + [trace.unique_blocks] * (length % BLOCK)
        for blocks, length in zip(trace.requests[:requests], trace.lengths, strict=False)
    ]


def unique_blocks(requests: list[list[int]]) -> int:
    """Different full blocks over all requests, each with all that is in front of it."""
    numbers: dict[tuple[int, ...], int] = {}
    for tokens in requests:
        parent = -1
        for end in range(BLOCK, len(tokens) + 1, BLOCK):
            parent = numbers.setdefault((parent, *tokens[end - BLOCK : end]), len(numbers))
    return len(numbers)


def serve(requests: list[list[int]], depth: int, blocks: int, patience: float | None) -> tuple[EngineCore, list[int]]:
    """Serve them all, in the default order if ``patience`` is None.

    Returns the engine, and for each request the steps between its arrival and the first one that computed any of it.
    """
    runner = CountingRunner()
    vocabulary = 1 + max(len(requests), max(map(max, requests)))
    sizes = (blocks * BLOCK, blocks, BLOCK)
    info = EngineInfo("none", "", "", "", *sizes, "none", "none", vocabulary, (), "lru", MAX_BATCH_TOKENS)
    core = EngineCore(runner, info, detokenizer=lambda _: NoText())
    if patience is not None:
        core._scheduler = PrefixFirst(core._scheduler, patience)
    arrived: list[int] = []
    going = 0
    while len(arrived) < len(requests) or core.has_work():
        while going < depth and len(arrived) < len(requests):
            tokens = token_bytes(requests[len(arrived)])
            core.submit(Submit(len(arrived), tokens, bytes(BLOCK), Sampling(OUTPUT_TOKENS, temperature=0.0)))
            arrived.append(runner.steps)
            going += 1
        report = core.step()
        going -= sum(output.finish_reason is not None for output in report.outputs) if report is not None else 0
    return core, sorted(runner.first_step[id] - step - 1 for id, step in enumerate(arrived))


def row(name: str, core: EngineCore, waits: list[int], steps: int) -> list[str]:
    """One line of the table; ``steps`` are those of the default order."""
    stats = core.call("stats", {})
    rate = stats["cached_prompt_tokens"] / stats["prompt_tokens"]
    p99 = waits[math.ceil(0.99 * len(waits)) - 1]
    change = f"{stats['steps']:,} ({100 * (stats['steps'] / steps - 1):+.1f} %)"
    counts = f"{stats['cached_prompt_tokens']:,}", f"{stats['recomputed_tokens']:,}"
    return [name, change, f"{100 * rate:.2f} %", *counts, f"{sum(waits) / len(waits):.1f}", str(p99), str(waits[-1])]


def main() -> None:
    """Print one table per workload, pool and depth."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="folder with rag_xquad_en")
    parser.add_argument("--workloads", default=",".join(WORKLOADS), help="default: all")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--pools", default="5,10,25", help="percent of the different blocks")
    parser.add_argument("--depths", default="8,32,128", help="requests that run or wait at any time")
    parser.add_argument("--patience", default="4,32,inf", help="how often a request may be overtaken")
    arguments = parser.parse_args()
    orders: list[float | None] = [None, *map(float, arguments.patience.split(","))]
    cells = list(itertools.product(map(float, arguments.pools.split(",")), map(int, arguments.depths.split(","))))
    for workload in arguments.workloads.split(","):
        requests = prompts(arguments.data, workload, arguments.requests)
        unique = unique_blocks(requests)
        for percent, depth in cells:
            blocks = round(unique * percent / 100)
            title = f"{workload}: {blocks:,} of {unique:,} blocks, {depth} requests at a time"
            columns = ("order", "steps", "hit", "tokens hit", "recomputed", "mean wait", "p99", "longest")
            table = Table(*columns, title=title)
            steps = 0
            with progress_bar() as bar:
                for patience in bar.track(orders, description=title):
                    core, waits = serve(requests, depth, blocks, patience)
                    steps = steps or core.load().steps
                    table.add_row(*row("arrival" if patience is None else f"prefix {patience:g}", core, waits, steps))
            Console(width=110).print(table)


if __name__ == "__main__":
    main()
