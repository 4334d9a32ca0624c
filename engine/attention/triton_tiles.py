"""How a step is cut into tiles for the Triton kernels: plain arithmetic on the host, once for all layers of a kind.

A tile is a few neighbouring new tokens of one sequence times the query heads that share a key/value head. There are
two launches at most. Sequences whose new tokens fit one narrow tile (decodes) form the first; their context is cut
into slices, so that a small batch with long contexts still fills a GPU. All others (prefill) form the second, in wide
tiles. Which shape a sequence gets and where its slices lie depends on that sequence alone, and so do its roundings.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import msgspec

from engine.errors import UnsupportedModelError

if TYPE_CHECKING:
    from engine.attention.backend import SequenceSlice

__all__ = ["SLICE_KEYS", "Launch", "Merge", "Tile", "TileShape", "layer_shapes", "padded_dim", "plan_launches"]

SLICE_KEYS: Final = 512
"""Keys per slice of a decode: enough to make the writing of its partial sums small. A multiple of every step."""

_MAX_DIM: Final = 256

Tile = tuple[int, int, int, int, int, int, int]
"""Sequence, first row in the flat batch, tokens, position of the first, first key, key behind the last, slot or -1."""

Merge = tuple[int, int, int, int]
"""First row in the flat batch, tokens, first slot, slots: the slices of one tile, to be combined."""


class TileShape(msgspec.Struct, frozen=True):
    """What one kernel is compiled for.

    ``rows`` = tokens x heads of a tile, ``keys`` = keys per step of its loop. Only a ``sliced`` kernel can
    leave partial sums in a slot instead of a result.
    """

    rows: int
    keys: int
    warps: int
    sliced: bool

    def heads(self, group: int) -> int:
        """Query heads of one tile, of ``group`` that share a key/value head."""
        return min(group, self.rows)

    def tokens(self, group: int) -> int:
        """New tokens of one tile at most."""
        return self.rows // self.heads(group)


class Launch(msgspec.Struct, frozen=True):
    """One launch of the attention kernel, and the merging of its ``slots`` slices afterwards."""

    shape: TileShape
    tiles: list[Tile]
    merges: list[Merge]
    slots: int


def padded_dim(dim: int) -> int:
    """The head dimension that a layer is computed with: 64, 128 or 256."""
    return max(64, 1 << (dim - 1).bit_length())


def layer_shapes(dim: int, itemsize: int) -> tuple[TileShape, ...]:
    """The shapes, narrow to wide, for heads of ``dim`` elements (key or value, the larger) of ``itemsize`` bytes.

    They fit the shared memory of every target. float32 is there to check results, not for speed: exact products have
    no tensor cores, and a wide tile of them unrolls into code that takes minutes to compile. Not tuned on a card yet.

    Raises:
        UnsupportedModelError: the heads are larger than the kernel supports.
    """
    if dim > _MAX_DIM:
        raise UnsupportedModelError(f"heads of {dim} elements; the Triton kernel supports up to {_MAX_DIM}")
    large = padded_dim(dim) > 128
    if itemsize > 2:
        return (TileShape(rows=16, keys=16 if large else 32, warps=4, sliced=True),)
    keys = 32 if large else 64
    return (
        TileShape(rows=16, keys=keys, warps=4, sliced=True),
        TileShape(rows=64, keys=keys, warps=8 if large else 4, sliced=False),
    )


def plan_launches(slices: Sequence[SequenceSlice], group: int, shapes: Sequence[TileShape]) -> list[Launch]:
    """Cut the slices of a step into tiles.

    Args:
        slices: of the flat batch; ``Tile`` names a sequence by its index here.
        group: query heads per key/value head.
        shapes: narrow to wide; a slice gets the first that holds all its tokens in one tile, else the last.

    Returns:
        One launch per shape that is needed, in each the tiles with most keys first, so that none of them starts late.
    """
    members: dict[TileShape, list[int]] = {}
    for sequence, piece in enumerate(slices):
        fitting = (shape for shape in shapes if piece.length <= shape.tokens(group))
        members.setdefault(next(fitting, shapes[-1]), []).append(sequence)
    return [_launch(shape, members[shape], slices, group) for shape in shapes if shape in members]


def _launch(shape: TileShape, members: list[int], slices: Sequence[SequenceSlice], group: int) -> Launch:
    tiles: list[Tile] = []
    merges: list[Merge] = []
    slots = 0
    for sequence in members:
        piece = slices[sequence]
        for offset in range(0, piece.length, shape.tokens(group)):
            row, position = piece.first + offset, piece.start + offset
            tokens = min(shape.tokens(group), piece.length - offset)
            end = position + tokens
            cuts = [*range(0, end, SLICE_KEYS), end] if shape.sliced else [0, end]
            parts = len(cuts) - 1
            if parts == 1:
                tiles.append((sequence, row, tokens, position, 0, end, -1))
                continue
            tiles += [
                (sequence, row, tokens, position, cuts[part], cuts[part + 1], slots + part) for part in range(parts)
            ]
            merges.append((row, tokens, slots, parts))
            slots += parts
    tiles.sort(key=lambda tile: tile[4] - tile[5])
    return Launch(shape, tiles, merges, slots)
