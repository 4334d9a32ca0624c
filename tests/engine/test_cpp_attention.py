"""What is special about attention in C++: shared prefixes read once, small number formats, and how work is cut."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from engine.attention.backend import AttentionBackend, KvPool, LayerOptions, LayerShape, SequenceSlice
from engine.attention.cpp_cpu import CppCpuAttention
from engine.attention.reference import ReferenceAttention
from engine.attention.tasks import GROUP_KEYS, AttentionTasks
from engine.attention.torch_cpu import TorchCpuAttention
from engine.errors import KernelError
from engine.native.library import Kernels

BLOCK = 16
SHAPE = LayerShape(kv_heads=2, key_dim=24, value_dim=40)
HEADS = 6
OPTIONS = LayerOptions(0.2)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def filled_pool(dtype: torch.dtype, blocks: int = 80) -> KvPool:
    """A pool in which every slot holds something, written as a step would have."""
    torch.manual_seed(1)
    pool = KvPool([SHAPE], blocks, BLOCK, dtype)
    rows = pool.rows(torch.arange(blocks * BLOCK), SHAPE.kv_heads)
    tokens = blocks * BLOCK
    pool.write(0, rows, torch.randn(2, tokens, SHAPE.key_dim), 10 * torch.randn(2, tokens, SHAPE.value_dim))
    return pool


def attend(backend: AttentionBackend, pool: KvPool, slices: Sequence[SequenceSlice]) -> torch.Tensor:
    tokens = sum(piece.length for piece in slices)
    torch.manual_seed(2)
    query, key = torch.randn(HEADS, tokens, SHAPE.key_dim), torch.randn(2, tokens, SHAPE.key_dim)
    value = torch.randn(2, tokens, SHAPE.value_dim)
    return backend.begin(pool, slices).attend(0, query, key, value, OPTIONS)


def decodes(tables: Sequence[list[int]], starts: Sequence[int]) -> list[SequenceSlice]:
    return [SequenceSlice(i, 1, start, table) for i, (table, start) in enumerate(zip(tables, starts, strict=True))]


def family() -> list[SequenceSlice]:
    """Decodes that share nothing, a little (not worth a task), a long prefix, and a longer one within that."""
    root = list(range(20))
    tables = [
        [*root, 40, 41],
        [*root, 42, 43, 44, 45, 46, 50],
        [*root, 42, 43, 44, 45, 46, 51],
        [*root[:2], 52, 53],
        [60, 61, 62],
        [*root, 63],
        [64],
    ]
    starts = [20 * BLOCK + 17, 25 * BLOCK, 25 * BLOCK + 9, 3 * BLOCK + 1, 40, 20 * BLOCK, 0]
    return decodes(tables, starts)


def keys_read(tasks: AttentionTasks) -> int:
    return sum(tasks.tasks[i + 3] - tasks.tasks[i + 2] for i in range(0, len(tasks.tasks), 6))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
def test_shared_prefixes_give_what_each_sequence_alone_gives(kernels: Kernels, dtype: torch.dtype) -> None:
    pool, reference = filled_pool(dtype), filled_pool(dtype)
    got = attend(CppCpuAttention(kernels), pool, family())
    want = attend(ReferenceAttention(), reference, family())
    torch.testing.assert_close(got, want, atol=2e-4, rtol=2e-4)
    assert all(torch.equal(one, other) for one, other in zip(pool.keys, reference.keys, strict=True))


def test_a_shared_prefix_is_read_once() -> None:
    slices = family()
    whole = sum(piece.start + 1 for piece in slices)
    tasks = AttentionTasks(slices, BLOCK, HEADS // 2, None)
    # Of the 20 blocks that four decodes begin with two whole groups of keys are read once, and of the 25 that two of
    # them begin with the group behind these.
    assert (20 * BLOCK // GROUP_KEYS, 25 * BLOCK // GROUP_KEYS) == (2, 3)
    assert keys_read(tasks) == whole - 3 * 2 * GROUP_KEYS - GROUP_KEYS
    assert keys_read(AttentionTasks(slices, BLOCK, HEADS // 2, window=10_000)) == whole


def test_every_token_meets_every_key_it_sees_exactly_once() -> None:
    slices = [
        *family(),
        SequenceSlice(7, 200, 0, list(range(13))),
        SequenceSlice(207, 5, 300, list(range(20))),
        SequenceSlice(212, 1, 70, [70, 71, 72, 73, 74]),
        SequenceSlice(213, 1, 70, [70, 71, 72, 73, 74]),  # a table that is all the same cannot be told apart
    ]
    for window in (None, 33):
        tasks = AttentionTasks(slices, BLOCK, 3, window)
        met: dict[int, list[tuple[int, int]]] = {}
        for i in range(0, len(tasks.tasks), 6):
            row, rows, first, last, table, _ = tasks.tasks[i : i + 6]
            for token, position in zip(
                tasks.row_token[row : row + rows], tasks.row_position[row : row + rows], strict=True
            ):
                low = 0 if window is None else max(0, position + 1 - window)
                seen = max(first, low), min(last, position + 1)
                if seen[0] < seen[1]:
                    met.setdefault(token, []).append(seen)
                piece = next(one for one in slices if one.first <= token < one.first + one.length)
                needed = -(-last // BLOCK)
                assert list(tasks.tables[table : table + needed]) == piece.block_table[:needed]
        for piece in slices:
            for token in range(piece.first, piece.first + piece.length):
                position = piece.start + token - piece.first
                ranges = sorted(met[token])
                assert ranges[0][0] == (0 if window is None else max(0, position + 1 - window))
                assert ranges[-1][1] == position + 1
                assert all(one[1] == other[0] for one, other in pairwise(ranges))


@pytest.mark.parametrize("backend_name", ["torch_cpu", "cpp_cpu"])
@pytest.mark.parametrize(("dtype", "error"), [(torch.bfloat16, 0.02), (torch.int8, 0.02)], ids=["bfloat16", "int8"])
def test_a_small_number_format_stays_close_to_float32(
    backend_name: str, dtype: torch.dtype, error: float, request: pytest.FixtureRequest
) -> None:
    kernels = request.getfixturevalue("kernels") if backend_name == "cpp_cpu" else None
    backend = CppCpuAttention(kernels) if kernels else TorchCpuAttention()
    slices = [SequenceSlice(0, 70, 300, list(range(24))), SequenceSlice(70, 1, 600, list(range(24, 64)))]
    exact = attend(ReferenceAttention(), filled_pool(torch.float32), slices)
    stored = attend(backend, filled_pool(dtype), slices)
    same = attend(ReferenceAttention(), filled_pool(dtype), slices)
    torch.testing.assert_close(stored, same, atol=1e-3, rtol=1e-3)
    assert 0 < float((stored - exact).norm() / exact.norm()) < error


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
def test_kernel_and_torch_store_the_same_bits(kernels: Kernels, dtype: torch.dtype) -> None:
    slices = [SequenceSlice(0, 70, 0, list(range(5)))]
    pools = [KvPool([SHAPE], 8, BLOCK, dtype) for _ in range(2)]
    for pool, backend in zip(pools, (CppCpuAttention(kernels), TorchCpuAttention()), strict=True):
        attend(backend, pool, slices)
    for name in ("keys", "values", "key_scales", "value_scales"):
        for one, other in zip(getattr(pools[0], name), getattr(pools[1], name), strict=True):
            # int8 divides in one and multiplies with the inverse in the other: a tie may round either way.
            torch.testing.assert_close(one.float(), other.float(), atol=1 if one.dtype == torch.int8 else 0, rtol=1e-6)


def test_a_library_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.so"
    path.write_bytes(b"no library")
    with pytest.raises(KernelError, match="cannot be loaded"):
        Kernels(path)
