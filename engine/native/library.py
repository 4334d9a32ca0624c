"""The C++ kernels as Python functions over tensors."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, byref, c_float, c_int, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import Any, Final

import torch

from engine.errors import KernelError

__all__ = ["AttentionArguments", "BatchArguments", "Kernels", "KvPointers", "LayerPointers", "MatrixPointers"]


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


class MatrixPointers(Structure):
    """``headstart_matrix``."""

    _fields_ = (
        *((name, c_void_p) for name in ("panels", "rest", "bias")),
        *((name, c_int32) for name in ("n", "k", "kind")),
    )


class LayerPointers(Structure):
    """``headstart_layer``."""

    _fields_ = (
        *((name, c_void_p) for name in ("input_norm", "query_norm", "key_norm", "mlp_norm")),
        *((name, MatrixPointers) for name in ("qkv", "output", "gate", "up", "down")),
        ("scaling", c_float),
        ("kind", c_int32),
    )


class KvPointers(Structure):
    """``headstart_kv``."""

    _fields_ = tuple((name, c_void_p) for name in ("keys", "values", "key_scales", "value_scales"))


class BatchArguments(Structure):
    """``headstart_batch``."""

    _fields_ = (
        *((name, c_void_p) for name in ("layers", "head", "embedding", "table", "norm", "pool", "attentions")),
        *((name, c_void_p) for name in ("token_ids", "positions", "rows", "cos", "sin")),
        *((name, c_void_p) for name in ("hidden", "normed", "qkv", "attended", "product")),
        *((name, c_void_p) for name in ("last_hidden", "last_attended", "logits")),
        *((name, c_int32) for name in ("layer_count", "tokens", "row_count", "width", "heads", "kv_heads", "dim")),
        ("eps", c_float),
    )


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
        sizes = (c_int32 * 10)()
        library.headstart_layout(sizes)
        structures = [ctypes.sizeof(kind) for kind in (MatrixPointers, LayerPointers, KvPointers, BatchArguments)]
        if sizes[:7] != [ctypes.sizeof(AttentionArguments), _TASK_BYTES, _MERGE_BYTES, *structures]:
            raise KernelError(f"{path} does not fit this version of the program")
        self._library = library
        self.use_threads(torch.get_num_threads())
        self.vector, self.panel, self.group = sizes[7:]
        """Floats per vector, to a multiple of which dimensions are padded; rows of a weight that lie together; and keys
        whose weighted values are summed by themselves."""

    def use_threads(self, count: int) -> None:
        """Compute on ``count`` threads from now on. A setting of the whole process; results do not depend on it."""
        self._library.headstart_set_threads(count)

    def attend(self, arguments: AttentionArguments) -> None:
        """Store K and V and attend, see attention.cpp."""
        self._library.headstart_attend(byref(arguments))

    def forward(self, arguments: BatchArguments) -> None:
        """Compute a batch, see forward.cpp."""
        self._library.headstart_forward(byref(arguments))

    def multiply(self, x: torch.Tensor, weight: MatrixPointers, out: torch.Tensor) -> None:
        """``out = x @ weight.T + bias``: ``[rows, k]``, packed ``[n, k]`` and ``[rows, n]``, contiguous."""
        self._library.headstart_multiply(x.data_ptr(), x.shape[0], byref(weight), out.data_ptr())


_SIGNATURES: Final[dict[str, tuple[Any, ...]]] = {
    "headstart_attend": (POINTER(AttentionArguments),),
    "headstart_forward": (POINTER(BatchArguments),),
    "headstart_layout": (POINTER(c_int32),),
    "headstart_set_threads": (c_int,),
    "headstart_multiply": (c_void_p, c_int, POINTER(MatrixPointers), c_void_p),
}
