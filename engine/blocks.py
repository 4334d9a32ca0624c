"""Block tables: which blocks hold a sequence's K and V, and which of them it shares with others."""

from __future__ import annotations

from collections.abc import Sequence

from cache_policy.keys import BlockHash, hash_block
from engine.batch import BlockCopy
from engine.block import Block, BlockTable
from engine.errors import NoSpaceError, require
from engine.in_flight import InFlight
from engine.owners import Owner
from engine.pool import MAX_PINNED_SHARE, BlockPool, PoolStats
from engine.windows import WindowStats
from engine.wire import CacheEvent

__all__ = ["BlockManager", "BlockTable"]


class BlockManager:
    """The one owner of live block tables and of the pool under them. Not thread-safe; knows no models or tensors.

    Contracts: an operation that raises has changed nothing; hits are pinned before anything is evicted for the same
    allocation; a block is published only after its K and V are computed; a block that is published, or named by more
    than one table, is never written again: who shares one that is not full gets a copy from ``extend`` to go on in.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        policy: str = "lru",
        *,
        window: int = 0,
        window_blocks: int = 0,
        block_hash: BlockHash = hash_block,
    ) -> None:
        """Manage ``num_blocks`` blocks of ``block_size`` tokens under the named eviction policy.

        Where a model has layers that see only the last ``window`` tokens, their K and V are in ``window_blocks`` blocks
        of their own, of which each sequence holds those that its next tokens see.

        Raises:
            ValueError: a size is not positive, or there are fewer window blocks than one token sees.
            cache_policy.policy.UnknownPolicyError: there is no such policy.
        """
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._pool = BlockPool(num_blocks, block_size, policy, window=window, window_blocks=window_blocks)
        self._windows = self._pool.windows
        if self._windows is not None and window_blocks < min(num_blocks, self._windows.span):
            raise ValueError(f"a window of {window} tokens needs {self._windows.span} blocks, not {window_blocks}")
        self._hash = block_hash
        self._live: set[BlockTable] = set()
        self._in_flight = InFlight()

    # --- for the scheduler -----------------------------------------------------------------------------

    def blocks_for(self, tokens: int) -> int:
        """How many blocks hold ``tokens`` tokens."""
        return -(-tokens // self.block_size)

    def lookup(self, table: BlockTable) -> int:
        """How many leading tokens an allocation made now would find computed. A hint, not a reservation."""
        return len(self._match(table)[1]) * self.block_size

    def in_flight(self, table: BlockTable) -> BlockTable | None:
        """The live table that is computing the block ``table`` would have to compute first; None when nobody is.

        It stays the answer until that block is published, or its table freed or kept from publishing.
        """
        computing = self._in_flight.awaited(table)
        if computing is not None:
            return computing
        _, hits, collided = self._match(table)
        at = len(hits)
        if collided or at >= table.hittable(self.block_size):
            return None
        return self._in_flight.find(table, at)

    def allocate(self, table: BlockTable, headroom: int = 0) -> int:
        """Give ``table`` blocks for all its tokens, shared ones first; return how many tokens are computed already.

        At least the last token is left to compute, so that there is something to sample from. ``headroom`` blocks must
        stay available afterwards.

        Raises:
            NoSpaceError: too few blocks are empty or idle.
            ValueError: the table has no tokens, or has blocks already.
        """
        if table.blocks or not table.tokens:
            raise ValueError("allocate needs a table with tokens and without blocks")
        pool = self._pool
        run, hits, collided = self._match(table)
        missing = self.blocks_for(len(table.tokens)) - len(hits)
        available = pool.available() - sum(block.ref == 0 for block in hits)
        if missing + headroom > available:
            raise NoSpaceError(missing + headroom, available)
        windows = self._windows
        if windows is not None:
            windows.require_room(hits, missing, headroom + sum(windows.growth(other) for other in self._live))
        pool.collisions += collided
        # Pinned first: an eviction below must not take a block that this very request is about to use.
        for block in hits:
            pool.acquire(block)
        if windows is not None:
            windows.start(table, hits)
            windows.seek(run)
        # The last block of a fully cached prompt is resident, yet computed again.
        absent = [key for key in table.keys[len(hits) :] if pool.find(key) is None]
        pool.eviction.missed(absent, table.owner)
        if not collided:  # or nothing will be published
            self._in_flight.announce(absent, table)
        table.blocks = [block.index for block in hits]
        table.blocks += [pool.take().index for _ in range(missing)]
        table.computed = len(hits) * self.block_size
        table.published = len(hits)
        table.publishing = table.root is not None
        table.awaited = None
        self._live.add(table)
        return table.computed

    def fork(self, table: BlockTable) -> BlockTable:
        """A second table with the same tokens, that shares every block in which anything is computed.

        Each of the two must be given to ``extend`` before more of it is computed.

        Raises:
            ValueError: nothing of the table is computed.
        """
        if not table.computed:
            raise ValueError("fork needs a table of which something is computed")
        other = BlockTable([*table.tokens], table.root, table.owner)
        other.blocks = table.blocks[: self.blocks_for(table.computed)]
        other.computed, other.published, other.publishing = table.computed, table.published, table.publishing
        other.keys, other.contents = [*table.keys], [*table.contents]
        for index in other.blocks:
            self._pool.acquire(self._pool.blocks[index])
        if self._windows is not None:
            self._windows.fork(table, other)
        self._live.add(other)
        return other

    def reserve(self, table: BlockTable, count: int) -> int:
        """How many of the next ``count`` tokens can be computed now, for which the table then has all it needs.

        Fewer than ``count`` where layers with a sliding window have too few blocks. Once these tokens are computed the
        table holds one window of them again, so that this takes nothing away from others but for the time of a step.
        """
        windows = self._windows
        if windows is None:
            return count
        missing = self.blocks_for(table.computed + count) - len(table.window)
        if missing > 0:
            windows.grow(table, min(missing, windows.available()))
        return min(count, len(table.window) * self.block_size - table.computed)

    def extend(self, table: BlockTable) -> BlockCopy | None:
        """Make room for all the tokens of ``table``, in blocks that it may write.

        When the next token belongs in a block that is shared and not full, the table gets a block of its own in its
        place. Then the copy is returned that has to be made before the token is computed.

        Raises:
            NoSpaceError: too few blocks are empty or idle.
            ValueError: the table has no blocks.
        """
        if not table.blocks:
            raise ValueError("extend needs an allocated table")
        pool = self._pool
        missing = self.blocks_for(len(table.tokens)) - len(table.blocks)
        at = table.computed // self.block_size
        shared = at < len(table.blocks) and table.computed < len(table.tokens) and pool.blocks[table.blocks[at]].ref > 1
        windows, wanted = self._windows, 0
        if windows is not None:
            wanted = max(0, self.blocks_for(len(table.tokens)) - len(table.window))
            if wanted + shared > windows.available():
                raise NoSpaceError(wanted + shared, windows.available())
        if missing <= 0 and not shared and not wanted:
            return None
        if missing + shared > pool.available():
            raise NoSpaceError(missing + shared, pool.available())
        copy = None
        if shared:
            source, own = table.blocks[at], pool.take().index
            pool.release(pool.blocks[source])
            table.blocks[at] = own
            copy = BlockCopy(source, own, None if windows is None else windows.own(table, at))
        if windows is not None:
            windows.grow(table, wanted)
        table.blocks += [pool.take().index for _ in range(missing)]
        return copy

    def commit(self, table: BlockTable, computed: int) -> None:
        """The K and V of the first ``computed`` tokens are in the table's blocks now: publish those that are full.

        Where another sequence has published the same content meanwhile, the table is turned to that block and its own
        copy is given back.

        Raises:
            ValueError: ``computed`` goes back, or beyond the table's tokens or blocks, or was written into a block that
                is shared.
        """
        if not table.computed <= computed <= min(len(table.tokens), len(table.blocks) * self.block_size):
            raise ValueError(f"cannot commit {computed} tokens after {table.computed}")
        if self._windows is not None and computed > len(table.window) * self.block_size:
            raise ValueError(f"cannot commit {computed} tokens with window blocks for fewer")
        if computed > table.computed and self._pool.blocks[table.blocks[table.computed // self.block_size]].ref > 1:
            raise ValueError("the block after a fork is shared: extend comes before computing")
        table.computed = computed
        full = computed // self.block_size
        if full > table.published and table.publishing:
            table.hash_full_blocks(self.block_size, self._hash)
            self._publish(table, full)
        if self._windows is not None:
            self._windows.slide(table)

    def free(self, table: BlockTable) -> None:
        """Give all blocks of ``table`` back; published ones stay hittable. Freeing it again does nothing."""
        self._live.discard(table)
        self._in_flight.ground(table)
        # Deepest first, so that among equals the tail of a prompt leaves the cache before its head.
        for index in reversed(table.blocks):
            self._pool.release(self._pool.blocks[index])
        table.blocks = []
        table.computed = table.published = 0
        if self._windows is not None:
            self._windows.drop(table)

    def owner(self, name: str, quota: int) -> Owner | None:
        """For a table's ``owner``: the tenant ``name``, which may have ``quota`` published blocks; None for 0.

        A block beyond that takes the place of one of the tenant's idle ones, in the order of the policy in force as it
        would be in a pool of ``quota`` blocks; when all are used or pinned it is not published, nor is what comes after
        it in the same sequence. Blocks of others never leave for it.
        """
        return self._pool.eviction.owner(name, quota) if quota else None

    def owners(self) -> list[Owner]:
        """Tenants with a quota that have blocks or requests, those with most blocks first."""
        return self._pool.eviction.owners()

    def capacity(self, table: BlockTable) -> int:
        """How many tokens the pool can hold for this sequence alone: pinned blocks of others are no room for it."""
        pins = self._pool.pins
        room = (self.num_blocks - pins.size) * self.block_size
        if not pins.size or len(table.tokens) < room:
            return room
        table.hash_full_blocks(self.block_size, self._hash)
        own = min(pins.common(table.keys), table.hittable(self.block_size))
        if table.blocks and not table.publishing:
            own = min(own, table.published)
        return room + own * self.block_size

    # --- for the operator ------------------------------------------------------------------------------

    def pin(self, keys: Sequence[bytes], room_for: int = 1) -> int:
        """Keep the prefix with this chain of keys in the cache: what is resident of it now, and what will be.

        The pin lasts until ``unpin``, over any ``reset``. Pinned blocks count as resident, but while idle not as
        available; all pins together take at most ``MAX_PINNED_SHARE`` of the pool, and leave blocks for ``room_for``
        tokens. Returns how many blocks of the chain are resident.

        Raises:
            PinLimitError: that would be too much.
            ValueError: there are no keys.
        """
        if not keys:
            raise ValueError("a pin needs at least one key")
        most = min(int(MAX_PINNED_SHARE * self.num_blocks), self.num_blocks - self.blocks_for(room_for))
        if self._windows is not None and self._windows.num_blocks < self.num_blocks:
            most = min(most, self._windows.num_blocks - self._windows.span)
        return self._pool.pin(keys, most)

    def unpin(self, keys: Sequence[bytes]) -> int:
        """Give up the pin of exactly this chain; how many blocks, resident or not, nothing pins any more."""
        return self._pool.unpin(keys)

    def pins(self) -> list[tuple[bytes, int, int]]:
        """Every pin: the last key of its chain, the chain's length in blocks, and how many of them are resident."""
        return [(node.key, length, resident) for node, length, resident in self._pool.pins.ends()]

    @property
    def policy(self) -> str:
        """Name of the eviction policy in force."""
        return self._pool.eviction.policy.name

    def set_policy(self, name: str) -> None:
        """Let another policy decide from now on; every block stays.

        Raises:
            cache_policy.policy.UnknownPolicyError: there is no such policy; the old one stays.
        """
        self._pool.set_policy(name)

    def evict(self, count: int) -> list[int]:
        """Evict up to ``count`` idle blocks and return their numbers; used and pinned ones are never touched."""
        return self._pool.evict(count)

    def reset(self) -> tuple[int, int]:
        """Drop the whole prefix cache; return how many idle blocks became empty and how many are used.

        Used blocks stay with their sequences but lose their keys at once, and sequences that have published some
        publish no more: nothing from before a reset is ever hit after it.
        """
        dropped = self._pool.reset()
        for table in self._live:
            if table.published:
                self._stop_publishing(table)
            table.published = 0
        return dropped, self._pool.stats().used

    def stats(self) -> PoolStats:
        """The pool's state and totals."""
        return self._pool.stats()

    def window_stats(self) -> WindowStats | None:
        """State and totals of the blocks of layers with a sliding window; None when there are none."""
        return None if self._windows is None else self._windows.stats()

    @property
    def has_events(self) -> bool:
        """Whether ``drain_events`` would return any."""
        return bool(self._pool.events)

    def retell(self) -> None:
        """Have the next events tell of everything hittable from the beginning."""
        self._pool.retell()

    def drain_events(self) -> tuple[CacheEvent, ...]:
        """What became hittable or ceased to be since the last call, in order."""
        return self._pool.events.drain()

    def resident(self) -> tuple[CacheEvent, ...]:
        """Everything hittable now as stored events, parents first: the start of a new listener's index."""
        return self._pool.resident()

    def check(self) -> None:
        """Verify every invariant of tables and pool.

        Raises:
            InvariantError: names the first one that does not hold.
        """
        references = [0] * self.num_blocks
        for table in self._live:
            for index in table.blocks:
                references[index] += 1
        self._pool.check(references)
        if self._windows is not None:
            self._windows.check(self._live, self._pool.blocks)
        for table in self._live:
            keys = [self._pool.blocks[index].key for index in table.blocks]
            require(bool(keys), "a live table has blocks")
            require(keys[: table.published] == table.keys[: table.published], "published blocks carry their keys")
            require(not any(keys[table.published :]), "the other blocks of a table carry none")
            require(table.published * self.block_size <= table.computed, "published blocks are computed")
            unwritten = table.blocks[self.blocks_for(table.computed) :]
            require(all(references[index] == 1 for index in unwritten), "blocks still to be written have one owner")
        self._in_flight.check(self._live, self._pool.find)

    # --- inside ----------------------------------------------------------------------------------------

    def _stop_publishing(self, table: BlockTable) -> None:
        self._in_flight.ground(table)
        table.publishing = False

    def _match(self, table: BlockTable) -> tuple[list[Block], list[Block], bool]:
        """The run of resident blocks, what of it an allocation made now would share, and whether a collision ended it.

        Layers with a window can go on only where they find the window before.
        """
        table.hash_full_blocks(self.block_size, self._hash)
        run, collided = self._pool.run(table)
        return run, run if self._windows is None else run[: self._windows.usable(run)], collided

    def _publish(self, table: BlockTable, full: int) -> None:
        """Publish the table's blocks from ``table.published`` up to ``full``."""
        pool = self._pool
        first = table.published
        parent = pool.blocks[table.blocks[first - 1]] if first else None
        for i in range(first, full):
            key, content = table.keys[i], table.contents[i]
            block = pool.blocks[table.blocks[i]]
            resident = pool.find(key)
            if resident is None:
                if table.owner is not None and not pool.make_room(table.owner):
                    self._stop_publishing(table)
                    return
                pool.publish(block, key, content, parent, table.root, table.owner)
            elif resident.holds(content, parent, table.root):
                pool.acquire(resident)
                table.blocks[i] = resident.index
                pool.release(block)
                block = resident
            else:
                pool.collisions += 1
                self._stop_publishing(table)
                return
            if self._windows is not None:
                self._windows.publish(table, i, block)
            self._in_flight.published(key)
            parent = block
            table.published = i + 1
