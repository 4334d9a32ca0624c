"""From logits to tokens. A draw depends on its request's logits, seed and position alone, never on the batch."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Final

import torch

from engine.batch import Chunk
from engine.errors import EngineError

__all__ = ["sample", "uniform"]

_GREEDY_BELOW: Final = 1e-5
"""A lower temperature would only add rounding to what is the most likely token anyway."""

_FIRST_CANDIDATES: Final = 256


def sample(logits: torch.Tensor, chunks: Sequence[Chunk], eos_token_ids: Sequence[int]) -> list[int]:
    """The next token of each chunk.

    Temperature, then top-k, top-p and min-p, in the order and with the meaning of transformers' logits processors. The
    draw inverts the cumulative distribution in vocabulary order, so that a rounding in the logits moves it by no
    more than that rounding. Before ``min_tokens``, tokens that would end the request are not candidates.

    Args:
        logits: ``[chunks, vocabulary]``, any float dtype; overwritten where tokens are forbidden.
        chunks: whose ``sampling``, ``seed`` and ``output_index`` decide.
        eos_token_ids: the model's own end-of-sequence tokens.

    Raises:
        EngineError: a row has no finite maximum: the model's arithmetic has failed.
    """
    logits = logits.float()
    for row, chunk in enumerate(chunks):
        if forbidden := [token for token in _forbidden(chunk, eos_token_ids) if 0 <= token < logits.shape[-1]]:
            logits[row, forbidden] = float("-inf")
    best, tokens = logits.max(dim=-1)
    if not bool(best.isfinite().all()):
        raise EngineError("the model computed logits that are not finite")
    return [
        int(token) if chunk.sampling.temperature < _GREEDY_BELOW else _draw(logits[row] - best[row], chunk)
        for row, (chunk, token) in enumerate(zip(chunks, tokens.tolist(), strict=True))
    ]


def uniform(seed: int, index: int) -> float:
    """A number in [0, 1) for the ``index``-th draw of a request: a hash of both, so draws need no shared state."""
    counter = seed.to_bytes(16, "little", signed=True) + index.to_bytes(8, "little")
    return int.from_bytes(hashlib.blake2b(counter, digest_size=6).digest(), "little") / 2**48


def _forbidden(chunk: Chunk, eos_token_ids: Sequence[int]) -> list[int]:
    sampling = chunk.sampling
    if chunk.output_index >= sampling.min_tokens:
        return []
    return [*sampling.stop_token_ids, *(() if sampling.ignore_eos else eos_token_ids)]


def _draw(relative: torch.Tensor, chunk: Chunk) -> int:
    """Draw from one row of logits relative to their maximum."""
    sampling = chunk.sampling
    weights = (relative / sampling.temperature).softmax(dim=-1)
    if 0 < sampling.top_k < len(weights):
        least = weights.topk(sampling.top_k).values[-1]
        weights = weights.where(weights >= least, 0.0)
    if sampling.top_p < 1.0:
        weights = weights.where(weights >= _nucleus(weights, sampling.top_p), 0.0)
    if sampling.min_p > 0.0:
        weights = weights.where(weights >= sampling.min_p * weights.max(), 0.0)
    cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
    # Strictly below the total, whose neighbours in float64 are much nearer than the step of ``uniform``.
    target = uniform(chunk.seed, chunk.output_index) * float(cumulative[-1])
    return int(torch.searchsorted(cumulative, target, right=True))


def _nucleus(weights: torch.Tensor, top_p: float) -> float:
    """The smallest weight among the most likely tokens that together reach ``top_p`` of the whole.

    Nearly always a few hundred tokens do, so the vocabulary is not sorted unless they do not.
    """
    wanted = top_p * float(weights.sum(dtype=torch.float64))
    count = _FIRST_CANDIDATES
    while True:
        top = weights.topk(min(count, len(weights))).values
        reached = top.cumsum(dim=-1, dtype=torch.float64) >= wanted
        if bool(reached[-1]) or count >= len(weights):
            return float(top[int(reached.float().argmax())] if bool(reached[-1]) else top[-1])
        count *= 16
