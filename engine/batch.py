"""What the scheduler hands to the model runner for one step, free of torch so that both sides test apart."""

from __future__ import annotations

from typing import Protocol

import msgspec

from engine.wire import Sampling, TokenLogprobs

__all__ = ["Batch", "BlockCopy", "Candidate", "Chunk", "ChunkResult", "History", "Runner"]


class History(msgspec.Struct, frozen=True, eq=False, weakref=True):
    """All tokens of one sequence so far, of which the first ``prompt_tokens`` are its prompt.

    ``tokens`` is the sequence's own list, to be read only; it grows, but what is in it never changes. Each sequence has
    one object of its own, under which a runner may keep (weakly) what it has derived from the tokens.
    """

    tokens: list[int]
    prompt_tokens: int


class Chunk(msgspec.Struct, frozen=True):
    """Consecutive tokens of one sequence to be computed in this step.

    ``tokens`` are the ids at positions ``start .. start+len-1``; a decode is a chunk of one token. ``block_table`` maps
    block index to physical block and covers every position up to the end of the chunk; so does ``window_table`` for the
    layers with a sliding window, where there are any, though what stands in it before their window means nothing.
    ``sample`` is True when the chunk reaches the sequence's end and its next token is wanted; the draw is fixed by
    ``seed`` and ``output_index`` (how many tokens this sequence has generated before), never by the rest of the batch.

    With ``candidates`` nothing is drawn: a beam wants to know so many ways to go on.

    ``scored`` are those positions of the chunk after which a prompt token follows whose log-probability is wanted.
    ``history`` may be None only where nothing is scored and neither penalties nor a bias are asked for.

    A chunk without tokens computes nothing: it is one more draw from where the chunk before it has ended, for another
    choice of the same prompt.
    """

    request_id: int
    tokens: list[int]
    start: int
    block_table: list[int]
    sample: bool
    sampling: Sampling
    seed: int
    output_index: int
    history: History | None = None
    scored: range = range(0)
    candidates: int = 0
    window_table: list[int] = []


class BlockCopy(msgspec.Struct, frozen=True):
    """A block whose content is to be copied: from ``source`` to ``target``.

    Likewise the blocks of the layers with a sliding window, ``window``, where there are any.
    """

    source: int
    target: int
    window: tuple[int, int] | None = None


class Batch(msgspec.Struct, frozen=True):
    """One step's work: prefill chunks and decodes mixed, in scheduling order.

    ``copies`` come before any chunk is computed. No block that is copied to is copied from in the same batch.
    """

    chunks: list[Chunk]
    copies: list[BlockCopy] = []


class Candidate(msgspec.Struct, frozen=True):
    """A token with which a beam could go on. ``score`` is its log-probability there, penalties and biases included.

    ``logprobs`` tells of it what ``Sampling.logprobs`` asks for.
    """

    token_id: int
    score: float
    logprobs: TokenLogprobs | None = None


class ChunkResult(msgspec.Struct, frozen=True):
    """What came of one chunk.

    ``token`` is the next token where one was wanted, ``logprobs`` how likely it was (see ``Sampling.logprobs``).
    ``candidates`` are the most likely next tokens in order, as many as were wanted; those that may not be drawn are
    passed over.
    ``prompt_logprobs`` has one entry for each position in ``Chunk.scored``: that of the prompt token after it.
    """

    token: int | None = None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    candidates: tuple[Candidate, ...] = ()


class Runner(Protocol):
    """Computes batches. Owns the weights and the KV pool; knows block numbers but not what they are shared for."""

    def execute(self, batch: Batch) -> list[ChunkResult]:
        """Write the chunks' K and V into their blocks and return one result per chunk, in order.

        K and V of all earlier positions of each chunk are in its blocks already. ``min_tokens`` and
        ``ignore_eos`` of the sampling are honoured here only as far as they forbid end-of-sequence tokens to be
        drawn.
        """
        ...
