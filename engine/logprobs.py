"""How likely tokens were: log-probabilities, ranks and the most likely alternatives, from rows of logits."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.wire import TokenLogprobs

__all__ = ["candidate_logprobs", "token_logprobs"]


def token_logprobs(logits: torch.Tensor, token_ids: Sequence[int], counts: Sequence[int]) -> list[TokenLogprobs]:
    """What the model thought of one token per row, in its own distribution.

    Args:
        logits: ``[rows, vocabulary]``, any float dtype, as the model computed them; computed on in float32.
        token_ids: the token of each row.
        counts: how many of the most likely tokens each row tells.
    """
    logprobs = logits.float().log_softmax(dim=-1)
    chosen = logprobs.gather(1, torch.tensor(token_ids, device=logits.device)[:, None])
    return [
        TokenLogprobs(token_id, logprob, rank, top[:count])
        for token_id, logprob, rank, top, count in zip(
            token_ids,
            chosen[:, 0].tolist(),
            _ranks(logprobs, chosen),
            _tops(logprobs, max(counts)),
            counts,
            strict=True,
        )
    ]


def candidate_logprobs(logits: torch.Tensor, token_ids: Sequence[int], count: int) -> list[TokenLogprobs]:
    """The same for several tokens in the same place, whose logits are ``[vocabulary]``."""
    logprobs = logits.float().log_softmax(dim=-1)[None]
    chosen = logprobs[0, torch.tensor(token_ids, device=logits.device), None]
    (top,) = _tops(logprobs, count)
    return [
        TokenLogprobs(token_id, logprob, rank, top)
        for token_id, logprob, rank in zip(token_ids, chosen[:, 0].tolist(), _ranks(logprobs, chosen), strict=True)
    ]


def _ranks(logprobs: torch.Tensor, chosen: torch.Tensor) -> list[int]:
    """For each row of ``chosen``, ``[n, 1]``, its place in the row of ``logprobs`` or in the only one."""
    ranks: list[int] = ((logprobs > chosen).sum(dim=-1) + 1).tolist()
    return ranks


def _tops(logprobs: torch.Tensor, count: int) -> list[tuple[tuple[int, float], ...]]:
    """The ``count`` most likely tokens of each row, or all there are."""
    if not count:
        return [()] * len(logprobs)
    values, ids = logprobs.topk(min(count, logprobs.shape[-1]), dim=-1)
    return [tuple(zip(*row, strict=True)) for row in zip(ids.tolist(), values.tolist(), strict=True)]
