"""Which attention back end serves a device."""

from __future__ import annotations

import torch

from engine.attention.backend import AttentionBackend
from engine.attention.torch_cpu import TorchCpuAttention
from engine.errors import WorkerError

__all__ = ["attention_backend", "free_device_bytes"]


def attention_backend(device: str) -> AttentionBackend:
    """The back end for ``cpu`` or ``cuda`` (an AMD card under ROCm is ``cuda`` too, as PyTorch names it).

    Raises:
        WorkerError: the device is unknown, there is no such card, or Triton is not installed.
    """
    kind = device.partition(":")[0]
    if kind == "cpu":
        return TorchCpuAttention()
    if kind != "cuda":
        raise WorkerError(f"device {device} is not supported; use cpu or cuda")
    count = torch.cuda.device_count()
    if not count:
        raise WorkerError(f"device {device}: PyTorch finds no GPU; install a CUDA or ROCm build, or use the device cpu")
    if (torch.device(device).index or 0) >= count:
        raise WorkerError(f"device {device}: the last GPU of this machine is cuda:{count - 1}")
    try:
        from engine.attention.triton_backend import TritonAttention
    except ImportError as error:
        raise WorkerError(f"device {device} needs Triton (pip install triton, Linux only): {error}") from error
    return TritonAttention()


def free_device_bytes(device: str) -> int:
    """Memory of a GPU that nobody holds."""
    return int(torch.cuda.mem_get_info(device)[0])
