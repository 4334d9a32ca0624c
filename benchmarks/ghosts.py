"""How near ghost caches come to a full replay, and what they cost.

    python -m benchmarks.ghosts ../shared/data --strides 4,16,32

For the hoisted RAG log and the Mooncake conversations, and per stride: the estimated block hit rate of each policy and
size less the replayed one, in points, and the processor time per request that all ghosts together took.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.policies import load
from cache_policy.ghosts import Ghost, GhostCaches
from cache_policy.replay import replay
from cache_policy.traces import Trace
from gateway.cli.terminal import progress_bar

TRACES = ("rag_hoisted", "mooncake_conversation")
PERCENTS = (2, 5, 10)


def follow(trace: Trace, ghosts: Sequence[Ghost], stride: int) -> tuple[list[float], float]:
    """Estimated block hit rate of each ghost, and seconds of processor time per request."""
    caches = GhostCaches(ghosts, stride)
    chains = [[block.to_bytes(16, "little") for block in request] for request in trace.requests]
    hits = [0.0] * len(ghosts)
    start = time.process_time()
    for keys in chains:
        for index, blocks in enumerate(caches.observe(keys)):
            hits[index] += blocks
    seconds = time.process_time() - start
    return [blocks / trace.accesses for blocks in hits], seconds / len(chains)


def main() -> None:
    """Print a table per trace."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="folder of the reference data")
    parser.add_argument("--strides", default="4,16,32", help="every so many-th block is followed (default: 4,16,32)")
    parser.add_argument("--policies", default="lru,s3fifo,arc", help="default: lru,s3fifo,arc")
    arguments = parser.parse_args()
    policies = arguments.policies.split(",")
    strides = [int(stride) for stride in arguments.strides.split(",")]
    for name in TRACES:
        trace: Trace = load(arguments.data, name)
        ghosts = [
            Ghost(policy, round(trace.unique_blocks * percent / 100)) for policy in policies for percent in PERCENTS
        ]
        with progress_bar() as bar:
            task = bar.add_task(name, total=len(ghosts) + len(strides))
            exact = []
            for ghost in ghosts:
                bar.update(task, description=f"{name}: replay {ghost.policy}, {ghost.blocks:,} blocks", advance=1)
                exact.append(replay(trace, ghost.policy, ghost.blocks).block_hit_rate)
            estimates = {}
            for stride in strides:
                bar.update(task, description=f"{name}: ghosts, 1 block in {stride}", advance=1)
                estimates[stride] = follow(trace, ghosts, stride)
        table = Table(title=f"{name}: {len(trace.requests):,} requests, {trace.unique_blocks:,} different blocks")
        table.add_column("policy")
        table.add_column("blocks", justify="right")
        table.add_column("replay", justify="right")
        for stride in strides:
            table.add_column(f"1 in {stride}", justify="right")
        for index, ghost in enumerate(ghosts):
            errors = [f"{100 * (estimates[stride][0][index] - exact[index]):+.2f}" for stride in strides]
            table.add_row(ghost.policy, f"{ghost.blocks:,}", f"{100 * exact[index]:.2f}", *errors)
        table.add_section()
        table.add_row("µs per request", "", "", *(f"{1e6 * estimates[stride][1]:.0f}" for stride in strides))
        Console().print(table)


if __name__ == "__main__":
    main()
