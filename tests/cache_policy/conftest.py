"""A small owner of blocks that keeps its side of the policy contract and watches the policy keep the other."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import pytest

from cache_policy.policy import EvictionPolicy

Path = tuple[int, ...]
"""Content of a block together with all before it, as the labels along the path from the root."""


class Pool:
    """Blocks in a prefix tree. A request is the list of its blocks; several may run at once and share blocks.

    ``first_use`` and ``last_use`` number the moments at which blocks were reported idle; ``questions`` counts the calls
    of ``evictable``.
    """

    def __init__(self, policy: EvictionPolicy) -> None:
        self.policy = policy
        self.free = list(range(policy.capacity))
        self.block_of: dict[Path, int] = {}
        self.path_of: dict[int, Path] = {}
        self.references: defaultdict[int, int] = defaultdict(int)
        self.first_use: dict[int, int] = {}
        self.last_use: dict[int, int] = {}
        self.now = 0
        self.questions = 0

    def parent(self, block: int) -> int | None:
        return self.block_of.get(self.path_of[block][:-1])

    def evictable(self, block: int) -> bool:
        self.questions += 1
        return block in self.evictable_blocks()

    def evictable_blocks(self) -> set[int]:
        parents = {path[:-1] for path in self.block_of}
        return {block for block, path in self.path_of.items() if not self.references[block] and path not in parents}

    def evict(self) -> int | None:
        """Let the policy's victim go; None when there is no candidate."""
        candidates = self.evictable_blocks()
        block = self.policy.victim(self.evictable)
        assert block in candidates if candidates else block is None
        if block is not None:
            self.drop(block)
        return block

    def drop(self, block: int) -> None:
        self.policy.removed(block)
        del self.block_of[self.path_of.pop(block)]
        del self.first_use[block], self.last_use[block]
        self.free.append(block)

    def admit(self, labels: Sequence[int]) -> list[int]:
        """Start a request: hit what is resident, allocate the rest as far as there is room."""
        blocks: list[int] = []
        for end in range(1, len(labels) + 1):
            path = tuple(labels[:end])
            block = self.block_of.get(path)
            if block is None:
                self.policy.missed(hash(path))
                if not self.free and self.evict() is None:
                    break
                block = self.free.pop()
                self.block_of[path], self.path_of[block] = block, path
            elif not self.references[block]:
                self.policy.acquired(block)
            self.references[block] += 1
            blocks.append(block)
        return blocks

    def finish(self, blocks: list[int]) -> None:
        for block in reversed(blocks):
            self.references[block] -= 1
            if not self.references[block]:
                self.report_idle(block)

    def report_idle(self, block: int) -> None:
        self.now += 1
        self.last_use[block] = self.now
        if block in self.first_use:
            self.policy.touched(block)
        else:
            self.first_use[block] = self.now
            path = self.path_of[block]
            self.policy.inserted(block, self.parent(block), hash(path), len(path) - 1)

    def swap(self, policy: EvictionPolicy) -> None:
        """Let another policy decide from now on."""
        old, self.policy = self.policy, policy
        idle = {block for block in self.path_of if not self.references[block]}
        order: list[int] = []
        while idle:
            parents = {self.parent(block) for block in idle}
            leaves = idle - parents
            block = old.victim(leaves.__contains__)
            assert block in leaves
            old.removed(block)
            idle.remove(block)
            order.append(block)
        self.first_use.clear()
        self.last_use.clear()
        for block in order:
            self.report_idle(block)

    def serve(self, labels: Sequence[int]) -> list[int]:
        blocks = self.admit(labels)
        self.finish(blocks)
        return blocks


@pytest.fixture
def pool_type() -> type[Pool]:
    return Pool
