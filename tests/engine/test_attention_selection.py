"""Which back end serves which device, and what is said where none can."""

from __future__ import annotations

import sys

import pytest
import torch

from engine.attention.selection import attention_backend
from engine.errors import WorkerError


def test_the_cpu_needs_no_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    assert attention_backend("cpu").name == "torch_cpu"


@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_a_gpu_gets_the_triton_kernels(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="triton is not installed (it exists for Linux only)")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert attention_backend(device).name == "triton"


def test_without_a_gpu_the_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(WorkerError, match="finds no GPU"):
        attention_backend("cuda")


def test_without_triton_the_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setitem(sys.modules, "triton", None)
    for name in [name for name in sys.modules if name.startswith("engine.attention.triton_")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(WorkerError, match="needs Triton"):
        attention_backend("cuda")


def test_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(WorkerError, match="the last GPU of this machine is cuda:1"):
        attention_backend("cuda:2")


def test_an_unknown_device_is_refused() -> None:
    with pytest.raises(WorkerError, match="use cpu or cuda"):
        attention_backend("tpu")
