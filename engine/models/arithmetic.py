"""What a lean forward is made of: the same few operations by PyTorch, and by our C++ kernels where they are built.

Tensors are ``[rows, width]``, contiguous in their last dimension. Results go into ``out``, which the caller reuses.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch.nn import functional

from engine.native.library import FEW_ROWS, Kernels

__all__ = ["Arithmetic", "KernelArithmetic", "TorchArithmetic"]

Norms = tuple[torch.Tensor, torch.Tensor]


class Arithmetic(Protocol):
    """The operations of a Llama layer."""

    name: str

    def linear(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, *, add: bool = False
    ) -> None:
        """``out (+)= x @ weight.T + bias``."""
        ...

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> None:
        """``x`` over the root of its mean square, times ``weight``."""
        ...

    def rotate(
        self,
        heads: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        query_heads: int,
        norms: Norms | None,
        eps: float,
    ) -> None:
        """Normalize (with ``norms``, for the first ``query_heads`` and the others) and rotate ``heads`` in place.

        ``heads`` is ``[rows, heads, dim]``; ``cos`` and ``sin`` are ``[rows, dim / 2]``.
        """
        ...

    def silu_product(self, gate_up: torch.Tensor, out: torch.Tensor) -> None:
        """``silu(gate) * up`` of the two halves of ``gate_up``."""
        ...


class TorchArithmetic:
    """By PyTorch, in any float dtype."""

    name = "torch"

    def linear(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, *, add: bool = False
    ) -> None:
        """See ``Arithmetic``."""
        if add:
            torch.addmm(out, x, weight.T, out=out)
        elif bias is not None:
            torch.addmm(bias, x, weight.T, out=out)
            return
        else:
            torch.mm(x, weight.T, out=out)
        if bias is not None:
            out += bias

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> None:
        """See ``Arithmetic``."""
        out.copy_(functional.rms_norm(x, weight.shape, weight, eps))

    def rotate(
        self,
        heads: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        query_heads: int,
        norms: Norms | None,
        eps: float,
    ) -> None:
        """See ``Arithmetic``."""
        if norms is not None:
            for part, weight in ((heads[:, :query_heads], norms[0]), (heads[:, query_heads:], norms[1])):
                part.copy_(functional.rms_norm(part, weight.shape, weight, eps))
        low, high = heads.chunk(2, dim=-1)
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        rotated = low * cos - high * sin
        high.mul_(cos).addcmul_(low, sin)
        low.copy_(rotated)

    def silu_product(self, gate_up: torch.Tensor, out: torch.Tensor) -> None:
        """See ``Arithmetic``."""
        gate, up = gate_up.chunk(2, dim=-1)
        torch.mul(functional.silu(gate), up, out=out)


class KernelArithmetic:
    """By our C++ kernels, in float32; products of many rows stay with PyTorch."""

    name = "kernels"

    def __init__(self, kernels: Kernels) -> None:
        self.kernels = kernels
        self._many = TorchArithmetic()
        self.rms_norm = kernels.rms_norm
        self.rotate = kernels.rotate
        self.silu_product = kernels.silu_product

    def linear(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, *, add: bool = False
    ) -> None:
        """See ``Arithmetic``."""
        if x.shape[0] > FEW_ROWS:
            self._many.linear(x, weight, bias, out, add=add)
        else:
            self.kernels.linear(x, weight, bias, out, add=add)
