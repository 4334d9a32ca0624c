"""A runner without a model: the test double of the ``Runner`` seam.

What it "computes" for a token depends on every token before it, as read back through the block table it was given. A
block that is wrong, stale or not computed yet therefore changes the text, as it would with a real model.

After some tokens each token of the vocabulary has a made-up probability, which is what log-probabilities are told of:
the greedy token is the most likely one, and following the ids from there (and from the last to 0) each is less likely
than the one before by the same factor. Greedy token and factor are drawn from all that was read. Tokens drawn with a
temperature come from anywhere in the vocabulary. Penalties and biases change nothing here.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from hashlib import blake2b
from typing import Final

from engine.batch import Batch, Candidate, Chunk, ChunkResult
from engine.wire import TokenLogprobs

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

    def execute(self, batch: Batch) -> list[ChunkResult]:
        """Copy blocks, write every chunk's digests, then tell what each chunk wants to know."""
        for copy in batch.copies:
            self.pool[copy.target] = [*self.pool[copy.source]]
        for chunk in batch.chunks:
            self._write(chunk)
        return [self._result(chunk) for chunk in batch.chunks]

    def _write(self, chunk: Chunk) -> None:
        for position, token in enumerate(chunk.tokens, chunk.start):
            before = self._read(chunk.block_table, position - 1) if position else b""
            block, slot = divmod(position, self.block_size)
            self.pool[chunk.block_table[block]][slot] = _digest(before, token)
        self.computed_tokens += len(chunk.tokens)

    def _read(self, block_table: list[int], position: int) -> bytes:
        block, slot = divmod(position, self.block_size)
        return self.pool[block_table[block]][slot]

    def _result(self, chunk: Chunk) -> ChunkResult:
        scores = tuple(self._score(chunk))
        if not chunk.sample:
            return ChunkResult(prompt_logprobs=scores)
        digests = [self._read(chunk.block_table, i) for i in range(chunk.start + len(chunk.tokens))]
        sampling = chunk.sampling
        forbidden = self.eos if chunk.output_index < sampling.min_tokens else frozenset[int]()
        distribution = _Distribution(_state(digests), self.vocab_size)
        if chunk.candidates:
            candidates = distribution.candidates(chunk.candidates, forbidden, sampling.logprobs)
            return ChunkResult(prompt_logprobs=scores, candidates=tuple(candidates))
        draw = f"{chunk.seed}/{chunk.output_index}".encode() if sampling.temperature else b""
        token = _next_token(digests, draw, self.vocab_size, forbidden)
        logprobs = None if sampling.logprobs is None else distribution.tell(token, sampling.logprobs)
        return ChunkResult(token, logprobs, scores)

    def _score(self, chunk: Chunk) -> Iterator[TokenLogprobs]:
        """The log-probabilities of the prompt tokens that follow the scored positions."""
        for position in chunk.scored:
            assert chunk.history is not None
            digests = [self._read(chunk.block_table, i) for i in range(position + 1)]
            token = chunk.history.tokens[position + 1]
            yield _Distribution(_state(digests), self.vocab_size).tell(token, chunk.sampling.prompt_logprobs or 0)


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


def _state(digests: list[bytes], draw: bytes = b"") -> int:
    return int.from_bytes(_digest(b"".join(digests) + draw, len(digests)), "little")


def _next_token(digests: list[bytes], draw: bytes, vocab_size: int, forbidden: frozenset[int]) -> int:
    token = _state(digests, draw) % vocab_size
    while token in forbidden:
        token = (token + 1) % vocab_size
    return token


class _Distribution:
    """The made-up probabilities of the next token (see the module)."""

    def __init__(self, state: int, vocab_size: int) -> None:
        self._first = state % vocab_size
        self._factor = 0.5 + (state >> 48) / 2**17  # below 1
        self._scale = math.log1p(-self._factor) - math.log1p(-(self._factor**vocab_size))
        self._vocab_size = vocab_size

    def tell(self, token: int, count: int) -> TokenLogprobs:
        """The place of one token, and the ``count`` most likely ones."""
        rank = (token - self._first) % self._vocab_size
        top = tuple(((self._first + i) % self._vocab_size, self._logprob(i)) for i in range(count))
        return TokenLogprobs(token, self._logprob(rank), rank + 1, top)

    def candidates(self, count: int, forbidden: frozenset[int], logprobs: int | None) -> list[Candidate]:
        """The ``count`` most likely tokens that are not forbidden."""
        top = self.tell(self._first, min(self._vocab_size, count + len(forbidden))).top
        return [
            Candidate(token, score, None if logprobs is None else self.tell(token, logprobs))
            for token, score in top
            if token not in forbidden
        ][:count]

    def _logprob(self, rank: int) -> float:
        """Of the token that ``rank`` others are more likely than."""
        return self._scale + rank * math.log(self._factor)
