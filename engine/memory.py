"""How many KV blocks fit into this machine's, or this container's, free memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from engine.errors import WorkerError

__all__ = ["GPU_MEMORY_SHARE", "MAX_AUTO_BLOCKS", "MEMORY_SHARE", "MIN_POOL_TOKENS", "available_bytes", "pool_blocks"]

MAX_AUTO_BLOCKS: Final = 4096
"""A pool in main memory that is sized by itself has no more blocks."""

MIN_POOL_TOKENS: Final = 512
"""A pool sized by itself holds at least one request of this many tokens, or the engine does not start."""

MEMORY_SHARE: Final = 0.4
"""A pool sized by itself takes this much of the free memory; the rest is for activations, the gateway and all else."""

GPU_MEMORY_SHARE: Final = 0.85
"""The same on a GPU, which serves nothing else; the rest is for activations."""


def pool_blocks(
    requested: int,
    *,
    available: int,
    bytes_per_block: int,
    block_size: int,
    share: float = MEMORY_SHARE,
    most: int = MAX_AUTO_BLOCKS,
) -> int:
    """The number of blocks to make: ``requested``, or by free memory when that is 0.

    ``available`` is what is free after the weights are loaded, in bytes; a pool sized by itself takes at most ``share``
    of it and ``most`` blocks. ``block_size`` is in tokens.

    Raises:
        WorkerError: that many, or the least useful number, does not fit.
    """
    fitting = available // bytes_per_block
    if requested:
        if requested > fitting:
            raise WorkerError(
                f"{requested} KV blocks need {_mib(requested * bytes_per_block)}, {_mib(available)} are free: "
                f"lower --kv-blocks to {fitting} or less, or 0 to size the pool by itself"
            )
        return requested
    least = -(-MIN_POOL_TOKENS // block_size)
    blocks = min(most, int(available * share) // bytes_per_block)
    if blocks < least:
        raise WorkerError(
            f"too little memory: {_mib(available)} are free, and a KV pool for {MIN_POOL_TOKENS} tokens "
            f"needs {_mib(int(least * bytes_per_block / share))}"
        )
    return blocks


def available_bytes(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Memory that can be taken without swapping: of the machine, and of the control groups this process is in."""
    return min([_machine_bytes(proc), *_cgroup_bytes(proc, cgroups)])


def _machine_bytes(proc: Path) -> int:
    try:
        for line in (proc / "meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    # Not Linux: half of what is built in, as what is free is not told.
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _cgroup_bytes(proc: Path, cgroups: Path) -> Iterator[int]:
    """What each memory limit above this process leaves; nothing where there is none."""
    try:
        entries = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for entry in entries:
        _, controllers, path = entry.split(":", 2)
        if not controllers:  # version 2
            root, limit, usage, reclaimable = cgroups, "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            root, limit, usage = cgroups / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            reclaimable = "total_inactive_file"
        else:
            continue
        group = root / path.lstrip("/")
        for directory in (group, *group.parents):
            try:
                most, used = (directory / limit).read_text(), (directory / usage).read_text()
                statistics = (directory / "memory.stat").read_text()
            except OSError:
                most = "max"  # the root has no limit; inside a container the path may not exist
            if most.strip() != "max":
                # Files that the kernel would drop first count as used, but are free for us.
                cached = dict(line.split() for line in statistics.splitlines()).get(reclaimable, "0")
                yield max(0, int(most) - int(used) + int(cached))
            if directory == root:
                break


def _mib(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB"
