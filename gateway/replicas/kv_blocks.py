"""Whose blocks an engine's cache events speak of: its own names for them, translated into this gateway's keys.

An engine hashes blocks in its own way, with a seed that may be random. So its hashes are taken as names: a stored block
comes with its tokens and its parent's name, and a prompt's first block with its cache salt, which for a request of this
gateway is its root. That is all it takes to make the key. Blocks under other salts belong to others and are left out.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Final

from cache_policy.keys import KEY_BYTES, TOKEN_BYTES, hash_block, token_bytes
from engine.wire import AllBlocksCleared, BlockRemoved, BlockStored, CacheEvent
from gateway.replicas.kv_messages import Cleared, EngineHash, KvEvent, MalformedEvents, Removed, Stored

__all__ = ["KvBlocks"]

_SALT: Final = re.compile(rf"[0-9a-f]{{{2 * KEY_BYTES}}}")
_OWN_MEDIUM: Final = (None, "GPU")
"""Where a hit costs nothing. Blocks in slower memory, of which some engines tell too, are left out."""


class _Block:
    """One key that the engine holds; ``copies`` blocks of its pool have it."""

    __slots__ = ("copies", "key", "parent")

    def __init__(self, key: bytes, parent: bytes | None) -> None:
        self.key = key
        self.parent = parent
        self.copies = 1


class KvBlocks:
    """The blocks that one engine holds for this gateway, at most ``capacity``. Owned by its event feed.

    vLLM does not share what is computed twice side by side: a block may be stored several times under one name, and is
    gone when it was removed as often. An entry takes about 300 bytes.
    """

    def __init__(self, capacity: int) -> None:
        self.block_size = 0
        """Tokens per block, as the events say; 0 before the first."""
        self.tells_salt = True
        """Whether the events tell the salt of a prompt, without which nobody can say whose it is."""
        self.overflowed = False
        """Whether blocks had to be left out to keep within the capacity."""
        self._capacity = capacity
        self._blocks: dict[EngineHash, _Block] = {}

    def limit(self, capacity: int) -> None:
        """Follow so many blocks at most from now on."""
        self._capacity = capacity

    def __len__(self) -> int:
        return len(self._blocks)

    def apply(self, event: KvEvent) -> Iterator[CacheEvent]:
        """What an event means in this gateway's keys.

        Raises:
            MalformedEvents: It contradicts itself or an earlier one.
        """
        match event:
            case Stored():
                if event.medium in _OWN_MEDIUM and not event.group_idx:
                    yield from self._stored(event)
            case Removed():
                if event.medium in _OWN_MEDIUM and not event.group_idx:
                    yield from self._removed(event)
            case Cleared():
                yield self.clear()

    def clear(self) -> AllBlocksCleared:
        """Nothing is known to be held."""
        self._blocks.clear()
        self.overflowed = False
        return AllBlocksCleared()

    def snapshot(self) -> Iterator[CacheEvent]:
        """All that is held, told from the beginning."""
        yield AllBlocksCleared()
        run: list[bytes] = []
        parent: bytes | None = None
        for block in self._blocks.values():
            if run and block.parent != run[-1]:
                yield BlockStored(tuple(run), parent, self.block_size)
                run = []
            if not run:
                parent = block.parent
            run.append(block.key)
        if run:
            yield BlockStored(tuple(run), parent, self.block_size)

    # --- inside ------------------------------------------------------------------------------------------

    def _stored(self, event: Stored) -> Iterator[CacheEvent]:
        size = event.block_size
        if len(event.token_ids) != size * len(event.block_hashes):
            return  # a layer group that keeps some of a prompt's blocks only
        if size != self.block_size:
            if self._blocks:
                raise MalformedEvents(f"its cache events tell of blocks of {self.block_size} and of {size} tokens")
            self.block_size = size
        parent = self._parent_key(event)
        if parent is None:
            return
        data = token_bytes(event.token_ids)
        stride = size * TOKEN_BYTES
        above = None if event.parent_block_hash is None else parent
        new: list[bytes] = []
        new_above = above
        for index, name in enumerate(event.block_hashes):
            if index and event.extra_keys is not None and index < len(event.extra_keys) and event.extra_keys[index]:
                break  # not of tokens alone
            key = hash_block(parent, data[index * stride : (index + 1) * stride])
            block = self._blocks.get(name)
            if block is None:
                if not new:
                    new_above = above
                self._blocks[name] = _Block(key, above)
                new.append(key)
            elif block.key != key:
                raise MalformedEvents("its cache events give two blocks one name")
            else:
                block.copies += 1
                if new:
                    yield BlockStored(tuple(new), new_above, size)
                    new = []
            parent = above = key
        if new:
            yield BlockStored(tuple(new), new_above, size)
        if len(self._blocks) > self._capacity:
            yield self._make_room()

    def _parent_key(self, event: Stored) -> bytes | None:
        """The key behind which the event's blocks stand; None when they are somebody else's."""
        if event.parent_block_hash is not None:
            parent = self._blocks.get(event.parent_block_hash)
            return None if parent is None else parent.key
        if event.extra_keys is None:
            self.tells_salt = False
            return None
        salt = event.extra_keys[0] if event.extra_keys else None
        if salt is not None and len(salt) == 1 and isinstance(salt[0], str) and _SALT.fullmatch(salt[0]):
            return bytes.fromhex(salt[0])
        return None

    def _removed(self, event: Removed) -> Iterator[CacheEvent]:
        gone = []
        for name in event.block_hashes:
            block = self._blocks.get(name)
            if block is None:
                continue
            block.copies -= 1
            if not block.copies:
                del self._blocks[name]
                gone.append(block.key)
        if gone:
            yield BlockRemoved(tuple(gone))

    def _make_room(self) -> BlockRemoved:
        """Leave out what was stored first, some more than needed: finding the first of many is slow."""
        self.overflowed = True
        surplus = len(self._blocks) - self._capacity + self._capacity // 16
        oldest = list(itertools.islice(self._blocks, surplus))
        return BlockRemoved(tuple([self._blocks.pop(name).key for name in oldest]))
