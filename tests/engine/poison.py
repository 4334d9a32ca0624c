"""Makes the KV blocks that no token to come may see unusable, so that reading them shows."""

from __future__ import annotations

import msgspec
import torch

from engine.batch import Batch, Chunk, ChunkResult

from .conftest import ModelEngine

__all__ = ["poison"]


def poison(engine: ModelEngine) -> None:
    """From now on, in every step, make the window blocks that nobody needs NaN, which spreads from where it is read.

    What a chunk's table says of places before its window points to such a block, too.
    """
    pool, windows = engine.runner._pool, engine.core._blocks._windows
    assert windows is not None
    window, size = engine.core.info.window, pool.block_size
    execute = engine.runner.execute

    def fill(blocks: list[int], value: float) -> None:
        for layer in pool.windowed:
            pool.keys[layer][blocks] = pool.values[layer][blocks] = value

    def spoiled(chunk: Chunk, block: int) -> Chunk:
        gone = max(0, chunk.start - window + 1) // size
        return msgspec.structs.replace(chunk, window_table=[block] * gone + chunk.window_table[gone:])

    def poisoned(batch: Batch) -> list[ChunkResult]:
        unused = [*windows._empty]
        fill(unused, torch.nan)
        chunks = [spoiled(chunk, unused[0]) for chunk in batch.chunks] if unused else batch.chunks
        results = execute(msgspec.structs.replace(batch, chunks=chunks))
        # Finite from here on: of a block that a sequence has begun to fill the rest is read, and weighs nothing.
        fill(unused, 1e4)
        return results

    engine.runner.execute = poisoned  # type: ignore[method-assign]
