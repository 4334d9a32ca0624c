"""A forward of the Llama family with fused projections, tables for the rotary embedding and buffers that stay.

It computes what the transformers model computes, in fewer and larger operations, and only what is asked for: behind
the last attention nothing but the rows whose next token is wanted. All by PyTorch: see ``kernel_model`` for ours.
"""

from __future__ import annotations

import torch

from engine.allocator import Buffers
from engine.attention.backend import LayerOptions, StepAttention
from engine.models.arithmetic import linear, rms_norm, rotate, silu_product
from engine.models.lean_weights import LeanWeights
from engine.models.rotary import RotaryTable

__all__ = ["LeanModel"]


class LeanModel:
    """Computes flat batches. Owns its buffers; one thread calls it."""

    def __init__(self, weights: LeanWeights) -> None:
        dtype = weights.embedding.dtype
        self._weights = weights
        self._rotary = RotaryTable(weights.rotary, dtype)
        self._options = [LayerOptions(layer.scaling, layer.window) for layer in weights.layers]
        self._buffers = Buffers(dtype)

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
        weights, buffer = self._weights, self._buffers.rows
        tokens, eps = len(token_ids), weights.eps
        width = weights.embedding.shape[1]
        cos, sin = (table.index_select(0, positions) for table in self._rotary.covering(positions))
        normed = buffer("normed", tokens, width)
        hidden = buffer("hidden", tokens, width)
        torch.index_select(weights.embedding, 0, token_ids, out=hidden)
        last = len(weights.layers) - 1
        for index, layer in enumerate(weights.layers):
            rms_norm(hidden, layer.input_norm, eps, normed)
            qkv = buffer("qkv", tokens, layer.qkv.shape[0])
            linear(normed, layer.qkv, layer.qkv_bias, qkv)
            heads = qkv.view(tokens, -1, weights.dim)
            turned = weights.heads + weights.kv_heads
            rotate(heads[:, :turned], cos, sin, weights.heads, layer.head_norms, eps)
            query, key, value = torch.split(heads.transpose(0, 1), [weights.heads, weights.kv_heads, weights.kv_heads])
            attended = step.attend(index, query, key, value, self._options[index]).view(tokens, -1)
            if index == last:
                tokens = len(rows)  # more than tokens were computed when several choices start from one of them
                attended, hidden, normed = attended[rows], hidden[rows], buffer("normed", tokens, width)
            linear(attended, layer.output, layer.output_bias, hidden, add=True)
            rms_norm(hidden, layer.mlp_norm, eps, normed)
            gate_up = buffer("gate_up", tokens, layer.gate_up.shape[0])
            linear(normed, layer.gate_up, layer.gate_up_bias, gate_up)
            product = buffer("product", tokens, layer.gate_up.shape[0] // 2)
            silu_product(gate_up, product)
            linear(product, layer.down, layer.down_bias, hidden, add=True)
        rms_norm(hidden, weights.norm, eps, normed)
        logits = buffer("logits", tokens, weights.head.shape[0])
        linear(normed, weights.head, None, logits)
        return logits
