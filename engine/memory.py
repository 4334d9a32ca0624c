"""How many KV blocks fit into this machine's, or this container's, free memory."""

from __future__ import annotations

import bisect
import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from engine.errors import WorkerError
from engine.windows import window_span

__all__ = [
    "GPU_MEMORY_SHARE",
    "MAX_AUTO_BLOCKS",
    "MEMORY_SHARE",
    "MIN_POOL_TOKENS",
    "PoolShape",
    "available_bytes",
    "pool_blocks",
]

MAX_AUTO_BLOCKS: Final = 4096
"""A pool in main memory that is sized by itself has no more blocks."""

MIN_POOL_TOKENS: Final = 512
"""A pool sized by itself holds at least one request of this many tokens, or the engine does not start."""

MEMORY_SHARE: Final = 0.4
"""A pool sized by itself takes this much of the free memory; the rest is for activations, the gateway and all else."""

GPU_MEMORY_SHARE: Final = 0.85
"""The same on a GPU, which serves nothing else; the rest is for activations."""

_TYPICAL_TOKENS: Final = 2048
_LEAST_WINDOW_SHARE: Final = 0.5


class PoolShape(msgspec.Struct, frozen=True):
    """What blocks of ``block_size`` tokens take in the layers that see everything, and in those with a window.

    ``block_bytes`` and ``window_block_bytes`` are those of one block over all layers of each kind. Layers of the second
    kind see the last ``window`` tokens; a step computes up to ``max_batch_tokens``.
    """

    block_size: int
    block_bytes: int
    window_block_bytes: int = 0
    window: int = 0
    max_batch_tokens: int = 0

    def window_blocks(self, num_blocks: int) -> int:
        """How many blocks the layers with a window get next to ``num_blocks`` of the others; 0 when there are none.

        A request of ``_TYPICAL_TOKENS`` takes the same part of both; what is left keeps prefixes hittable. In any case
        a whole step of one prompt fits, which sees a window of tokens before it.
        """
        if not self.window:
            return 0
        share = min(1.0, max(_LEAST_WINDOW_SHARE, self.window / _TYPICAL_TOKENS))
        at_once = window_span(self.window + self.max_batch_tokens, self.block_size)
        return min(num_blocks, max(at_once, math.ceil(share * num_blocks)))

    def total_bytes(self, num_blocks: int) -> int:
        """Memory of the whole pool."""
        return num_blocks * self.block_bytes + self.window_blocks(num_blocks) * self.window_block_bytes

    def fitting(self, size: int, most: int = sys.maxsize) -> int:
        """How many blocks, up to ``most``, fit into ``size`` bytes."""
        # The layers with a window get half of the others' blocks at least.
        most = min(most, 2 * size // (self.block_bytes + self.window_block_bytes))
        return bisect.bisect_right(range(1, most + 1), size, key=self.total_bytes)

    def requests(self, num_blocks: int, tokens: int) -> int:
        """How many requests of so many tokens find room in a pool of ``num_blocks`` at once."""
        blocks = -(-tokens // self.block_size)
        room = num_blocks // blocks
        if self.window:
            room = min(room, self.window_blocks(num_blocks) // min(blocks, window_span(self.window, self.block_size)))
        return room


def pool_blocks(
    requested: int, *, available: int, shape: PoolShape, share: float = MEMORY_SHARE, most: int = MAX_AUTO_BLOCKS
) -> int:
    """The number of blocks to make: ``requested``, or by free memory when that is 0.

    ``available`` is what is free after the weights are loaded, in bytes; a pool sized by itself takes at most ``share``
    of it and ``most`` blocks.

    Raises:
        WorkerError: that many, or the least useful number, does not fit.
    """
    if requested:
        if shape.total_bytes(requested) > available:
            raise WorkerError(
                f"{requested} KV blocks need {_mib(shape.total_bytes(requested))}, {_mib(available)} are free: "
                f"lower --kv-blocks to {shape.fitting(available)} or less, or 0 to size the pool by itself"
            )
        return requested
    least = -(-MIN_POOL_TOKENS // shape.block_size)
    blocks = shape.fitting(int(available * share), most)
    if blocks < least:
        raise WorkerError(
            f"too little memory: {_mib(available)} are free, and a KV pool for {MIN_POOL_TOKENS} tokens "
            f"needs {_mib(int(shape.total_bytes(least) / share))}"
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
