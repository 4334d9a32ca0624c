"""What tests do to a block manager of blocks of 16 tokens, in short words."""

from __future__ import annotations

from engine.blocks import BlockManager, BlockTable
from engine.errors import NoSpaceError

BLOCK = 16
ROOT = b"namespace-number"


def tok(first: int, count: int) -> list[int]:
    return list(range(100 + first, 100 + first + count))


def new(num_blocks: int, **options: object) -> BlockManager:
    return BlockManager(num_blocks, BLOCK, **options)  # type: ignore[arg-type]


def allocate(blocks: BlockManager, tokens: list[int], root: bytes | None = ROOT) -> BlockTable:
    table = BlockTable(list(tokens), root)
    blocks.allocate(table)
    return table


def compute(blocks: BlockManager, tokens: list[int], root: bytes | None = ROOT) -> BlockTable:
    """Allocate and compute all of it."""
    table = allocate(blocks, tokens, root)
    blocks.commit(table, len(tokens))
    return table


def warm(blocks: BlockManager, tokens: list[int]) -> BlockTable:
    """Compute and free again, so that its full blocks are idle and hittable."""
    table = compute(blocks, tokens)
    blocks.free(table)
    return table


def lookup(blocks: BlockManager, tokens: list[int], root: bytes = ROOT) -> int:
    return blocks.lookup(BlockTable(list(tokens), root))


def append(blocks: BlockManager, table: BlockTable, token: int) -> None:
    table.tokens.append(token)
    try:
        blocks.extend(table)
    except NoSpaceError:
        table.tokens.pop()
        raise


def keys_of(blocks: BlockManager, tokens: list[int]) -> list[bytes]:
    table = BlockTable(list(tokens), ROOT)
    blocks.lookup(table)
    return table.keys
