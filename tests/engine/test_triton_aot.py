"""The Triton kernels compile for GPUs that are not there, within their shared memory.

Left to ``python -m engine.attention.triton_aot``, which compiles all: float16, whose tiles are those of bfloat16; the
kernels without window, softcap and sinks, which are parts of those with them; and float32 for sm_90, which uses no
matrix unit and so is what sm_80 gets, with less shared memory.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed (it exists for Linux only)")
if os.environ.get("TRITON_INTERPRET", "0") != "0":
    pytest.skip("nothing is compiled while TRITON_INTERPRET is set", allow_module_level=True)

from engine.attention.triton_aot import DIMS, DTYPES, TARGETS, Target, Variant, compile_variant, main, variants
from engine.attention.triton_tiles import layer_shapes

SHIPPED = list(variants())
SHORT = [
    variant
    for variant in SHIPPED
    if (variant.kernel == "attention" and variant.extras and variant.dtype != "fp16")
    or (variant.kernel == "merge" and variant.extras and variant.dtype == "bf16" and variant.dim == 128)
    or (variant.kernel == "cache" and variant.dtype == "bf16" and variant.dim == 128)
]


@pytest.fixture(autouse=True)
def fresh_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing compiled earlier counts, and nothing is left in the user's cache."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@pytest.mark.parametrize(
    ("variant", "target"),
    [
        pytest.param(variant, target, id=f"{variant}-{target.name}".replace(" ", "-"))
        for variant in SHORT
        for target in TARGETS.values()
        if (variant.dtype, target.name) != ("fp32", "sm_90")
    ],
)
def test_every_tile_compiles_within_the_shared_memory(variant: Variant, target: Target) -> None:
    compiled = compile_variant(variant, target)
    assert compiled.shared <= target.shared_limit
    # Half precision runs on the matrix units; float32 on NVIDIA keeps all its bits, which they do not.
    if variant.kernel == "attention" and variant.shape is not None:
        wide = variant.shape.rows >= 64
        unit = {"sm_80": "mma.sync", "sm_90": "wgmma" if wide else "mma.sync", "gfx942": "v_mfma"}[target.name]
        assert (unit in compiled.assembly) == (variant.dtype == "bf16" or target.backend == "hip")


def test_every_shape_is_among_the_variants() -> None:
    shipped = {(variant.dtype, variant.dim, variant.shape) for variant in SHIPPED if variant.kernel == "attention"}
    assert shipped == {
        (name, dim, shape)
        for name, dtype in DTYPES.items()
        for dim in DIMS
        for shape in layer_shapes(dim, dtype.itemsize)
    }


def test_more_shared_memory_than_the_target_has_is_an_error() -> None:
    tight = Target("tight", "cuda", 80, 32, shared_limit=1000)
    variant = next(variant for variant in SHORT if variant.dim == 64 and variant.kernel == "attention")
    with pytest.raises(RuntimeError, match="shared memory; tight has 1000"):
        compile_variant(variant, tight)


def test_an_unknown_target_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["sm_1"])
    assert "unknown target sm_1" in capsys.readouterr().err
