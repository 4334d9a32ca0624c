"""Properties of the block manager, among them the unit cases of the acceptance list."""

from __future__ import annotations

import pytest

from cache_policy.policies.lru import LruPolicy
from cache_policy.policy import BlockKey, UnknownPolicyError
from engine.batch import BlockCopy
from engine.blocks import BlockManager, BlockTable
from engine.errors import InvariantError, NoSpaceError
from engine.wire import AllBlocksCleared, BlockRemoved, BlockStored

BLOCK = 16
ROOT = b"namespace-number"


def tok(first: int, count: int) -> list[int]:
    return list(range(100 + first, 100 + first + count))


def new(num_blocks: int, **options: object) -> BlockManager:
    return BlockManager(num_blocks, BLOCK, **options)  # type: ignore[arg-type]


def allocate(blocks: BlockManager, tokens: list[int], root: bytes | None = ROOT) -> BlockTable:
    table = BlockTable(list(tokens), root)
    blocks.allocate(table)
    return table


def compute(blocks: BlockManager, tokens: list[int], root: bytes | None = ROOT) -> BlockTable:
    """Allocate and compute all of it."""
    table = allocate(blocks, tokens, root)
    blocks.commit(table, len(tokens))
    return table


def warm(blocks: BlockManager, tokens: list[int]) -> BlockTable:
    """Compute and free again, so that its full blocks are idle and hittable."""
    table = compute(blocks, tokens)
    blocks.free(table)
    return table


def lookup(blocks: BlockManager, tokens: list[int], root: bytes = ROOT) -> int:
    return blocks.lookup(BlockTable(list(tokens), root))


def append(blocks: BlockManager, table: BlockTable, token: int) -> None:
    table.tokens.append(token)
    try:
        blocks.extend(table)
    except NoSpaceError:
        table.tokens.pop()
        raise


# --- forks ------------------------------------------------------------------------------------------------


def fork(blocks: BlockManager, count: int, root: bytes | None = ROOT) -> tuple[BlockTable, BlockTable]:
    first = compute(blocks, tok(0, count), root)
    return first, blocks.fork(first)


def copied(blocks: BlockManager, table: BlockTable, token: int) -> BlockCopy | None:
    """Append a token; return the copy that it takes."""
    table.tokens.append(token)
    return blocks.extend(table)


@pytest.mark.parametrize("root", [ROOT, None])
def test_d1_who_writes_first_into_a_shared_block_gets_a_copy_and_the_other_none(root: bytes | None) -> None:
    blocks = new(8)
    first, second = fork(blocks, 20, root)
    assert first.blocks == second.blocks
    shared = first.blocks[1]
    assert copied(blocks, first, 111) == BlockCopy(shared, first.blocks[1])
    assert copied(blocks, second, 222) is None
    assert first.blocks[0] == second.blocks[0]
    assert first.blocks[1] != second.blocks[1] == shared
    assert (first.tokens[-1], second.tokens[-1]) == (111, 222)
    for table in (first, second):
        blocks.commit(table, 21)
    assert blocks.stats().used == 3
    blocks.check()
    blocks.free(first)
    blocks.free(second)
    assert blocks.stats().used == 0
    assert lookup(blocks, tok(0, 20)) == (16 if root else 0)
    blocks.check()


def test_d2_nothing_is_copied_at_the_edge_of_a_block() -> None:
    blocks = new(8)
    first, second = fork(blocks, 32)
    assert copied(blocks, first, 111) is None
    assert copied(blocks, second, 222) is None
    assert first.blocks[:2] == second.blocks[:2]
    assert first.blocks[2] != second.blocks[2]
    assert blocks.stats().used == 4
    blocks.check()
    blocks.free(first)
    blocks.check()  # both full blocks are still used
    assert blocks.stats().used == 3


def test_many_forks_take_a_copy_each_but_the_last() -> None:
    blocks = new(8)
    first, second = fork(blocks, 20)
    third = blocks.fork(second)
    copies = [copied(blocks, table, token) for token, table in enumerate((first, second, third))]
    assert copies[0] is not None
    assert copies[1] is not None
    assert copies[2] is None
    assert len({table.blocks[1] for table in (first, second, third)}) == 3
    blocks.check()


def test_a_block_is_written_in_place_once_the_other_fork_has_ended() -> None:
    blocks = new(8)
    first, second = fork(blocks, 20)
    blocks.free(first)
    assert copied(blocks, second, 222) is None
    blocks.commit(second, 21)
    blocks.check()


def test_a_copy_that_finds_no_block_changes_nothing() -> None:
    blocks = new(2)
    first, _second = fork(blocks, 20)
    held, before = list(first.blocks), blocks.stats()
    with pytest.raises(NoSpaceError):
        append(blocks, first, 111)
    assert first.blocks == held
    assert blocks.stats() == before
    blocks.check()


def test_a_shared_block_is_never_written() -> None:
    blocks = new(4)
    first, second = fork(blocks, 20)
    first.tokens.append(111)
    with pytest.raises(ValueError, match="shared"):
        blocks.commit(first, 21)
    with pytest.raises(ValueError, match="computed"):
        blocks.fork(BlockTable([1], ROOT))
    assert copied(blocks, second, 222) is not None  # the failed commit has changed nothing
    blocks.check()


def test_equal_continuations_of_forks_end_up_in_one_block() -> None:
    blocks = new(8)
    first, second = fork(blocks, 20)
    for table in (first, second):
        for token in range(13):
            append(blocks, table, token)
        blocks.commit(table, 33)
    assert first.blocks[:2] == second.blocks[:2]
    blocks.check()


# --- what is in flight ------------------------------------------------------------------------------------


def waiting(tokens: list[int], root: bytes | None = ROOT) -> BlockTable:
    return BlockTable(list(tokens), root)


def test_a_block_is_in_flight_until_it_is_published() -> None:
    blocks = new(8)
    first = allocate(blocks, tok(0, 50))
    sharer, shorter, other = waiting(tok(0, 40)), waiting(tok(0, 17)), waiting(tok(1, 40))
    assert blocks.in_flight(sharer) is blocks.in_flight(shorter) is first
    assert blocks.in_flight(other) is None
    blocks.commit(first, 20)
    assert blocks.in_flight(shorter) is None
    assert blocks.in_flight(sharer) is first
    blocks.check()
    blocks.commit(first, 32)
    assert blocks.in_flight(sharer) is None
    assert blocks.allocate(sharer) == 32


@pytest.mark.parametrize("count", [1, 15, 16])
def test_nobody_waits_for_what_would_be_no_hit(count: int) -> None:
    blocks = new(8)
    allocate(blocks, tok(0, 50))
    assert blocks.in_flight(waiting(tok(0, count))) is None  # its last token is computed in any case
    assert blocks.in_flight(waiting(tok(0, 50), b"another-namespac")) is None
    assert blocks.in_flight(waiting(tok(0, 50), None)) is None


def test_what_nobody_will_publish_is_not_in_flight() -> None:
    blocks = new(16)
    private = allocate(blocks, tok(0, 50), None)
    sharer = waiting(tok(0, 50))
    assert blocks.in_flight(sharer) is None
    blocks.free(private)
    first = allocate(blocks, tok(0, 50))
    assert blocks.in_flight(sharer) is first
    blocks.free(first)
    assert blocks.in_flight(sharer) is None
    second = allocate(blocks, tok(0, 50))
    blocks.commit(second, 20)
    assert blocks.in_flight(sharer) is second
    blocks.reset()
    assert blocks.in_flight(sharer) is None
    blocks.check()


def test_the_first_of_two_that_compute_the_same_is_the_one_to_wait_for() -> None:
    blocks = new(16)
    first, second = allocate(blocks, tok(0, 50)), allocate(blocks, tok(0, 50))
    sharer = waiting(tok(0, 50))
    assert blocks.in_flight(sharer) is first
    blocks.commit(second, 50)
    assert blocks.in_flight(sharer) is None  # it is there now, whoever has computed it
    blocks.check()
    blocks.commit(first, 50)
    blocks.check()


# --- what may be hit -------------------------------------------------------------------------------------


def test_a2_a_colliding_key_is_a_miss_and_counted() -> None:
    blocks = new(16, block_hash=lambda parent, content: b"7")
    first = compute(blocks, tok(0, 33))
    held = list(first.blocks)
    blocks.free(first)
    other = allocate(blocks, tok(5000, 33))
    assert other.computed == 0
    assert held[0] not in other.blocks  # the one published block of the first is still its own
    assert lookup(blocks, tok(0, 33)) == 16
    assert lookup(blocks, tok(5000, 33)) == 0
    # One when the first one's own second block found its key taken, one for the other prompt.
    assert blocks.stats().collisions_rejected == 2
    blocks.check()


def test_a_collision_stops_publishing_the_rest_of_the_chain() -> None:
    blocks = new(16, block_hash=lambda parent, content: b"7" if content[:4] == b"\0\0\0\0" else parent + content)
    warm(blocks, [0, *tok(0, 47)])
    table = compute(blocks, [0, *tok(9, 47)])
    assert blocks.drain_events() == (
        BlockStored(tuple(blocks_keys(blocks, [0, *tok(0, 47)])), None, BLOCK),
    )  # nothing of the second prompt, whose later blocks have no published parent
    blocks.check()
    blocks.free(table)
    assert lookup(blocks, [0, *tok(9, 47)]) == 0


def blocks_keys(blocks: BlockManager, tokens: list[int]) -> list[bytes]:
    table = BlockTable(list(tokens), ROOT)
    blocks.lookup(table)
    return table.keys


def test_a6_equal_tokens_after_another_prefix_are_other_blocks() -> None:
    blocks = new(16)
    first = compute(blocks, tok(0, 16) + tok(900, 16) + [7])
    held = list(first.blocks)
    blocks.free(first)
    second = allocate(blocks, tok(50, 16) + tok(900, 16) + [7])
    assert second.computed == 0
    assert second.blocks[1] != held[1]


def test_equal_tokens_in_another_namespace_never_hit() -> None:
    blocks = new(16)
    warm(blocks, tok(0, 33))
    assert lookup(blocks, tok(0, 33), b"another-namespac") == 0


@pytest.mark.parametrize("count", range(1, 50))
def test_b1_b2_the_last_token_is_always_left_to_compute(count: int) -> None:
    blocks = new(8)
    assert warm(blocks, tok(0, count)).computed == 0  # freed
    again = allocate(blocks, tok(0, count))
    assert again.computed == BLOCK * ((count - 1) // BLOCK)


def test_b4_only_full_and_computed_blocks_are_hit() -> None:
    blocks = new(8)
    table = compute(blocks, tok(0, 24))
    assert lookup(blocks, [*tok(0, 24), 9]) == 16
    for token in tok(24, 8):
        append(blocks, table, token)
    assert lookup(blocks, [*tok(0, 32), 9]) == 16  # full, but not computed
    blocks.commit(table, 32)
    assert lookup(blocks, [*tok(0, 32), 9]) == 32


def test_b5_a_lookup_is_established_anew_at_allocation() -> None:
    blocks = new(8)
    warm(blocks, tok(0, 65))
    assert lookup(blocks, tok(0, 65)) == 64
    warm(blocks, tok(2000, 128))
    assert allocate(blocks, tok(0, 65)).computed == 0
    blocks.check()


@pytest.mark.parametrize(("computed", "hit"), [(32, 32), (0, 0), (47, 32)])
def test_b6_what_was_not_computed_before_an_abort_is_never_hit(computed: int, hit: int) -> None:
    blocks = new(8)
    table = allocate(blocks, tok(0, 80))
    blocks.commit(table, computed)
    blocks.free(table)
    assert lookup(blocks, [*tok(0, 80), 9]) == hit
    assert blocks.stats().used == 0


def test_private_tables_neither_read_nor_publish() -> None:
    blocks = new(16)
    warm(blocks, tok(0, 33))
    blocks.drain_events()
    private = compute(blocks, tok(0, 33), None)
    assert private.computed == 33
    assert blocks.drain_events() == ()
    blocks.free(private)
    assert blocks.stats().idle == 2  # the two of the shared one
    fresh = new(16)
    fresh.free(compute(fresh, tok(0, 33), None))
    assert lookup(fresh, tok(0, 33)) == 0


def test_c9_a_hit_is_contiguous_from_the_first_block() -> None:
    blocks = new(8)
    warm(blocks, tok(0, 48))
    keys = blocks_keys(blocks, tok(0, 48))
    del blocks._pool._index[keys[0]]  # force out the first block, which leaf-first eviction never would
    assert lookup(blocks, tok(0, 49)) == 0
    assert allocate(blocks, tok(0, 49)).computed == 0


# --- allocation ------------------------------------------------------------------------------------------


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


# --- sharing ---------------------------------------------------------------------------------------------


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


# --- events ----------------------------------------------------------------------------------------------


def test_events_tell_what_became_and_what_ceased_to_be_hittable() -> None:
    blocks = new(4)
    table = allocate(blocks, tok(0, 64))
    keys = blocks_keys(blocks, tok(0, 64))
    assert not blocks.has_events
    blocks.commit(table, 20)
    blocks.commit(table, 50)
    assert blocks.drain_events() == (BlockStored(tuple(keys[:3]), None, BLOCK),)
    blocks.commit(table, 64)
    assert blocks.drain_events() == (BlockStored((keys[3],), keys[2], BLOCK),)
    blocks.free(table)
    assert blocks.drain_events() == ()
    compute(blocks, tok(900, 32))
    new_keys = blocks_keys(blocks, tok(900, 32))
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
    first, branch, other = (blocks_keys(blocks, prompt) for prompt in prompts)
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
    assert seen == {key for prompt in prompts for key in blocks_keys(blocks, prompt)}


# --- operation -------------------------------------------------------------------------------------------


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
