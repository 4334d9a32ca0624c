"""Layers of two groups in one step: those that see everything, and those with a window and blocks of their own."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from engine.attention.backend import AttentionBackend, KvPool, LayerOptions, SequenceSlice, StepAttention

__all__ = ["GroupedStep", "begin_step", "step_of"]


def begin_step(
    backend: AttentionBackend, pool: KvPool, slices: Sequence[SequenceSlice], windowed: Sequence[SequenceSlice]
) -> StepAttention:
    """One step of ``backend``: ``slices`` for the layers that see everything, ``windowed`` for the others.

    Where all layers are of one group it is the backend's own step, and the slices of the other group are not looked at.
    """
    if not pool.windowed:
        return backend.begin(pool, slices)
    if len(pool.windowed) == len(pool.keys):
        return backend.begin(pool, windowed)
    return GroupedStep(backend.begin(pool, slices), backend.begin(pool, windowed), pool.windowed)


class GroupedStep:
    """Passes each layer on to the step of its group."""

    def __init__(self, full: StepAttention, windowed: StepAttention, layers: Collection[int]) -> None:
        self._full = full
        self._windowed = windowed
        self._layers = layers

    def of(self, layer: int) -> StepAttention:
        """The step of the group that the layer is in."""
        return self._windowed if layer in self._layers else self._full

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: LayerOptions
    ) -> torch.Tensor:
        """See ``StepAttention``."""
        return self.of(layer).attend(layer, query, key, value, options)


def step_of(step: StepAttention, layer: int) -> StepAttention:
    """The backend's own step for ``layer``: for who reads its tables instead of calling ``attend``."""
    return step.of(layer) if isinstance(step, GroupedStep) else step
