"""What a body's types cannot say: combinations, ranges that depend on the model, and what this engine cannot do yet.

A parameter that would change the answer and is not supported is refused by name; ignoring it would answer a different
question from the one that was asked. Parameters nobody knows are ignored, as OpenAI-compatible servers do.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final

import msgspec

from engine.admission import MAX_BIASED_TOKENS, MAX_PROMPT_LOGPROBS
from engine.wire import EngineInfo, Sampling
from gateway.errors import InvalidRequestError
from gateway.schema import ChatRequest, CompletionRequest, SamplingFields

__all__ = ["Asked", "chat_asked", "check_chat", "check_completion", "completion_asked", "sampling_for"]

COMPLETION_MAX_TOKENS: Final = 16
"""What ``/v1/completions`` generates where nothing is said, as OpenAI documents it. A chat may fill the context."""

MAX_CHOICES: Final = 16
MAX_STOPS: Final = 16
MAX_STOP_LENGTH: Final = 1024
MAX_STOP_TOKEN_IDS: Final = 256

_GREEDY_BELOW: Final = 1e-5
"""Dividing logits by less than this is an argmax, only with a risk of overflow."""

_SEED_RANGE: Final = 2**63
_TOKEN_ID: Final = re.compile(r"0|[1-9][0-9]{0,9}", re.ASCII)


class Asked(msgspec.Struct, frozen=True):
    """What the two routes ask for in different words.

    ``max_tokens`` None is as many as there is room for; 0 is an echo of the prompt alone. ``n`` choices are shown, the
    best of the ``generated`` ones. ``beam_width`` 0 is no search. ``logprobs`` and ``prompt_logprobs`` are the
    alternatives per token that the engine has to tell, None for no log-probabilities at all.
    """

    max_tokens: int | None
    n: int
    generated: int
    beam_width: int
    logprobs: int | None
    prompt_logprobs: int | None


def check_chat(body: ChatRequest, *, tools_supported: bool) -> None:
    """Refuse what a chat request cannot have here.

    Raises:
        InvalidRequestError: ``param`` names the field.
    """
    _check_shared(body)
    _refuse(_unsupported_in_chat(body, tools_supported))
    _check_max_tokens(body.max_tokens, "max_tokens")
    _check_max_tokens(body.max_completion_tokens, "max_completion_tokens")
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequestError("top_logprobs needs logprobs=true.", param="top_logprobs")


def check_completion(body: CompletionRequest) -> None:
    """The same for a text completion."""
    _check_shared(body)
    _refuse(_unsupported_in_completion(body))
    _check_max_tokens(body.max_tokens, "max_tokens", least=0 if body.echo else 1)
    best_of, n = body.best_of or body.n or 1, body.n or 1
    if not n <= best_of <= MAX_CHOICES:
        raise InvalidRequestError(f"best_of must lie between n, {n}, and {MAX_CHOICES}.", param="best_of")
    if body.stream and best_of > n:
        raise InvalidRequestError(
            "best_of cannot be streamed: which choices are best is known at the end.", param="best_of"
        )


def chat_asked(body: ChatRequest) -> Asked:
    """What a chat asks for; ``max_completion_tokens`` goes before the older ``max_tokens``."""
    n = body.n or 1
    return Asked(
        body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens,
        n,
        n,
        n if body.use_beam_search else 0,
        body.top_logprobs or 0 if body.logprobs else None,
        body.prompt_logprobs,
    )


def completion_asked(body: CompletionRequest) -> Asked:
    """What a text completion asks for."""
    n = body.n or 1
    best_of = body.best_of or n
    logprobs = body.logprobs
    if best_of > n and logprobs is None and not body.use_beam_search:
        logprobs = 0  # to find the best
    of_prompt = [body.prompt_logprobs, body.logprobs if body.echo else None]
    return Asked(
        COMPLETION_MAX_TOKENS if body.max_tokens is None else body.max_tokens,
        n,
        n if body.use_beam_search else best_of,
        best_of if body.use_beam_search else 0,
        logprobs,
        max((alternatives for alternatives in of_prompt if alternatives is not None), default=None),
    )


def sampling_for(body: SamplingFields, asked: Asked, prompt_tokens: int, info: EngineInfo) -> Sampling:
    """How the answer is drawn on the engine that ``info`` describes.

    ``max_tokens`` is cut to what the context has left after ``prompt_tokens``; an echo alone generates one token, since
    no engine generates none.

    Raises:
        InvalidRequestError: A value does not fit the model.
    """
    room = info.max_model_len - prompt_tokens
    limit = room if asked.max_tokens is None else min(asked.max_tokens, room)
    if body.min_tokens > limit:
        raise InvalidRequestError(
            f"min_tokens is {body.min_tokens}, but at most {limit} tokens may be generated.", param="min_tokens"
        )
    stop_token_ids = tuple(body.stop_token_ids or ())
    if any(not 0 <= token < info.vocab_size for token in stop_token_ids):
        raise InvalidRequestError(
            f"stop_token_ids must lie between 0 and {info.vocab_size - 1}.", param="stop_token_ids"
        )
    if asked.prompt_logprobs is not None:
        _check_prompt_logprobs(body, asked.n * prompt_tokens * (1 + asked.prompt_logprobs))
    temperature = 1.0 if body.temperature is None else body.temperature
    return Sampling(
        max_tokens=max(1, limit),
        temperature=0.0 if temperature < _GREEDY_BELOW else temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=0 if body.top_k is None or body.top_k < 0 else min(body.top_k, info.vocab_size),
        min_p=body.min_p or 0.0,
        seed=None if body.seed is None else body.seed % _SEED_RANGE,
        stop=_stops(body.stop),
        stop_token_ids=stop_token_ids,
        ignore_eos=body.ignore_eos,
        min_tokens=body.min_tokens,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
        logit_bias=_biases(body.logit_bias, info.vocab_size),
        logprobs=asked.logprobs,
        prompt_logprobs=asked.prompt_logprobs,
        beam_width=asked.beam_width,
        length_penalty=body.length_penalty,
        early_stopping=body.early_stopping,
    )


def _check_shared(body: SamplingFields) -> None:
    if (body.n or 1) > MAX_CHOICES:
        raise InvalidRequestError(f"n may be at most {MAX_CHOICES}.", param="n")
    if body.stream_options is not None and not body.stream:
        raise InvalidRequestError("stream_options needs stream=true.", param="stream_options")
    stops = _stops(body.stop)
    if len(stops) > MAX_STOPS or any(not 0 < len(stop) <= MAX_STOP_LENGTH for stop in stops):
        raise InvalidRequestError(
            f"stop may hold up to {MAX_STOPS} strings of 1 to {MAX_STOP_LENGTH} characters.", param="stop"
        )
    if body.stop_token_ids is not None and len(body.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise InvalidRequestError(f"stop_token_ids may hold up to {MAX_STOP_TOKEN_IDS} ids.", param="stop_token_ids")
    if body.logit_bias is not None and len(body.logit_bias) > MAX_BIASED_TOKENS:
        raise InvalidRequestError(f"logit_bias may hold up to {MAX_BIASED_TOKENS} tokens.", param="logit_bias")
    if body.stream and body.prompt_logprobs is not None:
        raise InvalidRequestError("prompt_logprobs are not streamed.", param="prompt_logprobs")


def _check_max_tokens(value: int | None, param: str, *, least: int = 1) -> None:
    if value is not None and value < least:
        raise InvalidRequestError(f"{param} must be at least {least}.", param=param)


def _check_prompt_logprobs(body: SamplingFields, wanted: int) -> None:
    if wanted > MAX_PROMPT_LOGPROBS:
        raise InvalidRequestError(
            f"{wanted} log-probabilities of the prompt are asked for; an answer may hold {MAX_PROMPT_LOGPROBS}.",
            param="logprobs" if body.prompt_logprobs is None else "prompt_logprobs",
        )


def _biases(bias: dict[str, float] | None, vocab_size: int) -> tuple[tuple[int, float], ...]:
    """The pairs for the engine. Raises ``InvalidRequestError`` for what is no token id, or one written strangely."""
    if not bias:
        return ()
    if any(_TOKEN_ID.fullmatch(key) is None or int(key) >= vocab_size for key in bias):
        raise InvalidRequestError(
            f"The keys of logit_bias must be token ids between 0 and {vocab_size - 1}.", param="logit_bias"
        )
    return tuple((int(key), value) for key, value in bias.items())


def _stops(stop: str | list[str] | None) -> tuple[str, ...]:
    if stop is None:
        return ()
    return (stop,) if isinstance(stop, str) else tuple(stop)


def _refuse(unsupported: Iterator[tuple[bool, str]]) -> None:
    for asked_for, param in unsupported:
        if asked_for:
            raise InvalidRequestError(
                f"{param} is not supported by this engine yet; leave it out.", param=param, code="unsupported_parameter"
            )


def _unsupported_in_chat(body: ChatRequest, tools_supported: bool) -> Iterator[tuple[bool, str]]:
    yield _response_type(body.response_format) != "text", "response_format"
    yield bool(body.tools) and not tools_supported, "tools"
    yield body.tool_choice not in (None, "auto", "none"), "tool_choice"


def _unsupported_in_completion(body: CompletionRequest) -> Iterator[tuple[bool, str]]:
    yield bool(body.suffix), "suffix"


def _response_type(response_format: dict[str, Any] | None) -> Any:
    return "text" if response_format is None else response_format.get("type")
