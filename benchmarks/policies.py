"""Replay every policy on the reference traces, and hold what they hit against the reference figures.

    python -m benchmarks.policies DATA            # everything, about ten minutes on one quiet core
    python -m benchmarks.policies DATA --policies lru,adaptive,opt --traces rag_hoisted --sizes 2,5

A table per trace: token hit rates in percent under prefix semantics, how much of the gap between LRU and the optimum a
policy closes, block touches per second of processor time, and by how many points a rate differs at most from
`ORACLES.json`. Then one table with that difference for every policy and trace, and for plain objects, whose figures are
libCacheSim's. The RAG series are made from the request log with the default model's tokenizer.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.rag_trace import rag_trace_lines
from cache_policy.replay import REPLAY_POLICY_NAMES, replay
from cache_policy.traces import Trace, read_trace
from gateway.cli.terminal import NOTES, fetch_model, progress_bar

REFERENCE_NAMES = {
    "lru": "LRU",
    "fifo": "FIFO",
    "lfu": "LFU",
    "s3fifo": "S3FIFO",
    "sieve": "SIEVE",
    "arc": "ARC",
    "wtinylfu": "WTinyLFU",
    "gdsf": "GDSF",
    "opt": "OPT",
}
SERIES = {
    "mooncake_conversation": "mooncake_conversation",
    "claude_code_A": "claude_code_A",
    "rag_hoisted": "xquad_en k5 relevance hoisted",
    "rag_as_is": "xquad_en k5 relevance as-is",
    "rag_as_is_k10": "xquad_en k10 relevance as-is",
}
OBJECT_POLICIES = ("lru", "fifo", "opt")
"""Compared as plain objects too: the policies that have one definition there."""


def load(data: Path, name: str) -> Trace:
    """A trace of ``data``, or one made from its RAG log."""
    if not name.startswith("rag"):
        return read_trace(data / "traces" / f"{name}.jsonl.gz")
    tokenizer = fetch_model("smollm2-135m-instruct") / "tokenizer.json"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{name}.jsonl"
        _, _, count = name.partition("_k")
        documents = int(count or 5)
        lines = rag_trace_lines(
            data / "rag_xquad_en", tokenizer, hoist=name.startswith("rag_hoisted"), documents=documents
        )
        path.write_text("\n".join(lines))
        return read_trace(path)


def measure(trace: Trace, policies: list[str], percents: list[float]) -> Iterator[tuple[str, int, float, float]]:
    """(policy, blocks, token hit rate, touches per second) of every replay."""
    with progress_bar() as bar:
        task = bar.add_task(trace.name, total=len(policies) * len(percents))
        for percent in percents:
            blocks = max(1, round(trace.unique_blocks * percent / 100))
            for name in policies:
                bar.update(task, description=f"{trace.name}: {name}, {blocks:,} blocks")
                start = time.process_time()
                rate = replay(trace, name, blocks).token_hit_rate
                yield name, blocks, rate, trace.accesses / (time.process_time() - start)
                bar.advance(task)


def main() -> None:
    """Print one table per trace, and what a policy closes of the gap on average."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="folder with ORACLES.json, traces and rag_xquad_en")
    parser.add_argument("--policies", default=",".join(REPLAY_POLICY_NAMES), help="default: all")
    parser.add_argument("--traces", default=",".join(SERIES), help="default: all")
    parser.add_argument("--sizes", default="1,2,5,10,20", help="percent of the trace's different blocks")
    parser.add_argument("--no-objects", action="store_true", help="leave out the replays of plain objects")
    arguments = parser.parse_args()
    policies = arguments.policies.split(",")
    percents = [float(size) for size in arguments.sizes.split(",")]
    oracles = json.loads((arguments.data / "ORACLES.json").read_text())["eviction"]
    off: dict[tuple[str, str, str], float] = {}
    for name in arguments.traces.split(","):
        trace = load(arguments.data, name)
        series = oracles[SERIES[name]]
        reference = {size["cap"]: size["prefix"] for size in series["own"]["caps"]}
        NOTES.print(f"{name}: {trace.accesses:,} touches of {trace.unique_blocks:,} blocks")
        results = {
            (policy, blocks): (rate, speed) for policy, blocks, rate, speed in measure(trace, policies, percents)
        }
        for (policy, blocks), (rate, _) in results.items():
            known = reference.get(blocks, {}).get(REFERENCE_NAMES.get(policy, ""))
            if known is not None:
                key = ("prefix", policy, name)
                off[key] = max(off.get(key, 0.0), abs(rate - known["token"]))
        Console(width=120).print(table(name, policies, results, reference))
        for size in series["own"]["caps"] if not arguments.no_objects else ():
            if round(100 * size["cap"] / trace.unique_blocks) not in percents:
                continue
            libcachesim = series["libcachesim"] or {"caps": []}
            hits = next((other["hit"] for other in libcachesim["caps"] if other["cap"] == size["cap"]), None)
            for policy in OBJECT_POLICIES:
                upper = policy.upper()
                expected = size["plain"][f"{upper}_fwd"]["block"] if hits is None else hits[upper]
                rate = replay(trace, policy, size["cap"], "object").block_hit_rate
                key = ("object", policy, name)
                off[key] = max(off.get(key, 0.0), abs(rate - expected))
    Console(width=120).print(deviations(off))


def deviations(off: dict[tuple[str, str, str], float]) -> Table:
    """The largest difference to the reference over all sizes, in points, by policy and trace."""
    traces = list(dict.fromkeys(trace for _, _, trace in off))
    result = Table("semantics", "policy", *traces, title="Furthest off the reference at any size, in points")
    for semantics, policy in dict.fromkeys((semantics, policy) for semantics, policy, _ in off):
        cells = (off.get((semantics, policy, trace)) for trace in traces)
        result.add_row(semantics, policy, *("" if cell is None else f"{100 * cell:.4f}" for cell in cells))
    return result


def table(
    name: str,
    policies: list[str],
    results: dict[tuple[str, int], tuple[float, float]],
    reference: dict[int, dict[str, dict[str, float]]],
) -> Table:
    """Policies by sizes: rate, and in brackets the part of the gap that it closes."""
    sizes = list(dict.fromkeys(blocks for _, blocks in results))
    result = Table("policy", *(f"{size:,}" for size in sizes), "mean gap", "M touches/s", "off", title=name)
    for policy in policies:
        cells, gaps, speeds, off = [], [], [], []
        for size in sizes:
            rate, speed = results[policy, size]
            speeds.append(speed)
            cell = f"{100 * rate:.2f}"
            if ("lru", size) in results and ("opt", size) in results:
                low, high = results["lru", size][0], results["opt", size][0]
                gaps.append((rate - low) / (high - low))
                cell += f" ({100 * gaps[-1]:.0f} %)"
            cells.append(cell)
            known = reference.get(size, {}).get(REFERENCE_NAMES.get(policy, ""))
            if known is not None:
                off.append(abs(rate - known["token"]))
        mean = f"{100 * sum(gaps) / len(gaps):.1f} %" if gaps else ""
        speed = sum(speeds) / len(speeds) / 1e6
        result.add_row(policy, *cells, mean, f"{speed:.2f}", f"{100 * max(off):.3f}" if off else "")
    return result


if __name__ == "__main__":
    main()
