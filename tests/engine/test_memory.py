"""The pool is sized by what is really free."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.errors import WorkerError
from engine.memory import MAX_AUTO_BLOCKS, available_bytes, pool_blocks

MIB = 2**20


def blocks(requested: int, available: int, *, bytes_per_block: int = MIB, block_size: int = 16) -> int:
    return pool_blocks(requested, available=available, bytes_per_block=bytes_per_block, block_size=block_size)


def test_an_automatic_pool_takes_a_part_of_what_is_free() -> None:
    assert blocks(0, 1000 * MIB) == 400
    assert blocks(0, 10**6 * MIB) == MAX_AUTO_BLOCKS
    assert pool_blocks(0, available=1000 * MIB, bytes_per_block=MIB, block_size=16, share=0.1) == 100


def test_too_little_memory_is_refused_with_the_figures() -> None:
    assert blocks(0, 80 * MIB) == 32  # 512 tokens
    with pytest.raises(WorkerError, match="79 MiB are free, and a KV pool for 512 tokens needs 80 MiB"):
        blocks(0, 79 * MIB)


def test_a_requested_pool_is_made_or_refused_never_changed() -> None:
    assert blocks(100, 100 * MIB) == 100
    assert blocks(1, 100 * MIB) == 1
    with pytest.raises(WorkerError, match="--kv-blocks to 100"):
        blocks(101, 100 * MIB)


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
