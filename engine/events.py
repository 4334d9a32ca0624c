"""The record of what became hittable and what ceased to be, on its way to the gateways' indexes."""

from __future__ import annotations

from engine.wire import AllBlocksCleared, BlockRemoved, BlockStored, CacheEvent

__all__ = ["CacheEventLog"]


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
