"""How a step is cut into tiles; no Triton and no tensors."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from engine.attention.backend import SequenceSlice
from engine.attention.triton_tiles import SLICE_KEYS, Launch, TileShape, layer_shapes, padded_dim, plan_launches
from engine.errors import UnsupportedModelError

SHAPES = (TileShape(16, 64, 4, sliced=True), TileShape(64, 64, 4, sliced=False))


def some_slices(seed: int) -> list[SequenceSlice]:
    draw = random.Random(seed)
    slices, first = [], 0
    for _ in range(draw.randint(1, 12)):
        start = draw.choice([0, draw.randrange(40), draw.randrange(3 * SLICE_KEYS), SLICE_KEYS, SLICE_KEYS - 1])
        length = draw.choice([1, 1, draw.randint(1, 8), draw.randint(1, 200)])
        slices.append(SequenceSlice(first, length, start, []))
        first += length
    return slices


@pytest.mark.parametrize("seed", range(20))
def test_every_token_meets_every_key_it_may_see_once(seed: int) -> None:
    group = random.Random(seed).choice([1, 3, 4, 8, 24, 71])
    slices = some_slices(seed)
    met: Counter[tuple[int, int]] = Counter()  # row in the batch, key
    for launch in plan_launches(slices, group, SHAPES):
        for sequence, row, tokens, position, begin, end, _ in launch.tiles:
            piece = slices[sequence]
            assert 0 < tokens * min(group, launch.shape.rows) <= launch.shape.rows
            assert row - piece.first == position - piece.start
            for token in range(tokens):
                met.update((row + token, key) for key in range(begin, min(end, position + token + 1)))
    expected = {
        (piece.first + token, key)
        for piece in slices
        for token in range(piece.length)
        for key in range(piece.start + token + 1)
    }
    assert met.keys() == expected
    assert set(met.values()) == {1}


@pytest.mark.parametrize("seed", range(20))
def test_a_merge_names_the_slots_of_one_tile_in_the_order_of_its_keys(seed: int) -> None:
    for launch in plan_launches(some_slices(seed), 3, SHAPES):
        in_slot = {tile[6]: tile for tile in launch.tiles if tile[6] >= 0}
        assert sorted(in_slot) == list(range(launch.slots))
        assert launch.shape.sliced or not in_slot
        merged = []
        for row, tokens, first, count in launch.merges:
            parts = [in_slot[slot] for slot in range(first, first + count)]
            merged += range(first, first + count)
            assert {part[1:3] for part in parts} == {(row, tokens)}
            assert [part[4] for part in parts] == [SLICE_KEYS * index for index in range(count)]
            assert [part[5] for part in parts[:-1]] == [part[4] for part in parts[1:]]
        assert merged == list(range(launch.slots))


def test_a_sequence_is_cut_alike_in_any_batch() -> None:
    def cuts(launches: list[Launch], sequence: int) -> set[tuple[TileShape, tuple[int, ...], bool]]:
        """Shape, then tokens, position, begin and end, and whether it is a slice, for each of its tiles."""
        return {
            (launch.shape, tile[2:6], tile[6] >= 0)
            for launch in launches
            for tile in launch.tiles
            if tile[0] == sequence
        }

    slices = some_slices(4)
    together = plan_launches(slices, 4, SHAPES)
    for sequence, piece in enumerate(slices):
        alone = plan_launches([SequenceSlice(0, piece.length, piece.start, [])], 4, SHAPES)
        assert cuts(alone, 0) == cuts(together, sequence)


def test_long_tiles_start_first() -> None:
    for launch in plan_launches(some_slices(3), 4, SHAPES):
        keys = [tile[5] - tile[4] for tile in launch.tiles]
        assert keys == sorted(keys, reverse=True)


def test_decodes_and_prefills_are_launched_apart() -> None:
    slices = [SequenceSlice(0, 1, 30, []), SequenceSlice(1, 60, 0, []), SequenceSlice(61, 5, 0, [])]
    narrow, wide = plan_launches(slices, 3, SHAPES)
    assert {tile[0] for tile in narrow.tiles} == {0, 2}
    assert {tile[0] for tile in wide.tiles} == {1}


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("dim", [16, 64, 80, 128, 192, 256])
def test_slices_are_whole_steps(dim: int, itemsize: int) -> None:
    assert padded_dim(dim) >= dim
    for shape in layer_shapes(dim, itemsize):
        assert SLICE_KEYS % shape.keys == 0


def test_larger_heads_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="up to 256"):
        layer_shapes(257, 2)
