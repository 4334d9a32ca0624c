"""The rotary embedding of a model as tables."""

from __future__ import annotations

from typing import Final

import torch

__all__ = ["RotaryTable"]

_LEAST_POSITIONS: Final = 1024


class RotaryTable:
    """Cosines and sines of the model's own rotary embedding, as far as positions have been seen. Grows by doubling."""

    def __init__(self, rotary: torch.nn.Module, dtype: torch.dtype) -> None:
        self._rotary = rotary
        self._dtype = dtype
        self._cos = self._sin = torch.empty(0)

    def covering(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Contiguous tables ``[n, dim / 2]`` with a row for each of ``positions``, and for all before them.

        The two halves of a head turn by the same angles.
        """
        most = int(positions.max()) + 1
        if most > len(self._cos):
            size = max(_LEAST_POSITIONS, 1 << (most - 1).bit_length())
            cos, sin = self._rotary(torch.empty(0, dtype=self._dtype), torch.arange(size)[None])
            self._cos, self._sin = (table[0, :, : table.shape[-1] // 2].contiguous() for table in (cos, sin))
        return self._cos, self._sin
