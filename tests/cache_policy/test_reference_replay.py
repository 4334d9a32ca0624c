"""Hit rates on recorded traces equal those of an independent simulator. ``benchmarks.policies`` has all of them."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import tempfile
from hashlib import blake2b
from pathlib import Path

import pytest

from cache_policy.ghosts import Ghost, GhostCaches, GhostTally
from cache_policy.replay import replay
from cache_policy.traces import read_trace

ROOT = Path(__file__).parents[2]
DATA = Path(os.environ.get("HEADSTART_REFERENCE_DATA", ROOT.parent / "shared" / "data"))
MOONCAKE, AGENTS, RAG = "mooncake_conversation", "claude_code_A", "xquad_en k5 relevance hoisted"
REFERENCE_NAMES = {"s3fifo": "S3FIFO", "wtinylfu": "WTinyLFU"}

pytestmark = pytest.mark.skipif(
    not (DATA / "ORACLES.json").exists(), reason="no reference data: set HEADSTART_REFERENCE_DATA"
)


@functools.cache
def load(name):
    if name != RAG:
        return read_trace(DATA / "traces" / f"{name}.jsonl.gz")
    from engine.models.catalog import ensure_model

    tokenizer = ensure_model("smollm2-135m-instruct") / "tokenizer.json"
    spec = importlib.util.spec_from_file_location("rag_trace", ROOT / "benchmarks" / "rag_trace.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rag.jsonl"
        path.write_text("\n".join(module.rag_trace_lines(DATA / "rag_xquad_en", tokenizer, hoist=True)))
        return read_trace(path)


@functools.cache
def oracles():
    return json.loads((DATA / "ORACLES.json").read_text())["eviction"]


def reference(trace, percent):
    """Capacity and the figures of the prefix semantics, by policy."""
    size = oracles()[trace]["own"]["caps"][[1, 2, 5, 10, 20].index(percent)]
    return size["cap"], size["prefix"]


@pytest.mark.parametrize(
    ("trace", "percent", "policy"),
    [
        *((MOONCAKE, 5, policy) for policy in ("lru", "fifo", "lfu", "gdsf", "opt")),
        *((AGENTS, 2, policy) for policy in ("lru", "gdsf", "opt")),
        *(pytest.param(RAG, 2, policy, marks=pytest.mark.model) for policy in ("lru", "lfu", "opt")),
    ],
)
def test_policies_with_one_definition_hit_block_for_block(trace, percent, policy):
    capacity, figures = reference(trace, percent)
    result = replay(load(trace), policy, capacity)
    expected = figures[policy.upper()]
    assert (result.hit_blocks, result.hit_tokens, result.evictions) == (
        expected["hit_blocks"],
        expected["hit_tokens"],
        expected["evictions"],
    )


@pytest.mark.parametrize(
    ("trace", "percent", "policy"),
    [
        *((MOONCAKE, 2, policy) for policy in ("sieve", "s3fifo", "arc", "wtinylfu")),
        *(pytest.param(RAG, 5, policy, marks=pytest.mark.model) for policy in ("s3fifo", "arc")),
    ],
)
def test_queue_policies_are_within_a_point(trace, percent, policy):
    capacity, figures = reference(trace, percent)
    expected = figures[REFERENCE_NAMES.get(policy, policy.upper())]["token"]
    assert replay(load(trace), policy, capacity).token_hit_rate == pytest.approx(expected, abs=0.01)


@pytest.mark.parametrize(
    ("trace", "percent", "policy"), [*((MOONCAKE, 5, policy) for policy in ("lru", "fifo", "opt")), (AGENTS, 10, "lru")]
)
def test_plain_objects_hit_as_in_libcachesim(trace, percent, policy):
    size = next(size for size in oracles()[trace]["libcachesim"]["caps"] if size["pct"] == percent)
    result = replay(load(trace), policy, size["cap"], "object")
    assert result.block_hit_rate == pytest.approx(size["hit"][policy.upper()], abs=5e-7)


@pytest.mark.parametrize(
    ("trace", "percent", "gap"),
    [(MOONCAKE, 2, 0.08), (AGENTS, 5, None), pytest.param(RAG, 5, 0.25, marks=pytest.mark.model)],
)
def test_adaptive_closes_its_part_of_the_gap_and_never_falls_behind_lru(trace, percent, gap):
    capacity, figures = reference(trace, percent)
    low, high = figures["LRU"]["token"], figures["OPT"]["token"]
    rate = replay(load(trace), "adaptive", capacity).token_hit_rate
    assert rate >= low - 0.002
    if gap is not None:
        assert rate >= low + gap * (high - low)


@pytest.mark.parametrize(("trace", "one_in"), [(MOONCAKE, 16), pytest.param(RAG, 64, marks=pytest.mark.model)])
def test_ghost_caches_are_within_two_points_of_a_full_replay(trace, one_in):
    requests = load(trace)
    ghosts = [
        Ghost(policy, round(requests.unique_blocks * percent / 100))
        for policy in ("lru", "s3fifo", "arc")
        for percent in (2, 5, 10)
    ]
    caches, tally = GhostCaches(ghosts, one_in), GhostTally(len(ghosts))
    keys = [blake2b(block.to_bytes(4, "little"), digest_size=16).digest() for block in range(requests.unique_blocks)]
    for request in requests.requests:
        caches.observe([keys[block] for block in request], tally)
    for ghost, blocks in zip(ghosts, tally.hit_blocks(), strict=True):
        expected = replay(requests, ghost.policy, ghost.blocks).block_hit_rate
        assert blocks / requests.accesses == pytest.approx(expected, abs=0.02), ghost
