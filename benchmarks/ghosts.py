"""How near ghost caches come to a full replay, and what they cost.

    python -m benchmarks.ghosts DATA --one-in 4,16,64

For the hoisted RAG log and the Mooncake conversations, and per sampling rate: the estimated block hit rate of each
policy and size less the replayed one, in points, the furthest off of several draws of the sample; and the processor
time per request that all ghosts together took, least of the draws.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.policies import load
from cache_policy.ghosts import Ghost, GhostCaches, GhostTally
from cache_policy.replay import replay
from cache_policy.traces import Trace
from gateway.cli.terminal import progress_bar

TRACES = ("rag_hoisted", "mooncake_conversation")
PERCENTS = (2, 5, 10)


def follow(trace: Trace, ghosts: Sequence[Ghost], one_in: int, draw: int) -> tuple[list[float], float]:
    """Estimated block hit rate of each ghost, and seconds of processor time per request."""
    caches = GhostCaches(ghosts, one_in)
    tally = GhostTally(len(ghosts))
    keys = [blake2b(f"{draw} {block}".encode(), digest_size=16).digest() for block in range(trace.unique_blocks)]
    # Every request brings keys of its own, whose hash is not known yet.
    chains = [[bytes(bytearray(keys[block])) for block in request] for request in trace.requests]
    start = time.process_time()
    for chain in chains:
        caches.observe(chain, tally)
    seconds = time.process_time() - start
    return [blocks / trace.accesses for blocks in tally.hit_blocks()], seconds / len(chains)


def main() -> None:
    """Print a table per trace."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="folder of the reference data")
    parser.add_argument("--one-in", default="4,16,64", help="one block in so many is followed (default: 4,16,64)")
    parser.add_argument("--draws", type=int, default=3, help="samples per rate (default: 3)")
    parser.add_argument("--policies", default="lru,s3fifo,arc", help="default: lru,s3fifo,arc")
    arguments = parser.parse_args()
    policies = arguments.policies.split(",")
    rates = [int(rate) for rate in arguments.one_in.split(",")]
    for name in TRACES:
        trace: Trace = load(arguments.data, name)
        ghosts = [
            Ghost(policy, round(trace.unique_blocks * percent / 100)) for policy in policies for percent in PERCENTS
        ]
        with progress_bar() as bar:
            task = bar.add_task(name, total=len(ghosts) + len(rates) * arguments.draws)
            exact = []
            for ghost in ghosts:
                bar.update(task, description=f"{name}: replay {ghost.policy}, {ghost.blocks:,} blocks", advance=1)
                exact.append(replay(trace, ghost.policy, ghost.blocks).block_hit_rate)
            estimates: dict[int, list[list[float]]] = {rate: [] for rate in rates}
            costs: dict[int, list[float]] = {rate: [] for rate in rates}
            for rate in rates:
                for draw in range(arguments.draws):
                    bar.update(task, description=f"{name}: ghosts, 1 block in {rate}", advance=1)
                    found, seconds = follow(trace, ghosts, rate, draw)
                    estimates[rate].append(found)
                    costs[rate].append(seconds)
        table = Table(title=f"{name}: {len(trace.requests):,} requests, {trace.unique_blocks:,} different blocks")
        table.add_column("policy")
        table.add_column("blocks", justify="right")
        table.add_column("replay", justify="right")
        for rate in rates:
            table.add_column(f"1 in {rate}", justify="right")
        for index, ghost in enumerate(ghosts):
            errors = []
            for rate in rates:
                off = (100 * (found[index] - exact[index]) for found in estimates[rate])
                errors.append(f"{max(off, key=abs):+.2f}")
            table.add_row(ghost.policy, f"{ghost.blocks:,}", f"{100 * exact[index]:.2f}", *errors)
        table.add_section()
        table.add_row("µs per request", "", "", *(f"{1e6 * min(costs[rate]):.0f}" for rate in rates))
        Console().print(table)


if __name__ == "__main__":
    main()
