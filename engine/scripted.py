"""A runner without a model: the test double of the ``Runner`` seam.

What it "computes" for a token depends on every token before it, as read back through the block table it was given. A
block that is wrong, stale or not computed yet therefore changes the text, as it would with a real model.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from hashlib import blake2b
from typing import Final

from engine.batch import Batch, Chunk

__all__ = ["ScriptedRunner", "scripted_continuation"]

_EMPTY: Final = b"never written"


class ScriptedRunner:
    """A deterministic ``engine.batch.Runner``. Owns a pool with one digest per token in place of K and V.

    The digest at position ``i`` covers the token there and the digest read at ``i - 1``; the next token is drawn from
    all digests of the sequence. A batch's chunks are written in order before any of them is sampled from.
    """

    def __init__(self, num_blocks: int, block_size: int, *, vocab_size: int, eos: Collection[int] = ()) -> None:
        """Draw tokens below ``vocab_size``; those in ``eos`` are passed over while ``Sampling`` forbids them."""
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.eos = frozenset(eos)
        self.pool = [[_EMPTY] * block_size for _ in range(num_blocks)]
        self.computed_tokens = 0

    def execute(self, batch: Batch) -> list[int | None]:
        """Copy blocks, write every chunk's digests, then draw where a token is wanted."""
        for source, target in batch.copies:
            self.pool[target] = [*self.pool[source]]
        for chunk in batch.chunks:
            self._write(chunk)
        return [self._draw(chunk) if chunk.sample else None for chunk in batch.chunks]

    def _write(self, chunk: Chunk) -> None:
        for position, token in enumerate(chunk.tokens, chunk.start):
            before = self._read(chunk.block_table, position - 1) if position else b""
            block, slot = divmod(position, self.block_size)
            self.pool[chunk.block_table[block]][slot] = _digest(before, token)
        self.computed_tokens += len(chunk.tokens)

    def _read(self, block_table: list[int], position: int) -> bytes:
        block, slot = divmod(position, self.block_size)
        return self.pool[block_table[block]][slot]

    def _draw(self, chunk: Chunk) -> int:
        digests = [self._read(chunk.block_table, i) for i in range(chunk.start + len(chunk.tokens))]
        forbidden = self.eos if chunk.output_index < chunk.sampling.min_tokens else frozenset[int]()
        draw = f"{chunk.seed}/{chunk.output_index}".encode() if chunk.sampling.temperature else b""
        return _next_token(digests, draw, self.vocab_size, forbidden)


def scripted_continuation(prompt: Sequence[int], count: int, *, vocab_size: int) -> list[int]:
    """The ``count`` tokens that a greedy request without end-of-sequence tokens must get from a ``ScriptedRunner``."""
    digests: list[bytes] = []
    for token in prompt:
        digests.append(_digest(digests[-1] if digests else b"", token))
    tokens: list[int] = []
    while len(tokens) < count:
        tokens.append(_next_token(digests, b"", vocab_size, frozenset()))
        digests.append(_digest(digests[-1], tokens[-1]))
    return tokens


def _digest(before: bytes, token: int) -> bytes:
    return blake2b(before + token.to_bytes(4, "little"), digest_size=8).digest()


def _next_token(digests: list[bytes], draw: bytes, vocab_size: int, forbidden: frozenset[int]) -> int:
    token = int.from_bytes(_digest(b"".join(digests) + draw, len(digests)), "little") % vocab_size
    while token in forbidden:
        token = (token + 1) % vocab_size
    return token
