"""Paged attention in Triton: one kernel for prefill after a cached prefix and for decode.

Importing this module needs triton; only the Triton back end does so.

One program computes one tile (see ``engine.attention.triton_tiles``). It walks over the keys in steps, finds each key
through the sequence's block table, and keeps the running softmax of Milakov and Gimelshein (arXiv:1805.02867) as
FlashAttention does. Where a tile has only a slice of the keys it leaves its running sums in a slot, and
``merge_kernel`` combines the slots (Flash-Decoding, with slices of fixed length).

All sums are float32, and the softmax works in powers of two. The running maximum starts at a finite floor instead of
minus infinity: a row that has seen no visible key yet must not compute ``exp2(-inf - -inf)``, which is NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch
import triton
import triton.language as tl

from engine.attention.triton_tiles import Launch, TileShape, padded_dim

__all__ = [
    "LaunchTables",
    "attention_constants",
    "attention_kernel",
    "compile_options",
    "merge_constants",
    "merge_kernel",
    "paged_attention",
]

_LOG2_E = tl.constexpr(1.4426950408889634)
# Below every score that can occur, and far enough from the largest float32 that scores minus it stay finite.
_FLOOR = tl.constexpr(-1e30)

# Triton's decorator has no type of its own.
_jit: Callable[[Callable[..., object]], Any] = triton.jit


@_jit
def _soft_cap(scores: tl.tensor, cap: tl.tensor) -> tl.tensor:
    """``cap * tanh(scores / cap)``, by an exponential that can underflow but not overflow."""
    decay = tl.exp(-2.0 * tl.abs(scores) / cap)
    bent = cap * (1.0 - decay) / (1.0 + decay)
    return tl.where(scores < 0, -bent, bent)


@_jit
def _normalize(
    sums: tl.tensor, peak: tl.tensor, total: tl.tensor, sinks: tl.tensor, heads: tl.tensor, valid: tl.tensor
) -> tl.tensor:
    """Divide by the softmax denominator, which a sink enters like a key whose value is zero."""
    if sinks is not None:
        sink = tl.load(sinks + heads, mask=valid, other=0.0).to(tl.float32) * _LOG2_E
        highest = tl.maximum(peak, sink)
        shrink = tl.exp2(peak - highest)
        sums = sums * shrink[:, None]
        total = total * shrink + tl.exp2(sink - highest)
    return sums / tl.where(total > 0.0, total, 1.0)[:, None]


@_jit
def _store(
    output: tl.tensor,
    result: tl.tensor,
    rows: tl.tensor,
    heads: tl.tensor,
    valid: tl.tensor,
    row_stride: tl.tensor,
    head_stride: tl.tensor,
    VALUE_DIM: tl.constexpr,
    PADDED_VALUE_DIM: tl.constexpr,
) -> None:
    dims = tl.arange(0, PADDED_VALUE_DIM)
    tl.store(
        output + rows[:, None] * row_stride + heads.to(tl.int64)[:, None] * head_stride + dims[None, :],
        result.to(output.dtype.element_ty),
        mask=valid[:, None] & (dims < VALUE_DIM)[None, :],
    )


@_jit
def attention_kernel(
    output: tl.tensor,
    query: tl.tensor,
    key_pool: tl.tensor,
    value_pool: tl.tensor,
    block_tables: tl.tensor,
    tiles: tl.tensor,
    sinks: tl.tensor,
    slot_sums: tl.tensor,
    slot_peaks: tl.tensor,
    slot_totals: tl.tensor,
    scale: tl.tensor,
    softcap: tl.tensor,
    window: tl.tensor,
    output_row_stride: tl.tensor,
    output_head_stride: tl.tensor,
    query_row_stride: tl.tensor,
    query_head_stride: tl.tensor,
    key_block_stride: tl.tensor,
    key_head_stride: tl.tensor,
    key_token_stride: tl.tensor,
    value_block_stride: tl.tensor,
    value_head_stride: tl.tensor,
    value_token_stride: tl.tensor,
    block_table_stride: tl.tensor,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PADDED_KEY_DIM: tl.constexpr,
    PADDED_VALUE_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    SLICED: tl.constexpr,
) -> None:
    """Attend one tile to its keys: a program per tile and block of ``HEADS`` query heads.

    ``sinks``, ``softcap`` and ``window`` are None where a layer has none, and then take no instruction.
    """
    head_blocks: tl.constexpr = KV_HEADS * ((GROUP + HEADS - 1) // HEADS)
    head_block = tl.program_id(0) % head_blocks
    kv_head = head_block // (head_blocks // KV_HEADS)
    tile = tiles + tl.program_id(0) // head_blocks * 7
    sequence = tl.load(tile)
    first_row = tl.load(tile + 1).to(tl.int64)
    tokens = tl.load(tile + 2)
    position = tl.load(tile + 3)
    begin = tl.load(tile + 4)
    end = tl.load(tile + 5)
    if window is not None:
        begin = tl.maximum(begin, position - window + 1)

    rows = tl.arange(0, ROWS)
    token = rows // HEADS
    head_of_group = head_block % (head_blocks // KV_HEADS) * HEADS + rows % HEADS
    head = kv_head * GROUP + head_of_group
    valid = (token < tokens) & (head_of_group < GROUP)
    query_position = position + token
    key_dims = tl.arange(0, PADDED_KEY_DIM)
    value_dims = tl.arange(0, PADDED_VALUE_DIM)

    queries = tl.load(
        query
        + (first_row + token)[:, None] * query_row_stride
        + head.to(tl.int64)[:, None] * query_head_stride
        + key_dims[None, :],
        mask=valid[:, None] & (key_dims < KEY_DIM)[None, :],
        other=0.0,
    )
    peak = tl.full([ROWS], _FLOOR, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, PADDED_VALUE_DIM], tl.float32)

    # Steps start at multiples of KEYS: the order of a query's sums is the same whatever shares its tile.
    for step in range(begin // KEYS * KEYS, end, KEYS):
        key_position = step + tl.arange(0, KEYS)
        # Outside [begin, end) a table entry may be stale and a block unwritten, and 0 * NaN would spoil the sums.
        needed = (key_position >= begin) & (key_position < end)
        block = tl.load(
            block_tables + sequence * block_table_stride + key_position // BLOCK_SIZE, mask=needed, other=0
        ).to(tl.int64)
        within = key_position % BLOCK_SIZE
        keys = tl.load(
            key_pool
            + (block * key_block_stride + kv_head * key_head_stride + within * key_token_stride)[:, None]
            + key_dims[None, :],
            mask=needed[:, None] & (key_dims < KEY_DIM)[None, :],
            other=0.0,
        )
        values = tl.load(
            value_pool
            + (block * value_block_stride + kv_head * value_head_stride + within * value_token_stride)[:, None]
            + value_dims[None, :],
            mask=needed[:, None] & (value_dims < VALUE_DIM)[None, :],
            other=0.0,
        )

        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
        if softcap is not None:
            scores = _soft_cap(scores, softcap)
        visible = needed[None, :] & (key_position[None, :] <= query_position[:, None])
        if window is not None:
            visible = visible & (key_position[None, :] > query_position[:, None] - window)
        scores = tl.where(visible, scores * _LOG2_E, float("-inf"))

        highest = tl.maximum(peak, tl.max(scores, 1))
        weights = tl.exp2(scores - highest[:, None])
        shrink = tl.exp2(peak - highest)
        total = total * shrink + tl.sum(weights, 1)
        sums = tl.dot(weights.to(values.dtype), values, sums * shrink[:, None], input_precision="ieee")
        peak = highest

    result_rows = first_row + token
    if SLICED:
        slot = tl.load(tile + 6).to(tl.int64)
        if slot >= 0:
            slot_rows = (slot * head_blocks + head_block) * ROWS + rows
            tl.store(slot_peaks + slot_rows, peak)
            tl.store(slot_totals + slot_rows, total)
            tl.store(slot_sums + slot_rows[:, None] * PADDED_VALUE_DIM + value_dims[None, :], sums)
        else:
            result = _normalize(sums, peak, total, sinks, head, valid)
            _store(
                output,
                result,
                result_rows,
                head,
                valid,
                output_row_stride,
                output_head_stride,
                VALUE_DIM,
                PADDED_VALUE_DIM,
            )
    else:
        result = _normalize(sums, peak, total, sinks, head, valid)
        _store(
            output, result, result_rows, head, valid, output_row_stride, output_head_stride, VALUE_DIM, PADDED_VALUE_DIM
        )


@_jit
def merge_kernel(
    output: tl.tensor,
    merges: tl.tensor,
    sinks: tl.tensor,
    slot_sums: tl.tensor,
    slot_peaks: tl.tensor,
    slot_totals: tl.tensor,
    output_row_stride: tl.tensor,
    output_head_stride: tl.tensor,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PADDED_VALUE_DIM: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """Combine the slots of one sliced tile, in order: a program per tile and block of ``HEADS`` query heads."""
    head_blocks: tl.constexpr = KV_HEADS * ((GROUP + HEADS - 1) // HEADS)
    head_block = tl.program_id(0) % head_blocks
    merge = merges + tl.program_id(0) // head_blocks * 4
    first_row = tl.load(merge).to(tl.int64)
    tokens = tl.load(merge + 1)
    first_slot = tl.load(merge + 2).to(tl.int64)
    slots = tl.load(merge + 3)

    rows = tl.arange(0, ROWS)
    token = rows // HEADS
    head_of_group = head_block % (head_blocks // KV_HEADS) * HEADS + rows % HEADS
    head = head_block // (head_blocks // KV_HEADS) * GROUP + head_of_group
    valid = (token < tokens) & (head_of_group < GROUP)
    value_dims = tl.arange(0, PADDED_VALUE_DIM)
    peak = tl.full([ROWS], _FLOOR, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, PADDED_VALUE_DIM], tl.float32)

    for slot in range(0, slots):
        slot_rows = ((first_slot + slot) * head_blocks + head_block) * ROWS + rows
        slot_peak = tl.load(slot_peaks + slot_rows)
        highest = tl.maximum(peak, slot_peak)
        shrink = tl.exp2(peak - highest)
        weight = tl.exp2(slot_peak - highest)
        total = total * shrink + tl.load(slot_totals + slot_rows) * weight
        part = tl.load(slot_sums + slot_rows[:, None] * PADDED_VALUE_DIM + value_dims[None, :])
        sums = sums * shrink[:, None] + part * weight[:, None]
        peak = highest

    result = _normalize(sums, peak, total, sinks, head, valid)
    _store(
        output,
        result,
        first_row + token,
        head,
        valid,
        output_row_stride,
        output_head_stride,
        VALUE_DIM,
        PADDED_VALUE_DIM,
    )


def attention_constants(
    shape: TileShape, *, kv_heads: int, group: int, block_size: int, key_dim: int, value_dim: int
) -> dict[str, int]:
    """What ``attention_kernel`` is compiled for, by parameter."""
    return {
        "KV_HEADS": kv_heads,
        "GROUP": group,
        "HEADS": shape.heads(group),
        "BLOCK_SIZE": block_size,
        "KEY_DIM": key_dim,
        "VALUE_DIM": value_dim,
        "PADDED_KEY_DIM": padded_dim(key_dim),
        "PADDED_VALUE_DIM": padded_dim(value_dim),
        "ROWS": shape.rows,
        "KEYS": shape.keys,
        "SLICED": shape.sliced,
    }


def merge_constants(shape: TileShape, *, kv_heads: int, group: int, value_dim: int) -> dict[str, int]:
    """What ``merge_kernel`` is compiled for, by parameter."""
    return {
        "KV_HEADS": kv_heads,
        "GROUP": group,
        "HEADS": shape.heads(group),
        "VALUE_DIM": value_dim,
        "PADDED_VALUE_DIM": padded_dim(value_dim),
        "ROWS": shape.rows,
    }


def compile_options(shape: TileShape, *, hip: bool) -> dict[str, int]:
    """Triton's compile options.

    A third pipeline stage prefetches block tables besides keys and values; on AMD it would not fit the shared memory.
    Fused multiply-add is asked for by name, because Triton's default for it changes between versions.
    """
    return {"num_warps": shape.warps, "num_stages": 2 if hip else 3, "enable_fp_fusion": True}


class LaunchTables(msgspec.Struct, frozen=True):
    """A ``Launch`` on the device: ``tiles`` int32 ``[n, 7]``, ``merges`` int32 ``[m, 4]``."""

    shape: TileShape
    tiles: torch.Tensor
    merges: torch.Tensor
    slots: int

    @classmethod
    def of(cls, launch: Launch, device: torch.device) -> LaunchTables:
        """Bring the tables of ``launch`` to the device."""
        tiles = torch.tensor(launch.tiles, dtype=torch.int32).to(device)
        merges = torch.tensor(launch.merges, dtype=torch.int32).to(device)
        return cls(launch.shape, tiles, merges, launch.slots)


def paged_attention(
    output: torch.Tensor,
    query: torch.Tensor,
    key_pool: torch.Tensor,
    value_pool: torch.Tensor,
    block_tables: torch.Tensor,
    launches: Sequence[LaunchTables],
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> None:
    """Attend every new token of a step to its sequence's keys in the pool, its own included.

    All tensors but ``output`` are read only. The last dimension of each is contiguous; the others have any stride.

    Args:
        output: ``[rows, heads, value_dim]``, written.
        query: ``[heads, rows, key_dim]``, the flat batch, in the dtype of the pool.
        key_pool: ``[blocks, kv_heads, block, key_dim]``, float16, bfloat16 or float32.
        value_pool: ``[blocks, kv_heads, block, value_dim]``.
        block_tables: int32 ``[sequences, width]``; entries of blocks that no token of the step sees are not read.
        launches: the step's tiles, planned for ``heads // kv_heads`` query heads per key/value head.
        scale: multiplies the scores.
        window: how many tokens, itself included, a token sees.
        softcap: bound of the scores.
        sinks: ``[heads]``, extra logits without a value.
    """
    heads, kv_heads = query.shape[0], key_pool.shape[1]
    group, block_size = heads // kv_heads, key_pool.shape[2]
    key_dim, value_dim = key_pool.shape[3], value_pool.shape[3]
    hip = torch.version.hip is not None
    for launch in launches:
        shape = launch.shape
        head_blocks = kv_heads * -(-group // shape.heads(group))
        slot_sums = slot_peaks = slot_totals = None
        if shape.sliced:
            # Made even where no tile is sliced, so that there is one compiled kernel and one way of rounding.
            slot_rows = max(launch.slots, 1) * head_blocks * shape.rows
            slot_sums = torch.empty(slot_rows, padded_dim(value_dim), dtype=torch.float32, device=query.device)
            slot_peaks, slot_totals = torch.empty(2, slot_rows, dtype=torch.float32, device=query.device)
        attention_kernel[(len(launch.tiles) * head_blocks,)](
            output,
            query,
            key_pool,
            value_pool,
            block_tables,
            launch.tiles,
            sinks,
            slot_sums,
            slot_peaks,
            slot_totals,
            scale,
            softcap,
            window,
            *output.stride()[:2],
            query.stride(1),
            query.stride(0),
            *key_pool.stride()[:3],
            *value_pool.stride()[:3],
            block_tables.stride(0),
            **attention_constants(
                shape, kv_heads=kv_heads, group=group, block_size=block_size, key_dim=key_dim, value_dim=value_dim
            ),
            **compile_options(shape, hip=hip),
        )
        if launch.slots:
            merge_kernel[(len(launch.merges) * head_blocks,)](
                output,
                launch.merges,
                sinks,
                slot_sums,
                slot_peaks,
                slot_totals,
                *output.stride()[:2],
                **merge_constants(shape, kv_heads=kv_heads, group=group, value_dim=value_dim),
                **compile_options(shape, hip=hip),
            )
