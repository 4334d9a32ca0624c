"""The cache-aware order: which documents, one behind the other, a replica already holds.

Of all paths through a replica's cached blocks that use only this request's documents, the one with most tokens leads.
What follows behind it is for others to say (``gateway.canonical.popularity``).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Container, Iterator, Sequence
from typing import Final

import msgspec
from xxhash import xxh3_128_digest

from cache_policy.keys import TOKEN_BYTES
from gateway.canonical.order import MAX_ORDERED, UNLIMITED, OrderLimits

__all__ = ["MAX_REMEMBERED", "MAX_TRIED", "ResidentPath", "ResidentPaths"]

MAX_TRIED: Final = 512
"""Documents tried at most in one search; a search that reaches it keeps the best path so far."""

MAX_REMEMBERED: Final = 3 << 17
"""What ``ResidentPaths`` keeps, in block keys: about 30 MB with the documents that they belong to."""

_STEP_COST: Final = 5
"""What a step costs besides its keys and its document's bytes, in keys,"""

_KEY_COST: Final = 80
"""and what a key costs in bytes."""


class ResidentPath(msgspec.Struct, frozen=True):
    """Documents (indexes into the caller's) that a replica holds, first to last; the last one maybe in part.

    ``tokens`` is the number of cached tokens from the prompt's start to the last cached full block of the path,
    ``keys`` are those of the first of these blocks, as many as were at hand.
    """

    documents: tuple[int, ...] = ()
    tokens: int = 0
    keys: tuple[bytes, ...] = ()


class ResidentPaths:
    """Searches for resident paths. Owns a memory of block keys; belongs to one thread.

    The memory is a tree per beginning of a prompt: which keys a document's blocks have behind which others. It saves
    hashing them again, and says nothing of what is resident; that is looked up. With a block, those before it are taken
    for resident: prefix caches evict what is behind first, and looking up every block takes longer than all else. Only
    what was resident when it was looked up is remembered. Of the tree that was unused for longest those documents
    leave first that have not led a prompt for longest, with all that stands behind them.
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
        root: bytes,
        block_size: int,
        resident: Container[bytes],
        limits: OrderLimits = UNLIMITED,
        preferred: Sequence[int] | None = None,
    ) -> ResidentPath:
        """The documents whose tokens are cached furthest on one replica, in an order that ``limits`` allow.

        ``head`` holds the token bytes before the first document and ``blocks`` those of each document (uint32, little
        endian), the same at every place in the prompt; a document of which that is not so has None and never leads.
        ``root`` is the first parent of the block keys, ``block_size`` is in tokens, ``resident`` are the keys the
        replica holds. Ties go to what comes first in ``preferred``, the indexes in some order (None: the caller's);
        they are frequent where a block ends in the separator of documents. Tries ``MAX_TRIED`` documents at most, each
        for the price of a hash and a look-up unless its first block is cached.
        """
        place = (root, xxh3_128_digest(head), block_size)
        tree = self._trees.get(place)
        if tree is None:
            tree = self._trees[place] = _Tree(root, head, block_size * TOKEN_BYTES)
            self.remembered += tree.size
        before = tree.size
        path = _search(tree, blocks, resident, limits, preferred)
        self.remembered += tree.size - before
        if self.remembered > self._max:
            self._shrink(place)
        else:
            self._trees.move_to_end(place)
        return path

    def _shrink(self, used: tuple[bytes, bytes, int]) -> None:
        """Forget until the bound holds, the tree at ``used`` last."""
        self._trees.move_to_end(used)
        while self.remembered > self._max:
            tree = next(iter(self._trees.values()))
            before = tree.size
            if not tree.forget():
                self._trees.popitem(last=False)
                self.remembered -= before
            else:
                self.remembered -= before - tree.size


class _Step:
    """A document, or the head, behind all that stands before it.

    ``keys`` are those of the blocks that it completes, maybe none. The next block's key is the hash of ``open``, which
    is the last key and the bytes behind that block, with ``need`` bytes more. ``children`` are the documents behind it,
    by their bytes: those that come again are mostly the same object, whose hash is known.
    """

    __slots__ = ("children", "keys", "need", "open")

    def __init__(self, keys: tuple[bytes, ...], open: bytes, need: int) -> None:
        self.keys: Final = keys
        self.open: Final = open
        self.need: Final = need
        self.children: dict[bytes, _Step] = {}

    def followed_by(self, data: bytes, stride: int) -> _Step:
        """``data`` behind this step, in blocks of ``stride`` bytes."""
        need, size = self.need, len(data)
        if size < need:
            return _Step((), self.open + data, need - size)
        key = xxh3_128_digest(self.open + data[:need])
        keys, end = [key], need + stride
        while end <= size:
            key = xxh3_128_digest(key + data[end - stride : end])
            keys.append(key)
            end += stride
        return _Step(tuple(keys), key + data[end - stride :], end - size)


class _Tree:
    """The steps of one head. ``size`` is what they take, in keys."""

    def __init__(self, root: bytes, head: bytes, stride: int) -> None:
        self.stride: Final = stride
        self.head: Final = _Step((), root, stride).followed_by(head, stride)
        self.leading: Final[OrderedDict[bytes, _Step]] = OrderedDict()
        """The steps behind the head, those last that led a prompt last."""
        self.head.children = self.leading
        self.size = _STEP_COST + len(self.head.keys)

    def grow(self, step: _Step, data: bytes) -> _Step:
        """Remember ``data`` behind ``step``."""
        child = step.children[data] = step.followed_by(data, self.stride)
        self.size += self._cost(data, child)
        return child

    def forget(self) -> bool:
        """Forget the document that has not led for longest, with all behind it; False when nothing is left."""
        if not self.leading:
            return False
        waiting = [self.leading.popitem(last=False)]
        while waiting:
            data, step = waiting.pop()
            self.size -= self._cost(data, step)
            waiting += step.children.items()
        return True

    def _cost(self, data: bytes, step: _Step) -> int:
        return _STEP_COST + len(step.keys) + len(data) // _KEY_COST


def _search(
    tree: _Tree,
    blocks: Sequence[bytes | None],
    resident: Container[bytes],
    limits: OrderLimits,
    preferred: Sequence[int] | None,
) -> ResidentPath:
    """Walk the resident paths depth first for the best one, in one function for its speed: it is most of the cost.

    Most of that in turn is memory that no processor cache holds: each look-up among a million keys waits for it.
    """
    stride, digest_of = tree.stride, xxh3_128_digest
    step = tree.head
    held = _held(step.keys, resident)
    best = held * stride  # bytes that the best path so far has in resident blocks
    best_path: tuple[int, ...] = ()
    if held < len(step.keys) or not blocks:
        return ResidentPath((), best // TOKEN_BYTES, step.keys[:held])
    texts = [block or b"" for block in blocks[:MAX_ORDERED]]
    sizes = [*map(len, texts)]
    limited = not limits.unlimited or None in blocks
    remaining = tuple(preferred or range(len(blocks)))
    if len(blocks) > MAX_ORDERED:
        remaining = tuple([index for index in remaining if index < MAX_ORDERED])
    tries = MAX_TRIED
    # The walk stands behind ``step``, to which ``path`` led, ``matched`` bytes of resident blocks from the start. The
    # documents ``remaining`` have ``ahead`` bytes, and no path from here gets further than ``reach``.
    path, matched, ahead = best_path, best, sum(sizes)
    reach = _whole_blocks(matched, stride - step.need + ahead, stride)
    choices = iter(_allowed(blocks, limits, path, remaining) if limited else remaining)
    parents: list[_Visit] = []
    while True:
        open, need, known = step.open, step.need, step.children.get
        for index in choices if reach > best else ():
            if not tries:
                choices = iter(())
                break
            tries -= 1
            text = texts[index]
            child = known(text)
            if child is None:
                if need <= sizes[index]:
                    first = digest_of(open + text[:need])
                    if first not in resident:
                        continue
                    # Often the first block ends in the label that every document has: the rest is hashed only when the
                    # second one is held as well.
                    end = need + stride
                    if end <= sizes[index] and digest_of(first + text[need:end]) not in resident:
                        if matched + stride > best:
                            best, best_path = matched + stride, (*path, index)
                        continue
                child = tree.grow(step, text)
            keys, now = child.keys, matched
            if keys:
                held = len(keys) if keys[-1] in resident else _held(keys, resident)
                now += held * stride
                if now > best:
                    best, best_path = now, (*path, index)
                if held < len(keys):
                    continue
            if len(remaining) > 1:
                parents.append((step, path, matched, remaining, ahead, reach, choices))
                at = remaining.index(index)
                step, path, matched = child, (*path, index), now
                remaining, ahead = remaining[:at] + remaining[at + 1 :], ahead - sizes[index]
                reach = _whole_blocks(matched, stride - step.need + ahead, stride)
                choices = iter(_allowed(blocks, limits, path, remaining) if limited else remaining)
                break
        else:
            if not parents:
                break
            step, path, matched, remaining, ahead, reach, choices = parents.pop()
    step = tree.head
    found = [*step.keys]
    for index in best_path:
        child = step.children.get(texts[index])
        if child is None:
            break
        step = child
        found += step.keys
    if best_path and texts[best_path[0]] in tree.leading:
        tree.leading.move_to_end(texts[best_path[0]])
    return ResidentPath(best_path, best // TOKEN_BYTES, tuple(found[: best // stride]))


_Visit = tuple[_Step, tuple[int, ...], int, tuple[int, ...], int, int, Iterator[int]]


def _whole_blocks(matched: int, behind: int, stride: int) -> int:
    """Bytes in full blocks when ``behind`` bytes follow ``matched``."""
    return matched + behind - behind % stride


def _allowed(
    blocks: Sequence[bytes | None], limits: OrderLimits, path: tuple[int, ...], remaining: tuple[int, ...]
) -> list[int]:
    """Those of ``remaining`` that may follow ``path``."""
    allowed = limits.choices(len(path), sorted(remaining), len(blocks))
    return [index for index in remaining if index in allowed and blocks[index] is not None]


def _held(keys: Sequence[bytes], resident: Container[bytes]) -> int:
    """How many of the first of ``keys`` are resident."""
    if not keys or keys[-1] in resident:
        return len(keys)
    if keys[0] not in resident:
        return 0
    return bisect_left(keys, True, key=lambda key: key not in resident)
