"""From logits to tokens. A draw depends on its request's logits, seed and position alone, never on the batch."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import islice
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from engine.batch import Candidate, Chunk, ChunkResult
from engine.errors import EngineError
from engine.logprobs import candidate_logprobs, token_logprobs
from engine.penalties import Penalties, changes_logits
from engine.wire import TokenLogprobs

__all__ = ["Sampler", "uniform"]

_GREEDY_BELOW: Final = 1e-5
"""A lower temperature would only add rounding to what is the most likely token anyway."""


class Sampler:
    """Turns one step's logits into what the chunks asked for. Owns the counts behind the penalties."""

    def __init__(self, eos_token_ids: Sequence[int]) -> None:
        """``eos_token_ids`` are the model's own end-of-sequence tokens."""
        self._eos = eos_token_ids
        self._penalties = Penalties()

    def results(self, logits: torch.Tensor, chunks: Sequence[Chunk]) -> list[ChunkResult]:
        """One result per chunk.

        Args:
            logits: ``[rows, vocabulary]``, any float dtype; may be overwritten. Each chunk has one row for each of its
                scored positions and then, when a next token is wanted, that of its last position.
            chunks: of one step, in the order of the rows.

        Raises:
            EngineError: a row to be drawn from has no finite maximum: the model's arithmetic has failed.
        """
        scored: list[int] = []
        drawn: list[int] = []
        beams: list[int] = []
        rows = 0
        for chunk in chunks:
            scored += range(rows, rows + len(chunk.scored))
            rows += len(chunk.scored)
            if chunk.sample:
                (beams if chunk.candidates else drawn).append(rows)
                rows += 1
        scores = iter(_scores(logits[scored], chunks) if scored else ())
        beam_chunks = [chunk for chunk in chunks if chunk.candidates]
        offers = iter(self.candidates(logits[beams], beam_chunks) if beams else ())
        drawn_chunks = [chunk for chunk in chunks if chunk.sample and not chunk.candidates]
        draws = iter(self.sample(logits if len(drawn) == rows else logits[drawn], drawn_chunks) if drawn else ())
        results = []
        for chunk in chunks:
            candidates = next(offers) if chunk.candidates else ()
            token, logprobs = next(draws) if chunk.sample and not chunk.candidates else (None, None)
            results.append(ChunkResult(token, logprobs, tuple(islice(scores, len(chunk.scored))), candidates))
        return results

    def sample(self, logits: torch.Tensor, chunks: Sequence[Chunk]) -> list[tuple[int, TokenLogprobs | None]]:
        """The next token of each chunk, and how likely it was where that is asked for.

        Penalties and biases (see ``Penalties``) come first. Then temperature, top-k, top-p and min-p, in this order and
        with the meaning of transformers' logits processors. The draw inverts the cumulative distribution in vocabulary
        order, so that a rounding in the logits moves it by no more than that rounding. Before ``min_tokens``, tokens
        that would end the request are not candidates. Log-probabilities are of the logits as they came.

        Args:
            logits: ``[chunks, vocabulary]``, any float dtype; may be overwritten.
            chunks: whose ``sampling``, ``seed`` and ``output_index`` decide.

        Raises:
            EngineError: a row has no finite maximum: the model's arithmetic has failed.
        """
        logits = logits.float()
        asking = [row for row, chunk in enumerate(chunks) if chunk.sampling.logprobs is not None]
        own = logits[asking] if asking else None  # a copy
        for row, chunk in enumerate(chunks):
            if changes_logits(chunk.sampling):
                self._penalties.apply(logits[row], chunk)
            if forbidden := self._forbidden(chunk, logits.shape[-1]):
                logits[row, forbidden] = float("-inf")
        best, most_likely = logits.max(dim=-1)
        _check(best)
        tokens = [
            token if chunk.sampling.temperature < _GREEDY_BELOW else _draw(logits[row] - best[row], chunk)
            for row, (chunk, token) in enumerate(zip(chunks, most_likely.tolist(), strict=True))
        ]
        logprobs: list[TokenLogprobs | None] = [None] * len(tokens)
        if own is not None:
            counts = [chunks[row].sampling.logprobs or 0 for row in asking]
            told = token_logprobs(own, [tokens[row] for row in asking], counts)
            for row, one in zip(asking, told, strict=True):
                logprobs[row] = one
        return list(zip(tokens, logprobs, strict=True))

    def candidates(self, logits: torch.Tensor, chunks: Sequence[Chunk]) -> list[tuple[Candidate, ...]]:
        """For each chunk of a beam the most likely next tokens, as many as it wants to know.

        Their scores are log-probabilities after penalties and biases; nothing else of the sampling counts. Tokens that
        are forbidden before ``min_tokens`` are passed over, which makes no other one more likely.

        Args:
            logits: ``[chunks, vocabulary]``, any float dtype; may be overwritten.
            chunks: whose ``candidates`` and ``sampling`` decide.

        Raises:
            EngineError: a row has no finite maximum.
        """
        logits = logits.float()
        asking = any(chunk.sampling.logprobs is not None for chunk in chunks)
        own = logits.clone() if asking else logits
        for row, chunk in enumerate(chunks):
            if changes_logits(chunk.sampling):
                self._penalties.apply(logits[row], chunk)
        _check(logits.amax(dim=-1))
        scores = logits.log_softmax(dim=-1)
        for row, chunk in enumerate(chunks):
            if forbidden := self._forbidden(chunk, logits.shape[-1]):
                scores[row, forbidden] = float("-inf")
        values, ids = scores.topk(max(chunk.candidates for chunk in chunks), dim=-1)
        offers = []
        for row, chunk in enumerate(chunks):
            token_ids, count = ids[row, : chunk.candidates].tolist(), chunk.sampling.logprobs
            told = [None] * len(token_ids) if count is None else candidate_logprobs(own[row], token_ids, count)
            offers.append(tuple(map(Candidate, token_ids, values[row].tolist(), told)))
        return offers

    def _forbidden(self, chunk: Chunk, vocab_size: int) -> list[int]:
        """Tokens that would end the request before it may end."""
        sampling = chunk.sampling
        if chunk.output_index >= sampling.min_tokens:
            return []
        ending = [*(() if chunk.candidates else sampling.stop_token_ids), *(() if sampling.ignore_eos else self._eos)]
        return [token for token in ending if 0 <= token < vocab_size]


def uniform(seed: int, index: int) -> float:
    """A number in [0, 1) for the ``index``-th draw of a request: a hash of both, so draws need no shared state."""
    counter = seed.to_bytes(16, "little", signed=True) + index.to_bytes(8, "little")
    return int.from_bytes(hashlib.blake2b(counter, digest_size=6).digest(), "little") / 2**48


def _scores(logits: torch.Tensor, chunks: Sequence[Chunk]) -> list[TokenLogprobs]:
    """The log-probabilities of all scored prompt tokens, in order; a row of logits each."""
    token_ids: list[int] = []
    counts: list[int] = []
    for chunk in chunks:
        if chunk.scored:
            assert chunk.history is not None
            token_ids += [chunk.history.tokens[position + 1] for position in chunk.scored]
            counts += [chunk.sampling.prompt_logprobs or 0] * len(chunk.scored)
    return token_logprobs(logits, token_ids, counts)


def _check(best: torch.Tensor) -> None:
    """Raise ``EngineError`` unless each row's best logit is a number."""
    if not bool(best.isfinite().all()):
        raise EngineError("the model computed logits that are not finite")


def _draw(relative: torch.Tensor, chunk: Chunk) -> int:
    """Draw from one row of logits relative to their maximum.

    Each filter leaves the tokens that are at least as likely as a certain one, so that ties stay together. NumPy finds
    that one: it sorts a whole vocabulary, however flat, in less time than PyTorch takes to find its likeliest tokens.
    """
    sampling = chunk.sampling
    weights = (relative / sampling.temperature).softmax(dim=-1).cpu()
    values: npt.NDArray[np.float32] = weights.numpy()  # the same memory
    least = np.float32(0.0)
    if 0 < sampling.top_k < len(values):
        least = np.partition(values, -sampling.top_k)[-sampling.top_k]
    if sampling.top_p < 1.0:
        least = _nucleus(values[values >= least] if least > 0.0 else values, sampling.top_p)
    if sampling.min_p > 0.0:
        least = max(least, np.float32(sampling.min_p) * values.max())
    if least > 0.0:
        values *= values >= least
    cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
    # Strictly below the total, whose neighbours in float64 are much nearer than the step of ``uniform``.
    target = uniform(chunk.seed, chunk.output_index) * float(cumulative[-1])
    return int(torch.searchsorted(cumulative, target, right=True))


def _nucleus(weights: npt.NDArray[np.float32], top_p: float) -> np.float32:
    """The smallest weight among the most likely tokens that together reach ``top_p`` of the whole."""
    ordered = np.sort(weights)[::-1].copy()
    reached = torch.from_numpy(ordered).cumsum(dim=-1, dtype=torch.float64).numpy()
    smallest: np.float32 = ordered[np.searchsorted(reached, top_p * reached[-1])]
    return smallest
