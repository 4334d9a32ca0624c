"""Cache keys: which prompts may share which KV blocks.

The key of a full block is a hash over its parent's key and its own token ids, so that equal keys mean equal tokens
after an equal prefix. The first block's parent is a root derived from the deployment secret and a namespace: nobody
outside can compute keys, and two namespaces never share one. Keys depend on nothing else, so that every process with
the same secret finds the same ones.

xxh3 is fast, not collision resistant against an attacker. Whoever serves KV by key compares the stored token ids and
parent on every hit; a key alone is a hint.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Final

import msgspec

try:
    from xxhash import xxh3_128_digest
except ImportError as error:
    raise ImportError("cache keys need the package 'xxhash', which cannot be imported: pip install xxhash") from error

__all__ = [
    "KEY_BYTES",
    "TOKEN_BYTES",
    "BlockHash",
    "Namespace",
    "chain_keys",
    "derive_root",
    "hash_block",
    "token_bytes",
    "token_list",
]

KEY_BYTES: Final = 16
"""Length of a root and of a block key."""

TOKEN_BYTES: Final = 4
"""Length of a token id in ``token_bytes``."""

BlockHash = Callable[[bytes, bytes], bytes]
"""(parent key, token bytes of one block) -> key of that block, ``KEY_BYTES`` long."""

_ROOT_DOMAIN: Final = b"headstart-root-1"
_SECRET_DOMAIN: Final = b"headstart-secret"


class Namespace(msgspec.Struct, frozen=True):
    """Who may share KV with whom: two prompts share blocks only when all of these are equal.

    ``tenant`` comes from the authenticated identity; ``model`` is the served name and ``weights`` the fingerprint of
    what is really loaded under it; ``salt`` is the caller's own narrowing; ``adapter`` names a fine-tuned adapter.
    The empty string stands for "none".
    """

    tenant: str
    model: str
    weights: str
    salt: str = ""
    adapter: str = ""


def derive_root(secret: bytes, namespace: Namespace) -> bytes:
    """The first parent of every key chain in ``namespace``: ``KEY_BYTES`` bytes of keyed BLAKE2b.

    Every field goes in under its own name, and name and value each with their length, so that no two namespaces
    produce the same input.

    Raises:
        ValueError: ``secret`` is empty; keys under a public root could be computed by anyone.
    """
    if not secret:
        raise ValueError(
            "the deployment secret is empty: set one, shared by all gateways and engines that share a cache"
        )
    # BLAKE2b takes keys of at most 64 bytes; hashing first takes a secret of any length.
    key = blake2b(secret, digest_size=64, person=_SECRET_DOMAIN).digest()
    root = blake2b(key=key, digest_size=KEY_BYTES, person=_ROOT_DOMAIN)
    for field in namespace.__struct_fields__:
        for part in (field, getattr(namespace, field)):
            # A JSON body can carry a lone surrogate; it must become some key, not an error.
            data = part.encode("utf-8", "surrogatepass")
            root.update(len(data).to_bytes(8, "little"))
            root.update(data)
    return root.digest()


def token_bytes(token_ids: Sequence[int]) -> bytes:
    """Token ids as little-endian uint32, the form in which they are hashed, compared and sent to an engine.

    Raises:
        OverflowError: an id is negative or does not fit 32 bits.
        TypeError: an id is not an integer.
    """
    ids = array("I", token_ids)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tobytes()


def token_list(data: bytes) -> list[int]:
    """The inverse of ``token_bytes``. Raises ``ValueError`` when ``data`` ends within an id."""
    ids = array("I", data)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tolist()


def hash_block(parent: bytes, tokens: bytes) -> bytes:
    """The default ``BlockHash``: xxh3-128 over the parent's key and the block's token bytes."""
    return xxh3_128_digest(parent + tokens)


def chain_keys(
    root: bytes, token_ids: Sequence[int] | bytes, block_size: int, block_hash: BlockHash = hash_block
) -> list[bytes]:
    """The keys of the full blocks of ``token_ids``, first to last; a part-full last block has none.

    The ids may also come as ``token_bytes``.

    ``root`` is a root of ``derive_root``, or the key of any block to continue its chain. ``block_size`` is in tokens.
    ``block_hash`` is replaced in tests that force collisions.

    Raises:
        ValueError: ``block_size`` is not positive.
        OverflowError: a token id does not fit 32 bits.
    """
    if block_size < 1:
        raise ValueError(f"block_size must be at least 1, not {block_size}")
    data = token_ids if isinstance(token_ids, bytes) else token_bytes(token_ids)
    stride = block_size * TOKEN_BYTES
    keys: list[bytes] = []
    parent = root
    if block_hash is hash_block:  # every request comes by here: a call per block is half of the time
        for start in range(0, len(data) - stride + 1, stride):
            parent = xxh3_128_digest(parent + data[start : start + stride])
            keys.append(parent)
        return keys
    for start in range(0, len(data) - stride + 1, stride):
        parent = block_hash(parent, data[start : start + stride])
        keys.append(parent)
    return keys
