"""A forward of the Llama family with fused projections, tables for the rotary embedding and buffers that stay.

It computes what the transformers model computes, in fewer and larger operations, and only what is asked for: behind
the last attention nothing but the rows whose next token is wanted.
"""

from __future__ import annotations

import torch

from engine.attention.backend import LayerOptions, StepAttention
from engine.attention.cpp_cpu import CppStep
from engine.models.arithmetic import Arithmetic, KernelArithmetic
from engine.models.fused_layers import FusedLayers
from engine.models.lean_weights import LeanWeights
from engine.native.library import FEW_ROWS

__all__ = ["LeanModel"]


class LeanModel:
    """Computes flat batches. Owns its buffers, which grow to the largest batch; one thread calls it."""

    def __init__(self, weights: LeanWeights, arithmetic: Arithmetic) -> None:
        self._weights = weights
        self._arithmetic = arithmetic
        self._dtype = weights.embedding.dtype
        self._rotary = _RotaryTable(weights.rotary, self._dtype)
        self._options = [LayerOptions(layer.scaling, layer.window) for layer in weights.layers]
        self._buffers: dict[str, torch.Tensor] = {}
        self._fused = FusedLayers(weights, arithmetic.kernels) if isinstance(arithmetic, KernelArithmetic) else None

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, step: StepAttention
    ) -> torch.Tensor:
        """Compute one flat batch.

        Args:
            token_ids: int64 ``[tokens]``.
            positions: int64 ``[tokens]``.
            rows: int64, the tokens whose logits are wanted.
            step: attends, and keeps K and V.

        Returns:
            Logits ``[rows, vocabulary]``, good until the next call.
        """
        weights, arithmetic = self._weights, self._arithmetic
        tokens, eps = len(token_ids), weights.eps
        width = weights.embedding.shape[1]
        cos, sin = self._rotary.rows(positions)
        normed = self._buffer("normed", tokens, width)
        hidden = self._buffer("hidden", tokens, width)
        torch.index_select(weights.embedding, 0, token_ids, out=hidden)
        if self._fused is not None and tokens <= FEW_ROWS and isinstance(step, CppStep):
            self._fused.run(hidden, cos, sin, step)
            return self._logits(hidden[rows])
        last = len(weights.layers) - 1
        for index, layer in enumerate(weights.layers):
            arithmetic.rms_norm(hidden, layer.input_norm, eps, normed)
            qkv = self._buffer("qkv", tokens, layer.qkv.shape[0])
            arithmetic.linear(normed, layer.qkv, layer.qkv_bias, qkv)
            heads = qkv.view(tokens, -1, weights.dim)
            turned = weights.heads + weights.kv_heads
            arithmetic.rotate(heads[:, :turned], cos, sin, weights.heads, layer.head_norms, eps)
            query, key, value = torch.split(heads.transpose(0, 1), [weights.heads, weights.kv_heads, weights.kv_heads])
            attended = step.attend(index, query, key, value, self._options[index]).view(tokens, -1)
            if index == last:
                tokens = len(rows)  # more than tokens were computed when several choices start from one of them
                attended, hidden, normed = attended[rows], hidden[rows], self._buffer("normed", tokens, width)
            arithmetic.linear(attended, layer.output, layer.output_bias, hidden, add=True)
            arithmetic.rms_norm(hidden, layer.mlp_norm, eps, normed)
            gate_up = self._buffer("gate_up", tokens, layer.gate_up.shape[0])
            arithmetic.linear(normed, layer.gate_up, layer.gate_up_bias, gate_up)
            product = self._buffer("product", tokens, layer.gate_up.shape[0] // 2)
            arithmetic.silu_product(gate_up, product)
            arithmetic.linear(product, layer.down, layer.down_bias, hidden, add=True)
        return self._logits(hidden)

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        weights = self._weights
        rows, width = hidden.shape
        normed = self._buffer("normed", rows, width)
        self._arithmetic.rms_norm(hidden, weights.norm, weights.eps, normed)
        logits = self._buffer("logits", rows, weights.head.shape[0])
        self._arithmetic.linear(normed, weights.head, None, logits)
        return logits

    def _buffer(self, name: str, rows: int, width: int) -> torch.Tensor:
        """A contiguous ``[rows, width]`` part of the buffer of that name."""
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape[0] < rows:
            buffer = self._buffers[name] = torch.empty(rows, width, dtype=self._dtype)
        return buffer[:rows]


class _RotaryTable:
    """Cosines and sines of the model's own rotary embedding, as far as positions have been seen. Grows by doubling."""

    def __init__(self, rotary: torch.nn.Module, dtype: torch.dtype) -> None:
        self._rotary = rotary
        self._dtype = dtype
        self._cos = self._sin = torch.empty(0)

    def rows(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``[positions, dim / 2]`` each: the two halves of a head turn by the same angles."""
        most = int(positions.max()) + 1
        if most > len(self._cos):
            size = max(1024, 1 << (most - 1).bit_length())
            cos, sin = self._rotary(torch.empty(0, dtype=self._dtype), torch.arange(size)[None])
            self._cos, self._sin = (table[0, :, : table.shape[-1] // 2].contiguous() for table in (cos, sin))
        return self._cos.index_select(0, positions), self._sin.index_select(0, positions)
