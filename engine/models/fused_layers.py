"""All layers of a lean model over a batch of few tokens, in one call of the C++ kernels."""

from __future__ import annotations

import ctypes

import torch

from engine.attention.backend import KvPool
from engine.attention.cpp_cpu import CppStep
from engine.models.lean_weights import LeanWeights
from engine.native.library import FEW_ROWS, AttentionArguments, BatchArguments, Kernels, KvPointers, LayerPointers

__all__ = ["FusedLayers"]


class FusedLayers:
    """Owns the addresses of the weights and the buffers of a batch; one thread calls it."""

    def __init__(self, weights: LeanWeights, kernels: Kernels) -> None:
        """``weights`` must be float32 and stay where they are."""
        self._weights = weights
        self._kernels = kernels
        self._windows = list(dict.fromkeys(layer.window for layer in weights.layers))
        self._layers = (LayerPointers * len(weights.layers))()
        for pointers, layer in zip(self._layers, weights.layers, strict=True):
            for name in ("input_norm", "qkv", "qkv_bias", "output", "output_bias", "mlp_norm"):
                setattr(pointers, name, _address(getattr(layer, name)))
            for name in ("gate_up", "gate_up_bias", "down", "down_bias"):
                setattr(pointers, name, _address(getattr(layer, name)))
            pointers.query_norm, pointers.key_norm = map(_address, layer.head_norms or (None, None))
            pointers.scaling = layer.scaling
            pointers.kind = self._windows.index(layer.window)
        first = weights.layers[0]
        intermediate, width = first.gate_up.shape[0] // 2, weights.embedding.shape[1]
        self._buffers = {
            "normed": torch.empty(FEW_ROWS, width),
            "qkv": torch.empty(FEW_ROWS, first.qkv.shape[0]),
            "attended": torch.empty(FEW_ROWS, weights.heads * weights.dim),
            "gate_up": torch.empty(FEW_ROWS, 2 * intermediate),
            "product": torch.empty(FEW_ROWS, intermediate),
        }
        self._batch = BatchArguments(
            layers=ctypes.addressof(self._layers),
            layer_count=len(weights.layers),
            width=width,
            intermediate=intermediate,
            heads=weights.heads,
            kv_heads=weights.kv_heads,
            dim=weights.dim,
            eps=weights.eps,
            **{name: buffer.data_ptr() for name, buffer in self._buffers.items()},
        )
        self._pool: KvPool | None = None
        self._kv = (KvPointers * len(weights.layers))()

    def run(self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, step: CppStep) -> None:
        """Take ``hidden``, ``[tokens, width]`` with at most ``FEW_ROWS`` rows, through all layers in place."""
        weights, batch = self._weights, self._batch
        if step.pool is not self._pool:
            self._point_at(step.pool)
        shape = weights.heads, weights.kv_heads, weights.dim, weights.dim
        attentions = (AttentionArguments * len(self._windows))(
            *(step.arguments(*shape, window) for window in self._windows)
        )
        batch.attentions = ctypes.addressof(attentions)
        batch.cos, batch.sin, batch.hidden = cos.data_ptr(), sin.data_ptr(), hidden.data_ptr()
        batch.tokens = hidden.shape[0]
        self._kernels.layers(batch)

    def _point_at(self, pool: KvPool) -> None:
        for layer, pointers in enumerate(self._kv):
            pointers.keys, pointers.values = pool.keys[layer].data_ptr(), pool.values[layer].data_ptr()
            if pool.key_scales:
                pointers.key_scales = pool.key_scales[layer].data_ptr()
                pointers.value_scales = pool.value_scales[layer].data_ptr()
            else:
                pointers.key_scales = pointers.value_scales = None
        self._batch.pool = ctypes.addressof(self._kv)
        self._pool = pool


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
