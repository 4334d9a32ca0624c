"""How likely tokens were: log-probabilities, ranks and the most likely alternatives, from rows of logits."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.wire import TokenLogprobs

__all__ = ["token_logprobs"]


def token_logprobs(logits: torch.Tensor, token_ids: Sequence[int], counts: Sequence[int]) -> list[TokenLogprobs]:
    """What the model thought of one token per row, in its own distribution.

    Args:
        logits: ``[rows, vocabulary]``, any float dtype, as the model computed them; computed on in float32.
        token_ids: the token of each row.
        counts: how many of the most likely tokens each row tells.
    """
    logprobs = logits.float().log_softmax(dim=-1)
    chosen = logprobs.gather(1, torch.tensor(token_ids, device=logits.device)[:, None])
    ranks = ((logprobs > chosen).sum(dim=-1) + 1).tolist()
    most = min(max(counts), logprobs.shape[-1])
    if most:
        values, ids = logprobs.topk(most, dim=-1)
        tops = [tuple(zip(*row, strict=True)) for row in zip(ids.tolist(), values.tolist(), strict=True)]
    else:
        tops = [()] * len(ranks)
    return [
        TokenLogprobs(token_id, logprob, rank, top[:count])
        for token_id, logprob, rank, top, count in zip(
            token_ids, chosen[:, 0].tolist(), ranks, tops, counts, strict=True
        )
    ]
