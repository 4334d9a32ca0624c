"""Penalties and biases: how a request changes its logits before anything is drawn from them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from weakref import WeakKeyDictionary

import torch

from engine.batch import Chunk, History
from engine.wire import Sampling

__all__ = ["Penalties", "changes_logits"]


def changes_logits(sampling: Sampling) -> bool:
    """Whether a request has a penalty or a bias at all."""
    return bool(
        sampling.presence_penalty
        or sampling.frequency_penalty
        or sampling.repetition_penalty != 1.0
        or sampling.logit_bias
    )


class Penalties:
    """Applies penalties and biases. Owns what has been counted of each sequence, for as long as the sequence lives.

    First a token that is in the prompt or was generated is made less likely by the factor ``repetition_penalty``:
    a positive logit is divided by it, any other multiplied. Then ``presence_penalty`` is subtracted for each token that
    was generated, ``frequency_penalty`` as often as it was, and the bias is added. (These are vLLM's and, for the
    factor, transformers' definitions.)
    """

    def __init__(self) -> None:
        self._counted: WeakKeyDictionary[History, _Counted] = WeakKeyDictionary()

    def apply(self, logits: torch.Tensor, chunk: Chunk) -> None:
        """Change ``logits``, float32 ``[vocabulary]``, in place. Only tokens that are new since the last time count."""
        history = chunk.history
        assert history is not None
        counted = self._counted.get(history)
        if counted is None:
            counted = self._counted[history] = _Counted(chunk.sampling, logits)
        counted.advance(history)
        if counted.factor is not None:
            torch.where(logits > 0, logits / counted.factor, logits * counted.factor, out=logits)
        if counted.addend is not None:
            logits += counted.addend


class _Counted:
    """What one sequence's tokens so far do to the logits: a factor and an addend per token of the vocabulary."""

    def __init__(self, sampling: Sampling, logits: torch.Tensor) -> None:
        self._sampling = sampling
        self._tokens = 0  # so many are counted
        self._generated: Counter[int] = Counter()
        self._bias = dict(sampling.logit_bias)
        self.factor = torch.ones_like(logits) if sampling.repetition_penalty != 1.0 else None
        self.addend: torch.Tensor | None = None
        if sampling.presence_penalty or sampling.frequency_penalty or sampling.logit_bias:
            self.addend = torch.zeros_like(logits)
            self._update(self._bias)

    def advance(self, history: History) -> None:
        """Count what has come since the last time."""
        known, self._tokens = self._tokens, len(history.tokens)
        new = history.tokens[known:]
        if not new:
            return
        if self.factor is not None:
            self.factor[new] = self._sampling.repetition_penalty
        generated = new[max(0, history.prompt_tokens - known) :]
        if generated and self.addend is not None:
            self._generated.update(generated)
            self._update(set(generated))

    def _update(self, token_ids: Iterable[int]) -> None:
        """Bring the addend of these tokens up to date, from the counts alone: however these came, it is the same."""
        assert self.addend is not None
        presence, frequency = self._sampling.presence_penalty, self._sampling.frequency_penalty
        ids = list(token_ids)
        values = [
            self._bias.get(token, 0.0) - (count * frequency + presence if (count := self._generated[token]) else 0.0)
            for token in ids
        ]
        self.addend[ids] = self.addend.new_tensor(values)
