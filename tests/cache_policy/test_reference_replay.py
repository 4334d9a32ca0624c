"""Hit counts on a recorded trace equal those of an independent simulator, block for block.

The replay follows the prefix-constrained rules: hits are the leading resident blocks and are pinned, the rest is
allocated in order by leaf-first eviction, uses are reported at the end of the request, deepest block first.
"""

from __future__ import annotations

import gzip
import json
import os
from collections import Counter
from pathlib import Path

import pytest

from cache_policy.policy import create_policy

DATA = Path(os.environ.get("HEADSTART_REFERENCE_DATA", Path(__file__).parents[3] / "shared" / "data"))
TRACE = DATA / "traces" / "claude_code_A.jsonl.gz"

pytestmark = pytest.mark.skipif(not TRACE.exists(), reason="no reference data: set HEADSTART_REFERENCE_DATA")


def replay(requests, policy):
    """Returns (hit blocks, evictions). Blocks are their hash ids, as these are unique to a whole prefix."""
    free, hits, evictions = policy.capacity, 0, 0
    parent: dict[int, int | None] = {}
    children: Counter[int | None] = Counter()
    pinned: set[int] = set()
    for ids in requests:
        hit = next((count for count, block in enumerate(ids) if block not in parent), len(ids))
        hits += hit
        pinned.update(ids[:hit])
        for block in ids[:hit]:
            policy.acquired(block)
        kept = hit
        for depth in range(hit, min(len(ids), policy.capacity)):
            policy.missed(ids[depth])
            if free:
                free -= 1
            else:
                victim = policy.victim(lambda block: block not in pinned and not children[block])
                if victim is None:
                    break
                policy.removed(victim)
                children[parent.pop(victim)] -= 1
                evictions += 1
            block, parent[block] = ids[depth], ids[depth - 1] if depth else None
            children[parent[block]] += 1
            pinned.add(block)
            kept += 1
        for depth in reversed(range(kept)):
            if depth < hit:
                policy.touched(ids[depth])
            else:
                policy.inserted(ids[depth], parent[ids[depth]], ids[depth], depth)
        pinned.clear()
    return hits, evictions


@pytest.mark.parametrize("size", [0, 2])
@pytest.mark.parametrize("name", ["lru", "fifo"])
def test_hits_equal_the_reference(name, size):
    with gzip.open(TRACE, "rt") as lines:
        requests = [json.loads(line)["hash_ids"] for line in lines]
    reference = json.loads((DATA / "ORACLES.json").read_text())["eviction"]["claude_code_A"]["own"]["caps"][size]
    expected = reference["prefix"][name.upper()]
    hits, evictions = replay(requests, create_policy(name, reference["cap"]))
    assert (hits, evictions) == (expected["hit_blocks"], expected["evictions"])
