"""The C++ kernels as Python functions over tensors."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, byref, c_float, c_int, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import Any, Final

import torch

from engine.errors import KernelError

__all__ = ["FEW_ROWS", "AttentionArguments", "BatchArguments", "Kernels", "KvPointers", "LayerPointers"]


class AttentionArguments(Structure):
    """``headstart_attention`` of kernels.h, field by field."""

    _fields_ = (
        *((name, c_void_p) for name in ("query", "key", "value", "out", "pool_keys", "pool_values")),
        *((name, c_void_p) for name in ("key_scales", "value_scales", "sinks")),
        *((name, c_int64) for name in ("query_token", "query_head", "key_token", "key_head")),
        *((name, c_int64) for name in ("value_token", "value_head")),
        *((name, c_void_p) for name in ("slots", "tasks", "row_token", "row_position", "tables")),
        *((name, c_void_p) for name in ("merges", "merge_slots", "partials")),
        *((name, c_int32) for name in ("tokens", "task_count", "merge_count", "heads", "kv_heads")),
        *((name, c_int32) for name in ("key_dim", "value_dim", "block", "kind", "window")),
        ("scaling", c_float),
        ("softcap", c_float),
    )


class LayerPointers(Structure):
    """``headstart_layer``."""

    _fields_ = (
        *((name, c_void_p) for name in ("input_norm", "qkv", "qkv_bias", "query_norm", "key_norm")),
        *((name, c_void_p) for name in ("output", "output_bias", "mlp_norm", "gate_up", "gate_up_bias")),
        ("down", c_void_p),
        ("down_bias", c_void_p),
        ("scaling", c_float),
        ("kind", c_int32),
    )


class KvPointers(Structure):
    """``headstart_kv``."""

    _fields_ = tuple((name, c_void_p) for name in ("keys", "values", "key_scales", "value_scales"))


class BatchArguments(Structure):
    """``headstart_batch``."""

    _fields_ = (
        *((name, c_void_p) for name in ("layers", "pool", "attentions", "cos", "sin", "hidden", "normed", "qkv")),
        *((name, c_void_p) for name in ("attended", "gate_up", "product")),
        *((name, c_int32) for name in ("layer_count", "tokens", "width", "intermediate", "heads", "kv_heads", "dim")),
        ("eps", c_float),
    )


FEW_ROWS: Final = 32
"""Up to here ``Kernels.linear`` is faster than a general matrix product."""

_TASK_BYTES: Final = 6 * 4
_MERGE_BYTES: Final = 3 * 4


class Kernels:
    """A loaded library. Tensors are float32 and contiguous in their last dimension; that is the caller's duty."""

    def __init__(self, path: Path) -> None:
        """Load the library and let it compute on as many threads as torch does now.

        Raises:
            KernelError: it does not load, or was not built from these sources.
        """
        try:
            library: Any = ctypes.CDLL(str(path))
            for name, arguments in _SIGNATURES.items():
                function = getattr(library, name)
                function.argtypes = arguments
                function.restype = None
        except (OSError, AttributeError) as error:
            raise KernelError(f"{path} cannot be loaded: {error}") from error
        sizes = (c_int32 * 7)()
        library.headstart_layout(sizes)
        structures = [ctypes.sizeof(kind) for kind in (LayerPointers, KvPointers, BatchArguments)]
        if sizes[:6] != [ctypes.sizeof(AttentionArguments), _TASK_BYTES, _MERGE_BYTES, *structures]:
            raise KernelError(f"{path} does not fit this version of the program")
        library.headstart_set_threads(torch.get_num_threads())
        self._library = library
        self.vector = int(sizes[6])
        """Floats per vector; dimensions are padded to a multiple of it."""

    def attend(self, arguments: AttentionArguments) -> None:
        """Store K and V and attend, see attention.cpp."""
        self._library.headstart_attend(byref(arguments))

    def layers(self, arguments: BatchArguments) -> None:
        """Compute all layers of a model over a batch of few tokens, see layers.cpp."""
        self._library.headstart_layers(byref(arguments))

    def linear(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, *, add: bool
    ) -> None:
        """``out (+)= x @ weight.T + bias``: ``[rows, k]``, ``[n, k]`` contiguous, ``[n]``, ``[rows, n]``."""
        self._library.headstart_linear(
            x.data_ptr(),
            x.stride(0),
            weight.data_ptr(),
            None if bias is None else bias.data_ptr(),
            out.data_ptr(),
            out.stride(0),
            x.shape[0],
            weight.shape[0],
            weight.shape[1],
            add,
        )

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> None:
        """``[rows, width]`` contiguous, normalized and scaled by ``weight`` into ``out``."""
        self._library.headstart_rms_norm(x.data_ptr(), weight.data_ptr(), out.data_ptr(), x.shape[0], x.shape[1], eps)

    def rotate(
        self,
        heads: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        query_heads: int,
        norms: tuple[torch.Tensor, torch.Tensor] | None,
        eps: float,
    ) -> None:
        """Rotate ``heads``, ``[rows, heads, dim]``, in place by ``cos`` and ``sin``, ``[rows, dim / 2]`` contiguous.

        ``norms`` are the weights by which the first ``query_heads`` and the others are normalized before.
        """
        query_norm, key_norm = (None, None) if norms is None else (norms[0].data_ptr(), norms[1].data_ptr())
        self._library.headstart_rotate(
            heads.data_ptr(),
            heads.stride(0),
            cos.data_ptr(),
            sin.data_ptr(),
            query_norm,
            key_norm,
            heads.shape[0],
            query_heads,
            heads.shape[1],
            heads.shape[2],
            eps,
        )

    def silu_product(self, gate_up: torch.Tensor, out: torch.Tensor) -> None:
        """``silu(gate) * up`` of ``[rows, 2 * width]`` into ``[rows, width]``, both contiguous."""
        self._library.headstart_silu_product(gate_up.data_ptr(), out.data_ptr(), out.shape[0], out.shape[1])


_SIGNATURES: Final[dict[str, tuple[Any, ...]]] = {
    "headstart_attend": (POINTER(AttentionArguments),),
    "headstart_layers": (POINTER(BatchArguments),),
    "headstart_layout": (POINTER(c_int32),),
    "headstart_set_threads": (c_int,),
    "headstart_linear": (c_void_p, c_int64, *[c_void_p] * 3, c_int64, *[c_int] * 4),
    "headstart_rms_norm": (*[c_void_p] * 3, c_int, c_int, c_float),
    "headstart_rotate": (c_void_p, c_int64, *[c_void_p] * 4, *[c_int] * 4, c_float),
    "headstart_silu_product": (c_void_p, c_void_p, c_int, c_int),
}
