"""A weight matrix in the order in which the C++ kernels read it."""

from __future__ import annotations

from typing import Final

import torch

from engine.native.library import Kernels, MatrixPointers

__all__ = ["PackedMatrix"]

_AT_A_TIME: Final = 64
"""Panels, which are copied while they are turned."""


class PackedMatrix:
    """A weight ``[n, k]`` in panels of ``Kernels.panel`` rows, each turned to ``[k, panel]``.

    A product of few or many rows then reads it from memory once, in one line, and without a horizontal sum. It is
    turned in place, as a panel takes the same memory either way: whoever else sees it sees it packed until ``unpack``.
    The last rows, which fill no panel, are left as they are; the kernels read a padded copy of them.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, kernels: Kernels) -> None:
        """Pack ``weight``, contiguous and of the kernels' dtype, which must stay where it is."""
        count, width = weight.shape
        self._panel = kernels.panel
        self._whole = count // self._panel
        self._weight = weight
        self._bias = bias
        self._rest: torch.Tensor | None = None
        if left := count % self._panel:
            self._rest = weight.new_zeros(width, self._panel)
            self._rest[:, :left] = weight[-left:].T
        self._turn(self._panel, width)
        self.pointers = MatrixPointers(
            panels=weight.data_ptr(),
            rest=None if self._rest is None else self._rest.data_ptr(),
            bias=None if bias is None else bias.data_ptr(),
            n=count,
            k=width,
        )

    def unpack(self) -> None:
        """Put the weight back into its own order. Nothing may be computed with ``pointers`` afterwards."""
        self._turn(self._weight.shape[1], self._panel)

    def _turn(self, rows: int, columns: int) -> None:
        """Transpose every panel, ``[rows, columns]``."""
        panels = self._weight[: self._whole * self._panel].view(self._whole, rows * columns)
        for first in range(0, self._whole, _AT_A_TIME):
            some = panels[first : first + _AT_A_TIME]
            some.copy_(some.view(-1, rows, columns).transpose(1, 2).reshape(some.shape))
