"""Paged attention on the CPU by our C++ kernel, which reads the pool where it lies. Optional: see ``engine.native``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from engine.attention.backend import KvPool, LayerOptions, SequenceSlice, slot_mapping
from engine.attention.tasks import GROUP_KEYS, AttentionTasks
from engine.errors import KernelError
from engine.native.library import AttentionArguments, Kernels

__all__ = ["CppCpuAttention"]

_KINDS: Final = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}


class CppCpuAttention:
    """An ``AttentionBackend`` for the CPU. It computes in float32, whatever model and pool are in."""

    name = "cpp_cpu"

    def __init__(self, kernels: Kernels) -> None:
        if kernels.group != GROUP_KEYS:
            raise KernelError(f"the kernels sum {kernels.group} keys by themselves, not {GROUP_KEYS}")
        self.kernels = kernels

    def begin(self, pool: KvPool, slices: Sequence[SequenceSlice]) -> CppStep:
        """See ``AttentionBackend``."""
        return CppStep(self.kernels, pool, slices)


class CppStep:
    """One step. Owns the tables that the kernel reads, made for the first layer of each kind and then shared."""

    def __init__(self, kernels: Kernels, pool: KvPool, slices: Sequence[SequenceSlice]) -> None:
        self._kernels = kernels
        self._slices = slices
        self._slots = slot_mapping(slices, pool.block_size)
        self._prepared: dict[tuple[int, int | None], tuple[AttentionArguments, AttentionTasks, torch.Tensor]] = {}
        self.pool = pool

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: LayerOptions
    ) -> torch.Tensor:
        """See ``StepAttention``."""
        heads, tokens, key_dim = query.shape
        kv_heads, _, value_dim = value.shape
        dtype = query.dtype
        query, key, value = _readable(query), _readable(key), _readable(value)
        output = query.new_empty(tokens, heads, value_dim)
        sinks = None if options.sinks is None else options.sinks.float().contiguous()
        arguments = self.arguments(heads, kv_heads, key_dim, value_dim, options.sliding_window)
        pool = self.pool
        arguments.query, arguments.key, arguments.value = query.data_ptr(), key.data_ptr(), value.data_ptr()
        arguments.query_head, arguments.query_token, _ = query.stride()
        arguments.key_head, arguments.key_token, _ = key.stride()
        arguments.value_head, arguments.value_token, _ = value.stride()
        arguments.out = output.data_ptr()
        arguments.pool_keys, arguments.pool_values = pool.keys[layer].data_ptr(), pool.values[layer].data_ptr()
        if pool.key_scales:
            arguments.key_scales = pool.key_scales[layer].data_ptr()
            arguments.value_scales = pool.value_scales[layer].data_ptr()
        arguments.sinks = None if sinks is None else sinks.data_ptr()
        arguments.scaling, arguments.softcap = options.scaling, options.softcap or 0.0
        self._kernels.attend(arguments)
        return output.to(dtype)

    def arguments(
        self, heads: int, kv_heads: int, key_dim: int, value_dim: int, window: int | None
    ) -> AttentionArguments:
        """What is the same in all layers of a kind. Its tables live as long as this step."""
        group = heads // kv_heads
        if (group, window) not in self._prepared:
            tasks = AttentionTasks(self._slices, self.pool.block_size, group, window)
            width = -(-value_dim // self._kernels.vector) * self._kernels.vector + 2
            partials = torch.empty(tasks.slots * heads * width)
            arguments = AttentionArguments(
                slots=self._slots.data_ptr(),
                tasks=tasks.tasks.buffer_info()[0],
                row_token=tasks.row_token.buffer_info()[0],
                row_position=tasks.row_position.buffer_info()[0],
                tables=tasks.tables.buffer_info()[0],
                merges=tasks.merges.buffer_info()[0],
                merge_slots=tasks.merge_slots.buffer_info()[0],
                partials=partials.data_ptr(),
                tokens=len(self._slots),
                task_count=len(tasks.tasks) // 6,
                merge_count=len(tasks.merges) // 3,
                heads=heads,
                kv_heads=kv_heads,
                key_dim=key_dim,
                value_dim=value_dim,
                block=self.pool.block_size,
                kind=_KINDS[self.pool.dtype],
                window=window or 0,
            )
            self._prepared[group, window] = arguments, tasks, partials
        return self._prepared[group, window][0]


def _readable(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.float()
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
