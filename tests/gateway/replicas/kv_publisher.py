"""An engine that publishes KV cache events as vLLM does, without the engine: a cache, a counter, and a short memory."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import OrderedDict, deque
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from cache_policy.keys import chain_keys
from cache_policy.vllm_keys import VllmHash, event_hash, vllm_block_hashes

_encode = msgspec.msgpack.encode


class Publisher:
    """Holds at most ``capacity`` blocks of ``block_size`` tokens, the longest unused evicted first.

    ``log`` are the messages that can be replayed. ``keys`` is what it holds, in the keys of whoever sent the prompts.
    Names of blocks are random, as with a random seed, unless there is an ``algorithm``: then they are vLLM's by its
    default seed; a block may be stored twice, as in vLLM.
    """

    algorithm: VllmHash | None = None

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
        self.hits = 0
        """Blocks of the last prompt that were there."""

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
        if self.algorithm is not None:
            names = vllm_block_hashes(tokens, self.block_size, self.algorithm, salt=salt or root.hex())
            self._names.update(zip(keys, map(event_hash, names), strict=True))
        held = set(self._blocks.values())
        hits = 0
        while hits < (len(tokens) - 1) // self.block_size and keys[hits] in held:
            hits += 1
        self.hits = hits
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


class Sockets:
    """A publisher on ZeroMQ sockets, as in vLLM: PUB for what happens, ROUTER for what was missed."""

    def __init__(self, publisher: Publisher) -> None:
        self.publisher = publisher
        self.endpoint = self.replay = ""
        self.replays = 0
        """How often somebody has asked for what was missed."""
        self.old_form = False
        """Whether a replay leaves the topic out, as older versions do."""
        self._context: zmq.asyncio.Context
        self._pub: zmq.asyncio.Socket
        self._tasks: list[asyncio.Task[None]] = []

    def bind(self) -> None:
        """Listen: on free ports the first time, then on the same ones."""
        self._context = zmq.asyncio.Context()
        self._pub, router = self._context.socket(zmq.PUB), self._context.socket(zmq.ROUTER)
        for socket, name in ((self._pub, "endpoint"), (router, "replay")):
            socket.setsockopt(zmq.LINGER, 0)
            socket.bind(getattr(self, name) or "tcp://127.0.0.1:*")
            setattr(self, name, socket.getsockopt_string(zmq.LAST_ENDPOINT))
        self._tasks = [asyncio.create_task(self._serve_replays(router))]

    async def send(self, message: tuple[int, bytes] | None, topic: bytes = b"kv-events") -> None:
        """Publish a message."""
        if message is not None:
            await self._pub.send_multipart([topic, message[0].to_bytes(8, "big"), message[1]])

    async def send_frames(self, *frames: bytes) -> None:
        """Publish whatever it is."""
        await self._pub.send_multipart(list(frames))

    async def close(self) -> None:
        """Let go of the sockets, like a process that dies."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._context.destroy(linger=0)  # returns when the ports are free

    async def __aenter__(self) -> Sockets:
        self.bind()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _serve_replays(self, router: zmq.asyncio.Socket) -> None:
        while True:
            client, _, start = await router.recv_multipart()
            self.replays += 1
            topic = [] if self.old_form else [b"kv-events"]
            for number, payload in [*self.publisher.log]:
                if number >= int.from_bytes(start, "big"):
                    await router.send_multipart([client, b"", *topic, number.to_bytes(8, "big"), payload])
            await router.send_multipart([client, b"", *topic, (-1).to_bytes(8, "big", signed=True), b""])
