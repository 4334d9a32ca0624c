"""Who leaves the cache next: what the policies are told of idle blocks, and whom they choose."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakValueDictionary

from cache_policy.policy import EvictionPolicy, create_policy
from engine.block import Block
from engine.errors import InvariantError
from engine.owners import Owner

__all__ = ["Eviction"]


class Eviction:
    """The one owner of the eviction policies: that of the pool, and one of its kind for the share of each ``Owner``.

    They hear of published blocks only: of each when it first becomes idle without a pin (``offer``), when it is used or
    pinned again (``withdraw``), and when it has left (``forget``). Only leaves are ever chosen.
    """

    def __init__(self, blocks: Sequence[Block], policy: str) -> None:
        """For a pool of these ``blocks``, by the named policy.

        Raises:
            cache_policy.policy.UnknownPolicyError: there is no such policy.
        """
        self._blocks = blocks
        self.policy: EvictionPolicy = create_policy(policy, len(blocks))
        self._owners: WeakValueDictionary[str, Owner] = WeakValueDictionary()

    def owner(self, name: str, quota: int) -> Owner:
        """The tenant of this name, whose quota of published blocks is ``quota`` from now on.

        A lower one than before takes effect when the tenant publishes next.
        """
        owner = self._owners.get(name)
        if owner is None:
            owner = self._owners[name] = Owner(name, quota, type(self.policy)(quota))
        owner.quota = quota
        return owner

    def owners(self) -> list[Owner]:
        """Tenants with a quota that have blocks or requests, those with most blocks first."""
        return sorted(self._owners.values(), key=lambda owner: -owner.resident)

    def missed(self, keys: Sequence[bytes], owner: Owner | None) -> None:
        """Keys that somebody looked for are not resident."""
        for policy in (self.policy,) if owner is None else (self.policy, owner.policy):
            missed = policy.missed
            for key in keys:
                missed(key)

    def offer(self, block: Block) -> None:
        """A block may be chosen, for the first time or again."""
        policy, owner, index = self.policy, block.owner, block.index
        if block.tracked:
            policy.touched(index)
            if owner is not None:
                owner.policy.touched(index)
            return
        block.tracked = True
        assert block.key is not None
        parent = None if block.parent is None else block.parent.index
        policy.inserted(index, parent, block.key, block.depth)
        if owner is not None:
            owner.policy.inserted(index, parent, block.key, block.depth)

    def withdraw(self, block: Block) -> None:
        """A block may not be chosen any more."""
        self.policy.acquired(block.index)
        if block.owner is not None:
            block.owner.policy.acquired(block.index)

    def forget(self, block: Block) -> None:
        """A block that could be chosen has left the cache."""
        self.policy.removed(block.index)
        if block.owner is not None:
            block.owner.policy.removed(block.index)

    def evictable(self, index: int) -> bool:
        """Whether the block is idle, not pinned, and nothing is published behind it."""
        block = self._blocks[index]
        return block.idle and block.pin is None and block.children == 0

    def victim(self, owner: Owner | None = None) -> Block | None:
        """The block to leave next, of all or of an owner's; None when none can."""
        policy = self.policy if owner is None else owner.policy
        index = policy.victim(self.evictable)
        return None if index is None else self._blocks[index]

    def restart(self) -> None:
        """Every block has left at once."""
        self._use(type(self.policy)(len(self._blocks)))

    def replace(self, name: str, idle: int) -> None:
        """Let another policy decide from now on. It hears of the ``idle`` blocks that may be chosen, in their order.

        Raises:
            cache_policy.policy.UnknownPolicyError: there is no such policy; the old one stays.
        """
        new, old = create_policy(name, len(self._blocks)), self.policy
        children = [block.children for block in self._blocks]
        order: list[Block] = []
        for _ in range(idle):
            index = old.victim(lambda i: self._blocks[i].idle and self._blocks[i].pin is None and children[i] == 0)
            if index is None:
                raise InvariantError(f"policy {old.name} does not know all idle blocks")
            old.removed(index)
            block = self._blocks[index]
            if block.parent is not None:
                children[block.parent.index] -= 1
            order.append(block)
        for block in self._blocks:
            block.tracked = False
        self._use(new)
        for block in order:
            self.offer(block)

    def _use(self, policy: EvictionPolicy) -> None:
        """Let ``policy`` decide from now on, and others of its kind on the owners' shares. They know no block yet."""
        self.policy = policy
        for owner in self._owners.values():
            owner.policy = type(policy)(owner.quota)
