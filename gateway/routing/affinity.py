"""Which replica a conversation belongs to where nobody knows what is cached: consistent hashing of its text."""

from __future__ import annotations

from collections.abc import Iterable

import xxhash

__all__ = ["owner"]


def owner(key: bytes, replica_ids: Iterable[str]) -> str | None:
    """The replica with the highest hash of ``key`` and its own id; None of none.

    Rendezvous hashing (Thaler and Ravishankar 1998): every gateway finds the same one without being told, and a replica
    that joins or leaves moves no conversation but those that it gets or had.
    """
    return max(
        replica_ids, key=lambda id: xxhash.xxh3_64_intdigest(key, xxhash.xxh3_64_intdigest(id.encode())), default=None
    )
