"""Memory for tensors: the C allocator keeps what a step frees, and what stays for long lies in huge pages."""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
from collections.abc import Sequence
from typing import Final

import torch

__all__ = ["Buffers", "keep_freed_memory", "mapped_zeros"]

# Parameters of glibc's mallopt, and the largest mmap threshold that all its versions take.
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_MMAP_BYTES: Final = 32 * 2**20
_TRIM_BYTES: Final = 256 * 2**20


def keep_freed_memory() -> None:
    """Let freed memory of up to 256 MiB stay with the process; nothing where the C library cannot.

    Left to itself, glibc returns the tensors of a step to the system and faults every page in again at the next one:
    90,000 page faults in a prefill of 512 tokens, a tenth of its time, and a third of a step of 8 decodes.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _MMAP_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _TRIM_BYTES)


def mapped_zeros(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Zeros on the CPU, in memory that the system gives when it is written to, in huge pages where it has them.

    ``torch.zeros`` writes to all of it at once, in small pages: each is a fault, and one more address to translate.
    """
    memory = mmap.mmap(-1, max(1, math.prod(shape)) * dtype.itemsize, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(AttributeError, OSError):  # systems without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype)[: math.prod(shape)].view(*shape)


class Buffers:
    """Owns the intermediate results of a model, which are overwritten in every step and grow to the largest one."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._buffers: dict[str, torch.Tensor] = {}

    def rows(self, name: str, rows: int, width: int) -> torch.Tensor:
        """The first ``rows`` rows of a contiguous buffer, ``[rows, width]``; a name always has the same width."""
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape[0] < rows:
            buffer = self._buffers[name] = torch.empty(rows, width, dtype=self._dtype)
        return buffer[:rows]
