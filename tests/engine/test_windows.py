"""Layers with a sliding window: which of their blocks are held, kept and given back, and what is read of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.attention.backend import KvPool, LayerOptions, LayerShape, SequenceSlice
from engine.attention.cpp_cpu import CppCpuAttention
from engine.attention.groups import begin_step
from engine.attention.reference import ReferenceAttention
from engine.attention.torch_cpu import TorchCpuAttention
from engine.blocks import BlockManager, BlockTable
from engine.errors import NoSpaceError

BLOCK = 4
WINDOW = 10

# --- the block manager ------------------------------------------------------------------------------------


def manager(num_blocks: int = 32, window_blocks: int = 16, window: int = WINDOW) -> BlockManager:
    return BlockManager(num_blocks, BLOCK, window=window, window_blocks=window_blocks)


def run(blocks: BlockManager, tokens: list[int]) -> int:
    """Compute in small pieces and free again; the tokens that were hit."""
    table = BlockTable([*tokens], b"root")
    hit = blocks.allocate(table)
    while table.computed < len(tokens):
        count = blocks.reserve(table, min(5, len(tokens) - table.computed))
        assert count
        blocks.commit(table, table.computed + count)
        blocks.check()
    blocks.free(table)
    blocks.check()
    return hit


def test_a_hit_ends_where_the_next_token_finds_its_whole_window() -> None:
    blocks = manager(window_blocks=8)
    text = list(range(100))
    run(blocks, text[:80])  # its first companions made room for its last ones
    assert blocks.lookup(BlockTable(text[:81], b"root")) == 80
    assert blocks.lookup(BlockTable(text[:41], b"root")) == 0
    assert run(blocks, text[:41]) == 0  # and brings them back
    assert blocks.lookup(BlockTable(text[:41], b"root")) == 40


def test_a_leaf_that_could_never_be_hit_makes_room() -> None:
    blocks = manager(num_blocks=64, window_blocks=8)
    run(blocks, list(range(40)))
    assert blocks.stats().idle == 10
    run(blocks, list(range(500, 540)))
    assert blocks.stats().idle == 10
    assert blocks.lookup(BlockTable([*range(41)], b"root")) == 0


def test_where_prompts_part_a_window_is_kept() -> None:
    blocks = manager(num_blocks=128, window_blocks=20)
    stem = list(range(40))
    run(blocks, stem + list(range(100, 120)))
    assert run(blocks, stem + list(range(200, 220))) == 40
    for i in range(5):
        run(blocks, list(range(1000 * (i + 1), 1000 * (i + 1) + 60)))
    assert blocks.lookup(BlockTable([*stem, 7], b"root")) == 40
    assert blocks.lookup(BlockTable([*stem[:30], 7], b"root")) == 0  # where nobody has parted nothing was kept


def test_a_window_that_was_missed_is_kept_from_then_on() -> None:
    blocks = manager(num_blocks=128, window_blocks=20)
    stem, tail = list(range(40)), list(range(100, 180))
    run(blocks, stem + tail)
    other = BlockTable([*stem, *range(200, 220)], b"root")
    assert blocks.lookup(other) == 0  # the first blocks' companions were taken for the last ones
    run(blocks, other.tokens)
    for i in range(5):
        run(blocks, list(range(1000 * (i + 1), 1000 * (i + 1) + 60)))
    assert blocks.lookup(BlockTable([*stem, 7], b"root")) == 40


def test_windows_that_are_kept_leave_room_for_others() -> None:
    blocks = manager(num_blocks=256, window_blocks=20)
    for i in range(8):
        stem = list(range(1000 * i, 1000 * i + 40))
        for tail in (500, 600):
            run(blocks, stem + list(range(1000 * i + tail, 1000 * i + tail + 8)))
    hits = [blocks.lookup(BlockTable([*range(1000 * i, 1000 * i + 40), 7], b"root")) for i in range(8)]
    assert hits == [0] * 4 + [40] * 4  # the fourth window made it more than half of the pool
    run(blocks, list(range(20)))
    assert blocks.lookup(BlockTable([*range(21)], b"root")) == 20


def test_pinned_blocks_keep_their_companions() -> None:
    blocks = manager(num_blocks=64, window_blocks=16)
    table = BlockTable(list(range(24)), b"root")
    blocks.allocate(table)
    blocks.reserve(table, 24)
    blocks.commit(table, 24)
    keys = table.keys
    blocks.pin(keys)
    blocks.free(table)
    for i in range(5):
        run(blocks, list(range(1000 * (i + 1), 1000 * (i + 1) + 40)))
    assert blocks.lookup(BlockTable(list(range(25)), b"root")) == 24
    blocks.unpin(keys)
    blocks.check()


def test_what_a_window_needs_is_required_and_refused_in_full() -> None:
    with pytest.raises(ValueError, match="needs 4 blocks, not 3"):
        manager(window_blocks=3)
    blocks = manager(window_blocks=4)
    table = BlockTable(list(range(40)), b"root")
    blocks.allocate(table)
    assert blocks.reserve(table, 40) == 16
    blocks.check()
    with pytest.raises(NoSpaceError):
        blocks.allocate(BlockTable([1, 2, 3], b"root"))
    with pytest.raises(ValueError, match="window blocks"):
        blocks.commit(table, 17)


def test_a_prompt_is_admitted_only_if_all_that_run_can_still_get_their_windows() -> None:
    blocks = manager(num_blocks=64, window_blocks=7)
    first, second = (BlockTable(list(range(start, start + 40)), b"root") for start in (0, 100))
    with pytest.raises(NoSpaceError):
        blocks.allocate(first, headroom=4)  # four blocks for its window, and four more
    blocks.allocate(first, headroom=3)
    with pytest.raises(NoSpaceError):
        blocks.allocate(second)  # nothing is taken yet, but four of the seven will be
    while first.computed < 40:
        blocks.commit(first, first.computed + blocks.reserve(first, 4))
    blocks.allocate(second)
    assert blocks.reserve(second, 40) == 16
    blocks.check()


def test_the_tail_of_a_prompt_leaves_before_its_head() -> None:
    blocks = manager(num_blocks=64, window_blocks=4)
    run(blocks, list(range(12)))
    assert blocks.lookup(BlockTable(list(range(13)), b"root")) == 12
    run(blocks, list(range(100, 108)))
    assert blocks.lookup(BlockTable(list(range(13)), b"root")) == 8


# --- attention --------------------------------------------------------------------------------------------


@pytest.fixture(params=["reference", "torch_cpu", "cpp_cpu"])
def backend(request: pytest.FixtureRequest) -> Any:
    if request.param == "cpp_cpu":
        return CppCpuAttention(request.getfixturevalue("kernels"))
    return ReferenceAttention() if request.param == "reference" else TorchCpuAttention()


@pytest.mark.parametrize(("start", "length"), [(30, 1), (21, 9), (23, 3)])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_what_was_given_back_is_never_read(backend: Any, start: int, length: int, softcap: float | None) -> None:
    torch.manual_seed(0)
    shape = LayerShape(2, 8, 8)
    end, blocks = start + length, 9
    query, key, value = (torch.randn(heads, end, 8) for heads in (4, 2, 2))
    options = LayerOptions(0.3, WINDOW, softcap)
    table = list(range(1, blocks))
    outputs = []
    for given_back in (False, True):
        pool = KvPool([shape], blocks, BLOCK, torch.float32)
        step = ReferenceAttention().begin(pool, [SequenceSlice(0, start, 0, table)])
        step.attend(0, query[:, :start], key[:, :start], value[:, :start], options)
        seen = table
        if given_back:
            first = max(0, start - WINDOW + 1) // BLOCK
            for block in [0, *table[:first]]:
                pool.keys[0][block] = pool.values[0][block] = float("nan")
            seen = [0] * first + table[first:]
        step = backend.begin(pool, [SequenceSlice(0, length, start, seen)])
        outputs.append(step.attend(0, query[:, start:], key[:, start:], value[:, start:], options))
    assert torch.equal(outputs[0], outputs[1])


def test_each_layer_reads_and_writes_the_blocks_of_its_group(backend: Any) -> None:
    torch.manual_seed(0)
    shape, length, numbers = LayerShape(2, 8, 8), 14, {0: [3, 1, 4, 2], 1: [0, 2, 1, 3]}
    query, key, value = (torch.randn(heads, length, 8) for heads in (4, 2, 2))
    options = {0: LayerOptions(0.3), 1: LayerOptions(0.3, WINDOW)}
    pool = KvPool([shape, shape], 5, BLOCK, torch.float32, windowed=[1], window_blocks=4)
    assert [len(keys) for keys in pool.keys] == [5, 4]
    step = begin_step(backend, pool, *([SequenceSlice(0, length, 0, numbers[layer])] for layer in (0, 1)))
    for layer in (0, 1):
        alone = KvPool([shape], 5, BLOCK, torch.float32)
        wanted = backend.begin(alone, [SequenceSlice(0, length, 0, numbers[layer])])
        expected = wanted.attend(0, query, key, value, options[layer])
        assert torch.equal(step.attend(layer, query, key, value, options[layer]), expected)
        assert torch.equal(pool.keys[layer], alone.keys[0][: len(pool.keys[layer])])
