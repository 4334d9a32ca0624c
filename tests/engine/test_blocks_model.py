"""The block manager against a model of what each block really contains, over random histories (invariants I1-I8).

The long form drives the same model for HEADSTART_BLOCK_OPERATIONS operations with each of ten seeds; it is left out
where that is not set. A million in all::

    HEADSTART_BLOCK_OPERATIONS=100000 python -m pytest tests/engine/test_blocks_model.py -k long
"""

from __future__ import annotations

import os
import random
from collections import Counter
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
from engine.batch import BlockCopy
from engine.blocks import BlockManager, BlockTable
from engine.errors import NoSpaceError, PinLimitError
from engine.wire import AllBlocksCleared, BlockRemoved, BlockStored

BLOCK = 2
NUM_BLOCKS = 7
ROOTS = st.sampled_from([b"one", b"two"])
SOURCES = ((0,) * 13, (0, 0, 0, 0, 0, 1, 0, 1, 1, 0, 1, 0, 1), (0, 0, 1, 1, 1, 1, 1, 0, 0, 0, 1, 1, 0))
# Prefixes are shared, diverge and come back all the time.
PROMPTS = st.builds(lambda source, length: list(source[:length]), st.sampled_from(SOURCES), st.integers(1, 13))

WINDOW = 4
WINDOW_BLOCKS = 5
QUOTAS = {b"one": 3, b"two": 0}
"""Of the tenants, each with a namespace of its own."""

Written = tuple[bytes | None, tuple[int, ...]]
"""What one slot of a block holds: KV depends on the namespace and on every token up to its own."""


class PoolModel(RuleBasedStateMachine):
    """Drives the manager and writes into the slots of its blocks what a runner would."""

    block_hash: Callable[[bytes, bytes], bytes] = staticmethod(hash_block)

    most_pinned = NUM_BLOCKS // 2

    live = Bundle("live")

    def __init__(self) -> None:
        super().__init__()
        self.blocks = self.manager()
        self.slots: list[list[Written | None]] = [[None] * BLOCK for _ in range(NUM_BLOCKS)]
        self.tables: list[BlockTable] = []
        self.resident: dict[bytes, bytes | None] = {}  # key -> parent's key, from events alone
        self.pins: list[list[bytes]] = []
        self.hits = self.copies = self.in_flight = self.pinned = self.refused = 0  # how often each was seen

    def manager(self) -> BlockManager:
        return BlockManager(NUM_BLOCKS, BLOCK, block_hash=self.block_hash)

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
                        assert key not in self.protected()
                        del self.resident[key]
                        assert key not in self.resident.values()  # leaf first
                case AllBlocksCleared():
                    self.resident.clear()

    def protected(self) -> set[bytes]:
        """Resident keys that may not leave."""
        return {key for keys in self.pins for key in self.resident_part(keys)}

    def resident_part(self, keys: list[bytes]) -> list[bytes]:
        """The keys of a chain that follow on one another from a root."""
        for i, key in enumerate(keys):
            if self.resident.get(key, key) != (keys[i - 1] if i else None):
                return keys[:i]
        return keys

    def used_keys(self) -> set[bytes]:
        return {key for table in self.tables for key in table.keys[: table.published]}

    def owned(self, tenant: str) -> set[bytes]:
        """The tenant's resident keys."""
        blocks = self.blocks._pool.blocks
        return {block.key for block in blocks if block.key is not None and block.root == tenant.encode()}

    def of_other_tenants(self, table: BlockTable) -> set[bytes]:
        blocks = self.blocks._pool.blocks
        return {block.key for block in blocks if block.key is not None and block.root != table.root}

    def expected_hit(self, table: BlockTable) -> int:
        """The longest run of resident full blocks, short of the last token."""
        if table.root is None:
            return 0
        keys = chain_keys(table.root, table.tokens[:-1], BLOCK, self.block_hash)
        count = 0
        while count < len(keys) and keys[count] in self.resident:
            count += 1
        return count * BLOCK

    def assert_in_flight(self, table: BlockTable) -> None:
        """Who is waited for is alive and computing exactly the tokens that would be computed first otherwise."""
        other = self.blocks.in_flight(table)
        if other is None:
            return
        self.in_flight += 1
        end = self.expected_hit(table) + BLOCK
        assert other in self.tables
        assert other.publishing
        assert other.root == table.root
        assert end < len(table.tokens)  # more than the hit is left to compute
        assert other.tokens[:end] == table.tokens[:end]
        assert other.computed < end

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
        owner = None if root is None else self.blocks.owner(root.decode(), QUOTAS[root])
        table = BlockTable(tokens, root, owner)
        before = self.state()
        self.assert_hit(self.blocks.lookup(table), table)
        self.assert_in_flight(table)
        hit = self.blocks.lookup(table)
        try:
            cached = self.blocks.allocate(table, headroom)
        except NoSpaceError:
            assert self.state() == before
            return multiple()
        assert cached == table.computed == hit
        self.hits += hit > 0
        self.tables.append(table)
        self.hear()
        return table

    @rule(table=live, token=st.integers(0, 1))
    def append(self, table: BlockTable, token: int) -> None:
        before = self.state()
        table.tokens.append(token)
        if not self.extend(table):
            table.tokens.pop()
            assert self.state() == before

    def extend(self, table: BlockTable) -> bool:
        """Make room, and copy what is to be copied; False when there was no space."""
        taken = self.blocks.stats().used + len(self.protected() - self.used_keys())
        sharers = Counter(block for other in self.tables for block in other.blocks)
        held = list(table.blocks)
        try:
            copy = self.blocks.extend(table)
        except NoSpaceError:
            assert self.window_is_short(table) or taken > NUM_BLOCKS - (-(-len(table.tokens) // BLOCK) - len(held) + 1)
            return False
        if copy is None:
            assert table.blocks[: len(held)] == held
        else:
            source, target = copy.source, copy.target
            assert sharers[source] > 1  # nobody copies what is its own
            assert not sharers[target]
            assert [target if block == source else block for block in held] == table.blocks[: len(held)]
            self.slots[target] = [*self.slots[source]]
            self.copy_window(copy)
            self.copies += 1
        self.hear()
        return True

    @precondition(lambda self: any(table.computed for table in self.tables))
    @rule(target=live, table=live)
    def fork(self, table: BlockTable) -> object:
        if not table.computed or len(self.tables) > 2 * NUM_BLOCKS:
            return multiple()
        used = self.blocks.stats().used
        other = self.blocks.fork(table)
        assert self.blocks.stats().used == used
        assert (other.tokens, other.computed) == (table.tokens, table.computed)
        self.tables.append(other)
        self.hear()
        return other

    def is_shared(self, table: BlockTable) -> bool:
        """Whether the block of its next token is another table's too."""
        at = table.computed // BLOCK
        return at < len(table.blocks) and any(
            table.blocks[at] in other.blocks for other in self.tables if other is not table
        )

    # What only a model with a window has to do.

    def window_is_short(self, table: BlockTable) -> bool:
        return False

    def write_window(self, table: BlockTable, position: int) -> None: ...

    def copy_window(self, copy: BlockCopy) -> None: ...

    @rule(table=live, count=st.sampled_from([1, 5, 13]))
    def compute(self, table: BlockTable, count: int) -> None:
        forked = len(table.blocks) * BLOCK < len(table.tokens) or self.is_shared(table)
        if forked and not self.extend(table):
            return
        count = min(len(table.tokens) - table.computed, count)
        end = table.computed + self.blocks.reserve(table, count)
        self.hear()
        for position in range(table.computed, end):
            block = table.blocks[position // BLOCK]
            assert sum(block in other.blocks for other in self.tables) == 1  # never write what is shared
            self.slots[block][position % BLOCK] = self.written(table, position)
            self.write_window(table, position)
        others = self.of_other_tenants(table)
        publishing = table.publishing and end > table.computed
        self.blocks.commit(table, end)
        self.hear()
        assert others <= self.resident.keys()  # nobody makes room for another tenant's block
        if publishing and not table.publishing and table.owner is not None:
            idle = self.owned(table.owner.name) - self.used_keys() - self.protected()
            self.refused += not idle  # for want of room; else for a collision
            assert not idle or self.block_hash is not hash_block

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

    @rule(tokens=PROMPTS, root=ROOTS, wrong=st.booleans())
    def pin(self, tokens: list[int], root: bytes, wrong: bool) -> None:
        keys = chain_keys(root, tokens, BLOCK, self.block_hash)
        if wrong:  # no chain: nothing but its beginning may come of it
            keys = [*keys, b"unknown", *keys[:1]]
        if not keys:
            return
        before = self.state()
        wanted = {tuple(chain[: i + 1]) for chain in (*self.pins, keys) for i in range(len(chain))}
        try:
            resident = self.blocks.pin(keys)
        except PinLimitError:
            assert self.state() == before
            assert len(wanted) > self.most_pinned
            return
        assert len(wanted) <= self.most_pinned
        if keys not in self.pins:
            self.pins.append(keys)
        assert resident == len(self.resident_part(keys))
        self.pinned += resident > 0

    @precondition(lambda self: self.pins)
    @rule(number=st.integers(0, NUM_BLOCKS))
    def unpin(self, number: int) -> None:
        keys = self.pins.pop(number % len(self.pins))
        left = {tuple(chain[: i + 1]) for chain in self.pins for i in range(len(chain))}
        released = self.blocks.unpin(keys)
        assert released == len({tuple(keys[: i + 1]) for i in range(len(keys))} - left)
        assert self.blocks.unpin(keys) == 0
        self.hear()

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
        assert stats.pinned == len(self.protected())
        for root, quota in QUOTAS.items():
            assert not quota or len(self.owned(root.decode())) <= quota
        assert len(self.blocks.pins()) == len(self.pins)

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
