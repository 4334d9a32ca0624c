"""The contract between an eviction policy and the owner of the blocks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar

__all__ = ["BlockKey", "EvictionPolicy"]

BlockKey = bytes | int
"""Identity of a block's content that outlives the block: a chained key in an engine, a hash id in a trace."""


class EvictionPolicy(ABC):
    """Decides which idle cached block leaves first. One instance belongs to one owner and is not thread safe.

    The owner (the engine's block pool, the offline simulator, a ghost cache) holds the blocks and tells the policy what
    happens to them. A *block* is the owner's number for one, unique while the block is known here and free to be
    used again for other content after ``removed``; a *key* is the content's identity, the same whenever that content
    comes back, for policies that remember what they evicted.

    The life of a block::

        missed(key)                      a block for this content is about to be allocated
            -> (computed and in use; the policy does not know the block yet)
        inserted(block, ...)             its first use has ended: idle, a candidate
        acquired(block)                  in use again: no candidate
        touched(block)                   that use has ended: idle, a candidate again
        removed(block)                   evicted or dropped: forgotten

    What a policy may rely on:

    * The blocks of one request are reported when it ends, deepest first: a child comes before its parent, so that
      among equals the tail of a prompt leaves first.
    * A parent is in use whenever one of its children is, and only a block without resident children is ever evicted.
      So when a block is idle, its resident children are idle and known here, and a parent outlives its children.
    * ``inserted`` counts as the first use, each ``touched`` as one hit. Several requests may use a block at once;
      only the first takes it out (``acquired``) and only the last brings it back (``touched``).

    What an owner may rely on: ``victim`` changes nothing that the owner can see, never returns a block for which
    ``evictable`` is False, and finds a block whenever there is one; memory is bounded by ``capacity``.

    To drop everything, the owner makes a new instance: this one would remember what it saw. To swap policies, it makes
    a new instance and reports what is idle as ``inserted``, in the order in which the old policy lets it go; blocks
    in use follow when they next become idle.
    """

    name: ClassVar[str]
    """The word for it on the command line and in the configuration."""

    def __init__(self, capacity: int) -> None:
        """``capacity`` is the size of the owner's pool in blocks, used by policies that divide it.

        Raises:
            ValueError: ``capacity`` is not positive.
        """
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1 block, not {capacity}")
        self.capacity = capacity

    def missed(self, key: BlockKey) -> None:  # noqa: B027 - most policies have nothing to do here
        """A block for ``key``, which is not resident, is about to be allocated.

        Comes before the call of ``victim`` that makes room for it, once per allocation, for content whose key is known
        by then (prompt blocks, not those that a decode will fill). When its request is aborted, the block may never be
        inserted.
        """

    @abstractmethod
    def inserted(self, block: int, parent: int | None, key: BlockKey, depth: int) -> None:
        """A block became idle for the first time.

        Args:
            block: the owner's number.
            parent: the block before it in its chain; None at a root. It may not be known here yet (see the order
                of reports above).
            key: identity of its content.
            depth: its place in the chain, 0 at a root.
        """

    @abstractmethod
    def acquired(self, block: int) -> None:
        """An idle block is in use again."""

    @abstractmethod
    def touched(self, block: int) -> None:
        """The last use of an acquired block has ended; it is idle again."""

    @abstractmethod
    def removed(self, block: int) -> None:
        """A known block, idle or in use, has lost its content: evicted, or dropped by the owner."""

    @abstractmethod
    def victim(self, evictable: Callable[[int], bool]) -> int | None:
        """The block that should leave first among those for which ``evictable`` is True; None when there is none.

        ``evictable`` is the owner's word: idle and without resident children. The block stays known until ``removed``.
        """
