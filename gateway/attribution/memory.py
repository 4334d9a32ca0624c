"""Prompts that were sent before, as one tree of token sequences: how far does a new one run along with any of them?

A radix tree, in which an edge is a run of tokens and only a divergence makes a node: its size follows the number of
prompts, not of tokens or blocks. It finds the very token at which a prompt leaves every other one behind.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

import msgspec

from cache_policy.keys import TOKEN_BYTES

__all__ = ["AHEAD_TOKENS", "CommonPrefix", "TokenMemory"]

AHEAD_TOKENS: Final = 16
"""How far one can look ahead where two prompts part."""

_TOKENS_A_PROMPT: Final = 128
"""What a remembered prompt costs besides its tokens, counted in tokens: prompts may be as short as one."""


class CommonPrefix(msgspec.Struct, frozen=True):
    """``tokens`` at the start of a prompt are those of an earlier one, whose number is ``serial``.

    Of several that share as much it is one of the latest to leave there; None when nothing was remembered. ``ahead``
    are the next tokens of it, at most ``AHEAD_TOKENS``, as bytes.
    """

    tokens: int
    serial: int | None
    ahead: bytes = b""


class _Edge:
    __slots__ = ("children", "data", "parent", "serial")

    def __init__(self, data: bytes, parent: _Edge | None, serial: int) -> None:
        self.data = data
        self.parent = parent
        self.serial = serial
        self.children: dict[bytes, _Edge] = {}


class TokenMemory:
    """The prompts remembered, at most ``capacity`` tokens, and one prompt per 128 of these. Owns its tree.

    A token costs four bytes, a prompt some 500 more, up to 1,200 with a namespace of its own. Prompts whose end was not
    passed for the longest time leave first. Belongs to one thread.
    Namespaces are trees of their own, so that nothing is ever told across them.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity: Final = capacity
        self._max_prompts: Final = max(2, capacity // _TOKENS_A_PROMPT)
        self._held = 0
        self._roots: dict[bytes, _Edge] = {}
        self._leaves: OrderedDict[int, tuple[bytes, _Edge]] = OrderedDict()  # by identity, longest unused first

    @property
    def tokens(self) -> int:
        """Tokens held."""
        return self._held // TOKEN_BYTES

    def remember(self, namespace: bytes, data: bytes, serial: int) -> CommonPrefix:
        """Take in a prompt (``cache_policy.keys.token_bytes``) and say what it shares with those before.

        ``serial`` is the caller's number for it.
        """
        root = self._roots.get(namespace)
        if root is None:
            root = self._roots[namespace] = _Edge(b"", None, serial)
            self._add_leaf(namespace, root, data, serial)
            return CommonPrefix(0, None)
        node, edge, at, common = _walk(root, data)
        found = _found(node, edge, at, common)
        if edge is not None and common < len(edge.data):
            node = self._split(edge, common)
        if at + common < len(data):
            self._add_leaf(namespace, node, data[at + common :], serial)
        else:
            self._touch(node)
        return found

    def find(self, namespace: bytes, data: bytes) -> CommonPrefix:
        """What a prompt shares with those before, without taking it in."""
        root = self._roots.get(namespace)
        if root is None:
            return CommonPrefix(0, None)
        node, edge, at, common = _walk(root, data)
        return _found(node, edge, at, common)

    def _add_leaf(self, namespace: bytes, parent: _Edge, data: bytes, serial: int) -> None:
        if not data:
            return
        leaf = _Edge(data, parent, serial)
        parent.children[data[:TOKEN_BYTES]] = leaf
        self._leaves.pop(id(parent), None)
        self._leaves[id(leaf)] = namespace, leaf
        self._held += len(data)
        while len(self._leaves) > self._max_prompts or (self.tokens > self.capacity and len(self._leaves) > 1):
            self._forget_one()

    def _split(self, edge: _Edge, at: int) -> _Edge:
        """Cut an edge in two; the upper half becomes a node between it and its parent, and is returned."""
        assert edge.parent is not None
        upper = _Edge(edge.data[:at], edge.parent, edge.serial)
        edge.parent.children[upper.data[:TOKEN_BYTES]] = upper
        edge.data = edge.data[at:]
        edge.parent = upper
        upper.children[edge.data[:TOKEN_BYTES]] = edge
        return upper

    def _touch(self, edge: _Edge) -> None:
        if id(edge) in self._leaves:
            self._leaves.move_to_end(id(edge))

    def _forget_one(self) -> None:
        _, (namespace, leaf) = self._leaves.popitem(last=False)
        self._held -= len(leaf.data)
        parent = leaf.parent
        assert parent is not None
        del parent.children[leaf.data[:TOKEN_BYTES]]
        if parent.children:
            return
        if parent.parent is None:
            del self._roots[namespace]
        else:
            self._leaves[id(parent)] = namespace, parent
            self._leaves.move_to_end(id(parent), last=False)


def _walk(root: _Edge, data: bytes) -> tuple[_Edge, _Edge | None, int, int]:
    """As far down as ``data`` goes: the last node reached, the edge below it that is left within, if any, the bytes up
    to that node, and those in common with that edge.
    """
    node, at = root, 0
    while True:
        edge = node.children.get(data[at : at + TOKEN_BYTES])
        if edge is None:
            return node, None, at, 0
        common = _common_bytes(edge.data, data, at)
        if common < len(edge.data):
            return node, edge, at, common
        node, at = edge, at + common


def _found(node: _Edge, edge: _Edge | None, size: int, common: int) -> CommonPrefix:
    nearest, at = (node, len(node.data)) if edge is None else (edge, common)
    if edge is None and node.children:
        nearest, at = next(reversed(node.children.values())), 0
    ahead = nearest.data[at : at + AHEAD_TOKENS * TOKEN_BYTES]
    return CommonPrefix((size + common) // TOKEN_BYTES, nearest.serial, ahead)


def _common_bytes(edge: bytes, data: bytes, at: int) -> int:
    """How many whole tokens ``edge`` and ``data[at:]`` have in common, in bytes."""
    size = min(len(edge), len(data) - at)
    if edge[:size] == data[at : at + size]:
        return size
    low, high = 0, size // TOKEN_BYTES  # tokens: so many are equal, so many are not
    step = 8
    while step < high and edge[: step * TOKEN_BYTES] == data[at : at + step * TOKEN_BYTES]:
        low, step = step, step * 4
    high = min(high, step)
    while low < high:
        middle = (low + high + 1) // 2
        if edge[low * TOKEN_BYTES : middle * TOKEN_BYTES] == data[at + low * TOKEN_BYTES : at + middle * TOKEN_BYTES]:
            low = middle
        else:
            high = middle - 1
    return low * TOKEN_BYTES
