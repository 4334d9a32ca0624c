"""The request bodies of the OpenAI API and our extensions, as typed structs.

Types are strict (``"4"`` is no integer) and unknown fields are accepted and ignored, as OpenAI-compatible servers do.
What a field's type cannot say (ranges that depend on the model, combinations) is checked in ``gateway.api``.
"""

from __future__ import annotations

from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from engine.admission import MAX_BIAS, MAX_LOGPROBS, MAX_PENALTY, MAX_REPETITION_PENALTY
from gateway.config import HoistMode, OrderMode

__all__ = [
    "MAX_DOCUMENTS",
    "ChatMessage",
    "ChatRequest",
    "CompletionRequest",
    "HeadstartOptions",
    "SamplingFields",
    "StreamOptions",
]


MAX_DOCUMENTS: Final = 10_000
"""Documents of one request, more than fit any model: a body has room for so many that reading them takes seconds."""

_Choices = Annotated[int, Meta(ge=1, le=128)]
_TopLogprobs = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]
_Penalty = Annotated[float, Meta(ge=-MAX_PENALTY, le=MAX_PENALTY)]
_RepetitionPenalty = Annotated[float, Meta(ge=1 / MAX_REPETITION_PENALTY, le=MAX_REPETITION_PENALTY)]
_Bias = Annotated[float, Meta(ge=-MAX_BIAS, le=MAX_BIAS)]


class StreamOptions(msgspec.Struct, frozen=True):
    """``stream_options``."""

    include_usage: bool = False


class HeadstartOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body's ``headstart`` object.

    ``template`` names a registered template and ``fields`` gives the values of its declared fields (then the
    messages need no system message). ``bypass`` neither reads nor fills the cache. ``gold`` are acceptable answers; the
    quality gate looks for them where it compares. All else overrides what is configured for the template or by default.
    """

    template: str | None = None
    fields: dict[str, str] | None = None
    order: OrderMode | None = None
    keep_first: Annotated[int, Meta(ge=0)] | None = None
    keep_last: Annotated[int, Meta(ge=0)] | None = None
    max_displacement: Annotated[int, Meta(ge=0)] | None = None
    hint: bool | None = None
    hoist: HoistMode | None = None
    bypass: bool = False
    gold: Annotated[list[Annotated[str, Meta(max_length=1024)]], Meta(max_length=32)] | None = None


class ChatMessage(msgspec.Struct, frozen=True):
    """One message. ``content`` is a string or a list of ``{"type": "text", "text": …}`` parts."""

    role: str
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None


class SamplingFields(msgspec.Struct, frozen=True, kw_only=True):
    """Fields that chat and text completions share.

    ``repetition_penalty``, ``prompt_logprobs`` and the beam search (``use_beam_search``, ``length_penalty``,
    ``early_stopping``) are vLLM's.
    """

    model: str
    max_tokens: int | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    n: _Choices | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    min_tokens: Annotated[int, Meta(ge=0)] = 0
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    repetition_penalty: _RepetitionPenalty | None = None
    logit_bias: dict[str, _Bias] | None = None
    prompt_logprobs: _TopLogprobs | None = None
    use_beam_search: bool = False
    length_penalty: Annotated[float, Meta(ge=-10, le=10)] = 1.0
    early_stopping: bool = False
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    prompt_cache_key: str | None = None
    headstart: HeadstartOptions | None = None


class ChatRequest(SamplingFields, frozen=True, kw_only=True):
    """``POST /v1/chat/completions``.

    ``documents`` follows the convention of Hugging Face chat templates and vLLM: objects with ``text`` (or
    ``content``), mostly ``id`` and ``title``, and any further attributes, all of which reach the model.
    """

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    documents: Annotated[list[dict[str, Any]], Meta(max_length=MAX_DOCUMENTS)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    logprobs: bool | None = None
    top_logprobs: _TopLogprobs | None = None
    response_format: dict[str, Any] | None = None


class CompletionRequest(SamplingFields, frozen=True, kw_only=True):
    """``POST /v1/completions``. ``prompt`` is text, token ids, or a list of either with one element.

    ``max_tokens`` 0 with ``echo`` gives the prompt back and generates nothing.
    """

    prompt: str | list[Any]
    echo: bool | None = None
    logprobs: _TopLogprobs | None = None
    best_of: _Choices | None = None
    suffix: str | None = None
