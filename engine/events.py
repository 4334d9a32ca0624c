"""The record of what became hittable and what ceased to be, on its way to the gateways' indexes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from engine.wire import AllBlocksCleared, BlockRemoved, BlockStored, CacheEvent

if TYPE_CHECKING:
    from engine.block import Block

__all__ = ["CacheEventLog", "stored_events"]


class CacheEventLog:
    """Collects cache events between two drains, runs of one kind as one event. Owned by the block pool."""

    __slots__ = ("_block_size", "_events", "_parent", "_removed", "_stored")

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._events: list[CacheEvent] = []
        # The run that is still growing: at most one of the two lists is filled.
        self._stored: list[bytes] = []
        self._parent: bytes | None = None
        self._removed: list[bytes] = []

    def __bool__(self) -> bool:
        """Whether ``drain`` would return anything."""
        return bool(self._events or self._stored or self._removed)

    def stored(self, key: bytes, parent: bytes | None) -> None:
        """``key`` is hittable, after ``parent`` (None: the first block of a prompt)."""
        if not self._stored or self._stored[-1] != parent:
            self._end_run()
            self._parent = parent
        self._stored.append(key)

    def removed(self, key: bytes) -> None:
        """``key`` was evicted."""
        if self._stored:
            self._end_run()
        self._removed.append(key)

    def cleared(self) -> None:
        """Nothing is hittable; what was recorded before has lost its meaning."""
        self._stored, self._removed = [], []
        self._events = [AllBlocksCleared()]

    def retold(self, events: Iterable[CacheEvent]) -> None:
        """Nothing was hittable, and now what ``events`` say: the same picture as before, for whoever has lost it."""
        self.cleared()
        self._events += events

    def drain(self) -> tuple[CacheEvent, ...]:
        """Everything since the last drain, in order."""
        self._end_run()
        events, self._events = tuple(self._events), []
        return events

    def _end_run(self) -> None:
        if self._stored:
            self._events.append(BlockStored(tuple(self._stored), self._parent, self._block_size))
            self._stored = []
        elif self._removed:
            self._events.append(BlockRemoved(tuple(self._removed)))
            self._removed = []


def stored_events(blocks: Iterable[Block], block_size: int) -> tuple[CacheEvent, ...]:
    """All these published blocks as stored events, parents first."""
    children: dict[Block | None, list[Block]] = {}
    for block in blocks:
        children.setdefault(block.parent, []).append(block)
    return tuple(
        BlockStored(tuple(run), parent, block_size)
        for start in children.get(None, ())
        for parent, run in _runs(start, children)
    )


def _runs(start: Block, children: dict[Block | None, list[Block]]) -> Iterator[tuple[bytes | None, list[bytes]]]:
    """Cut the tree under ``start`` into unbranched runs of keys, each with its parent's key, parents first."""
    stack: list[tuple[bytes | None, Block]] = [(None, start)]
    while stack:
        parent, block = stack.pop()
        run: list[bytes] = []
        below: Sequence[Block] = (block,)
        while len(below) == 1:
            block = below[0]
            assert block.key is not None
            run.append(block.key)
            below = children.get(block, ())
        yield parent, run
        stack += [(block.key, child) for child in below]
