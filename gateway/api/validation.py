"""What a body's types cannot say: combinations, ranges that depend on the model, and what this engine cannot do yet.

A parameter that would change the answer and is not supported is refused by name; ignoring it would answer a different
question from the one that was asked. Parameters nobody knows are ignored, as OpenAI-compatible servers do.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from engine.wire import EngineInfo, Sampling
from gateway.errors import InvalidRequestError
from gateway.schema import ChatRequest, CompletionRequest, SamplingFields

__all__ = ["chat_max_tokens", "check_chat", "check_completion", "completion_max_tokens", "sampling_for"]

COMPLETION_MAX_TOKENS: Final = 16
"""What ``/v1/completions`` generates where nothing is said, as OpenAI documents it. A chat may fill the context."""

MAX_CHOICES: Final = 16
MAX_STOPS: Final = 16
MAX_STOP_LENGTH: Final = 1024
MAX_STOP_TOKEN_IDS: Final = 256

_GREEDY_BELOW: Final = 1e-5
"""Dividing logits by less than this is an argmax, only with a risk of overflow."""

_SEED_RANGE: Final = 2**63


def check_chat(body: ChatRequest, *, tools_supported: bool) -> None:
    """Refuse what a chat request cannot have here.

    Raises:
        InvalidRequestError: ``param`` names the field.
    """
    _check_shared(body)
    _refuse(_unsupported_in_chat(body, tools_supported))
    _check_max_tokens(body.max_completion_tokens, "max_completion_tokens")


def check_completion(body: CompletionRequest) -> None:
    """The same for a text completion."""
    _check_shared(body)
    _refuse(_unsupported_in_completion(body))


def chat_max_tokens(body: ChatRequest) -> int | None:
    """The token limit of a chat answer: ``max_completion_tokens``, else the older ``max_tokens``; None for none."""
    return body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens


def completion_max_tokens(body: CompletionRequest) -> int:
    """The token limit of a completion."""
    return COMPLETION_MAX_TOKENS if body.max_tokens is None else body.max_tokens


def sampling_for(body: SamplingFields, max_tokens: int | None, prompt_tokens: int, info: EngineInfo) -> Sampling:
    """How the answer is drawn on the engine that ``info`` describes.

    ``max_tokens`` is cut to what the context has left after ``prompt_tokens``.

    Raises:
        InvalidRequestError: A value does not fit the model.
    """
    room = info.max_model_len - prompt_tokens
    limit = room if max_tokens is None else min(max_tokens, room)
    if body.min_tokens > limit:
        raise InvalidRequestError(
            f"min_tokens is {body.min_tokens}, but at most {limit} tokens may be generated.", param="min_tokens"
        )
    stop_token_ids = tuple(body.stop_token_ids or ())
    if any(not 0 <= token < info.vocab_size for token in stop_token_ids):
        raise InvalidRequestError(
            f"stop_token_ids must lie between 0 and {info.vocab_size - 1}.", param="stop_token_ids"
        )
    temperature = 1.0 if body.temperature is None else body.temperature
    return Sampling(
        max_tokens=limit,
        temperature=0.0 if temperature < _GREEDY_BELOW else temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=0 if body.top_k is None or body.top_k < 0 else min(body.top_k, info.vocab_size),
        min_p=body.min_p or 0.0,
        seed=None if body.seed is None else body.seed % _SEED_RANGE,
        stop=_stops(body.stop),
        stop_token_ids=stop_token_ids,
        ignore_eos=body.ignore_eos,
        min_tokens=body.min_tokens,
    )


def _check_shared(body: SamplingFields) -> None:
    _refuse(_unsupported_in_both(body))
    _check_max_tokens(body.max_tokens, "max_tokens")
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


def _check_max_tokens(value: int | None, param: str) -> None:
    if value is not None and value < 1:
        raise InvalidRequestError(f"{param} must be at least 1.", param=param)


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


def _unsupported_in_both(body: SamplingFields) -> Iterator[tuple[bool, str]]:
    yield bool(body.presence_penalty), "presence_penalty"
    yield bool(body.frequency_penalty), "frequency_penalty"
    yield body.repetition_penalty not in (None, 1.0), "repetition_penalty"
    yield bool(body.logit_bias), "logit_bias"
    yield body.prompt_logprobs is not None, "prompt_logprobs"


def _unsupported_in_chat(body: ChatRequest, tools_supported: bool) -> Iterator[tuple[bool, str]]:
    yield bool(body.logprobs), "logprobs"
    yield body.top_logprobs is not None, "top_logprobs"
    yield _response_type(body.response_format) != "text", "response_format"
    yield bool(body.tools) and not tools_supported, "tools"
    yield body.tool_choice not in (None, "auto", "none"), "tool_choice"


def _unsupported_in_completion(body: CompletionRequest) -> Iterator[tuple[bool, str]]:
    yield bool(body.echo), "echo"
    yield body.logprobs is not None, "logprobs"
    yield (body.best_of or 1) != 1, "best_of"
    yield bool(body.suffix), "suffix"


def _response_type(response_format: dict[str, Any] | None) -> Any:
    return "text" if response_format is None else response_format.get("type")
