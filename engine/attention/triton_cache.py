"""Writing new keys and values into the paged pool, in Triton. Importing this module needs triton."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

__all__ = ["cache_constants", "cache_kernel", "reshape_and_cache"]

# Triton's decorator has no type of its own.
_jit: Callable[[Callable[..., object]], Any] = triton.jit


@_jit
def _scatter(
    pool: tl.tensor,
    new: tl.tensor,
    row: tl.tensor,
    block: tl.tensor,
    within: tl.tensor,
    block_stride: tl.tensor,
    head_stride: tl.tensor,
    token_stride: tl.tensor,
    new_head_stride: tl.tensor,
    new_row_stride: tl.tensor,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PADDED_HEADS: tl.constexpr,
    PADDED_DIM: tl.constexpr,
) -> None:
    heads = tl.arange(0, PADDED_HEADS)
    dims = tl.arange(0, PADDED_DIM)
    mask = (heads < KV_HEADS)[:, None] & (dims < DIM)[None, :]
    wide_heads = heads.to(tl.int64)
    vectors = tl.load(
        new + row * new_row_stride + wide_heads[:, None] * new_head_stride + dims[None, :], mask=mask, other=0.0
    )
    tl.store(
        pool + block * block_stride + within * token_stride + (wide_heads * head_stride)[:, None] + dims[None, :],
        vectors.to(pool.dtype.element_ty),
        mask=mask,
    )


@_jit
def cache_kernel(
    key: tl.tensor,
    value: tl.tensor,
    key_pool: tl.tensor,
    value_pool: tl.tensor,
    slots: tl.tensor,
    key_head_stride: tl.tensor,
    key_row_stride: tl.tensor,
    value_head_stride: tl.tensor,
    value_row_stride: tl.tensor,
    key_block_stride: tl.tensor,
    key_pool_head_stride: tl.tensor,
    key_token_stride: tl.tensor,
    value_block_stride: tl.tensor,
    value_pool_head_stride: tl.tensor,
    value_token_stride: tl.tensor,
    KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PADDED_HEADS: tl.constexpr,
    PADDED_KEY_DIM: tl.constexpr,
    PADDED_VALUE_DIM: tl.constexpr,
) -> None:
    """Store the K and V of one token: a program per row of the flat batch."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    block = slot // BLOCK_SIZE
    within = slot % BLOCK_SIZE
    _scatter(
        key_pool,
        key,
        row,
        block,
        within,
        key_block_stride,
        key_pool_head_stride,
        key_token_stride,
        key_head_stride,
        key_row_stride,
        KV_HEADS,
        KEY_DIM,
        PADDED_HEADS,
        PADDED_KEY_DIM,
    )
    _scatter(
        value_pool,
        value,
        row,
        block,
        within,
        value_block_stride,
        value_pool_head_stride,
        value_token_stride,
        value_head_stride,
        value_row_stride,
        KV_HEADS,
        VALUE_DIM,
        PADDED_HEADS,
        PADDED_VALUE_DIM,
    )


def cache_constants(*, kv_heads: int, block_size: int, key_dim: int, value_dim: int) -> dict[str, int]:
    """What ``cache_kernel`` is compiled for, by parameter."""
    return {
        "KV_HEADS": kv_heads,
        "BLOCK_SIZE": block_size,
        "KEY_DIM": key_dim,
        "VALUE_DIM": value_dim,
        "PADDED_HEADS": triton.next_power_of_2(kv_heads),
        "PADDED_KEY_DIM": triton.next_power_of_2(key_dim),
        "PADDED_VALUE_DIM": triton.next_power_of_2(value_dim),
    }


def reshape_and_cache(
    key: torch.Tensor, value: torch.Tensor, key_pool: torch.Tensor, value_pool: torch.Tensor, slots: torch.Tensor
) -> None:
    """Store new K and V where the slot mapping says.

    The last dimension of every tensor is contiguous; the others have any stride.

    Args:
        key: ``[kv_heads, rows, key_dim]``, the flat batch; stored in the dtype of the pool.
        value: ``[kv_heads, rows, value_dim]``.
        key_pool: ``[blocks, kv_heads, block, key_dim]``, written.
        value_pool: ``[blocks, kv_heads, block, value_dim]``, written.
        slots: int64 ``[rows]``, block * block size + offset within the block.
    """
    kv_heads, block_size = key_pool.shape[1:3]
    cache_kernel[(len(slots),)](
        key,
        value,
        key_pool,
        value_pool,
        slots,
        *key.stride()[:2],
        *value.stride()[:2],
        *key_pool.stride()[:3],
        *value_pool.stride()[:3],
        **cache_constants(kv_heads=kv_heads, block_size=block_size, key_dim=key.shape[-1], value_dim=value.shape[-1]),
    )
