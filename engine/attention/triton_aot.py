"""Compile the Triton kernels ahead of time, for GPUs that are not there: ``python -m engine.attention.triton_aot``.

It proves that every configuration that ``engine.attention.triton_tiles`` can choose compiles for each target and takes
no more shared memory than the target has. No GPU and no driver is needed; Triton brings the assemblers.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as compile_source
from triton.runtime.jit import JITFunction

from engine.attention.triton_cache import cache_constants, cache_kernel
from engine.attention.triton_paged import (
    attention_constants,
    attention_kernel,
    compile_options,
    merge_constants,
    merge_kernel,
)
from engine.attention.triton_tiles import TileShape, layer_shapes

__all__ = ["DIMS", "DTYPES", "TARGETS", "Compiled", "Target", "Variant", "compile_variant", "main", "variants"]

DTYPES: Final = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
"""Dtypes of the pool, by Triton's names."""

DIMS: Final = (64, 128, 256)
"""Head dimensions; others are computed with the next larger one."""

# A usual model: 32 query and 8 key/value heads. Neither changes the memory a tile takes.
_KV_HEADS: Final = 8
_GROUP: Final = 4
_BLOCK_SIZE: Final = 16

_POOL_POINTERS: Final = frozenset({"output", "query", "key", "value", "key_pool", "value_pool", "sinks"})
_FLOAT_POINTERS: Final = frozenset({"slot_sums", "slot_peaks", "slot_totals"})
_TABLE_POINTERS: Final = frozenset({"block_tables", "tiles", "merges"})
_OPTIONAL: Final = frozenset({"sinks", "softcap", "window"})


class Target(msgspec.Struct, frozen=True):
    """A GPU architecture: ``shared_limit`` is the bytes of shared memory (LDS) that one program may take."""

    name: str
    backend: str
    arch: int | str
    warp_size: int
    shared_limit: int


TARGETS: Final = {
    target.name: target
    for target in (
        Target("sm_80", "cuda", 80, 32, 163 * 1024),
        Target("sm_90", "cuda", 90, 32, 227 * 1024),
        Target("gfx942", "hip", "gfx942", 64, 64 * 1024),
    )
}


class Variant(msgspec.Struct, frozen=True):
    """One kernel in one configuration; ``extras``: with window, softcap and sinks, or with none of them."""

    kernel: str
    dtype: str
    dim: int
    shape: TileShape | None = None
    extras: bool = False

    def __str__(self) -> str:
        size = f" {self.shape.rows}x{self.shape.keys}" if self.shape else ""
        return f"{self.kernel} {self.dtype} dim {self.dim}{size}{' extras' if self.extras else ''}"


class Compiled(msgspec.Struct, frozen=True):
    """What came out: ``shared`` in bytes, and the assembly text (PTX or AMDGCN)."""

    target: Target
    variant: Variant
    shared: int
    assembly: str
    seconds: float


def variants() -> Iterator[Variant]:
    """Every configuration that is shipped."""
    for dtype, torch_dtype in DTYPES.items():
        for dim in DIMS:
            for shape in layer_shapes(dim, torch_dtype.itemsize):
                for extras in (False, True):
                    yield Variant("attention", dtype, dim, shape, extras)
                    if shape.sliced:
                        yield Variant("merge", dtype, dim, shape, extras)
            yield Variant("cache", dtype, dim)


def compile_variant(variant: Variant, target: Target) -> Compiled:
    """Compile one kernel for one target, through Triton's cache.

    Raises:
        RuntimeError: Triton is in interpreter mode, or the kernel takes more shared memory than the target has.
        triton.errors.TritonError: it does not compile.
    """
    kernel, constants, options = _configuration(variant, hip=target.backend == "hip")
    if not isinstance(kernel, JITFunction):
        raise RuntimeError("nothing can be compiled while TRITON_INTERPRET is set")
    omitted = set() if variant.extras else _OPTIONAL.intersection(kernel.arg_names)
    constants = {**constants, **dict.fromkeys(omitted)}
    signature = {name: _type(name, variant.dtype, constants) for name in kernel.arg_names}
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(kernel.arg_names)
        if name not in constants and name not in {"scale", "softcap", "window"}
    }
    started = time.perf_counter()
    compiled = compile_source(
        ASTSource(kernel, signature, constexprs=constants, attrs=aligned),
        target=GPUTarget(target.backend, target.arch, target.warp_size),
        options=options,
    )
    seconds = time.perf_counter() - started
    shared: int = compiled.metadata.shared
    if shared > target.shared_limit:
        raise RuntimeError(f"{variant} takes {shared} bytes of shared memory; {target.name} has {target.shared_limit}")
    assembly: str = compiled.asm["amdgcn" if target.backend == "hip" else "ptx"]
    return Compiled(target, variant, shared, assembly, seconds)


def _configuration(variant: Variant, *, hip: bool) -> tuple[Any, dict[str, int | None], dict[str, int]]:
    """The kernel of a variant, its constants and Triton's options."""
    heads = {"kv_heads": _KV_HEADS, "block_size": _BLOCK_SIZE, "key_dim": variant.dim, "value_dim": variant.dim}
    if variant.shape is None:
        return cache_kernel, {**cache_constants(**heads)}, {}
    options = compile_options(variant.shape, hip=hip)
    if variant.kernel == "merge":
        constants = merge_constants(variant.shape, kv_heads=_KV_HEADS, group=_GROUP, value_dim=variant.dim)
        return merge_kernel, {**constants}, options
    return attention_kernel, {**attention_constants(variant.shape, group=_GROUP, **heads)}, options


def _type(name: str, dtype: str, constants: Mapping[str, int | None]) -> str:
    if name in constants:
        return "constexpr"
    if name in _POOL_POINTERS:
        return f"*{dtype}"
    if name in _FLOAT_POINTERS:
        return "*fp32"
    if name in _TABLE_POINTERS:
        return "*i32"
    if name == "slots":
        return "*i64"
    return "fp32" if name in {"scale", "softcap"} else "i32"


def main(arguments: list[str] | None = None) -> int:
    """Compile everything and print a line for each: target, configuration, shared memory, seconds."""
    parser = argparse.ArgumentParser(prog="python -m engine.attention.triton_aot", description=main.__doc__)
    parser.add_argument("targets", nargs="*", default=list(TARGETS), metavar="TARGET", help=f"of {', '.join(TARGETS)}")
    names: list[str] = parser.parse_args(arguments).targets
    if unknown := [name for name in names if name not in TARGETS]:
        parser.error(f"unknown target {', '.join(unknown)}; known: {', '.join(TARGETS)}")
    for name in names:
        for variant in variants():
            compiled = compile_variant(variant, TARGETS[name])
            limit = compiled.target.shared_limit
            print(f"{name:7} {variant!s:36} {compiled.shared:7d} of {limit} B {compiled.seconds:6.1f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
