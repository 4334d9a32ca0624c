"""Paged attention on a GPU, by our Triton kernels. Importing this module needs triton."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import torch

from engine.attention.backend import KvPool, LayerOptions, SequenceSlice, slot_mapping
from engine.attention.triton_cache import reshape_and_cache
from engine.attention.triton_paged import LaunchTables, paged_attention
from engine.attention.triton_tiles import TileShape, layer_shapes, plan_launches

__all__ = ["TritonAttention"]

_TABLE_MULTIPLE: Final = 16
"""Block tables are padded to a multiple of it: Triton compiles again where a stride stops being divisible by 16."""


class TritonAttention:
    """An ``AttentionBackend`` for CUDA and ROCm devices; on the CPU it runs in Triton's interpreter only."""

    name = "triton"

    def __init__(self, shapes: Callable[[int, int], tuple[TileShape, ...]] = layer_shapes) -> None:
        """``shapes``: which tiles to use for a head dimension and bytes per element, see ``layer_shapes``."""
        self._shapes = shapes

    def begin(self, pool: KvPool, slices: Sequence[SequenceSlice]) -> TritonStep:
        """See ``AttentionBackend``."""
        return TritonStep(pool, slices, self._shapes)


class TritonStep:
    """One step. Owns the tables on the device; tiles are planned at the first layer of each kind and then shared."""

    def __init__(
        self,
        pool: KvPool,
        slices: Sequence[SequenceSlice],
        shapes: Callable[[int, int], tuple[TileShape, ...]],
    ) -> None:
        self._pool = pool
        self._shapes = shapes
        self._slices = slices
        self._device = pool.keys[0].device
        self._slots = slot_mapping(slices, pool.block_size).to(self._device)
        self._block_tables = _padded_tables(slices, pool.block_size).to(self._device)
        self._launches: dict[tuple[int, int], list[LaunchTables]] = {}

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: LayerOptions
    ) -> torch.Tensor:
        """See ``StepAttention``.

        Raises:
            UnsupportedModelError: the heads are larger than the kernels support.
        """
        keys, values = self._pool.keys[layer], self._pool.values[layer]
        query, key, value = (_rows_contiguous(tensor) for tensor in (query, key, value))
        reshape_and_cache(key, value, keys, values, self._slots)
        output = query.new_empty(query.shape[1], query.shape[0], value.shape[-1])
        paged_attention(
            output,
            query,
            keys,
            values,
            self._block_tables,
            self._launches_for(query.shape[0] // key.shape[0], max(key.shape[-1], value.shape[-1])),
            scale=options.scaling,
            window=options.sliding_window,
            softcap=options.softcap,
            sinks=options.sinks,
        )
        return output

    def _launches_for(self, group: int, dim: int) -> list[LaunchTables]:
        if (group, dim) not in self._launches:
            shapes = self._shapes(dim, self._pool.dtype.itemsize)
            self._launches[group, dim] = [
                LaunchTables.of(launch, self._device) for launch in plan_launches(self._slices, group, shapes)
            ]
        return self._launches[group, dim]


def _padded_tables(slices: Sequence[SequenceSlice], block_size: int) -> torch.Tensor:
    """The block tables up to each slice's end, int32 ``[sequences, width]``; the padding is never read."""
    tables = [piece.block_table[: -(-(piece.start + piece.length) // block_size)] for piece in slices]
    width = -(-max(len(table) for table in tables) // _TABLE_MULTIPLE) * _TABLE_MULTIPLE
    return torch.tensor([table + [0] * (width - len(table)) for table in tables], dtype=torch.int32)


def _rows_contiguous(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
