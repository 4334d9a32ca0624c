"""Runs attention cases in Triton's interpreter, in a process of its own: the mode must be set before the import.

One JSON object per line on standard input is one case, and one on standard output its answer; see ``Case``.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from engine.attention.backend import SequenceSlice

__all__ = ["Answer", "Case"]


class Case(msgspec.Struct, frozen=True):
    """One step over a pool: ``sequences`` are (tokens before, new tokens).

    ``wide`` computes float32 in the wide, unsliced tiles too, which are otherwise for half precision. ``alone`` repeats
    the step for each sequence by itself. ``stale`` spoils the table entries of blocks outside the window.
    """

    name: str
    sequences: tuple[tuple[int, int], ...]
    heads: tuple[int, int] = (2, 1)
    dims: tuple[int, int] = (64, 64)
    dtype: str = "float32"
    block_size: int = 16
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    wide: bool = False
    alone: bool = False
    stale: bool = False


class Answer(msgspec.Struct, frozen=True):
    """How far the result is from the reference in float32, and the pool from the K and V that were to be stored.

    ``plain`` is the distance to the reference without window, softcap and sinks: how much the case can tell.
    """

    error: float
    plain: float
    stored: bool
    same_alone: bool = True


def main() -> None:
    """Answer cases until the input ends."""
    os.environ["TRITON_INTERPRET"] = "1"
    import torch

    torch.set_num_threads(1)
    for line in sys.stdin.buffer:
        answer = compute(msgspec.json.decode(line, type=Case))
        sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
        sys.stdout.buffer.flush()


def compute(case: Case) -> Answer:
    """Compute one case with the kernels and with the reference."""
    import torch

    from engine.attention.backend import KvPool, LayerOptions, LayerShape, SequenceSlice
    from engine.attention.reference import ReferenceAttention
    from engine.attention.triton_backend import TritonAttention
    from engine.attention.triton_tiles import TileShape, layer_shapes

    generator = torch.Generator().manual_seed(7)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    dtype: torch.dtype = getattr(torch, case.dtype)
    heads, kv_heads = case.heads
    layer = LayerShape(kv_heads, *case.dims)
    needed = [-(-(start + length) // case.block_size) for start, length in case.sequences]
    blocks = torch.randperm(sum(needed) + 1, generator=generator).tolist()
    unused = blocks.pop()
    tables = [[blocks.pop() for _ in range(count)] for count in needed]
    starts, lengths = zip(*case.sequences, strict=True)
    firsts = [sum(lengths[:index]) for index in range(len(lengths))]
    slices = [SequenceSlice(*piece) for piece in zip(firsts, lengths, starts, tables, strict=True)]
    rows = sum(lengths)

    # What no token may see is NaN: it would spread.
    pool = KvPool([layer], sum(needed) + 1, case.block_size, dtype)
    for kind in (pool.keys[0], pool.values[0]):
        kind.fill_(torch.nan)
        for start, table in zip(starts, tables, strict=True):
            for position in range(start):
                kind[table[position // case.block_size], :, position % case.block_size] = random(
                    kv_heads, kind.shape[-1]
                )
    expected_pool = KvPool([layer], sum(needed) + 1, case.block_size, torch.float32)
    expected_pool.keys[0].copy_(pool.keys[0])
    expected_pool.values[0].copy_(pool.values[0])

    # As the modules hand them over: the heads of a token side by side, seen with heads first.
    query = random(rows, heads, layer.key_dim).transpose(0, 1)
    key = random(rows, kv_heads, layer.key_dim).transpose(0, 1)
    value = random(rows, kv_heads, layer.value_dim).transpose(0, 1)
    # Large scores: a wrong window, cap or sink shows.
    scale = 3 * layer.key_dim**-0.5
    sinks = torch.linspace(-2, 6, heads) if case.sinks else None
    options = LayerOptions(scale, case.window, case.softcap, sinks)

    def reference(options: LayerOptions) -> torch.Tensor:
        step = ReferenceAttention().begin(expected_pool, slices)
        return step.attend(0, query.float(), key.float(), value.float(), options)

    def shapes(dim: int, itemsize: int) -> tuple[TileShape, ...]:
        return layer_shapes(dim, 2 if case.wide else itemsize)

    backend = TritonAttention(shapes)
    given = [_spoiled(piece, case, unused) for piece in slices] if case.stale else slices
    got = backend.begin(pool, given).attend(0, query, key, value, options)
    same_alone = True
    for piece in slices if case.alone else ():
        part = slice(piece.first, piece.first + piece.length)
        single = [SequenceSlice(0, piece.length, piece.start, piece.block_table)]
        alone = backend.begin(pool, single).attend(0, query[:, part], key[:, part], value[:, part], options)
        same_alone = same_alone and torch.equal(alone, got[part])

    def distance(options: LayerOptions) -> float:
        return float((got.float() - reference(options)).abs().max().nan_to_num(torch.inf))

    error, plain = distance(options), distance(LayerOptions(scale))
    stored = all(
        torch.equal(ours.float().nan_to_num(9e9), theirs.nan_to_num(9e9))
        for ours, theirs in ((pool.keys[0], expected_pool.keys[0]), (pool.values[0], expected_pool.values[0]))
    )
    return Answer(error, plain, stored, same_alone)


def _spoiled(piece: SequenceSlice, case: Case, unused: int) -> SequenceSlice:
    """The slice with the table entries of blocks behind its window as they are once such blocks are freed."""
    assert case.window is not None
    gone = max(0, piece.start - case.window + 1) // case.block_size
    return msgspec.structs.replace(piece, block_table=[unused] * gone + piece.block_table[gone:])


if __name__ == "__main__":
    main()
