"""Replay every policy on the reference traces and print how much of the gap between LRU and the optimum each closes.

    python -m benchmarks.policies ../shared/data            # everything, about ten minutes on one quiet core
    python -m benchmarks.policies ../shared/data --policies lru,adaptive,opt --traces rag_hoisted --sizes 2,5

Prefix semantics; rates are token hit rates in percent. Where `ORACLES.json` has a figure, the last column says by how
many points ours differs from it. The RAG series are made from the request log with the default model's tokenizer.
The speed column is block touches per second of processor time.
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
}


def load(data: Path, name: str) -> Trace:
    """A trace of ``data``, or one made from its RAG log."""
    if not name.startswith("rag"):
        return read_trace(data / "traces" / f"{name}.jsonl.gz")
    tokenizer = fetch_model("smollm2-135m-instruct") / "tokenizer.json"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{name}.jsonl"
        lines = rag_trace_lines(data / "rag_xquad_en", tokenizer, hoist=name == "rag_hoisted")
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
    arguments = parser.parse_args()
    policies = arguments.policies.split(",")
    percents = [float(size) for size in arguments.sizes.split(",")]
    oracles = json.loads((arguments.data / "ORACLES.json").read_text())["eviction"]
    for name in arguments.traces.split(","):
        trace = load(arguments.data, name)
        reference = {size["cap"]: size["prefix"] for size in oracles[SERIES[name]]["own"]["caps"]}
        NOTES.print(f"{name}: {trace.accesses:,} touches of {trace.unique_blocks:,} blocks")
        results = {
            (policy, blocks): (rate, speed) for policy, blocks, rate, speed in measure(trace, policies, percents)
        }
        Console(width=120).print(table(name, policies, results, reference))


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
