"""The seam between transformers' modules and our paged attention, and the KV pool that both sides share.

One step is one flat batch: the tokens of all sequences side by side, no padding. ``paged_attention`` is what the
modules call, once per layer; it hands over to the ``StepAttention`` that the runner passed along with the input.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Final, Protocol

import msgspec
import torch
from transformers import AttentionInterface

from engine.allocator import mapped_zeros
from engine.errors import UnsupportedModelError

__all__ = [
    "ATTENTION_NAME",
    "AttentionBackend",
    "KvPool",
    "LayerOptions",
    "LayerShape",
    "SequenceSlice",
    "StepAttention",
    "paged_attention",
    "slot_mapping",
]

ATTENTION_NAME: Final = "headstart_paged"
"""Our name in transformers' attention registry. Its mask registry does not know it, so that no mask is made."""


_INT8_MOST: Final = 127


class LayerShape(msgspec.Struct, frozen=True):
    """What one layer stores per token: ``kv_heads`` keys of ``key_dim`` and values of ``value_dim`` elements."""

    kv_heads: int
    key_dim: int
    value_dim: int


class LayerOptions(msgspec.Struct, frozen=True):
    """How one layer attends, as its module said.

    ``scaling`` multiplies the scores, which ``softcap`` then squeezes into (-softcap, softcap). A token sees the last
    ``sliding_window`` tokens, itself included. ``sinks`` are extra logits, one per query head, that take part in
    the softmax and have no value (gpt-oss).
    """

    scaling: float
    sliding_window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None


class SequenceSlice(msgspec.Struct, frozen=True):
    """Consecutive new tokens of one sequence in the flat batch.

    They are rows ``first .. first+length-1`` of the batch and positions ``start .. start+length-1`` of the sequence;
    K and V of earlier positions are in the blocks of ``block_table`` already.
    """

    first: int
    length: int
    start: int
    block_table: list[int]


class KvPool:
    """K and V of every layer, in blocks: one tensor ``[blocks, kv_heads, block, dim]`` per layer and kind.

    Owned by the model runner, which copies blocks; all else is written by a step's attention. Starts as zeros, which
    the system provides lazily, so that a block takes memory when it is first written; and whatever is read beyond a
    sequence's end is finite.

    ``dtype`` is that of the tensors. With int8 each row of a head has a scale of its own in ``key_scales`` and
    ``value_scales``, float32 ``[blocks, kv_heads, block]``; with other types these are empty.
    """

    def __init__(
        self,
        layers: Sequence[LayerShape],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        *,
        windowed: Collection[int] = (),
        window_blocks: int = 0,
    ) -> None:
        """``windowed`` are the indices of layers that have ``window_blocks`` blocks, numbered apart."""
        self.num_blocks = num_blocks
        self.window_blocks = window_blocks
        self.windowed = frozenset(windowed)
        self.block_size = block_size
        self.dtype = dtype
        counts = [window_blocks if index in self.windowed else num_blocks for index in range(len(layers))]
        shapes = [(count, layer.kv_heads, block_size) for count, layer in zip(counts, layers, strict=True)]
        dims = [(layer.key_dim, layer.value_dim) for layer in layers]
        self.keys, self.values = (
            [_zeros((*shape, dim[kind]), dtype, device) for shape, dim in zip(shapes, dims, strict=True)]
            for kind in range(2)
        )
        self.key_scales, self.value_scales = (
            [_zeros(shape, torch.float32, device) for shape in shapes if dtype == torch.int8] for _ in range(2)
        )

    def copy(self, pairs: Sequence[tuple[int, int]], window_pairs: Sequence[tuple[int, int]] = ()) -> None:
        """Copy whole blocks in every layer, in windowed ones the second pairs.

        Each pair's first block is copied to its second, which is in no other pair.
        """
        for chosen, in_window in ((pairs, False), (window_pairs, True)):
            if not chosen:
                continue
            sources, targets = torch.tensor(chosen, device=self.keys[0].device).unbind(1)
            for tensors in (self.keys, self.values, self.key_scales, self.value_scales):
                for layer, tensor in enumerate(tensors):
                    if (layer in self.windowed) == in_window:
                        tensor.index_copy_(0, targets, tensor.index_select(0, sources))

    def rows(self, slots: torch.Tensor, kv_heads: int) -> torch.Tensor:
        """Rows of a layer's pool seen as ``[blocks * kv_heads * block, dim]``, token by token, head by head."""
        blocks, offsets = slots // self.block_size, slots % self.block_size
        heads = torch.arange(kv_heads, device=slots.device)
        return ((blocks[:, None] * kv_heads + heads) * self.block_size + offsets[:, None]).flatten()

    def write(self, layer: int, rows: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store new K and V, ``[kv_heads, tokens, dim]`` each, at ``rows`` (see there), in the pool's dtype."""
        for pool, scales, new in (
            (self.keys[layer], self.key_scales, key),
            (self.values[layer], self.value_scales, value),
        ):
            dim = new.shape[-1]
            stored = new.transpose(0, 1).reshape(-1, dim)
            if scales:
                most = stored.float().abs().amax(-1, keepdim=True) / _INT8_MOST
                scales[layer].view(-1).index_copy_(0, rows, most[:, 0])
                stored = (stored / most.clamp_min(torch.finfo(torch.float32).tiny)).round()
            pool.view(-1, dim).index_copy_(0, rows, stored.to(pool.dtype))

    def read(self, layer: int, rows: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V ``[*rows.shape, block, dim]`` of whole blocks, in ``dtype``; each head of a block is a row here.

        A block's part of one head is contiguous, so that a single copy brings it in place.
        """
        found = []
        for pool, scales in ((self.keys[layer], self.key_scales), (self.values[layer], self.value_scales)):
            flat = rows.flatten()
            read = pool.view(-1, self.block_size * pool.shape[-1]).index_select(0, flat).to(dtype)
            read = read.view(*rows.shape, self.block_size, pool.shape[-1])
            if scales:
                of_rows = scales[layer].view(-1, self.block_size).index_select(0, flat)
                read = read * of_rows.view(*rows.shape, self.block_size, 1).to(dtype)
            found.append(read)
        return found[0], found[1]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    on_cpu = torch.device(device).type == "cpu"
    return mapped_zeros(shape, dtype) if on_cpu else torch.zeros(shape, dtype=dtype, device=device)


class StepAttention(Protocol):
    """The attention of one step, for all its layers."""

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: LayerOptions
    ) -> torch.Tensor:
        """Write ``key`` and ``value`` into the pool and attend to everything each token may see.

        Args:
            layer: index of the layer.
            query: ``[heads, tokens, key_dim]``, the flat batch.
            key: ``[kv_heads, tokens, key_dim]``, rotary embedding applied.
            value: ``[kv_heads, tokens, value_dim]``.
            options: as the module said.

        Returns:
            ``[tokens, heads, value_dim]``.
        """
        ...


class AttentionBackend(Protocol):
    """A way to compute paged attention. Stateless: everything of a step is in the object that ``begin`` returns."""

    name: str

    def begin(self, pool: KvPool, slices: Sequence[SequenceSlice]) -> StepAttention:
        """Prepare one step over ``pool``: what all layers need is computed here, once."""
        ...


def slot_mapping(slices: Sequence[SequenceSlice], block_size: int) -> torch.Tensor:
    """The slot (block * block_size + offset) of every token of the flat batch, int64."""
    slots = [
        piece.block_table[position // block_size] * block_size + position % block_size
        for piece in slices
        for position in range(piece.start, piece.start + piece.length)
    ]
    return torch.tensor(slots)


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    paged: StepAttention,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    dropout: float = 0.0,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function of transformers' modules: ``[1, heads, tokens, dim]`` in, ``[1, tokens, heads, dim]`` out.

    Raises:
        UnsupportedModelError: the module asks for something that would be left out (a position bias, a selection of
            blocks, an attention that is not causal): a tensor we do not know is never ignored.
    """
    unknown = [name for name, extra in others.items() if isinstance(extra, torch.Tensor) and name != "position_ids"]
    if attention_mask is not None:
        unknown.append("attention_mask")
    if others.get("is_causal") is False:
        unknown.append("is_causal=False")
    if unknown:
        raise UnsupportedModelError(
            f"{type(module).__name__} gives its attention {', '.join(unknown)}, which paged attention cannot honour."
        )
    options = LayerOptions(
        query.shape[-1] ** -0.5 if scaling is None else float(scaling), sliding_window, softcap or None, s_aux
    )
    layer: int = module.layer_idx  # type: ignore[assignment]
    return paged.attend(layer, query[0], key[0], value[0], options).unsqueeze(0), None


AttentionInterface.register(ATTENTION_NAME, paged_attention)
