"""A weight matrix in the order in which the C++ kernels read it, and in as few bits as hold it exactly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch

from engine.allocator import mapped_zeros
from engine.native.library import Kernels, MatrixPointers

__all__ = ["PackedMatrix", "PanelMemory"]

_AT_A_TIME: Final = 8
"""Panels, which are copied while they are turned."""

_SCALED: Final = 32
"""Weights in a row that share a scale and an offset."""


class PanelMemory:
    """Owns the memory of panels that do not lie where their weights do: one after the other, and in huge pages."""

    def __init__(self, words: int) -> None:
        """Room for that many words of 32 bits. What is not taken costs nothing but addresses."""
        self._free = mapped_zeros((words,), torch.int32)

    def take(self, words: int) -> torch.Tensor:
        """Zeros, int32 ``[words]``."""
        if words > len(self._free):
            return mapped_zeros((words,), torch.int32)
        taken, self._free = self._free[:words], self._free[words:]
        return taken


class PackedMatrix:
    """A weight ``[n, k]`` in panels of ``Kernels.panel`` rows, each turned so that its columns lie together.

    A product of few or many rows then reads it from memory once, in one line, and without a horizontal sum.

    Where fewer bits than float32's hold every weight exactly, that is what is kept, in memory of its own: for weights
    that were bfloat16 once, and for those that were made from GGUF's formats of 4 and 8 bits with a scale for 32 of
    them. It is proved for each matrix, to the last bit. The kernels make the same float32 of them as they read, so that
    results do not change, and less is read. The weight itself is needed no more.

    Any other weight is turned in place, as it takes the same memory either way: whoever else sees it sees it packed
    until ``unpack``. Its last rows, which fill no panel, are left as they are; the kernels read a padded copy of them.
    """

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, kernels: Kernels, memory: PanelMemory | None = None
    ) -> None:
        """Pack ``weight``, contiguous and float32; in place where there is no ``memory`` for anything else."""
        count, width = weight.shape
        self._panel = kernels.panel
        self._bias = bias
        self._rest: torch.Tensor | None = None
        self._turned: torch.Tensor | None = None
        self._words: torch.Tensor | None = None
        self.pointers = MatrixPointers(bias=None if bias is None else bias.data_ptr(), n=count, k=width)
        if memory is None or not any(self._pack(weight, kind, memory) for kind in _ENCODINGS):
            self._pack_in_place(weight)

    @property
    def bytes_read(self) -> int:
        """By a product."""
        return 4 * (self._words.numel() if self._words is not None else self.pointers.n * self.pointers.k)

    def unpack(self) -> None:
        """Put a weight that was turned back in order. Nothing may be computed with ``pointers`` afterwards."""
        if self._turned is not None:
            self._turn(self._turned, self._turned.shape[1], self._panel)

    def _pack(self, weight: torch.Tensor, kind: int, memory: PanelMemory) -> bool:
        """Whether that kind keeps every weight. Then it is what lies in ``memory``."""
        encoded = []
        for rows in torch.split(weight, _AT_A_TIME * self._panel):
            if (words := _ENCODINGS[kind](rows)) is None:
                return False
            encoded.append(words)
        panels = -(-len(weight) // self._panel)
        words = memory.take(panels * self._panel * encoded[0].shape[1]).view(panels, -1, self._panel)
        for first, some in zip(range(0, panels, _AT_A_TIME), encoded, strict=True):
            if left := len(some) % self._panel:
                some = torch.cat((some, some.new_zeros(self._panel - left, some.shape[1])))
            words[first : first + _AT_A_TIME] = some.view(-1, self._panel, words.shape[1]).transpose(1, 2)
        self._words = words
        self.pointers.kind = kind
        self.pointers.panels, self.pointers.rest = words.data_ptr(), words[-1].data_ptr()
        return True

    def _pack_in_place(self, weight: torch.Tensor) -> None:
        width = weight.shape[1]
        if left := len(weight) % self._panel:
            self._rest = weight.new_zeros(width, self._panel)
            self._rest[:, :left] = weight[-left:].T
            self.pointers.rest = self._rest.data_ptr()
        self._turned = weight
        self._turn(weight, self._panel, width)
        self.pointers.panels = weight.data_ptr()

    def _turn(self, weight: torch.Tensor, rows: int, columns: int) -> None:
        """Transpose every whole panel, ``[rows, columns]``."""
        whole = len(weight) // self._panel
        panels = weight[: whole * self._panel].view(whole, rows * columns)
        for first in range(0, whole, _AT_A_TIME):
            some = panels[first : first + _AT_A_TIME]
            some.copy_(some.view(-1, rows, columns).transpose(1, 2).reshape(some.shape))


def _as_nibbles(rows: torch.Tensor) -> torch.Tensor | None:
    """Of what GGUF's Q4_1 was: 16 values in equal distances from the least of a block on."""
    if rows.shape[1] % _SCALED:
        return None
    blocks = rows.view(len(rows), -1, _SCALED)
    offset = blocks.amin(-1, keepdim=True)
    scale = ((blocks.amax(-1, keepdim=True) - offset) / 15).half().float()
    numbers = ((blocks - offset) / scale.clamp_min(_LEAST)).round_()
    return _scaled_words(blocks, numbers, scale, offset, 4)


def _as_bytes(rows: torch.Tensor) -> torch.Tensor | None:
    """Of what GGUF's Q8_0 was: multiples of a 127th of the largest of a block."""
    if rows.shape[1] % _SCALED:
        return None
    blocks = rows.view(len(rows), -1, _SCALED)
    scale = (blocks.abs().amax(-1, keepdim=True) / 127).half().float()
    numbers = (blocks / scale.clamp_min(_LEAST)).round_() + 128
    return _scaled_words(blocks, numbers, scale, -128 * scale, 8)


def _scaled_words(
    blocks: torch.Tensor, numbers: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor, bits: int
) -> torch.Tensor | None:
    """Words ``[rows, words]`` in the order of kernels.h; None where they do not give ``blocks`` again.

    ``scale`` has the few digits of half precision: its product with a number is exact, and it is all the same whether
    the sum is rounded by itself or in one operation with it.
    """
    most = 2**bits - 1
    if not (_same(numbers.clamp(0, most), numbers) and _same((numbers * scale).add_(offset), blocks)):
        return None
    octets = numbers.to(torch.uint8)
    if bits == 4:
        octets = octets[..., 0::2] | octets[..., 1::2] << 4
    words = octets.contiguous().view(torch.int32)
    return torch.cat((scale.view(torch.int32), offset.contiguous().view(torch.int32), words), -1).flatten(1)


def _as_bfloat16(rows: torch.Tensor) -> torch.Tensor | None:
    halves = rows.bfloat16()
    if not _same(halves.float(), rows):
        return None
    if rows.shape[1] % 2:
        halves = torch.nn.functional.pad(halves, (0, 1))
    return halves.view(torch.int32)


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.int32), other.contiguous().view(torch.int32))


_LEAST: Final = 1e-30
"""Stands for a scale of zero."""

_Encode = Callable[[torch.Tensor], torch.Tensor | None]

_ENCODINGS: Final[dict[int, _Encode]] = {2: _as_nibbles, 3: _as_bytes, 1: _as_bfloat16}
"""By kind of ``headstart_matrix``, the shortest first. They give the words of some rows, None where they do not fit."""
