"""The forward of the Llama family by the C++ kernels: a whole step in one call."""

from __future__ import annotations

import ctypes

import torch

from engine.allocator import Buffers
from engine.attention.backend import KvPool, StepAttention
from engine.attention.cpp_cpu import CppStep
from engine.attention.groups import step_of
from engine.errors import InvariantError
from engine.models.lean_weights import LeanLayer, LeanWeights
from engine.models.packing import PackedMatrix
from engine.models.rotary import RotaryTable
from engine.native.library import AttentionArguments, BatchArguments, Kernels, KvPointers, LayerPointers

__all__ = ["KernelModel"]


class KernelModel:
    """Computes what ``LeanModel`` computes. Owns the packed weights and its buffers; one thread calls it.

    A token's result is the same bits whatever else is in the batch, in whatever chunks its context has been computed
    and whether a part of that was shared, cached or computed again.
    """

    def __init__(self, weights: LeanWeights, kernels: Kernels) -> None:
        """Pack ``weights``, float32, in place: nothing else can compute with them until ``unpack``."""
        self._weights = weights
        self._kernels = kernels
        self._rotary = RotaryTable(weights.rotary, torch.float32)
        self._buffers = Buffers(torch.float32)
        # Of each kind of attention the first layer: all layers with the same window are in one group of blocks.
        self._kinds: dict[int | None, int] = {}
        for index, layer in enumerate(weights.layers):
            self._kinds.setdefault(layer.window, index)
        self._packed: list[PackedMatrix] = []
        self._layers = (LayerPointers * len(weights.layers))(*map(self._layer, weights.layers))
        self._head = self._pack(weights.head, None)
        self._pool: KvPool | None = None
        self._kv = (KvPointers * len(weights.layers))()
        head = ctypes.addressof(self._head.pointers)
        tied = weights.head.data_ptr() == weights.embedding.data_ptr()
        self._batch = BatchArguments(
            layers=ctypes.addressof(self._layers),
            head=head,
            embedding=head if tied else None,
            table=None if tied else weights.embedding.data_ptr(),
            norm=weights.norm.data_ptr(),
            pool=ctypes.addressof(self._kv),
            layer_count=len(weights.layers),
            width=weights.embedding.shape[1],
            heads=weights.heads,
            kv_heads=weights.kv_heads,
            dim=weights.dim,
            eps=weights.eps,
        )

    def unpack(self) -> None:
        """Give the weights back to those who had them. Nothing may be computed here afterwards."""
        for matrix in self._packed:
            matrix.unpack()

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, step: StepAttention
    ) -> torch.Tensor:
        """See ``LeanModel.forward``; ``step`` must be of ``CppCpuAttention``."""
        steps = [step_of(step, layer) for layer in self._kinds.values()]
        weights, batch = self._weights, self._batch
        tokens, wanted = len(token_ids), len(rows)
        cos, sin = self._rotary.covering(positions)
        shape = weights.heads, weights.kv_heads, weights.dim, weights.dim
        attentions = (AttentionArguments * len(steps))()
        for kind, (window, own) in enumerate(zip(self._kinds, steps, strict=True)):
            if not isinstance(own, CppStep):
                raise InvariantError("the kernels attend by themselves")
            self._point_at(own.pool)  # the same for all
            attentions[kind] = own.arguments(*shape, window)
        width, attended = weights.embedding.shape[1], weights.heads * weights.dim
        first = weights.layers[0]
        for name, count, size in (
            ("hidden", tokens, width),
            ("normed", max(tokens, wanted), width),
            ("qkv", tokens, first.qkv.shape[0]),
            ("attended", tokens, attended),
            ("product", max(tokens, wanted), first.down.shape[1]),
            ("last_hidden", wanted, width),
            ("last_attended", wanted, attended),
            ("logits", wanted, weights.head.shape[0]),
        ):
            setattr(batch, name, self._buffers.rows(name, count, size).data_ptr())
        batch.attentions = ctypes.addressof(attentions)
        batch.token_ids, batch.positions, batch.rows = token_ids.data_ptr(), positions.data_ptr(), rows.data_ptr()
        batch.cos, batch.sin = cos.data_ptr(), sin.data_ptr()
        batch.tokens, batch.row_count = tokens, wanted
        self._kernels.forward(batch)
        return self._buffers.rows("logits", wanted, weights.head.shape[0])

    def _layer(self, layer: LeanLayer) -> LayerPointers:
        middle = layer.gate_up.shape[0] // 2
        bias = layer.gate_up_bias
        gate_bias, up_bias = (None, None) if bias is None else (bias[:middle], bias[middle:])
        query_norm, key_norm = layer.head_norms or (None, None)
        return LayerPointers(
            input_norm=layer.input_norm.data_ptr(),
            query_norm=None if query_norm is None else query_norm.data_ptr(),
            key_norm=None if key_norm is None else key_norm.data_ptr(),
            mlp_norm=layer.mlp_norm.data_ptr(),
            qkv=self._pack(layer.qkv, layer.qkv_bias).pointers,
            output=self._pack(layer.output, layer.output_bias).pointers,
            gate=self._pack(layer.gate_up[:middle], gate_bias).pointers,
            up=self._pack(layer.gate_up[middle:], up_bias).pointers,
            down=self._pack(layer.down, layer.down_bias).pointers,
            scaling=layer.scaling,
            kind=[*self._kinds].index(layer.window),
        )

    def _pack(self, weight: torch.Tensor, bias: torch.Tensor | None) -> PackedMatrix:
        packed = PackedMatrix(weight, bias, self._kernels)
        self._packed.append(packed)
        return packed

    def _point_at(self, pool: KvPool) -> None:
        if pool is self._pool:
            return
        for layer, pointers in enumerate(self._kv):
            pointers.keys, pointers.values = pool.keys[layer].data_ptr(), pool.values[layer].data_ptr()
            if pool.key_scales:
                pointers.key_scales = pool.key_scales[layer].data_ptr()
                pointers.value_scales = pool.value_scales[layer].data_ptr()
            else:
                pointers.key_scales = pointers.value_scales = None
        self._pool = pool
