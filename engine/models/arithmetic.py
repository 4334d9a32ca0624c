"""The operations of a Llama layer by PyTorch, in any float dtype.

Tensors are ``[rows, width]``, contiguous in their last dimension. Results go into ``out``, which the caller reuses.
"""

from __future__ import annotations

import torch
from torch.nn import functional

__all__ = ["linear", "rms_norm", "rotate", "silu_product"]


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, *, add: bool = False
) -> None:
    """``out (+)= x @ weight.T + bias``."""
    if add:
        torch.addmm(out, x, weight.T, out=out)
    elif bias is not None:
        torch.addmm(bias, x, weight.T, out=out)
        return
    else:
        torch.mm(x, weight.T, out=out)
    if bias is not None:
        out += bias


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> None:
    """``x`` over the root of its mean square, times ``weight``."""
    out.copy_(functional.rms_norm(x, weight.shape, weight, eps))


def rotate(
    heads: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    query_heads: int,
    norms: tuple[torch.Tensor, torch.Tensor] | None,
    eps: float,
) -> None:
    """Normalize (with ``norms``, for the first ``query_heads`` and the others) and rotate ``heads`` in place.

    ``heads`` is ``[rows, heads, dim]``; ``cos`` and ``sin`` are ``[rows, dim / 2]``.
    """
    if norms is not None:
        for part, weight in ((heads[:, :query_heads], norms[0]), (heads[:, query_heads:], norms[1])):
            part.copy_(functional.rms_norm(part, weight.shape, weight, eps))
    low, high = heads.chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    rotated = low * cos - high * sin
    high.mul_(cos).addcmul_(low, sin)
    low.copy_(rotated)


def silu_product(gate_up: torch.Tensor, out: torch.Tensor) -> None:
    """``silu(gate) * up`` of the two halves of ``gate_up``."""
    gate, up = gate_up.chunk(2, dim=-1)
    torch.mul(functional.silu(gate), up, out=out)
