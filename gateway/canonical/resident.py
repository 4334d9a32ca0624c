"""The cache-aware order: which documents, one behind the other, a replica already holds.

Of all paths through a replica's cached blocks that use only this request's documents, the one with most tokens leads.
What follows behind it is for others to say (``gateway.canonical.popularity``).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Container, Sequence
from typing import Final

import msgspec

from cache_policy.keys import TOKEN_BYTES, hash_block
from gateway.canonical.order import MAX_ORDERED, UNLIMITED, OrderLimits

__all__ = ["MAX_REMEMBERED", "MAX_TRIED", "ResidentPath", "ResidentPaths"]

MAX_TRIED: Final = 512
"""Documents tried at most in one search; a search that reaches it keeps the best path so far."""

MAX_REMEMBERED: Final = 1 << 18
"""Block keys kept by ``ResidentPaths``, about 20 MB with what they hang on."""

_STEP_COST: Final = 3
"""What a step costs besides the keys it adds, in keys."""


class ResidentPath(msgspec.Struct, frozen=True):
    """Documents (indexes into the caller's) that a replica holds, first to last; the last one maybe in part.

    ``tokens`` is the number of cached tokens from the prompt's start to the last cached full block of the path.
    """

    documents: tuple[int, ...] = ()
    tokens: int = 0


class ResidentPaths:
    """Searches for resident paths. Owns a memory of block keys; belongs to one thread.

    The memory is a tree per beginning of a prompt: which keys a document's blocks have behind which others. It saves
    hashing them again, and says nothing of what is resident; that is looked up. With a block, those before it are taken
    for resident: prefix caches evict what is behind first, and looking up every block takes longer than all else. The
    trees that were unused for longest leave first, as a whole.
    """

    def __init__(self, max_remembered: int = MAX_REMEMBERED) -> None:
        self._max: Final = max_remembered
        self._trees: OrderedDict[tuple[bytes, bytes, int], _Tree] = OrderedDict()
        self.remembered = 0
        """Size of the memory, in block keys."""

    def longest(
        self,
        head: bytes,
        blocks: Sequence[bytes | None],
        digests: Sequence[int],
        root: bytes,
        block_size: int,
        resident: Container[bytes],
        limits: OrderLimits = UNLIMITED,
        preferred: Sequence[int] | None = None,
    ) -> ResidentPath:
        """The documents whose tokens are cached furthest on one replica, in an order that ``limits`` allow.

        ``head`` holds the token bytes before the first document and ``blocks`` those of each document (uint32, little
        endian), the same at every place in the prompt; a document of which that is not so has None and never leads.
        ``digests`` tell the documents apart. ``root`` is the first parent of the block keys, ``block_size`` is in
        tokens, ``resident`` are the keys the replica holds. Ties go to what comes first in ``preferred``, the indexes
        in some order (None: the caller's); they are frequent where a block ends in the separator of documents. Tries
        ``MAX_TRIED`` documents at most, each for the price of two look-ups unless it is cached, or new at its place.
        """
        place = (root, head, block_size)
        tree = self._trees.get(place)
        if tree is None:
            tree = self._trees[place] = _Tree(root, head, block_size * TOKEN_BYTES)
            self.remembered += tree.size
        else:
            self._trees.move_to_end(place)
        before = tree.size
        path = _Search(tree, blocks, digests, resident, limits).run(preferred)
        self.remembered += tree.size - before
        while self.remembered > self._max:
            self.remembered -= self._trees.popitem(last=False)[1].size
        return path


class _Step:
    """A document, or the head, behind all that stands before it.

    ``first`` is the key of the first block that it completes, None when it completes none; ``keys`` those of all its
    blocks, empty until they were asked for; ``key`` the last one, or that of the step before; ``pending`` the bytes
    behind the last full block.
    """

    __slots__ = ("children", "first", "key", "keys", "pending")

    def __init__(self, key: bytes, pending: bytes, first: bytes | None) -> None:
        self.first: Final = first
        self.keys: tuple[bytes, ...] = ()
        self.key = key
        self.pending = pending
        self.children: dict[int, _Step] = {}


class _Tree:
    """The steps of one head. ``size`` is what they take, in keys; ``head`` stands for nothing but the root."""

    def __init__(self, root: bytes, head: bytes, stride: int) -> None:
        self.head_data: Final = head
        self.stride: Final = stride
        self.root: Final = _Step(root, b"", None)
        self.size = len(head) // stride
        self.head: Final = self.grow(self.root, 0, head)

    def grow(self, step: _Step, digest: int, data: bytes) -> _Step:
        """The step with ``data`` behind ``step``."""
        pending, need = step.pending, self.stride - len(step.pending)
        if len(data) < need:
            child = _Step(step.key, pending + data, None)
        else:
            child = _Step(step.key, b"", hash_block(step.key, pending + data[:need]))
        step.children[digest] = child
        self.size += _STEP_COST
        return child

    def chain(self, step: _Step, pending: int, data: bytes) -> tuple[bytes, ...]:
        """The keys of all blocks that ``data`` completes in ``step``, ``pending`` bytes of the first being older."""
        stride = self.stride
        assert step.first is not None, "a step without a full block has no keys"
        keys = [step.first]
        start = stride - pending
        end = len(data) - (len(data) - start) % stride
        for at in range(start, end, stride):
            keys.append(hash_block(keys[-1], data[at : at + stride]))
        step.keys, step.key, step.pending = tuple(keys), keys[-1], data[end:]
        self.size += len(keys)
        return step.keys


class _Search:
    """One depth-first walk. Keeps the best path, and how many documents may still be tried."""

    def __init__(
        self,
        tree: _Tree,
        blocks: Sequence[bytes | None],
        digests: Sequence[int],
        resident: Container[bytes],
        limits: OrderLimits,
    ) -> None:
        self._tree = tree
        self._blocks = blocks
        self._digests = digests
        self._is_resident = resident.__contains__
        self._limits = None if limits.unlimited else limits
        self._tries = MAX_TRIED
        self._best_bytes = 0
        self._best_path: tuple[int, ...] = ()

    def run(self, preferred: Sequence[int] | None) -> ResidentPath:
        tree, head = self._tree, self._tree.head
        self._best_bytes, whole = self._held(head, tree.root, tree.head_data)
        if whole and self._blocks:
            ordered = min(len(self._blocks), MAX_ORDERED)
            remaining = tuple([index for index in preferred or range(ordered) if index < ordered])
            ahead = sum([len(self._blocks[index] or b"") for index in remaining])
            self._descend(head, self._best_bytes, (), remaining, ahead)
        return ResidentPath(self._best_path, self._best_bytes // TOKEN_BYTES)

    def _held(self, step: _Step, before: _Step, data: bytes) -> tuple[int, bool]:
        """How many bytes of ``step`` are resident in full blocks, and whether all of its blocks are."""
        if step.first is None:
            return 0, True
        is_resident, keys = self._is_resident, step.keys
        if not keys:
            if not is_resident(step.first):
                return 0, False
            keys = self._tree.chain(step, len(before.pending), data)
        if is_resident(keys[-1]):
            return len(keys) * self._tree.stride, True
        return bisect_left(keys, True, key=lambda key: not is_resident(key)) * self._tree.stride, False

    def _descend(
        self, step: _Step, matched: int, path: tuple[int, ...], remaining: tuple[int, ...], ahead: int
    ) -> None:
        """Try each remaining document behind ``step``. ``ahead`` is the size in bytes of all that remain."""
        size = len(step.pending) + ahead
        within_reach = matched + size - size % self._tree.stride
        is_resident = self._is_resident
        choices: Sequence[int] = remaining
        if self._limits is not None:
            allowed = self._limits.choices(len(path), sorted(remaining), len(self._blocks))
            choices = [index for index in remaining if index in allowed]
        for index in choices:
            block = self._blocks[index]
            if block is None:
                continue
            if not self._tries or within_reach <= self._best_bytes:
                return
            self._tries -= 1
            digest = self._digests[index]
            child = step.children.get(digest) or self._tree.grow(step, digest, block)
            if child.first is not None and not is_resident(child.first):
                continue
            gained, whole = self._held(child, step, block)
            if matched + gained > self._best_bytes:
                self._best_bytes, self._best_path = matched + gained, (*path, index)
            if whole and len(remaining) > 1:
                rest = tuple([other for other in remaining if other != index])
                self._descend(child, matched + gained, (*path, index), rest, ahead - len(block))
