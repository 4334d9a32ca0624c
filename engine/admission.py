"""Which requests can never be served: bounds on whatever sizes memory or goes into arithmetic."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Final

from engine.beam import candidates_per_beam
from engine.wire import EngineInfo, Sampling, Submit

__all__ = [
    "MAX_BEAM_WIDTH",
    "MAX_BIAS",
    "MAX_BIASED_TOKENS",
    "MAX_LENGTH_PENALTY",
    "MAX_LOGPROBS",
    "MAX_PENALTY",
    "MAX_PROMPT_LOGPROBS",
    "MAX_REPETITION_PENALTY",
    "why_refused",
]

MAX_LOGPROBS: Final = 20
"""So many of the most likely tokens may be asked for at each place."""

MAX_PROMPT_LOGPROBS: Final = 400_000
"""A request is told at most so many log-probabilities of its prompt, as they come in one message (of some 6 MB)."""

MAX_BIASED_TOKENS: Final = 300
MAX_BIAS: Final = 100.0
MAX_PENALTY: Final = 2.0
MAX_REPETITION_PENALTY: Final = 100.0
"""And its inverse at least: logits stay finite."""

MAX_BEAM_WIDTH: Final = 16
MAX_LENGTH_PENALTY: Final = 10.0


def why_refused(
    request: Submit, tokens: Sequence[int], info: EngineInfo, *, max_tokens: int, max_running: int
) -> tuple[str, str] | None:
    """Why a request can never be served by the engine that ``info`` describes, as (code, message) of ``Output.error``.

    ``tokens`` is the decoded prompt, empty when it cannot be decoded; ``max_tokens`` how many tokens it and its output
    may have at most. None when the request can be served.
    """
    if not tokens or request.sampling.max_tokens < 1:
        return "invalid_request", "a request needs at least one prompt token and max_tokens of at least 1"
    if not 1 <= request.n <= max_running:
        return "invalid_request", f"n must lie between 1 and {max_running}, the most that may run at once"
    if min(request.priority, request.class_limit, request.max_cached_blocks) < 0:
        return "invalid_request", "priority, class_limit and max_cached_blocks may not be negative"
    if max(tokens) >= info.vocab_size:
        return "invalid_token", f"token ids must be below the vocabulary size of {info.vocab_size}"
    if len(tokens) >= max_tokens:
        return (
            "context_length_exceeded",
            f"the prompt has {len(tokens)} tokens; prompt and output together may have {max_tokens}",
        )
    fault = next(
        chain(_faults(request.sampling, len(tokens), info.vocab_size), _beam_faults(request, info, max_running)), None
    )
    return None if fault is None else ("invalid_request", fault)


def _faults(sampling: Sampling, prompt_tokens: int, vocab_size: int) -> Iterator[str]:
    """What is out of range. Comparisons are such that NaN never passes."""
    for name, count in (("logprobs", sampling.logprobs), ("prompt_logprobs", sampling.prompt_logprobs)):
        if count is not None and not 0 <= count <= MAX_LOGPROBS:
            yield f"{name} must lie between 0 and {MAX_LOGPROBS}"
    if sampling.prompt_logprobs is not None:
        most = MAX_PROMPT_LOGPROBS // (sampling.prompt_logprobs + 1)
        if prompt_tokens > most:
            yield f"prompt_logprobs of {sampling.prompt_logprobs} are told for prompts of up to {most} tokens"
    for name, penalty in (
        ("presence_penalty", sampling.presence_penalty),
        ("frequency_penalty", sampling.frequency_penalty),
    ):
        if not -MAX_PENALTY <= penalty <= MAX_PENALTY:
            yield f"{name} must lie between {-MAX_PENALTY:g} and {MAX_PENALTY:g}"
    if not 1 / MAX_REPETITION_PENALTY <= sampling.repetition_penalty <= MAX_REPETITION_PENALTY:
        yield f"repetition_penalty must lie between {1 / MAX_REPETITION_PENALTY:g} and {MAX_REPETITION_PENALTY:g}"
    if len(sampling.logit_bias) > MAX_BIASED_TOKENS:
        yield f"logit_bias may name up to {MAX_BIASED_TOKENS} tokens"
    for token, bias in sampling.logit_bias:
        if not 0 <= token < vocab_size:
            yield f"token ids in logit_bias must be below the vocabulary size of {vocab_size}"
        if not abs(bias) <= MAX_BIAS:
            yield f"biases must lie between {-MAX_BIAS:g} and {MAX_BIAS:g}"


def _beam_faults(request: Submit, info: EngineInfo, max_running: int) -> Iterator[str]:
    sampling = request.sampling
    if not sampling.beam_width:
        return
    most = min(MAX_BEAM_WIDTH, max_running)
    if not request.n <= sampling.beam_width <= most:
        yield f"beam_width must lie between n, which is {request.n}, and {most}"
    if not abs(sampling.length_penalty) <= MAX_LENGTH_PENALTY:
        yield f"length_penalty must lie between {-MAX_LENGTH_PENALTY:g} and {MAX_LENGTH_PENALTY:g}"
    endings = len(info.eos_token_ids)
    if candidates_per_beam(sampling, info.eos_token_ids) + endings > info.vocab_size:
        yield f"beam_width is too large for a vocabulary of {info.vocab_size} tokens"
