"""The block manager against a model of what each block really contains, over random histories (invariants I1-I8)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    precondition,
    rule,
    run_state_machine_as_test,
)

from cache_policy.keys import chain_keys, hash_block
from cache_policy.policy import POLICY_NAMES, BlockKey, EvictionPolicy
from engine.blocks import BlockManager, BlockTable
from engine.errors import NoSpaceError
from engine.wire import AllBlocksCleared, BlockRemoved, BlockStored

BLOCK = 2
NUM_BLOCKS = 7
ROOTS = st.sampled_from([b"one", b"two"])
SOURCES = ((0,) * 13, (0, 0, 0, 0, 0, 1, 0, 1, 1, 0, 1, 0, 1), (0, 0, 1, 1, 1, 1, 1, 0, 0, 0, 1, 1, 0))
# Prefixes are shared, diverge and come back all the time.
PROMPTS = st.builds(lambda source, length: list(source[:length]), st.sampled_from(SOURCES), st.integers(1, 13))

Written = tuple[bytes | None, tuple[int, ...]]
"""What one slot of a block holds: KV depends on the namespace and on every token up to its own."""


class PoolModel(RuleBasedStateMachine):
    """Drives the manager and writes into the slots of its blocks what a runner would."""

    block_hash: Callable[[bytes, bytes], bytes] = staticmethod(hash_block)

    live = Bundle("live")

    def __init__(self) -> None:
        super().__init__()
        self.blocks = BlockManager(NUM_BLOCKS, BLOCK, block_hash=self.block_hash)
        self.slots: list[list[Written | None]] = [[None] * BLOCK for _ in range(NUM_BLOCKS)]
        self.tables: list[BlockTable] = []
        self.resident: dict[bytes, bytes | None] = {}  # key -> parent's key, from events alone

    # --- what the model knows ------------------------------------------------------------------------

    def hear(self) -> None:
        """Take in the events, checking that each makes sense where it comes."""
        for event in self.blocks.drain_events():
            match event:
                case BlockStored(keys, parent, _):
                    for key in keys:
                        assert key not in self.resident
                        assert parent is None or parent in self.resident
                        self.resident[key] = parent
                        parent = key
                case BlockRemoved(keys):
                    for key in keys:
                        del self.resident[key]
                        assert key not in self.resident.values()  # leaf first
                case AllBlocksCleared():
                    self.resident.clear()

    def expected_hit(self, table: BlockTable) -> int:
        """The longest run of resident full blocks, short of the last token."""
        if table.root is None:
            return 0
        keys = chain_keys(table.root, table.tokens[:-1], BLOCK, self.block_hash)
        count = 0
        while count < len(keys) and keys[count] in self.resident:
            count += 1
        return count * BLOCK

    def assert_hit(self, found: int, table: BlockTable) -> None:
        assert found == self.expected_hit(table)

    def state(self) -> object:
        tables = [(list(table.blocks), table.computed, table.published) for table in self.tables]
        return self.blocks.stats(), tables, self.blocks.has_events

    def written(self, table: BlockTable, position: int) -> Written:
        return table.root, tuple(table.tokens[: position + 1])

    # --- operations ----------------------------------------------------------------------------------

    @rule(target=live, tokens=PROMPTS, root=ROOTS | st.none(), headroom=st.integers(0, 2))
    def allocate(self, tokens: list[int], root: bytes | None, headroom: int) -> object:
        table = BlockTable(tokens, root)
        before = self.state()
        self.assert_hit(self.blocks.lookup(table), table)
        hit = self.blocks.lookup(table)
        try:
            cached = self.blocks.allocate(table, headroom)
        except NoSpaceError:
            assert self.state() == before
            return multiple()
        assert cached == table.computed == hit
        self.tables.append(table)
        self.hear()
        return table

    @rule(table=live, token=st.integers(0, 1))
    def append(self, table: BlockTable, token: int) -> None:
        before = self.state()
        table.tokens.append(token)
        try:
            self.blocks.extend(table)
        except NoSpaceError:
            table.tokens.pop()
            assert self.state() == before
            assert before[0].used == NUM_BLOCKS  # type: ignore[index]
        self.hear()

    @rule(table=live, count=st.sampled_from([1, 5, 13]))
    def compute(self, table: BlockTable, count: int) -> None:
        end = min(len(table.tokens), table.computed + count)
        for position in range(table.computed, end):
            block = table.blocks[position // BLOCK]
            assert sum(block in other.blocks for other in self.tables) == 1  # never write what is shared
            self.slots[block][position % BLOCK] = self.written(table, position)
        self.blocks.commit(table, end)
        self.hear()

    @rule(tokens=PROMPTS, root=ROOTS)
    def run_to_its_end(self, tokens: list[int], root: bytes) -> None:
        table = self.allocate(tokens, root, 0)
        if isinstance(table, BlockTable):
            self.compute(table, len(tokens))
            self.free(table)

    @rule(table=consumes(live))
    def free(self, table: BlockTable) -> None:
        self.tables.remove(table)
        self.blocks.free(table)
        self.blocks.free(table)
        self.hear()

    @precondition(lambda self: self.blocks.stats().idle > 2)
    @rule(count=st.integers(0, 2))
    def evict(self, count: int) -> None:
        used = {block for table in self.tables for block in table.blocks}
        evicted = self.blocks.evict(count)
        assert not used & set(evicted)
        self.hear()

    @precondition(lambda self: len(self.resident) > 2)  # or there would be little to hit
    @rule()
    def reset(self) -> None:
        self.blocks.reset()
        self.hear()
        assert not self.resident

    @rule(name=st.sampled_from(POLICY_NAMES))
    def set_policy(self, name: str) -> None:
        before = self.state()
        self.blocks.set_policy(name)
        assert self.state() == before

    # --- what always holds ---------------------------------------------------------------------------

    @invariant()
    def bookkeeping_is_consistent(self) -> None:
        self.blocks.check()
        stats = self.blocks.stats()
        assert stats.used + stats.idle + stats.empty == NUM_BLOCKS
        assert stats.used == len({block for table in self.tables for block in table.blocks})

    @invariant()
    def every_sequence_finds_its_own_content(self) -> None:
        for table in self.tables:
            for position in range(table.computed):
                block = table.blocks[position // BLOCK]
                assert self.slots[block][position % BLOCK] == self.written(table, position)

    @invariant()
    def a_snapshot_equals_the_sum_of_the_events(self) -> None:
        parents: dict[bytes, bytes | None] = {}
        for event in self.blocks.resident():
            assert isinstance(event, BlockStored)
            parent = event.parent_block_hash
            for key in event.block_hashes:
                assert key not in parents
                parents[key] = parent
                parent = key
        assert parents == self.resident


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
        self.blocks._pool.policy = ContraryPolicy(NUM_BLOCKS)


class CollidingPoolModel(PoolModel):
    """The same with so few keys that most of them collide: fewer hits, never a wrong one."""

    block_hash = staticmethod(lambda parent, content: bytes([(sum(parent) + sum(content)) % 5]))

    def assert_hit(self, found: int, table: BlockTable) -> None:
        assert found <= self.expected_hit(table)


@pytest.mark.parametrize("model", [PoolModel, CollidingPoolModel, ContraryPoolModel])
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
