"""Forks of a sequence share blocks until one of them writes."""

from __future__ import annotations

import pytest

from engine.batch import BlockCopy
from engine.blocks import BlockManager, BlockTable
from engine.errors import NoSpaceError

from .block_tables import ROOT, append, compute, lookup, new, tok


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
