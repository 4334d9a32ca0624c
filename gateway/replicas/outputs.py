"""Several outputs of one request as one: what has piled up goes on in one piece."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from operator import attrgetter

from engine.wire import Output

__all__ = ["merged", "runs_merged"]

_choice = attrgetter("index")


def merged(outputs: Sequence[Output]) -> Output:
    """Successive outputs of one choice as one. What is said once (with the first output) is kept."""
    if len(outputs) == 1:
        return outputs[0]
    first, last = outputs[0], outputs[-1]
    return Output(
        first.id,
        "".join([output.text for output in outputs]),
        tuple([token for output in outputs for token in output.token_ids]),
        last.finish_reason,
        first.cached_tokens,
        first.prefill_s,
        first.queue_s,
        last.error,
        first.index,
        tuple([entry for output in outputs for entry in output.logprobs]),
        first.prompt_logprobs,
    )


def runs_merged(outputs: Sequence[Output]) -> list[Output]:
    """The outputs of several choices, those of one choice that follow each other merged."""
    return [merged([*run]) for _, run in groupby(outputs, _choice)]
