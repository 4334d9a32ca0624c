"""The pool of KV blocks: the state of each block, the index of shareable ones, and which one leaves next.

A block is a number; the runner owns the memory behind it. Every block is in exactly one of three states::

    empty  ──take──▶  used  ──last release, no key──▶  empty
                      used  ──last release, key─────▶  idle  ──acquire──▶  used
                                                       idle  ──evict────▶  empty

*Used* blocks are named by at least one live block table. *Idle* blocks belong to nobody but keep their KV under their
key until they are evicted, leaf first. A block is *published* under a key only while the block before it is published
too, and whoever uses it uses that one as well; so published blocks form a forest whose parents outlive their children.

A published block may be *pinned*, with all before it in its chain: then it is not evicted, and while it is idle the
policy takes it for used.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from engine.block import Block, BlockTable
from engine.errors import InvariantError, PinLimitError, require
from engine.events import CacheEventLog, stored_events
from engine.eviction import Eviction
from engine.owners import Owner
from engine.pins import PinNode, PinTree
from engine.windows import WindowPool
from engine.wire import CacheEvent

__all__ = ["MAX_PINNED_SHARE", "BlockPool", "PoolStats"]

MAX_PINNED_SHARE: Final = 0.5
"""Pins take at most this part of a pool, so that the rest of it can still be served."""


class PoolStats(msgspec.Struct, frozen=True):
    """State of the pool in blocks, and totals since it was made.

    ``used`` + ``idle`` + ``empty`` = ``num_blocks``. ``collisions_rejected`` counts keys that were equal for different
    content or a different prefix; each was treated as a miss. ``pinned`` blocks are among the used and idle ones;
    ``pinned_keys`` are those that are pinned, resident or not.
    """

    num_blocks: int
    used: int
    idle: int
    empty: int
    evictions: int
    collisions_rejected: int
    pinned: int
    pinned_keys: int


class BlockPool:
    """The one owner of all blocks, of the key index and of who is evicted. Not thread-safe."""

    def __init__(
        self, num_blocks: int, block_size: int, policy: str, *, window: int = 0, window_blocks: int = 0
    ) -> None:
        """A pool of ``num_blocks`` empty blocks of ``block_size`` tokens, evicting by the named policy.

        With a ``window`` there is a second one, of ``window_blocks`` blocks, for layers that see so many tokens.

        Raises:
            ValueError: a size is not positive.
            cache_policy.policy.UnknownPolicyError: there is no such policy.
        """
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a pool needs at least one block of one token, not {num_blocks} of {block_size}")
        self.blocks = [Block(index) for index in range(num_blocks)]
        self.block_size = block_size
        self.events = CacheEventLog(block_size)
        self.eviction = Eviction(self.blocks, policy)
        self.collisions = 0  # counted by whoever compares
        self.evictions = 0
        self.pins = PinTree()
        self._empty = [*reversed(range(num_blocks))]  # a stack
        self._idle = 0
        self._pinned = 0
        self._idle_pinned = 0
        self._index: dict[bytes, Block] = {}
        self.windows = WindowPool(window_blocks, block_size, window, self._forsake) if window else None

    def available(self) -> int:
        """Blocks that ``take`` could hand out now: empty ones, and idle ones by evicting them, but for pinned ones."""
        return len(self._empty) + self._idle - self._idle_pinned

    def find(self, key: bytes) -> Block | None:
        """The block published under ``key``. Equal keys are a hint: compare with ``Block.holds``."""
        return self._index.get(key)

    def run(self, table: BlockTable) -> tuple[list[Block], bool]:
        """The longest run of blocks that are resident for a table from its start, and whether a collision ended it.

        Its keys and contents must be up to date.
        """
        run: list[Block] = []
        parent: Block | None = None
        root, find = table.root, self._index.get
        for key, content in zip(table.keys[: table.hittable(self.block_size)], table.contents, strict=False):
            block = find(key)
            if block is None:
                break
            if not block.holds(content, parent, root):
                return run, True
            run.append(block)
            parent = block
        return run, False

    def take(self) -> Block:
        """A block for one table, evicting when none is empty. Callers ask ``available`` first."""
        block = self.blocks[self._empty.pop()] if self._empty else self._evict()
        block.ref = 1
        return block

    def acquire(self, block: Block) -> None:
        """One more table names a block that is published, or that another table names."""
        if block.ref == 0:
            self._idle -= 1
            if block.pin is None:
                self.eviction.withdraw(block)
            else:
                self._idle_pinned -= 1
        block.ref += 1

    def release(self, block: Block) -> None:
        """One table less names the block. The blocks of a table are released deepest first."""
        block.ref -= 1
        if block.ref:
            return
        if block.key is None:
            self._empty.append(block.index)
        else:
            self._idle += 1
            if block.pin is None:
                self.eviction.offer(block)
                if self.windows is not None:
                    self._forsake(block)
            else:
                self._idle_pinned += 1

    def make_room(self, owner: Owner) -> bool:
        """Evict of the owner's idle blocks until it may publish one more; False when all it has are used or pinned."""
        while owner.resident >= owner.quota:
            block = self.eviction.victim(owner)
            if block is None:
                return False
            self._empty.append(self._remove(block).index)
        return True

    def publish(
        self,
        block: Block,
        key: bytes,
        content: bytes,
        parent: Block | None,
        root: bytes | None,
        owner: Owner | None = None,
    ) -> None:
        """Make a used, fully computed block hittable under a key that no block has.

        An ``owner`` must have room for it (see ``make_room``).
        """
        block.key, block.content, block.root, block.parent = key, content, root, parent
        if owner is not None:
            block.owner = owner
            owner.resident += 1
        if parent is not None:
            block.depth = parent.depth + 1
            parent.children += 1
        self._index[key] = block
        if self.pins.size:
            above = self.pins.root if parent is None else parent.pin
            node = None if above is None else above.children.get(key)
            if node is not None:
                self._bind(node, block)
        self.events.stored(key, None if parent is None else parent.key)

    def evict(self, count: int) -> list[int]:
        """Evict up to ``count`` idle blocks and return their numbers; used and pinned ones are never touched."""
        evicted: list[int] = []
        while len(evicted) < count and self._idle > self._idle_pinned:
            evicted.append(self._evict().index)
        self._empty += evicted
        return evicted

    def pin(self, keys: Sequence[bytes], limit: int) -> int:
        """Evict none of the blocks of this chain any more, those that are resident and those that will be.

        ``keys`` are those of a chain from its first block on. Returns how many of its blocks are pinned now, which is
        as many as are resident.

        Raises:
            PinLimitError: with it, more than ``limit`` blocks would be pinned.
        """
        wanted = self.pins.size + self.pins.new_nodes(keys)
        if wanted > limit:
            raise PinLimitError(wanted, limit)
        parent: Block | None = None
        resident = 0
        for node in self.pins.add(keys):
            block = node.block or self._index.get(node.key)
            if block is None or block.parent is not parent:
                break
            if node.block is None:
                self._bind(node, block)
                if block.ref == 0:
                    self._idle_pinned += 1
                    self.eviction.withdraw(block)
            parent = block
            resident += 1
        return resident

    def unpin(self, keys: Sequence[bytes]) -> int:
        """Give up the pin of exactly this chain; how many blocks, resident or not, nothing pins any more."""
        dropped = self.pins.remove(keys)
        for node in dropped:  # deepest first, as the policy expects it
            block = node.block
            if block is None:
                continue
            block.pin = node.block = None
            self._pinned -= 1
            if self.windows is not None and block.companion is not None:
                self.windows.release(block.companion)
            if block.ref == 0:
                self._idle_pinned -= 1
                self.eviction.offer(block)
                if self.windows is not None:
                    self._forsake(block)
        return len(dropped)

    def reset(self) -> int:
        """Take every key away and return how many idle blocks became empty; used blocks stay with their tables.

        Pins stay too, for what will be published under their keys.
        """
        dropped = self._idle
        self._idle = self._idle_pinned = self._pinned = 0
        for block in self._index.values():
            self._unpublish(block)
            if block.ref == 0:
                self._empty.append(block.index)
        self._index.clear()
        self.eviction.restart()
        self.events.cleared()
        return dropped

    def set_policy(self, name: str) -> None:
        """Let another policy decide from now on; every block stays.

        The new policy hears of the idle blocks in the order in which the old one would have evicted them, and of those
        in use, and of pinned ones, when they next become idle or lose their pin.

        Raises:
            cache_policy.policy.UnknownPolicyError: there is no such policy; the old one stays.
        """
        self.eviction.replace(name, self._idle - self._idle_pinned)

    def stats(self) -> PoolStats:
        """The pool's state and totals."""
        return PoolStats(
            num_blocks=len(self.blocks),
            used=len(self.blocks) - self._idle - len(self._empty),
            idle=self._idle,
            empty=len(self._empty),
            evictions=self.evictions,
            collisions_rejected=self.collisions,
            pinned=self._pinned,
            pinned_keys=self.pins.size,
        )

    def resident(self) -> tuple[CacheEvent, ...]:
        """Everything hittable now as stored events, parents first: the start of a new listener's index."""
        return stored_events(self._index.values(), self.block_size)

    def retell(self) -> None:
        """Have the next events tell of everything hittable from the beginning."""
        self.events.retold(self.resident())

    def check(self, references: Sequence[int]) -> None:
        """Verify the pool's invariants against ``references``: per block, how many table entries name it.

        Raises:
            InvariantError: names the first one that does not hold.
        """
        children = [0] * len(self.blocks)
        for key, block in self._index.items():
            require(block.key == key, "key and block agree", block.index)
            if block.parent is not None:
                children[block.parent.index] += 1
        for owner in self.eviction.owners():
            owned = sum(block.owner is owner for block in self.blocks)
            require(owned == owner.resident, "the blocks of an owner are counted")
        empty = set(self._empty)
        require(len(empty) == len(self._empty), "no block is empty twice")
        require(sum(block.idle for block in self.blocks) == self._idle, "idle blocks are counted")
        pinned = [block for block in self.blocks if block.pin is not None]
        require(len(pinned) == self._pinned, "pinned blocks are counted")
        require(sum(block.idle for block in pinned) == self._idle_pinned, "idle pinned blocks are counted")
        require(sum(1 for _ in self.pins.nodes()) == self.pins.size, "pins are counted")
        for node in self.pins.nodes():
            require(node.block is None or node.block.pin is node, "a pin and its block agree")
        for block in self.blocks:
            index = block.index
            unowned = block.ref == 0 and block.key is None
            require(block.ref == references[index], "references equal table entries", index)
            require(block.children == children[index], "children are counted", index)
            require((index in empty) == unowned, "empty exactly when unused and without key", index)
            if block.key is None:
                require(not block.tracked, "unknown to the policy without a key", index)
                require(block.pin is None, "not pinned without a key", index)
                require(block.owner is None, "in no quota without a key", index)
                continue
            require(self._index.get(block.key) is block, "found under its key", index)
            require(block.tracked or block.ref > 0 or block.pin is not None, "known to the policy when idle", index)
            if self.windows is not None and self.eviction.evictable(index):
                require(block.companion is not None, "an idle leaf has a companion, or could not be hit", index)
            above = self.pins.root if block.parent is None else block.parent.pin
            wanted = None if above is None else above.children.get(block.key)
            require(block.pin is wanted, "pinned exactly when its chain up to it is", index)
            if block.parent is not None:
                require(block.parent.key is not None, "its parent is published", index)
                require(block.parent.ref >= block.ref, "its parent is used wherever it is", index)

    def _bind(self, node: PinNode, block: Block) -> None:
        node.block, block.pin = block, node
        self._pinned += 1
        if self.windows is not None and block.companion is not None:
            self.windows.acquire(block.companion)

    def _evict(self) -> Block:
        """Take the policy's victim out of the cache, see ``_remove``."""
        block = self.eviction.victim()
        if block is None:
            raise InvariantError(f"policy {self.eviction.policy.name} found no victim among {self._idle} idle blocks")
        return self._remove(block)

    def _remove(self, block: Block) -> Block:
        """Take an idle block out of the cache; it is in no state until the caller puts it in one."""
        parent = self._drop(block)
        if self.windows is not None and parent is not None:
            self._forsake(parent)
        return block

    def _forsake(self, block: Block) -> None:
        """Empty an idle leaf without companion, which could never be hit, and those above it that are alike then."""
        last: Block | None = block
        while last is not None and last.companion is None and self.eviction.evictable(last.index):
            self._empty.append(last.index)
            last = self._drop(last)

    def _drop(self, block: Block) -> Block | None:
        """Take an idle block out of the cache; returns its parent."""
        parent = block.parent
        assert block.key is not None
        del self._index[block.key]
        self.events.removed(block.key)
        self.eviction.forget(block)
        if parent is not None:
            parent.children -= 1
        self._unpublish(block)
        self._idle -= 1
        self.evictions += 1
        return parent

    def _unpublish(self, block: Block) -> None:
        if self.windows is not None and block.companion is not None:
            if block.pin is not None:
                self.windows.release(block.companion)
            self.windows.detach(block)
        if block.owner is not None:
            block.owner.resident -= 1
            block.owner = None
        if block.pin is not None:
            block.pin.block = None
            block.pin = None
        block.key = block.parent = block.root = None
        block.content = b""
        block.depth = block.children = 0
        block.tracked = block.sought = False
