"""Who gets which block, who has to leave for it, and what is told of it."""

from __future__ import annotations

import pytest

from cache_policy.policies.lru import LruPolicy
from cache_policy.policy import BlockKey, UnknownPolicyError
from engine.blocks import BlockTable
from engine.errors import InvariantError, NoSpaceError
from engine.wire import AllBlocksCleared, BlockRemoved, BlockStored

from .block_tables import BLOCK, ROOT, allocate, append, compute, keys_of, lookup, new, tok, warm

# --- allocation -----------------------------------------------------------------------------------


def test_c1_hits_are_pinned_before_anything_is_evicted() -> None:
    blocks = new(4)
    warm(blocks, tok(0, 48))
    live = allocate(blocks, tok(900, 16))
    before = blocks.stats()
    with pytest.raises(NoSpaceError):
        allocate(blocks, tok(0, 48) + tok(700, 16))
    assert blocks.stats() == before
    assert lookup(blocks, tok(0, 49)) == 48
    blocks.check()
    blocks.free(live)
    assert allocate(blocks, tok(0, 48) + tok(700, 16)).computed == 48
    blocks.check()


def test_c2_a_lookup_reserves_nothing() -> None:
    blocks = new(4)
    warm(blocks, tok(0, 32))
    assert lookup(blocks, tok(0, 33)) == 32
    other = allocate(blocks, tok(3000, 64))
    assert len(set(other.blocks)) == 4
    with pytest.raises(NoSpaceError):
        allocate(blocks, tok(0, 33))
    blocks.free(other)
    assert allocate(blocks, tok(0, 33)).computed == 0
    blocks.check()


def test_c3_freeing_twice_is_harmless() -> None:
    blocks = new(8)
    table = compute(blocks, tok(0, 32))
    blocks.free(table)
    once = blocks.stats()
    blocks.free(table)
    assert blocks.stats() == once
    first, second = allocate(blocks, tok(100, 32)), allocate(blocks, tok(200, 32))
    assert not set(first.blocks) & set(second.blocks)
    blocks.check()


def test_c4_used_blocks_are_never_evicted() -> None:
    blocks = new(8)
    live = compute(blocks, tok(0, 64))
    held = list(live.blocks)
    other = allocate(blocks, [*tok(0, 64), 1])
    assert other.blocks[:4] == held
    blocks.free(other)
    assert blocks.evict(8) == []
    assert live.blocks == held
    assert lookup(blocks, [*tok(0, 64), 1]) == 64
    with pytest.raises(NoSpaceError):
        allocate(blocks, tok(500, 80))
    blocks.check()


def test_c5_what_the_cache_occupies_is_not_in_use() -> None:
    blocks = new(64)
    for i in range(2000):
        table = compute(blocks, tok(10 * i, 50))
        for token in range(5):
            append(blocks, table, token)
        blocks.commit(table, 55)
        stats = blocks.stats()
        assert 0 < stats.used <= 64
        assert stats.used + stats.idle + stats.empty == 64
        blocks.free(table)
    stats = blocks.stats()
    assert stats.used == 0
    assert stats.idle + stats.empty == 64
    blocks.check()


def test_c7_an_evicted_key_is_gone_in_both_directions() -> None:
    blocks = new(2)
    warm(blocks, tok(0, 32))
    second = compute(blocks, tok(900, 32))
    assert lookup(blocks, tok(0, 33)) == 0
    blocks.free(second)
    third = allocate(blocks, tok(0, 32))
    assert third.computed == 0
    blocks.commit(third, 32)
    assert lookup(blocks, tok(900, 33)) == 0
    blocks.check()


def test_headroom_is_left_available() -> None:
    blocks = new(4)
    with pytest.raises(NoSpaceError):
        blocks.allocate(BlockTable(tok(0, 48), ROOT), headroom=2)
    table = BlockTable(tok(0, 48), ROOT)
    assert blocks.allocate(table, headroom=1) == 0
    append(blocks, table, 1)
    for token in range(15):
        append(blocks, table, token)
    with pytest.raises(NoSpaceError):
        append(blocks, table, 2)
    assert len(table.blocks) == 4
    blocks.check()


def test_misuse_is_refused_and_changes_nothing() -> None:
    blocks = new(4)
    table = allocate(blocks, tok(0, 20))
    before = blocks.stats()
    with pytest.raises(ValueError, match="without blocks"):
        blocks.allocate(table)
    with pytest.raises(ValueError, match="with tokens"):
        blocks.allocate(BlockTable([], ROOT))
    with pytest.raises(ValueError, match="allocated"):
        blocks.extend(BlockTable([1], ROOT))
    for computed in (-1, 21):
        with pytest.raises(ValueError, match="commit"):
            blocks.commit(table, computed)
    assert blocks.stats() == before
    with pytest.raises(ValueError, match="at least one"):
        new(0)
    with pytest.raises(UnknownPolicyError):
        new(1, policy="clairvoyant")


# --- sharing --------------------------------------------------------------------------------------


def test_content_computed_twice_ends_up_in_one_block() -> None:
    blocks = new(16)
    first, second = allocate(blocks, tok(0, 40)), allocate(blocks, tok(0, 40))  # both before either is computed
    assert not set(first.blocks) & set(second.blocks)
    blocks.commit(first, 40)
    own = second.blocks[2]
    blocks.commit(second, 40)
    assert second.blocks == [*first.blocks[:2], own]  # the part-full block stays its own
    assert blocks.stats().used == 4
    blocks.check()
    blocks.free(first)
    blocks.check()
    blocks.free(second)
    assert blocks.stats().idle == 2
    blocks.check()


def test_the_policy_hears_of_the_deepest_block_first() -> None:
    blocks = new(8)
    heard: list[tuple[int, int | None, int]] = []

    class Recorder(LruPolicy):
        def inserted(self, block: int, parent: int | None, key: BlockKey, depth: int) -> None:
            heard.append((block, parent, depth))
            super().inserted(block, parent, key, depth)

    blocks._pool.eviction.policy = Recorder(8)
    table = compute(blocks, tok(0, 50))
    first, second, third, _ = table.blocks
    blocks.free(table)
    assert heard == [(third, second, 2), (second, first, 1), (first, None, 0)]


def test_the_tail_of_a_prompt_leaves_before_its_head() -> None:
    blocks = new(4)
    warm(blocks, tok(0, 64))
    live = allocate(blocks, tok(900, 32))
    assert lookup(blocks, [*tok(0, 64), 1]) == 32
    blocks.free(live)
    blocks.check()


def test_least_recently_used_prompts_leave_first() -> None:
    blocks = new(6)
    for first in (0, 1000, 2000):
        warm(blocks, tok(first, 32))
    blocks.free(allocate(blocks, tok(0, 33)[:33]))  # used again
    warm(blocks, tok(3000, 32))
    assert [lookup(blocks, [*tok(first, 32), 1]) for first in (0, 1000, 2000)] == [32, 0, 32]


# --- events ---------------------------------------------------------------------------------------


def test_events_tell_what_became_and_what_ceased_to_be_hittable() -> None:
    blocks = new(4)
    table = allocate(blocks, tok(0, 64))
    keys = keys_of(blocks, tok(0, 64))
    assert not blocks.has_events
    blocks.commit(table, 20)
    blocks.commit(table, 50)
    assert blocks.drain_events() == (BlockStored(tuple(keys[:3]), None, BLOCK),)
    blocks.commit(table, 64)
    assert blocks.drain_events() == (BlockStored((keys[3],), keys[2], BLOCK),)
    blocks.free(table)
    assert blocks.drain_events() == ()
    compute(blocks, tok(900, 32))
    new_keys = keys_of(blocks, tok(900, 32))
    assert blocks.drain_events() == (
        BlockRemoved((keys[3], keys[2])),
        BlockStored(tuple(new_keys), None, BLOCK),
    )
    blocks.reset()
    assert blocks.has_events
    assert blocks.drain_events() == (AllBlocksCleared(),)


def test_runs_of_different_prompts_are_different_events() -> None:
    blocks = new(8)
    prompts = [tok(0, 32), tok(0, 16) + tok(500, 16), tok(900, 16)]
    for prompt in prompts:
        compute(blocks, prompt)
    first, branch, other = (keys_of(blocks, prompt) for prompt in prompts)
    assert blocks.drain_events() == (
        BlockStored(tuple(first), None, BLOCK),
        BlockStored((branch[1],), first[0], BLOCK),
        BlockStored((other[0],), None, BLOCK),
    )


def test_the_resident_snapshot_holds_every_key_after_its_parent() -> None:
    blocks = new(32)
    prompts = [tok(0, 32) + tok(500, 32), tok(0, 32) + tok(600, 16), tok(900, 48)]
    for prompt in prompts:
        warm(blocks, prompt)
    seen: set[bytes] = set()
    for event in blocks.resident():
        assert isinstance(event, BlockStored)
        parent = event.parent_block_hash
        for key in event.block_hashes:
            assert parent is None or parent in seen
            seen.add(key)
            parent = key
    assert seen == {key for prompt in prompts for key in keys_of(blocks, prompt)}


# --- operation ------------------------------------------------------------------------------------


def test_nothing_from_before_a_reset_is_hit_after_it() -> None:
    blocks = new(16)
    warm(blocks, tok(0, 32))
    live = allocate(blocks, tok(1000, 64))
    blocks.commit(live, 40)
    sharing = allocate(blocks, tok(1000, 33))
    untouched = allocate(blocks, tok(2000, 32))
    assert blocks.reset() == (2, 7)
    blocks.check()
    assert lookup(blocks, tok(0, 33)) == lookup(blocks, tok(1000, 65)) == 0
    blocks.commit(live, 64)  # its head is no longer published, so its tail cannot be
    blocks.commit(untouched, 32)
    blocks.check()
    assert lookup(blocks, tok(1000, 65)) == 0
    assert lookup(blocks, tok(2000, 33)) == 32
    for table in (live, sharing, untouched):
        blocks.free(table)
        blocks.check()
    assert blocks.stats().idle == 2
    assert blocks.stats().empty == 14


def test_switching_the_policy_keeps_every_block_and_its_order() -> None:
    blocks = new(8)
    for first in (0, 1000, 2000):
        warm(blocks, tok(first, 32))
    live = allocate(blocks, [*tok(2000, 32), 1])
    before = blocks.stats()
    blocks.set_policy("fifo")
    assert blocks.policy == "fifo"
    assert blocks.stats() == before
    blocks.check()
    blocks.evict(2)
    assert [lookup(blocks, [*tok(first, 32), 1]) for first in (0, 1000, 2000)] == [0, 32, 32]
    warm(blocks, tok(3000, 32))
    blocks.set_policy("lru")
    blocks.check()
    with pytest.raises(UnknownPolicyError):
        blocks.set_policy("clairvoyant")
    assert blocks.policy == "lru"
    blocks.free(live)
    blocks.evict(2)
    assert [lookup(blocks, [*tok(first, 32), 1]) for first in (1000, 2000, 3000)] == [0, 32, 32]
    blocks.check()


@pytest.mark.parametrize("damage", ["reference", "key", "empty", "children", "writer"])
def test_check_finds_a_damaged_pool(damage: str) -> None:
    blocks = new(8)
    table = compute(blocks, tok(0, 40))
    sharing = allocate(blocks, tok(0, 40))
    block = blocks._pool.blocks[table.blocks[0]]
    blocks.check()
    match damage:
        case "reference":
            block.ref += 1
        case "key":
            block.key = b"something else"
        case "empty":
            blocks._pool._empty.append(block.index)
        case "children":
            block.children = 0
        case "writer":
            blocks.reset()
            sharing.computed = 16
    with pytest.raises(InvariantError, match="broken invariant"):
        blocks.check()
