"""An engine that publishes KV cache events as vLLM does, without the engine: a cache, a counter, and a short memory."""

from __future__ import annotations

import itertools
import random
from collections import OrderedDict, deque
from typing import Any

import msgspec

from cache_policy.keys import chain_keys

_encode = msgspec.msgpack.encode


class Publisher:
    """Holds at most ``capacity`` blocks of ``block_size`` tokens, the longest unused evicted first.

    ``log`` are the messages that can be replayed. ``keys`` is what it holds, in the keys of whoever sent the prompts.
    Names of blocks are random, as with a random seed; a block may be stored twice, as in vLLM.
    """

    def __init__(self, rng: random.Random, *, capacity: int = 40, block_size: int = 4, memory: int = 10_000) -> None:
        self.rng = rng
        self.block_size = block_size
        self.log: deque[tuple[int, bytes]] = deque(maxlen=memory)
        self._capacity = capacity
        self._numbers = itertools.count()
        self._times = itertools.count()
        self._names: dict[bytes, int] = {}
        self._blocks: OrderedDict[int, bytes] = OrderedDict()  # the pool: an id -> the key of what is in it
        self._ids = itertools.count()

    @property
    def keys(self) -> set[bytes]:
        return set(self._blocks.values())

    def restart(self) -> None:
        """Begin a new life: an empty cache, other names, numbers from 0."""
        self._names.clear()
        self._blocks.clear()
        self.log.clear()
        self._numbers = itertools.count()

    def publish(self, *events: Any) -> tuple[int, bytes]:
        """Number and payload of a message with these events."""
        message = next(self._numbers), _encode([float(next(self._times)), events, 0])
        self.log.append(message)
        return message

    def compute(self, root: bytes, tokens: list[int], salt: str | None = None) -> tuple[int, bytes] | None:
        """Serve a prompt; the message that tells what became of the blocks, if anything did."""
        keys = chain_keys(root, tokens, self.block_size)
        held = set(self._blocks.values())
        hits = 0
        while hits < len(keys) and keys[hits] in held:
            hits += 1
        hits -= hits == len(keys) and bool(self.rng.randrange(2))  # the last block is computed again, beside the other
        events: list[Any] = []
        for id, key in [*self._blocks.items()]:
            if key in keys[:hits]:
                self._blocks.move_to_end(id)
        new = keys[hits:]
        for _ in range(len(self._blocks) + len(new) - self._capacity):
            _, key = self._blocks.popitem(last=False)
            events.append({"type": "BlockRemoved", "block_hashes": [self._names[key]], "medium": "GPU", "group_idx": 0})
        for key in new:
            self._blocks[next(self._ids)] = key
        if new:
            events.append(
                {
                    "type": "BlockStored",
                    "block_hashes": [self._name(key) for key in new],
                    "parent_block_hash": self._name(keys[hits - 1]) if hits else None,
                    "token_ids": tokens[hits * self.block_size : len(keys) * self.block_size],
                    "block_size": self.block_size,
                    "lora_id": None,
                    "medium": "GPU",
                    "lora_name": None,
                    "extra_keys": [None if hits + i else [salt or root.hex()] for i in range(len(new))],
                    "group_idx": 0,
                }
            )
        return self.publish(*events) if events else None

    def clear(self) -> tuple[int, bytes]:
        """Drop the whole cache."""
        self._blocks.clear()
        return self.publish({"type": "AllBlocksCleared"})

    def _name(self, key: bytes) -> int:
        return self._names.setdefault(key, self.rng.getrandbits(64))
