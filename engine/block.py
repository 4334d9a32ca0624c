"""What is known of one block of the pool, and of the blocks of one sequence."""

from __future__ import annotations

from cache_policy.keys import TOKEN_BYTES, BlockHash, token_bytes
from engine.owners import Owner
from engine.pins import PinNode

__all__ = ["Block", "BlockTable"]


class Block:
    """What the pool knows of one block. Written by the pool only. ``key`` None: not published."""

    __slots__ = (
        "children",
        "companion",
        "content",
        "depth",
        "index",
        "key",
        "owner",
        "parent",
        "pin",
        "ref",
        "root",
        "sought",
        "tracked",
    )

    def __init__(self, index: int) -> None:
        self.index = index
        self.ref = 0  # entries of live tables that name it
        self.key: bytes | None = None
        self.content = b""  # the bytes of its tokens, compared on every hit
        self.parent: Block | None = None
        self.root: bytes | None = None  # the namespace
        self.depth = 0  # place in its chain, 0 at a root
        self.children = 0  # published blocks whose parent it is
        self.tracked = False  # the policy knows it
        self.pin: PinNode | None = None  # what pins it
        self.owner: Owner | None = None  # whose quota it counts against
        self.companion: int | None = None  # the block with the same tokens in the window pool
        self.sought = False  # its companion is seen from where a chain ended for someone

    @property
    def idle(self) -> bool:
        """Hittable, and used by nobody."""
        return self.ref == 0 and self.key is not None

    def holds(self, content: bytes, parent: Block | None, root: bytes | None) -> bool:
        """Whether its KV is that of these tokens after that block in this namespace, whatever its key says.

        The same parent stands for the same whole prefix, as parents outlive their children.
        """
        return self.content == content and self.parent is parent and self.root == root


class BlockTable:
    """The tokens of one sequence and the blocks that hold their K and V. Changed by its ``BlockManager`` only, except
    that the sequence's owner appends generated tokens to ``tokens``.

    ``root`` is the first parent of its keys; None makes it private: it neither reads nor publishes. ``blocks`` are
    physical block numbers in order, empty while nothing is allocated; the K and V of the first ``computed`` tokens
    are in them. No more than its first ``hit_limit`` tokens are taken from the cache (None: as many as there are).
    What it publishes counts against the quota of ``owner``, where there is one.

    ``window`` are the blocks of the layers with a sliding window, in order and with numbers of their own; those before
    ``window_start`` have been given back, and what stands in their places means nothing.
    """

    __slots__ = (
        "awaited",
        "blocks",
        "computed",
        "contents",
        "hit_limit",
        "keys",
        "owner",
        "published",
        "publishing",
        "root",
        "tokens",
        "window",
        "window_start",
    )

    def __init__(self, tokens: list[int], root: bytes | None, owner: Owner | None = None) -> None:
        self.tokens = tokens
        self.root = root
        self.owner = owner
        self.hit_limit: int | None = None
        self.blocks: list[int] = []
        self.window: list[int] = []
        self.window_start = 0
        self.computed = 0
        # Keys and token bytes of the full blocks, kept over a preemption and while waiting: hashed once.
        self.keys: list[bytes] = []
        self.contents: list[bytes] = []
        # The first ``published`` blocks carry a key; no more will when ``publishing`` is False.
        self.published = 0
        self.publishing = False
        self.awaited: bytes | None = None  # the key that was last found in flight

    def hash_full_blocks(self, block_size: int, block_hash: BlockHash) -> None:
        """Bring the keys and contents up to the tokens."""
        done, full = len(self.keys), len(self.tokens) // block_size
        if done == full or self.root is None:
            return
        data = token_bytes(self.tokens[done * block_size : full * block_size])
        stride = block_size * TOKEN_BYTES
        contents = [data[start : start + stride] for start in range(0, len(data), stride)]
        parent = self.keys[-1] if done else self.root
        for content in contents:
            parent = block_hash(parent, content)
            self.keys.append(parent)
        self.contents += contents

    def hittable(self, block_size: int) -> int:
        """How many leading blocks an allocation may take from the cache: the last token is always computed."""
        if self.root is None:
            return 0
        most = len(self.tokens) - 1
        if self.hit_limit is not None:
            most = min(most, self.hit_limit)
        return most // block_size
