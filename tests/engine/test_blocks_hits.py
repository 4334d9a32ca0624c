"""Which blocks a prompt may take from the cache, and which it had better wait for."""

from __future__ import annotations

import pytest

from engine.blocks import BlockTable
from engine.wire import BlockStored

from .block_tables import BLOCK, ROOT, allocate, append, compute, keys_of, lookup, new, tok, warm

# --- what may be hit ------------------------------------------------------------------------------


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
        BlockStored(tuple(keys_of(blocks, [0, *tok(0, 47)])), None, BLOCK),
    )  # nothing of the second prompt, whose later blocks have no published parent
    blocks.check()
    blocks.free(table)
    assert lookup(blocks, [0, *tok(9, 47)]) == 0


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
    keys = keys_of(blocks, tok(0, 48))
    del blocks._pool._index[keys[0]]  # force out the first block, which leaf-first eviction never would
    assert lookup(blocks, tok(0, 49)) == 0
    assert allocate(blocks, tok(0, 49)).computed == 0


# --- what is in flight ----------------------------------------------------------------------------


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
