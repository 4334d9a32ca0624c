"""Attention as the formula says, one sequence at a time: what every back end is measured against."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.attention.backend import KvPool, LayerOptions, SequenceSlice, slot_mapping

__all__ = ["ReferenceAttention", "dense_attention"]


def dense_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    start: int,
    options: LayerOptions,
    *,
    key_start: int = 0,
) -> torch.Tensor:
    """Causal attention of one sequence, in float32 with all features.

    Args:
        query: ``[heads, tokens, key_dim]``, for positions ``start`` and on.
        key: ``[kv_heads, context, key_dim]``, for positions ``key_start`` and on; what lies behind a query is unseen.
        value: ``[kv_heads, context, value_dim]``, likewise.
        start: position of the first query.
        options: scale, window, softcap, sinks.
        key_start: position of the first key.

    Returns:
        ``[tokens, heads, value_dim]`` in the dtype of ``query``.
    """
    heads, tokens, _ = query.shape
    kv_heads, context, _ = key.shape
    grouped = query.float().reshape(kv_heads, heads // kv_heads, tokens, -1)
    scores = grouped @ key.float().unsqueeze(1).transpose(-1, -2) * options.scaling
    if options.softcap is not None:
        scores = torch.tanh(scores / options.softcap) * options.softcap
    position = torch.arange(start, start + tokens)[:, None]
    seen = torch.arange(key_start, key_start + context)[None, :]
    hidden = seen > position
    if options.sliding_window is not None:
        hidden |= seen <= position - options.sliding_window
    scores = scores.masked_fill(hidden, float("-inf"))
    if options.sinks is not None:
        sinks = options.sinks.float().reshape(kv_heads, -1, 1, 1).expand(-1, -1, tokens, 1)
        scores = torch.cat((scores, sinks), dim=-1)
    weights = scores.softmax(dim=-1)[..., :context]
    output = weights @ value.float().unsqueeze(1)
    return output.reshape(heads, tokens, -1).transpose(0, 1).to(query.dtype)


class ReferenceAttention:
    """An ``AttentionBackend`` of plain tensor arithmetic: slow, and easy to check by eye."""

    name = "reference"

    def begin(self, pool: KvPool, slices: Sequence[SequenceSlice]) -> ReferenceStep:
        """See ``AttentionBackend``."""
        return ReferenceStep(pool, slices)


class ReferenceStep:
    """One step: write, then gather what each sequence sees, token by token."""

    def __init__(self, pool: KvPool, slices: Sequence[SequenceSlice]) -> None:
        self._pool = pool
        self._slices = slices

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: LayerOptions
    ) -> torch.Tensor:
        """See ``StepAttention``."""
        size = self._pool.block_size
        slots = slot_mapping(self._slices, size)
        self._pool.write(layer, self._pool.rows(slots, key.shape[0]), key, value)
        output = query.new_empty(query.shape[1], query.shape[0], value.shape[-1])
        for piece in self._slices:
            end = piece.start + piece.length
            window = options.sliding_window
            first = 0 if window is None else max(0, piece.start - window + 1)
            whole = slot_mapping([SequenceSlice(0, end - first, first, piece.block_table)], size)
            blocks, offsets = whole // size, whole % size
            keys = self._pool.keys[layer][blocks, :, offsets].transpose(0, 1)
            values = self._pool.values[layer][blocks, :, offsets].transpose(0, 1)
            if self._pool.key_scales:
                keys = keys * self._pool.key_scales[layer][blocks, :, offsets].T.unsqueeze(-1)
                values = values * self._pool.value_scales[layer][blocks, :, offsets].T.unsqueeze(-1)
            rows = slice(piece.first, piece.first + piece.length)
            output[rows] = dense_attention(query[:, rows], keys, values, piece.start, options, key_start=first)
        return output
