"""A model of what each block of a block manager really contains, for histories of any kind (invariants I1-I8)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, precondition, rule

from cache_policy.keys import chain_keys, hash_block
from cache_policy.policy import POLICY_NAMES
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
