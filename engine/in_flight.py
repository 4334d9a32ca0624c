"""Which blocks are being computed right now, and by whom: who else needs one may wait for it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from engine.block import Block, BlockTable
from engine.errors import require

__all__ = ["InFlight"]


class InFlight:
    """The tables that are about to compute and publish a key, by key. Owned by the block manager."""

    def __init__(self) -> None:
        self._tables: dict[bytes, BlockTable] = {}

    def announce(self, keys: Iterable[bytes], table: BlockTable) -> None:
        """``table`` will publish those of ``keys`` that no other one is about to publish already."""
        for key in keys:
            self._tables.setdefault(key, table)

    def published(self, key: bytes) -> None:
        """``key`` is resident now, whoever had announced it."""
        self._tables.pop(key, None)

    def ground(self, table: BlockTable) -> None:
        """Nothing of ``table`` is in flight any more."""
        for key in table.keys[table.published :]:
            if self._tables.get(key) is table:
                del self._tables[key]

    def awaited(self, table: BlockTable) -> BlockTable | None:
        """The table that computes what ``table`` was last told to be in flight; None when that is over."""
        return None if table.awaited is None else self._tables.get(table.awaited)

    def find(self, table: BlockTable, at: int) -> BlockTable | None:
        """The table that is computing the block of ``table`` at place ``at``; ``table.awaited`` is its key then."""
        key = table.keys[at]
        computing = self._tables.get(key)
        if computing is None or computing.root != table.root or computing.contents[at] != table.contents[at]:
            return None
        table.awaited = key
        return computing

    def check(self, live: Collection[BlockTable], find: Callable[[bytes], Block | None]) -> None:
        """Verify what is in flight against all ``live`` tables and the index of resident blocks.

        Raises:
            InvariantError: names the first invariant that does not hold.
        """
        for key, table in self._tables.items():
            require(table in live and table.publishing, "what is in flight has a table that will publish it")
            require(key in table.keys[table.published :], "what is in flight is still to be published")
            require(find(key) is None, "what is in flight is not resident")
