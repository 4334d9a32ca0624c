"""The pool is sized by what is really free."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from engine.errors import WorkerError
from engine.memory import MAX_AUTO_BLOCKS, PoolShape, available_bytes, pool_blocks

MIB = 2**20


PLAIN = PoolShape(block_size=16, block_bytes=MIB)
WINDOWED = PoolShape(block_size=16, block_bytes=MIB, window_block_bytes=3 * MIB, window=128, max_batch_tokens=512)


def blocks(requested: int, available: int, *, shape: PoolShape = PLAIN) -> int:
    return pool_blocks(requested, available=available, shape=shape)


def test_an_automatic_pool_takes_a_part_of_what_is_free() -> None:
    assert blocks(0, 1000 * MIB) == 400
    assert blocks(0, 10**6 * MIB) == MAX_AUTO_BLOCKS
    assert pool_blocks(0, available=1000 * MIB, shape=PLAIN, share=0.1) == 100


def test_too_little_memory_is_refused_with_the_figures() -> None:
    assert blocks(0, 80 * MIB) == 32  # 512 tokens
    with pytest.raises(WorkerError, match="79 MiB are free, and a KV pool for 512 tokens needs 80 MiB"):
        blocks(0, 79 * MIB)


def test_a_requested_pool_is_made_or_refused_never_changed() -> None:
    assert blocks(100, 100 * MIB) == 100
    assert blocks(1, 100 * MIB) == 1
    with pytest.raises(WorkerError, match="--kv-blocks to 100"):
        blocks(101, 100 * MIB)


def test_layers_with_a_window_get_fewer_blocks_but_room_for_a_step() -> None:
    assert PLAIN.window_blocks(4096) == 0
    assert WINDOWED.window_blocks(4096) == 2048
    assert WINDOWED.window_blocks(64) == 41  # 128 + 512 tokens
    assert WINDOWED.window_blocks(30) == 30
    wide = msgspec.structs.replace(WINDOWED, window=1536)
    assert wide.window_blocks(4096) == 3072
    assert msgspec.structs.replace(wide, window=10**6).window_blocks(4096) == 4096


def test_a_pool_of_two_kinds_of_blocks_fits_to_the_byte() -> None:
    assert WINDOWED.total_bytes(1000) == 2500 * MIB
    assert WINDOWED.total_bytes(64) == (64 + 3 * 41) * MIB
    for free in (5 * MIB, 187 * MIB, 2500 * MIB, 10**6 * MIB):
        count = WINDOWED.fitting(free)
        assert WINDOWED.total_bytes(count) <= free < WINDOWED.total_bytes(count + 1)
    assert blocks(0, 2500 * MIB, shape=WINDOWED) == 400
    assert blocks(1000, 2500 * MIB, shape=WINDOWED) == 1000
    with pytest.raises(WorkerError, match=r"1001 KV blocks need 2,504 MiB, .* lower --kv-blocks to 1000"):
        blocks(1001, 2500 * MIB, shape=WINDOWED)


def test_room_is_told_by_the_kind_of_blocks_that_ends_first() -> None:
    assert PLAIN.requests(640, 1024) == 10
    assert WINDOWED.requests(640, 1024) == 10
    # With 1,024 tokens in its window a request needs as many blocks of each kind, and there are half as many.
    assert msgspec.structs.replace(WINDOWED, window=1024).requests(640, 1024) == 5


def machine(tmp_path: Path, free: int, cgroup: str) -> tuple[Path, Path]:
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(f"MemTotal: 99999999 kB\nMemFree: 1 kB\nMemAvailable: {free // 1024} kB\n")
    (proc / "self" / "cgroup").write_text(cgroup)
    return proc, cgroups


def write(folder: Path, files: dict[str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)


def test_without_limits_the_machine_decides(tmp_path: Path) -> None:
    proc, cgroups = machine(tmp_path, 5000 * MIB, "0::/\n")
    assert available_bytes(proc, cgroups) == 5000 * MIB
    write(cgroups, {"memory.stat": "inactive_file 0\n"})  # the root group has no memory.max
    assert available_bytes(proc, cgroups) == 5000 * MIB


def test_the_tightest_limit_above_the_process_decides(tmp_path: Path) -> None:
    proc, cgroups = machine(tmp_path, 5000 * MIB, "0::/outer/inner\n")
    inner = cgroups / "outer" / "inner"
    stat = f"anon 5\ninactive_file {100 * MIB}\nactive_file 7\n"
    write(inner, {"memory.max": "max\n", "memory.current": f"{300 * MIB}\n", "memory.stat": stat})
    write(inner.parent, {"memory.max": f"{1000 * MIB}\n", "memory.current": f"{400 * MIB}\n", "memory.stat": stat})
    assert available_bytes(proc, cgroups) == 700 * MIB  # reclaimable files count as free


def test_limits_of_version_1_are_read_too(tmp_path: Path) -> None:
    proc, cgroups = machine(tmp_path, 5000 * MIB, "5:cpu:/\n4:memory:/box\n")
    files = {"memory.limit_in_bytes": f"{800 * MIB}\n", "memory.usage_in_bytes": f"{300 * MIB}\n"}
    write(cgroups / "memory" / "box", files | {"memory.stat": f"total_inactive_file {50 * MIB}\n"})
    assert available_bytes(proc, cgroups) == 550 * MIB


def test_this_machine_has_memory() -> None:
    assert available_bytes() > MIB
