"""Kernels for processors with narrower vectors than this one's compute the same, up to the order of their sums."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest
import torch

from engine.attention.backend import KvPool, LayerOptions, LayerShape, SequenceSlice
from engine.attention.cpp_cpu import CppCpuAttention
from engine.attention.reference import ReferenceAttention
from engine.models.packing import PackedMatrix, PanelMemory
from engine.native.build import build_kernels, compiler
from engine.native.library import Kernels

ARCHITECTURES = {"x86-64-v3": 8, "x86-64": 4}  # floats of a vector


def can_run(architecture: str) -> bool:
    if platform.machine() != "x86_64" or compiler() is None:
        return False
    wanted = {"avx2", "fma", "bmi2", "f16c"} if architecture == "x86-64-v3" else set()
    return wanted <= set(Path("/proc/cpuinfo").read_text().split())


@pytest.fixture(scope="module", params=ARCHITECTURES)
def narrow(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    if not can_run(request.param):
        pytest.skip(f"{request.param} cannot be built or run here")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HEADSTART_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("HEADSTART_KERNEL_FLAGS", f"-march={request.param}")
        kernels = Kernels(build_kernels())
    assert kernels.vector == ARCHITECTURES[request.param]
    return kernels


def test_products_are_those_of_torch_in_every_form_of_weight(narrow: Kernels) -> None:
    torch.manual_seed(1)
    scale = torch.rand(75, 6, 1).half().float()
    numbers, signed = torch.randint(0, 16, (75, 6, 32)).float(), torch.randint(-127, 128, (75, 6, 32)).float()
    numbers[..., 0], numbers[..., 1], signed[..., 0] = 0, 15, 127
    weights = {
        0: torch.randn(75, 192),
        1: torch.randn(75, 191).bfloat16().float(),
        2: (numbers * scale - 2 * scale).view(75, 192),
        3: (signed * scale).view(75, 192),
    }
    for kind, weight in weights.items():
        packed = PackedMatrix(weight.clone(), None, narrow, PanelMemory(weight.numel()))
        assert packed.pointers.kind == kind
        for rows in (1, 6, 7, 40):
            x = torch.randn(rows, weight.shape[1])
            out, alone = torch.empty(rows, 75), torch.empty(1, 75)
            narrow.multiply(x, packed.pointers, out)
            torch.testing.assert_close(out, x @ weight.T, atol=1e-2, rtol=1e-4)
            narrow.multiply(x[-1:], packed.pointers, alone)
            assert torch.equal(alone, out[-1:])


@pytest.mark.parametrize("window", [None, 70])
def test_attention_is_that_of_the_reference(narrow: Kernels, window: int | None) -> None:
    shape, options = LayerShape(kv_heads=2, key_dim=24, value_dim=40), LayerOptions(0.2, window)
    slices = [SequenceSlice(0, 50, 200, list(range(16))), SequenceSlice(50, 1, 140, list(range(20, 29)))]
    outputs = []
    for backend in (CppCpuAttention(narrow), ReferenceAttention()):
        torch.manual_seed(2)
        pool = KvPool([shape], 32, 16, torch.float32)
        rows = pool.rows(torch.arange(32 * 16), shape.kv_heads)
        pool.write(0, rows, torch.randn(2, 32 * 16, 24), torch.randn(2, 32 * 16, 40))
        query, key, value = torch.randn(6, 51, 24), torch.randn(2, 51, 24), torch.randn(2, 51, 40)
        outputs.append(backend.begin(pool, slices).attend(0, query, key, value, options))
    torch.testing.assert_close(*outputs, atol=1e-5, rtol=1e-4)
