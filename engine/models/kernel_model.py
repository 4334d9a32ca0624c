"""The forward of the Llama family by the C++ kernels: a whole step in one call."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import torch

from engine.allocator import Buffers
from engine.attention.backend import KvPool, StepAttention
from engine.attention.cpp_cpu import CppStep
from engine.attention.groups import step_of
from engine.errors import InvariantError
from engine.models.lean_weights import LeanLayer, LeanWeights
from engine.models.packing import PackedMatrix, PanelMemory
from engine.models.rotary import RotaryTable
from engine.native.library import AttentionArguments, BatchArguments, Kernels, KvPointers, LayerPointers

__all__ = ["KernelModel"]


class KernelModel:
    """Computes what ``LeanModel`` computes. Owns the packed weights and its buffers; one thread calls it.

    A token's result is the same bits whatever else is in the batch, in whatever chunks its context has been computed
    and whether a part of that was shared, cached or computed again.
    """

    def __init__(self, weights: LeanWeights, kernels: Kernels) -> None:
        """Pack ``weights``, float32. Some are packed in place: nothing else can compute with them until ``unpack``.

        Those that are not are needed no more, and not kept.
        """
        self._kernels = kernels
        self._rotary = RotaryTable(weights.rotary, torch.float32)
        self._buffers = Buffers(torch.float32)
        # Of each kind of attention the first layer: all layers with the same window are in one group of blocks.
        self._kinds: dict[int | None, int] = {}
        for index, layer in enumerate(weights.layers):
            self._kinds.setdefault(layer.window, index)
        self._memory = PanelMemory(sum(matrix.numel() for matrix in _matrices(weights)))
        self._packed: list[PackedMatrix] = []
        self._others: list[torch.Tensor] = []
        self._layers = (LayerPointers * len(weights.layers))(*map(self._layer, weights.layers))
        self._head = self._pack(weights.head, None)
        self._pool: KvPool | None = None
        self._kv = (KvPointers * len(weights.layers))()
        head = ctypes.addressof(self._head.pointers)
        tied = weights.head.data_ptr() == weights.embedding.data_ptr()
        self._qkv_width, self._middle = len(weights.layers[0].qkv), weights.layers[0].down.shape[1]
        self._batch = BatchArguments(
            layers=ctypes.addressof(self._layers),
            head=head,
            embedding=head if tied else None,
            table=None if tied else self._kept(weights.embedding),
            norm=self._kept(weights.norm),
            pool=ctypes.addressof(self._kv),
            layer_count=len(weights.layers),
            width=weights.embedding.shape[1],
            heads=weights.heads,
            kv_heads=weights.kv_heads,
            dim=weights.dim,
            eps=weights.eps,
        )

    @property
    def weight_bytes(self) -> int:
        """What a step reads of the matrices, at least."""
        return sum(matrix.bytes_read for matrix in self._packed)

    def unpack(self) -> None:
        """Give the weights back to those who had them. Nothing may be computed here afterwards."""
        for matrix in self._packed:
            matrix.unpack()

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, step: StepAttention
    ) -> torch.Tensor:
        """See ``LeanModel.forward``; ``step`` must be of ``CppCpuAttention``."""
        steps = [step_of(step, layer) for layer in self._kinds.values()]
        batch = self._batch
        tokens, wanted = len(token_ids), len(rows)
        cos, sin = self._rotary.covering(positions)
        shape = batch.heads, batch.kv_heads, batch.dim, batch.dim
        attentions = (AttentionArguments * len(steps))()
        for kind, (window, own) in enumerate(zip(self._kinds, steps, strict=True)):
            if not isinstance(own, CppStep):
                raise InvariantError("the kernels attend by themselves")
            self._point_at(own.pool)  # the same for all
            attentions[kind] = own.arguments(*shape, window)
        width, attended = batch.width, batch.heads * batch.dim
        for name, count, size in (
            ("hidden", tokens, width),
            ("normed", max(tokens, wanted), width),
            ("qkv", tokens, self._qkv_width),
            ("attended", tokens, attended),
            ("product", max(tokens, wanted), self._middle),
            ("last_hidden", wanted, width),
            ("last_attended", wanted, attended),
        ):
            setattr(batch, name, self._buffers.rows(name, count, size).data_ptr())
        logits = self._buffers.rows("logits", wanted, self._head.pointers.n)
        batch.logits = logits.data_ptr()
        batch.attentions = ctypes.addressof(attentions)
        batch.token_ids, batch.positions, batch.rows = token_ids.data_ptr(), positions.data_ptr(), rows.data_ptr()
        batch.cos, batch.sin = cos.data_ptr(), sin.data_ptr()
        batch.tokens, batch.row_count = tokens, wanted
        self._kernels.forward(batch)
        return logits

    def _layer(self, layer: LeanLayer) -> LayerPointers:
        gate, up = _halves(layer.gate_up)
        gate_bias, up_bias = (None, None) if layer.gate_up_bias is None else _halves(layer.gate_up_bias)
        query_norm, key_norm = layer.head_norms or (None, None)
        return LayerPointers(
            input_norm=self._kept(layer.input_norm),
            query_norm=None if query_norm is None else self._kept(query_norm),
            key_norm=None if key_norm is None else self._kept(key_norm),
            mlp_norm=self._kept(layer.mlp_norm),
            qkv=self._pack(layer.qkv, layer.qkv_bias).pointers,
            output=self._pack(layer.output, layer.output_bias).pointers,
            gate=self._pack(gate, gate_bias).pointers,
            up=self._pack(up, up_bias).pointers,
            down=self._pack(layer.down, layer.down_bias).pointers,
            scaling=layer.scaling,
            kind=[*self._kinds].index(layer.window),
        )

    def _pack(self, weight: torch.Tensor, bias: torch.Tensor | None) -> PackedMatrix:
        packed = PackedMatrix(weight, bias, self._kernels, self._memory)
        self._packed.append(packed)
        return packed

    def _kept(self, tensor: torch.Tensor) -> int:
        """The address of a tensor that the kernels read as it is."""
        self._others.append(tensor)
        return tensor.data_ptr()

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


def _matrices(weights: LeanWeights) -> Iterator[torch.Tensor]:
    """All that are packed."""
    for layer in weights.layers:
        yield from (layer.qkv, layer.output, *_halves(layer.gate_up), layer.down)
    yield weights.head


def _halves(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    middle = len(tensor) // 2
    return tensor[:middle], tensor[middle:]
