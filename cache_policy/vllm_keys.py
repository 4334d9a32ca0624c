"""vLLM's own names for the blocks of a prompt, as its KV cache events give them.

A block's hash is that of ``(parent's hash, token ids, extra keys)``: SHA-256 or xxh3-128, over what pickle makes of it
(``--prefix-caching-hash-algo sha256``, the default, and ``xxhash``) or over the canonical form of CBOR (RFC 8949;
``sha256_cbor``, ``xxhash_cbor``). The first block's parent is the hash of the seed, a text: vLLM takes it from
``PYTHONHASHSEED`` and, where that is not set, a fixed one for SHA-256 and a random one otherwise. A prompt's cache salt
is an extra key of its first block. Written after ``vllm/v1/core/kv_cache_utils.py`` and ``vllm/utils/hashing.py`` of
vLLM 0.32.

The gateway's index does without them where it has heard of all blocks: it takes vLLM's hashes as mere names
(``gateway.replicas.kv_blocks``), and computes them only for blocks that were stored before it listened.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Sequence
from typing import Final, Literal

import cbor2
from xxhash import xxh3_128_digest

__all__ = ["DEFAULT_SEED", "VllmHash", "event_hash", "vllm_block_hashes"]

VllmHash = Literal["sha256", "sha256_cbor", "xxhash", "xxhash_cbor"]

DEFAULT_SEED: Final = "vllm-none-hash"
"""vLLM's seed for SHA-256 where ``PYTHONHASHSEED`` is not set."""

_PICKLE_PROTOCOL: Final = 5

_HASHES: Final[dict[VllmHash, Callable[[object], bytes]]] = {
    "sha256": lambda value: hashlib.sha256(pickle.dumps(value, _PICKLE_PROTOCOL)).digest(),
    "sha256_cbor": lambda value: hashlib.sha256(cbor2.dumps(value, canonical=True)).digest(),
    "xxhash": lambda value: xxh3_128_digest(pickle.dumps(value, _PICKLE_PROTOCOL)),
    "xxhash_cbor": lambda value: xxh3_128_digest(cbor2.dumps(value, canonical=True)),
}
_EVENT_BITS: Final = 64


def vllm_block_hashes(
    token_ids: Sequence[int], block_size: int, algorithm: VllmHash, *, seed: str = DEFAULT_SEED, salt: str | None = None
) -> list[bytes]:
    """The hashes of the full blocks of a prompt, first to last: 32 bytes each by SHA-256, 16 by xxh3.

    ``block_size`` is in tokens, ``seed`` the engine's ``PYTHONHASHSEED``, ``salt`` the request's ``cache_salt``.

    Raises:
        ValueError: ``block_size`` is not positive.
    """
    if block_size < 1:
        raise ValueError(f"block_size must be at least 1, not {block_size}")
    digest = _HASHES[algorithm]
    parent = digest(seed)
    extra: tuple[tuple[str, str], ...] | None = (("cache_salt", salt),) if salt else None
    hashes = []
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        block = tuple(token_ids[start : start + block_size])
        parent = digest((parent, block, extra))
        hashes.append(parent)
        extra = None
    return hashes


def event_hash(block_hash: bytes) -> int:
    """How events name a block, unless vLLM runs with ``VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0``: its last 8 bytes."""
    return int.from_bytes(block_hash, "big") & ((1 << _EVENT_BITS) - 1)
