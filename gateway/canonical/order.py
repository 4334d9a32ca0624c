"""Step 4, order: which document comes first.

``preserve`` keeps the caller's order, ``canonical`` sorts by id, and the cache-aware order follows what a replica
really holds: of all paths through its cached blocks that use only this request's documents it takes the one with most
tokens, and leaves the rest in the caller's order, which is relevance.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Final

import msgspec

from cache_policy.keys import TOKEN_BYTES, hash_block
from gateway.canonical.documents import Document

__all__ = ["MAX_NODES", "ResidentOrder", "by_id", "longest_resident_path"]

MAX_NODES: Final = 256
"""Documents tried at most in one search; a search that reaches it keeps the best path so far."""


class ResidentOrder(msgspec.Struct, frozen=True):
    """An order of documents (indexes into the caller's) and what a replica holds of it.

    ``path`` counts the leading documents that were placed for the cache's sake; ``resident_tokens`` is the number of
    cached tokens from the prompt's start to the last cached full block inside the documents.
    """

    order: tuple[int, ...]
    path: int
    resident_tokens: int


def by_id(documents: Sequence[Document]) -> tuple[int, ...]:
    """The indexes of ``documents`` sorted by id; equal ids stay in the caller's order."""
    return tuple(sorted(range(len(documents)), key=lambda index: documents[index].id))


def longest_resident_path(
    head: bytes, blocks: Sequence[bytes | None], root: bytes, block_size: int, resident: Container[bytes]
) -> ResidentOrder:
    """The order whose first tokens are cached furthest on one replica.

    ``head`` holds the token bytes before the first document and ``blocks`` those of each document (uint32, little
    endian), the same at every place in the prompt; a document of which that is not so has None and never leads.
    ``root`` is the first parent of the block keys, ``block_size`` is in tokens, ``resident`` are the keys the replica
    holds. Ties go to the caller's order. Looks at ``MAX_NODES`` documents at most, each for the price of one hash
    unless it is cached.
    """
    return _Search(blocks, block_size, resident).run(head, root)


class _Search:
    """One depth-first walk. Keeps the best path and the nodes visited so far."""

    def __init__(self, blocks: Sequence[bytes | None], block_size: int, resident: Container[bytes]) -> None:
        self._blocks = blocks
        self._stride = block_size * TOKEN_BYTES
        self._resident = resident
        self._nodes = 0
        self._best_bytes = 0
        self._best_path: tuple[int, ...] = ()

    def run(self, head: bytes, root: bytes) -> ResidentOrder:
        parent, matched, complete = self._follow(root, head)
        self._best_bytes = matched
        everything = tuple(range(len(self._blocks)))
        if complete:
            self._descend(parent, head[matched:], matched, (), everything)
        placed = set(self._best_path)
        rest = tuple(index for index in everything if index not in placed)
        return ResidentOrder(self._best_path + rest, len(self._best_path), self._best_bytes // TOKEN_BYTES)

    def _follow(self, parent: bytes, data: bytes) -> tuple[bytes, int, bool]:
        """Walk the full blocks of ``data``: last resident key, bytes matched, and whether all of them are resident."""
        stride = self._stride
        end = len(data) - len(data) % stride
        for start in range(0, end, stride):
            key = hash_block(parent, data[start : start + stride])
            if key not in self._resident:
                return parent, start, False
            parent = key
        return parent, end, True

    def _descend(
        self, parent: bytes, pending: bytes, matched: int, path: tuple[int, ...], remaining: tuple[int, ...]
    ) -> None:
        """Try each remaining document next; ``pending`` are the bytes since the last full block."""
        for index in remaining:
            block = self._blocks[index]
            if block is None:
                continue
            if self._nodes == MAX_NODES:
                return
            self._nodes += 1
            data = pending + block
            key, gained, complete = self._follow(parent, data)
            here = (*path, index)
            if matched + gained > self._best_bytes:
                self._best_bytes, self._best_path = matched + gained, here
            if complete:
                rest = tuple(other for other in remaining if other != index)
                self._descend(key, data[gained:], matched + gained, here, rest)
