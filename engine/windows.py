"""The KV blocks of the layers that see no more than a sliding window: kept only as far as a window may need them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Final

import msgspec

from engine.block import Block, BlockTable
from engine.errors import NoSpaceError, require

__all__ = ["WindowPool", "WindowStats", "window_span"]

_KEPT_SHARE: Final = 0.5
"""Of two simulated loads, documents after a system prompt and conversations, either loses with more or with less."""


class WindowStats(msgspec.Struct, frozen=True):
    """State of a window pool in blocks, and totals since it was made.

    ``used`` + ``idle`` + ``empty`` = ``num_blocks``. ``released`` counts the blocks that running sequences gave back
    because no token to come sees them.
    """

    num_blocks: int
    used: int
    idle: int
    empty: int
    released: int
    evictions: int


def window_span(window: int, block_size: int) -> int:
    """In how many blocks of ``block_size`` tokens ``window`` consecutive tokens can lie at most."""
    return (window + block_size - 2) // block_size + 1


class WindowPool:
    """The one owner of the blocks of the windowed layers, which are numbered apart from those of the main pool.

    What such a block is for is said by the main pool: the *companion* of a published block holds the K and V of the
    same tokens in the windowed layers. So there is one index, one way to compare and one order of chains for both. A
    published block has one companion, or none any more; a hit may end only where the blocks that its next token sees
    have theirs. A block is in one of three states::

        empty  ──take──▶  used  ──last release, no companion──▶  empty
                          used  ──last release, companion─────▶  idle  ──acquire──▶  used
                                                                 idle  ──take─────▶  used, for something else

    *Used* blocks are named by live block tables, or by a pin. Of the idle ones most lie where no hit has ever ended, in
    the midst of chains; they are *spare*. *Kept* are those that the next token sees where the cache has already ended
    for somebody once: there others will come, and one window is all they need of a prefix of any length. The spare ones
    are taken first, until more than ``_KEPT_SHARE`` of the pool is kept; of either kind that whose use ended first,
    whatever policy rules the main pool. Not thread-safe.

    A table's ``window`` has a place for each of its blocks; only those from ``window_start`` on are held.
    """

    def __init__(self, num_blocks: int, block_size: int, window: int, on_loss: Callable[[Block], None]) -> None:
        """``num_blocks`` empty blocks of ``block_size`` tokens for layers in which a token sees ``window`` tokens.

        ``on_loss`` hears of each block of the main pool whose companion was taken.

        Raises:
            ValueError: a size is not positive.
        """
        if min(num_blocks, block_size, window) < 1:
            raise ValueError("a window pool needs at least one block of one token and a window of one token")
        self.num_blocks = num_blocks
        self.span = window_span(window, block_size)
        """The most blocks that one token sees."""
        self._released = 0
        self._evictions = 0
        self._block_size = block_size
        self._window = window
        self._on_loss = on_loss
        self._refs = [0] * num_blocks  # table entries that name it, and one when it is pinned
        self._companion_of: list[Block | None] = [None] * num_blocks
        self._empty = [*reversed(range(num_blocks))]  # a stack
        self._spare: OrderedDict[int, None] = OrderedDict()
        self._kept: OrderedDict[int, None] = OrderedDict()

    def available(self) -> int:
        """Blocks that could be handed out now."""
        return len(self._empty) + len(self._spare) + len(self._kept)

    # --- companions ------------------------------------------------------------------------------------

    def usable(self, hits: Sequence[Block]) -> int:
        """How many of the leading ``hits`` of a chain can be used: as far as the next token finds its whole window."""
        count = len(hits)
        while count:
            first = self._first_seen(count * self._block_size)
            gap = next((i for i in range(count - 1, first - 1, -1) if hits[i].companion is None), None)
            if gap is None:
                break
            count = gap
        return count

    def seek(self, run: Sequence[Block]) -> None:
        """A chain of resident blocks ends for someone after ``run``: keep what the next token sees there.

        What is missing of that will be kept when it is computed again.
        """
        for block in run[self._first_seen(len(run) * self._block_size) :]:
            block.sought = True
            index = block.companion
            if index is not None and index in self._spare:
                del self._spare[index]
                self._kept[index] = None

    def acquire(self, index: int) -> None:
        """One more names a block that is a companion, or that another table names."""
        if not self._refs[index]:
            self._withdraw(index)
        self._refs[index] += 1

    def release(self, index: int) -> None:
        """One less names the block."""
        self._refs[index] -= 1
        if self._refs[index]:
            return
        owner = self._companion_of[index]
        if owner is None:
            self._empty.append(index)
        else:
            (self._kept if owner.sought else self._spare)[index] = None

    def detach(self, block: Block) -> None:
        """A block of the main pool is published no more: its companion is left to whoever uses it, or empty."""
        index, block.companion = block.companion, None
        assert index is not None
        self._companion_of[index] = None
        if not self._refs[index]:
            self._withdraw(index)
            self._empty.append(index)

    # --- tables ----------------------------------------------------------------------------------------

    def require_room(self, hits: Sequence[Block], missing: int, headroom: int) -> None:
        """Check that a table may start with ``hits`` and ``missing`` blocks to compute, leaving ``headroom`` blocks.

        Raises:
            NoSpaceError: so much is not available.
        """
        held = hits[self._first_seen(len(hits) * self._block_size) :]
        needed = min(missing, self.span - len(held)) + headroom
        idle = sum(block.companion is not None and not self._refs[block.companion] for block in held)
        available = self.available() - idle
        if needed > available:
            raise NoSpaceError(needed, available)

    def start(self, table: BlockTable, hits: Sequence[Block]) -> None:
        """Hold what the first token after ``hits`` sees of them."""
        table.window_start = self._first_seen(len(hits) * self._block_size)
        table.window = [0] * table.window_start
        for block in hits[table.window_start :]:
            assert block.companion is not None
            self.acquire(block.companion)
            table.window.append(block.companion)

    def fork(self, table: BlockTable, other: BlockTable) -> None:
        """Hold for ``other`` what ``table`` holds of the blocks that both have."""
        other.window_start = table.window_start
        other.window = table.window[: len(other.blocks)]
        for index in other.window[other.window_start :]:
            self.acquire(index)

    def grow(self, table: BlockTable, count: int) -> None:
        """Take ``count`` blocks more, which must be available."""
        table.window += [self._take() for _ in range(count)]

    def own(self, table: BlockTable, at: int) -> tuple[int, int]:
        """Take a block, which must be available, in place of the shared one at ``at``; returns (shared, own)."""
        shared, own = table.window[at], self._take()
        self.release(shared)
        table.window[at] = own
        return shared, own

    def publish(self, table: BlockTable, at: int, block: Block) -> None:
        """The table's block at ``at`` is ``block`` now, published by it or by another one with the same content."""
        own = table.window[at]
        if block.companion is None:
            self._companion_of[own] = block
            block.companion = own
            if block.pin is not None:
                self.acquire(own)
        else:
            self.acquire(block.companion)
            table.window[at] = block.companion
            self.release(own)

    def slide(self, table: BlockTable) -> None:
        """Give back what no token from ``table.computed`` on sees."""
        start, end = table.window_start, self._first_seen(table.computed)
        for at in range(start, end):
            self.release(table.window[at])
            table.window[at] = 0
        self._released += end - start
        table.window_start = end

    def drop(self, table: BlockTable) -> None:
        """Give everything back."""
        for index in reversed(table.window[table.window_start :]):
            self.release(index)
        table.window = []
        table.window_start = 0

    def growth(self, table: BlockTable) -> int:
        """How many blocks a table will take yet before its prompt is computed."""
        if len(table.tokens) - table.computed <= 1:
            return 0
        blocks = -(-len(table.tokens) // self._block_size)
        return max(0, min(blocks, self.span) - (len(table.window) - table.window_start))

    # --- inside ----------------------------------------------------------------------------------------

    def _first_seen(self, position: int) -> int:
        """The place in its table of the first block that a token at ``position``, and so any later one, sees."""
        return max(0, position - self._window + 1) // self._block_size

    def _withdraw(self, index: int) -> None:
        """An idle block is idle no more."""
        if index in self._spare:
            del self._spare[index]
        else:
            del self._kept[index]

    def _take(self) -> int:
        if self._empty:
            index = self._empty.pop()
            self._refs[index] = 1
            return index
        full = len(self._kept) > _KEPT_SHARE * self.num_blocks
        index, _ = (self._spare if self._spare and not full else self._kept).popitem(last=False)
        self._refs[index] = 1
        loser, self._companion_of[index] = self._companion_of[index], None
        assert loser is not None
        loser.companion = None
        self._evictions += 1
        self._on_loss(loser)
        return index

    # --- for the operator ------------------------------------------------------------------------------

    def stats(self) -> WindowStats:
        """The pool's state and totals."""
        return WindowStats(
            num_blocks=self.num_blocks,
            used=self.num_blocks - self.available(),
            idle=len(self._spare) + len(self._kept),
            empty=len(self._empty),
            released=self._released,
            evictions=self._evictions,
        )

    def check(self, tables: Iterable[BlockTable], blocks: Sequence[Block]) -> None:
        """Verify the pool's invariants against all live tables and the main pool's blocks.

        Raises:
            InvariantError: names the first one that does not hold.
        """
        references = [0] * self.num_blocks
        for table in tables:
            require(table.window_start == self._first_seen(table.computed), "a table holds what its next token sees")
            require(len(table.window) * self._block_size >= table.computed, "a table holds a window up to its end")
            for at in range(table.window_start, len(table.window)):
                index = table.window[at]
                references[index] += 1
                block = blocks[table.blocks[at]] if at < table.published else None
                require(self._companion_of[index] is block, "a table's two blocks at a place belong together")
        for block in blocks:
            if block.companion is not None:
                require(self._companion_of[block.companion] is block, "agrees with its companion", block.index)
                require(block.key is not None, "has a companion only with a key", block.index)
                references[block.companion] += block.pin is not None
        empty = set(self._empty)
        require(len(empty) == len(self._empty), "no window block is empty twice")
        for index, (ref, owner) in enumerate(zip(self._refs, self._companion_of, strict=True)):
            require(ref == references[index], "references to a window block equal table entries and pins", index)
            require((index in empty) == (not ref and owner is None), "empty exactly when nothing needs it", index)
            kept = owner is not None and owner.sought
            spare = owner is not None and not owner.sought
            require((index in self._kept) == (not ref and kept), "kept exactly when only cached, and sought", index)
            require((index in self._spare) == (not ref and spare), "spare exactly when only cached, not sought", index)
            require(owner is None or owner.companion == index, "agrees with the block it belongs to", index)
