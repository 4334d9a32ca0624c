"""Quotas of resident blocks: a tenant's next block takes the place of its own idle ones, and of nobody else's."""

from __future__ import annotations

import gc

import pytest

from cache_policy.policy import POLICY_NAMES
from engine.block import Block
from engine.blocks import BlockManager, BlockTable
from engine.errors import NoSpaceError

BLOCK = 4


class Tenants:
    """A pool and what several tenants do with it; each has its own namespace."""

    def __init__(self, num_blocks: int, policy: str = "lru", **quotas: int) -> None:
        self.blocks = BlockManager(num_blocks, BLOCK, policy)
        self.quotas = quotas

    def start(self, tenant: str, first: int, count: int) -> BlockTable:
        """Compute ``count`` blocks of the tenant's text ``first``, and keep them in use."""
        tokens = [1000 * first + i for i in range(count * BLOCK)]
        table = BlockTable(tokens, tenant.encode(), self.blocks.owner(tenant, self.quotas.get(tenant, 0)))
        self.blocks.allocate(table)
        for end in range(table.computed + 1, len(tokens) + 1):
            self.blocks.commit(table, end)
            for owner in self.blocks.owners():
                assert owner.resident <= owner.quota
        self.blocks.check()
        return table

    def run(self, tenant: str, first: int, count: int) -> None:
        self.blocks.free(self.start(tenant, first, count))
        self.blocks.check()

    def cached(self, tenant: str, first: int, count: int) -> int:
        """How many blocks a request with one token more would hit."""
        tokens = [1000 * first + i for i in range(count * BLOCK)]
        return self.blocks.lookup(BlockTable([*tokens, 0], tenant.encode())) // BLOCK

    def resident(self) -> dict[str, int]:
        return {owner.name: owner.resident for owner in self.blocks.owners()}


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_a_tenant_never_has_more_than_its_quota_and_others_lose_nothing(policy: str) -> None:
    tenants = Tenants(64, policy, greedy=8)
    tenants.run("frugal", 0, 10)
    for text in range(1, 30):
        tenants.run("greedy", text, 5)
        assert tenants.resident() == {"greedy": min(8, 5 * text)}
    assert tenants.cached("frugal", 0, 10) == 10
    assert tenants.blocks.stats().idle == 18


def test_the_tail_of_its_least_recently_used_prompt_makes_room() -> None:
    tenants = Tenants(64, limited=8)
    tenants.run("limited", 1, 4)
    tenants.run("limited", 2, 4)
    tenants.run("limited", 1, 4)
    tenants.run("limited", 3, 2)
    assert [tenants.cached("limited", text, 4) for text in (1, 2)] == [4, 2]


def test_the_policy_in_force_says_which_of_its_blocks_makes_room() -> None:
    tenants = Tenants(64, "fifo", limited=8)
    tenants.run("limited", 1, 4)
    tenants.run("limited", 2, 4)
    tenants.run("limited", 1, 4)
    tenants.run("limited", 3, 2)
    assert [tenants.cached("limited", text, 4) for text in (1, 2)] == [2, 4]


def test_what_finds_no_room_is_computed_but_not_published() -> None:
    tenants = Tenants(64, limited=8)
    table = tenants.start("limited", 1, 12)
    assert table.published == 8
    assert tenants.cached("limited", 1, 12) == 8
    assert tenants.blocks.stats().used == 12  # what its requests use is theirs
    other = tenants.start("limited", 2, 3)
    assert other.published == 0
    assert tenants.cached("limited", 2, 3) == 0
    tenants.blocks.free(table)
    tenants.blocks.free(other)
    assert (tenants.blocks.stats().used, tenants.blocks.stats().idle) == (0, 8)
    tenants.run("limited", 2, 3)
    assert tenants.cached("limited", 2, 3) == 3


def test_what_will_not_be_published_is_waited_for_by_nobody() -> None:
    tenants = Tenants(64, limited=2)
    computing = BlockTable(list(range(20)), b"limited", tenants.blocks.owner("limited", 2))
    tenants.blocks.allocate(computing)
    waiting = BlockTable([*range(20)], b"limited", computing.owner)
    assert tenants.blocks.in_flight(waiting) is computing
    tenants.blocks.commit(computing, 12)
    assert tenants.blocks.in_flight(waiting) is None
    tenants.blocks.check()


def test_a_full_pool_evicts_by_its_own_policy_whatever_the_quotas() -> None:
    tenants = Tenants(12, limited=8)
    tenants.run("limited", 1, 6)
    tenants.run("free", 2, 10)
    assert tenants.cached("free", 2, 10) == 10
    assert tenants.resident() == {"limited": 2}
    with pytest.raises(NoSpaceError):
        tenants.start("free", 3, 13)


def test_a_lower_quota_takes_effect_with_the_next_block() -> None:
    tenants = Tenants(64, limited=8)
    tenants.run("limited", 1, 8)
    tenants.quotas["limited"] = 3
    owner = tenants.blocks.owner("limited", 3)
    assert owner is not None
    assert owner.resident == 8
    table = BlockTable([7] * BLOCK, b"limited", owner)
    tenants.blocks.allocate(table)
    tenants.blocks.commit(table, BLOCK)
    assert owner.resident == 3
    tenants.blocks.check()


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_quotas_survive_resets_and_changes_of_policy(policy: str) -> None:
    tenants = Tenants(64, limited=8)
    tenants.run("limited", 1, 8)
    tenants.blocks.set_policy(policy)
    tenants.blocks.check()
    tenants.run("limited", 2, 6)
    assert tenants.resident() == {"limited": 8}
    assert tenants.cached("limited", 1, 8) == 2
    running = tenants.start("limited", 2, 6)
    tenants.blocks.reset()
    tenants.blocks.check()
    assert tenants.resident() == {"limited": 0}
    tenants.blocks.free(running)
    tenants.run("limited", 3, 8)
    assert tenants.resident() == {"limited": 8}


def test_pinned_blocks_count_and_stay() -> None:
    tenants = Tenants(64, limited=8)
    table = tenants.start("limited", 1, 6)
    tenants.blocks.pin(table.keys)
    tenants.blocks.free(table)
    tenants.run("limited", 2, 6)
    assert tenants.cached("limited", 1, 6) == 6
    assert tenants.cached("limited", 2, 6) == 2


def test_a_tenant_without_blocks_and_requests_is_forgotten() -> None:
    tenants = Tenants(64, **{f"t{i}": 4 for i in range(50)})
    for i in range(50):
        tenants.run(f"t{i}", i, 4)
    gc.collect()
    assert len(tenants.blocks.owners()) == 16  # as many as have blocks
    assert sum(owner.resident for owner in tenants.blocks.owners()) == 64


def test_check_finds_a_wrong_count() -> None:
    tenants = Tenants(8, limited=4)
    tenants.run("limited", 1, 2)
    block: Block = tenants.blocks._pool.blocks[0]
    assert block.owner is not None
    block.owner.resident += 1
    with pytest.raises(Exception, match="blocks of an owner are counted"):
        tenants.blocks.check()
