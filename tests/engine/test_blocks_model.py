"""The block manager against a model of what each block really contains, over random histories (invariants I1-I8).

The long form drives the same model for HEADSTART_BLOCK_OPERATIONS operations with each of ten seeds; it is left out
where that is not set. A million in all::

    HEADSTART_BLOCK_OPERATIONS=100000 python -m pytest tests/engine/test_blocks_model.py -k long
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import invariant, run_state_machine_as_test

from cache_policy.keys import chain_keys
from cache_policy.policy import POLICY_NAMES, BlockKey, EvictionPolicy
from engine.batch import BlockCopy
from engine.blocks import BlockManager, BlockTable

from .pool_model import BLOCK, NUM_BLOCKS, SOURCES, PoolModel, Written

WINDOW = 4
WINDOW_BLOCKS = 5


class ContraryPolicy(EvictionPolicy):
    """Wants the blocks nearest to the root out first, so that leaf-first is up to the manager alone."""

    name = "contrary"

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.depths: dict[int, int] = {}
        self.used: set[int] = set()

    def inserted(self, block: int, parent: int | None, key: BlockKey, depth: int) -> None:
        assert block not in self.depths
        self.depths[block] = depth

    def acquired(self, block: int) -> None:
        assert block not in self.used
        self.used.add(block)

    def touched(self, block: int) -> None:
        self.used.remove(block)

    def removed(self, block: int) -> None:
        assert block not in self.used
        del self.depths[block]

    def victim(self, evictable: Callable[[int], bool]) -> int | None:
        candidates = sorted(self.depths.keys() - self.used, key=self.depths.__getitem__)
        return next(filter(evictable, candidates), None)


class ContraryPoolModel(PoolModel):
    """Under a policy of bad advice. It also checks that it is told each thing exactly when it may be."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks._pool.eviction.policy = ContraryPolicy(NUM_BLOCKS)


class CollidingPoolModel(PoolModel):
    """The same with so few keys that most of them collide: fewer hits, never a wrong one."""

    block_hash = staticmethod(lambda parent, content: bytes([(sum(parent) + sum(content)) % 5]))

    def assert_hit(self, found: int, table: BlockTable) -> None:
        assert found <= self.expected_hit(table)


class WindowedPoolModel(PoolModel):
    """With layers that see ``WINDOW`` tokens, and fewer blocks for them than tables could name."""

    most_pinned = WINDOW_BLOCKS - 3  # what one token sees lies in three blocks at most

    def manager(self) -> BlockManager:
        self.windows: list[list[Written | None]] = [[None] * BLOCK for _ in range(WINDOW_BLOCKS)]
        self.short = 0
        return BlockManager(NUM_BLOCKS, BLOCK, block_hash=self.block_hash, window=WINDOW, window_blocks=WINDOW_BLOCKS)

    def expected_hit(self, table: BlockTable) -> int:
        """The longest run after which a token finds all it sees in the windowed layers too."""
        most = super().expected_hit(table) // BLOCK
        keys = chain_keys(table.root or b"", table.tokens, BLOCK, self.block_hash)[:most]
        companions = {block.key: block.companion for block in self.blocks._pool.blocks}
        count = next(
            count
            for count in range(most, -1, -1)
            if all(companions[key] is not None for key in keys[max(0, count * BLOCK - WINDOW + 1) // BLOCK : count])
        )
        self.short += count < most
        return count * BLOCK

    def state(self) -> object:
        return super().state(), self.blocks.window_stats(), [list(table.window) for table in self.tables]

    def window_is_short(self, table: BlockTable) -> bool:
        stats = self.blocks.window_stats()
        assert stats is not None
        pinned = self.protected() - self.used_keys()
        wanted = -(-len(table.tokens) // BLOCK) - len(table.window) + self.is_shared(table)
        return stats.used + len(pinned) + wanted > WINDOW_BLOCKS

    def write_window(self, table: BlockTable, position: int) -> None:
        block = table.window[position // BLOCK]
        assert sum(block in other.window[other.window_start :] for other in self.tables) == 1
        self.windows[block][position % BLOCK] = self.written(table, position)

    def copy_window(self, copy: BlockCopy) -> None:
        assert copy.window is not None
        source, target = copy.window
        self.windows[target] = [*self.windows[source]]

    @invariant()
    def every_sequence_finds_its_own_content(self) -> None:
        super().every_sequence_finds_its_own_content()
        for table in self.tables:
            for position in range(max(0, table.computed - WINDOW + 1), table.computed):
                block = table.window[position // BLOCK]
                assert self.windows[block][position % BLOCK] == self.written(table, position)

    @invariant()
    def what_nobody_needs_is_empty(self) -> None:
        stats = self.blocks.window_stats()
        assert stats is not None
        assert stats.used + stats.idle + stats.empty == WINDOW_BLOCKS
        held = {block for table in self.tables for block in table.window[table.window_start :]}
        assert held <= set(range(WINDOW_BLOCKS))
        assert stats.used >= len(held)


def drive(model: PoolModel, seed: int, operations: int) -> None:
    """A history without hypothesis, and so much longer: all the same every invariant after every operation."""
    draw = random.Random(seed)
    names, weights = zip(*WEIGHTS.items(), strict=True)
    while operations:
        (name,) = draw.choices(names, weights)
        table = draw.choice(model.tables) if model.tables else None
        tokens = list(draw.choice(SOURCES)[: draw.randint(1, 13)])
        root = draw.choice([b"one", b"two", b"one", b"two", None])
        if table is None and name in ("append", "compute", "fork", "free"):
            continue
        operations -= 1
        if name == "allocate":
            model.allocate(tokens, root, draw.randint(0, 2))
        elif name == "run_to_its_end":
            model.run_to_its_end(tokens, root or b"one")
        elif name == "evict":
            model.evict(draw.randint(0, 2))
        elif name == "reset":
            model.reset()
        elif name == "set_policy":
            if not isinstance(model, ContraryPoolModel):
                model.set_policy(draw.choice(POLICY_NAMES))
        elif name == "pin":
            model.pin(tokens[: draw.randint(2, 6)], root or b"one", draw.random() < 0.1)
        elif name == "unpin":
            if model.pins:
                model.unpin(draw.randrange(len(model.pins)))
        elif name == "append":
            model.append(table, draw.randint(0, 1))
        elif name == "compute":
            model.compute(table, draw.choice([1, 5, 13]))
        elif name == "fork":
            model.fork(table)
        elif name == "free":
            model.free(table)
        model.bookkeeping_is_consistent()
        model.every_sequence_finds_its_own_content()
        model.a_snapshot_equals_the_sum_of_the_events()


WEIGHTS = {
    "allocate": 20,
    "append": 20,
    "compute": 25,
    "fork": 8,
    "free": 15,
    "run_to_its_end": 8,
    "evict": 2,
    "reset": 1,
    "set_policy": 1,
    "pin": 2,
    "unpin": 2,
}
MODELS = (PoolModel, CollidingPoolModel, ContraryPoolModel, WindowedPoolModel)
LONG = int(os.environ.get("HEADSTART_BLOCK_OPERATIONS", "0"))


@pytest.mark.skipif(not LONG, reason="HEADSTART_BLOCK_OPERATIONS is not set")
@pytest.mark.timeout(0)
@pytest.mark.parametrize("seed", range(10))
def test_long_histories_keep_every_invariant(seed: int) -> None:
    model = MODELS[seed % len(MODELS)]()
    drive(model, seed, LONG)
    assert model.hits > LONG // 100
    assert model.copies > LONG // 1000
    assert model.in_flight > LONG // 1000
    assert model.pinned > LONG // 1000
    assert model.refused > LONG // 1000
    if isinstance(model, WindowedPoolModel):
        stats = model.blocks.window_stats()
        assert stats is not None
        assert stats.evictions > LONG // 100
        assert stats.released > LONG // 100
        assert model.short > LONG // 1000
    assert model.blocks.stats().evictions > LONG // 100


@pytest.mark.parametrize("model", MODELS)
def test_random_histories_keep_every_invariant(model: type[PoolModel]) -> None:
    run_state_machine_as_test(
        model,
        settings=settings(
            max_examples=40,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow],
            print_blob=True,
        ),
    )
