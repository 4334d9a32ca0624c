"""Paged attention on the CPU with PyTorch's fused attention: whole blocks are gathered, decodes run as one batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch.nn.functional import scaled_dot_product_attention

from engine.attention.backend import KvPool, LayerOptions, SequenceSlice, slot_mapping
from engine.attention.reference import dense_attention

__all__ = ["TorchCpuAttention"]

_PADDING: Final = 256
"""Tokens of padding that cost about as much as one more call of the attention kernel."""

_DENSE_ROWS: Final = 64
"""Queries per dense call, which holds all their scores at once."""


class TorchCpuAttention:
    """An ``AttentionBackend`` for the CPU."""

    name = "torch_cpu"

    def begin(self, pool: KvPool, slices: Sequence[SequenceSlice]) -> CpuStep:
        """See ``AttentionBackend``."""
        return CpuStep(pool, slices)


class CpuStep:
    """One step. Owns the gather indices and masks, made at the first layer that needs them and then shared.

    Single tokens (decodes) of similar context are padded to one batch; every other slice is attended by itself.
    """

    def __init__(self, pool: KvPool, slices: Sequence[SequenceSlice]) -> None:
        self._pool = pool
        self._slots = slot_mapping(slices, pool.block_size)
        self._slices = slices
        self._prefills = [piece for piece in slices if piece.length > 1]
        self._decodes = [
            _DecodeGroup(pool, group) for group in _similar([piece for piece in slices if piece.length == 1])
        ]
        self._rows: dict[int, torch.Tensor] = {}
        self._masks: dict[tuple[int, int | None], torch.Tensor] = {}

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: LayerOptions
    ) -> torch.Tensor:
        """See ``StepAttention``."""
        kv_heads = key.shape[0]
        if kv_heads not in self._rows:
            self._rows[kv_heads] = self._pool.rows(self._slots, kv_heads)
        self._pool.write(layer, self._rows[kv_heads], key, value)
        output = query.new_empty(query.shape[1], query.shape[0], value.shape[-1])
        if options.softcap is not None or options.sinks is not None:
            # The fused kernel has neither.
            for piece in self._slices:
                self._dense(layer, piece, query, output, options)
            return output
        for group in self._decodes:
            output[group.rows] = group.attend(self._pool, layer, query, options)
        for piece in self._prefills:
            rows = slice(piece.first, piece.first + piece.length)
            window = options.sliding_window
            if piece.start == 0 and (window is None or window >= piece.length) and self._pool.dtype == key.dtype:
                # The whole context is in this batch, as the pool keeps it, and the plain causal form is the fastest.
                keys, values, mask = key[:, rows], value[:, rows], None
            else:
                keys, values, first = self._context(layer, piece, window, query.dtype)
                mask = self._mask(piece, window, first, query.dtype)
            attended = scaled_dot_product_attention(
                query[None, :, rows],
                keys[None],
                values[None],
                attn_mask=mask,
                is_causal=mask is None,
                scale=options.scaling,
                enable_gqa=query.shape[0] != kv_heads,
            )
            output[rows] = attended[0].transpose(0, 1)
        return output

    def _context(
        self, layer: int, piece: SequenceSlice, window: int | None, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor, int]:
        """K and V from the first block that any token of the slice sees to its end, and the position they start at."""
        size, end = self._pool.block_size, piece.start + piece.length
        first = _first_block(piece.start, window, size)
        table = torch.tensor([piece.block_table[first : -(-end // size)]])
        keys, values = _gather(self._pool, layer, table, dtype)
        context = end - first * size
        return keys[0, :, :context], values[0, :, :context], first * size

    def _mask(self, piece: SequenceSlice, window: int | None, key_start: int, dtype: torch.dtype) -> torch.Tensor:
        """The additive mask ``[tokens, context]`` of a prefill slice."""
        cached = self._masks.get((piece.first, window))
        if cached is None:
            position = torch.arange(piece.start, piece.start + piece.length)[:, None]
            seen = torch.arange(key_start, piece.start + piece.length)[None, :]
            cached = self._masks[piece.first, window] = _additive(position, seen, window, dtype)
        return cached

    def _dense(
        self, layer: int, piece: SequenceSlice, query: torch.Tensor, output: torch.Tensor, options: LayerOptions
    ) -> None:
        keys, values, key_start = self._context(layer, piece, options.sliding_window, torch.float32)
        for offset in range(0, piece.length, _DENSE_ROWS):
            rows = slice(piece.first + offset, piece.first + min(offset + _DENSE_ROWS, piece.length))
            output[rows] = dense_attention(
                query[:, rows], keys, values, piece.start + offset, options, key_start=key_start
            )


class _DecodeGroup:
    """Decodes whose contexts are padded to the longest of them. The query heads of one KV head are its queries."""

    def __init__(self, pool: KvPool, slices: list[SequenceSlice]) -> None:
        self.rows = torch.tensor([piece.first for piece in slices])
        self._slices = slices
        self._size = pool.block_size
        self._prepared: dict[int | None, tuple[torch.Tensor, torch.Tensor]] = {}

    def attend(self, pool: KvPool, layer: int, query: torch.Tensor, options: LayerOptions) -> torch.Tensor:
        """``[decodes, heads, value_dim]``."""
        if options.sliding_window not in self._prepared:
            self._prepared[options.sliding_window] = self._prepare(options.sliding_window, query.dtype)
        table, mask = self._prepared[options.sliding_window]
        keys, values = _gather(pool, layer, table, query.dtype)
        heads, kv_heads, count = query.shape[0], keys.shape[1], len(self._slices)
        grouped = query.index_select(1, self.rows).transpose(0, 1).reshape(count, kv_heads, heads // kv_heads, -1)
        attended = scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=options.scaling)
        return attended.reshape(count, heads, -1)

    def _prepare(self, window: int | None, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """The block table ``[decodes, blocks]`` and the additive mask ``[decodes, 1, 1, blocks * block]``."""
        firsts = [_first_block(piece.start, window, self._size) for piece in self._slices]
        tables = [
            piece.block_table[first : piece.start // self._size + 1]
            for piece, first in zip(self._slices, firsts, strict=True)
        ]
        width = max(len(table) for table in tables)
        # Padding repeats a sequence's own block: what lies in foreign blocks is never even multiplied with zero.
        padded = torch.tensor([table + table[-1:] * (width - len(table)) for table in tables])
        position = torch.tensor([piece.start for piece in self._slices])[:, None]
        seen = torch.tensor(firsts)[:, None] * self._size + torch.arange(width * self._size)[None, :]
        return padded, _additive(position, seen, window, dtype)[:, None, None, :]


def _gather(pool: KvPool, layer: int, table: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V in the blocks of each row of ``table`` in a line: ``[sequences, kv_heads, blocks * block, dim]``."""
    kv_heads = pool.keys[layer].shape[1]
    rows = table[:, None, :] * kv_heads + torch.arange(kv_heads)[None, :, None]
    keys, values = pool.read(layer, rows, dtype)
    return keys.flatten(2, 3), values.flatten(2, 3)


def _first_block(start: int, window: int | None, size: int) -> int:
    """The first block that holds a token which position ``start`` sees."""
    return 0 if window is None else max(0, start - window + 1) // size


def _additive(position: torch.Tensor, seen: torch.Tensor, window: int | None, dtype: torch.dtype) -> torch.Tensor:
    """0 where ``position`` sees ``seen``, else the lowest finite number (a block of -inf alone would become NaN)."""
    hidden = seen > position
    if window is not None:
        hidden |= seen <= position - window
    return torch.zeros(hidden.shape, dtype=dtype).masked_fill(hidden, torch.finfo(dtype).min)


def _similar(decodes: list[SequenceSlice]) -> list[list[SequenceSlice]]:
    """Split decodes into groups so that padding to the longest of a group is cheaper than a group more."""
    groups: list[list[SequenceSlice]] = []
    padding = 0
    for piece in sorted(decodes, key=lambda piece: -piece.start):
        if groups:
            padding += groups[-1][0].start - piece.start
        if not groups or padding > _PADDING:
            groups.append([])
            padding = 0
        groups[-1].append(piece)
    return groups
