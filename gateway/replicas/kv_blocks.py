"""Whose blocks an engine's cache events speak of: its own names for them, translated into this gateway's keys.

An engine hashes blocks in its own way, with a seed that may be random. So its hashes are taken as names: a stored block
comes with its tokens and its parent's name, and a prompt's first block with its cache salt, which for a request of this
gateway is its root. That is all it takes to make the key. Blocks under other salts belong to others and are left out.

Of blocks that were stored before anybody listened the events tell nothing. They are learned as requests find them, by
the names that vLLM's rule gives them, where it can be found out (``gateway.replicas.kv_names``).
"""

from __future__ import annotations

import itertools
import re
from collections import ChainMap, OrderedDict
from collections.abc import Iterator, Sequence
from typing import Final

from cache_policy.keys import KEY_BYTES, TOKEN_BYTES, chain_keys, hash_block, token_bytes
from engine.wire import AllBlocksCleared, BlockRemoved, BlockStored, CacheEvent
from gateway.replicas.kv_messages import Cleared, EngineHash, KvEvent, MalformedEvents, Removed, Stored
from gateway.replicas.kv_names import KvNames

__all__ = ["KvBlocks"]

_SALT: Final = re.compile(rf"[0-9a-f]{{{2 * KEY_BYTES}}}")
_OWN_MEDIUM: Final = (None, "GPU")
"""Where a hit costs nothing. Blocks in slower memory, of which some engines tell too, are left out."""

_MAX_STRAYS: Final = 1 << 16
_MAX_TRIES: Final = 64
_MAX_TRIED: Final = 256
"""Prompts, and blocks of each, by which it is tried to find out how an engine names blocks; 7 ms each at most."""

_MAX_FOUND: Final = 1024
"""Blocks of a prompt that are learned at its end; naming one takes 3 to 8 microseconds."""


class _Block:
    """One key that the engine holds; ``copies`` blocks of its pool have it.

    It is ``late`` when it was stored at a time when whatever requests found was learned already.
    """

    __slots__ = ("copies", "key", "late", "parent")

    def __init__(self, key: bytes, parent: bytes | None, *, late: bool = False) -> None:
        self.key = key
        self.parent = parent
        self.copies = 1
        self.late = late


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
        self.complete = False
        """Whether no block is held of which nothing was heard, as far as this gateway has anything to do with it."""
        self._capacity = capacity
        self._blocks: dict[EngineHash, _Block] = {}
        # While it is not complete:
        self._names = KvNames()
        self._tries = 0
        self._strays: OrderedDict[EngineHash, None] = OrderedDict()  # stored behind blocks that are not known
        self._gone: OrderedDict[EngineHash, None] = OrderedDict()  # removed lately

    @property
    def learns(self) -> bool:
        """Whether blocks of which no event told are learned as requests find them."""
        return self._names.known

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
                yield self.clear(complete=True)

    def clear(self, *, complete: bool) -> AllBlocksCleared:
        """Nothing is known to be held; ``complete`` tells whether nothing is."""
        self._blocks.clear()
        self._strays.clear()
        self._gone.clear()
        self._names, self._tries = KvNames(), 0  # in another life it may have another seed
        self.overflowed = False
        self.complete = complete
        return AllBlocksCleared()

    def found(self, root: bytes, token_ids: Sequence[int], cached_tokens: int) -> Iterator[CacheEvent]:
        """What the end of a request tells: of its prompt so many tokens were cached, and now all of it has been."""
        size, salt = self.block_size, root.hex()
        if self.complete or not size:
            return
        if not self._names.known:
            self._tries += 1
            told: ChainMap[EngineHash, object] = ChainMap({}, self._strays, self._blocks)  # type: ignore[arg-type]
            tried = token_ids[: _MAX_TRIED * size]
            if self._tries > _MAX_TRIES or not self._names.find(tried, size, salt, told):
                return
        token_ids = token_ids[: _MAX_FOUND * size]
        keys = chain_keys(root, token_bytes(token_ids), size)
        new: list[bytes] = []
        above = new_above = None
        for index, (name, key) in enumerate(zip(self._names.of(token_ids, size, salt), keys, strict=True)):
            block = self._blocks.get(name)
            if block is None:
                if name not in self._strays and (index >= cached_tokens // size or name in self._gone):
                    break
                self._strays.pop(name, None)
                self._blocks[name] = _Block(key, above)
                if not new:
                    new_above = above
                new.append(key)
            elif block.key != key:
                break
            elif new:
                yield BlockStored(tuple(new), new_above, size)
                new = []
            above = key
        if new:
            yield BlockStored(tuple(new), new_above, size)
        if len(self._blocks) > self._capacity:
            yield self._make_room()

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
        if self._gone:
            for name in event.block_hashes:
                self._gone.pop(name, None)
        parent = self._parent_key(event)
        if parent is None:
            if event.parent_block_hash is not None and not self.complete:
                _remember(self._strays, event.block_hashes)
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
                self._blocks[name] = _Block(key, above, late=self._names.known)
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
                self._strays.pop(name, None)
                continue
            block.copies -= 1
            if not block.copies:
                del self._blocks[name]
                gone.append(block.key)
                # The longest unused leave first: what was stored before anybody listened, and not used since, is gone.
                self.complete = self.complete or block.late
        if not self.complete:
            _remember(self._gone, event.block_hashes)
        if gone:
            yield BlockRemoved(tuple(gone))

    def _make_room(self) -> BlockRemoved:
        """Leave out what was stored first, some more than needed: finding the first of many is slow."""
        self.overflowed = True
        surplus = len(self._blocks) - self._capacity + self._capacity // 16
        oldest = list(itertools.islice(self._blocks, surplus))
        return BlockRemoved(tuple([self._blocks.pop(name).key for name in oldest]))


def _remember(names: OrderedDict[EngineHash, None], more: Sequence[EngineHash]) -> None:
    """Take note of ``more``, and forget the oldest beyond the bound."""
    names.update(dict.fromkeys(more))
    while len(names) > _MAX_STRAYS:
        names.popitem(last=False)
