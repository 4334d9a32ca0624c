"""Which prefixes are pinned: chains of block keys whose blocks stay in the cache once they are there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.block import Block

__all__ = ["PinNode", "PinTree"]


class PinNode:
    """One pinned block, wanted or there. Written by ``PinTree``; ``block`` by the pool, None while it is not resident.

    ``pins`` counts the pins that lead through it and ``ends`` says whether one of them ends here.
    """

    __slots__ = ("block", "children", "ends", "key", "pins")

    def __init__(self, key: bytes) -> None:
        self.key = key
        self.pins = 0
        self.ends = False
        self.children: dict[bytes, PinNode] = {}
        self.block: Block | None = None


class PinTree:
    """The one owner of all pins, as a tree of block keys under ``root``, which is no block.

    A pin is a wish: it outlives the blocks, and holds for those that come. As a tree it can only ask for whole
    prefixes: whatever keys are given, a pinned block's parent is pinned.
    """

    def __init__(self) -> None:
        self.root = PinNode(b"")
        self.size = 0
        """Nodes but for the root: blocks that are pinned, or will be when they come."""

    def new_nodes(self, keys: Sequence[bytes]) -> int:
        """By how many nodes ``add`` would make the tree larger."""
        return len(keys) - self.common(keys)

    def common(self, keys: Sequence[bytes]) -> int:
        """How many of the chain's first keys are pinned."""
        node, count = self.root, 0
        for key in keys:
            below = node.children.get(key)
            if below is None:
                break
            node, count = below, count + 1
        return count

    def add(self, keys: Sequence[bytes]) -> list[PinNode]:
        """Pin a chain; adding it again does nothing. Its nodes, from the first on."""
        path = [self.root]
        for key in keys:
            node = path[-1].children.get(key)
            if node is None:
                node = path[-1].children[key] = PinNode(key)
                self.size += 1
            path.append(node)
        if not path[-1].ends:
            path[-1].ends = True
            for node in path:
                node.pins += 1
        return path[1:]

    def remove(self, keys: Sequence[bytes]) -> list[PinNode]:
        """Give up the pin of exactly this chain; the nodes that nothing pins any more, deepest first."""
        path = [self.root]
        for key in keys:
            node = path[-1].children.get(key)
            if node is None:
                return []
            path.append(node)
        if not path[-1].ends:
            return []
        path[-1].ends = False
        for node in path:
            node.pins -= 1
        dropped = []
        for parent, node in zip(reversed(path[:-1]), reversed(path[1:]), strict=True):
            if node.pins:
                break
            del parent.children[node.key]
            dropped.append(node)
        self.size -= len(dropped)
        return dropped

    def ends(self) -> Iterator[tuple[PinNode, int, int]]:
        """Every pin: the last node of its chain, the length of the chain, and how many of its blocks are resident."""
        stack = [(node, 1, 0) for node in self.root.children.values()]
        while stack:
            node, length, resident = stack.pop()
            resident += node.block is not None
            if node.ends:
                yield node, length, resident
            stack += [(below, length + 1, resident) for below in node.children.values()]

    def nodes(self) -> Iterator[PinNode]:
        """All nodes, parents first."""
        stack = [*self.root.children.values()]
        while stack:
            node = stack.pop()
            yield node
            stack += node.children.values()
