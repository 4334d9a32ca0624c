"""``/v1/completions`` from the client's side: a generation request as its body, its events as outputs.

Field names are OpenAI's and, where OpenAI has none, vLLM's, which SGLang and llama.cpp share or ignore.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from engine.wire import Output, Sampling, TokenLogprobs
from gateway.errors import HeadstartError, InvalidRequestError, ReplicaRefusal
from gateway.replicas.base import CountedOutput, GenerationRequest
from gateway.replicas.outputs import runs_merged

__all__ = ["AnswerReader", "BrokenAnswer", "FailedAnswer", "completion_body", "refusal"]

_DONE: Final = b"[DONE]"
_SPELLED_ID: Final = "token_id:"
_MAX_MESSAGE: Final = 2000


class BrokenAnswer(Exception):
    """What a server sent is no answer, or ends before it does; in words that quote nothing of it."""


class FailedAnswer(Exception):
    """The server says itself that it gives the request up; in words that quote nothing of it."""


# --- the request ---------------------------------------------------------------------------------------


def completion_body(model: str, request: GenerationRequest, *, stream: bool) -> bytes:
    """The JSON body that asks the server for ``request``, as a ``stream`` of events or as one answer.

    Every value is given, also one that says nothing: what is left out, servers take from the model's own defaults. The
    namespace goes out as ``cache_salt``; of a request that shall not use the cache it is one that nobody else has.

    Raises:
        InvalidRequestError: Something is asked for that such a server cannot be asked for.
    """
    sampling = request.sampling
    _refuse_unsupported(sampling)
    body: dict[str, Any] = {
        "model": model,
        "prompt": request.token_ids,
        "n": request.n,
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "min_p": sampling.min_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "stop": sampling.stop,
        "stop_token_ids": sampling.stop_token_ids,
        "ignore_eos": sampling.ignore_eos,
        "min_tokens": sampling.min_tokens,
        "cache_salt": request.root.hex() if request.use_cache else secrets.token_hex(16),
        "stream": stream,
    }
    if stream:
        body["stream_options"] = {"include_usage": True}
    if sampling.seed is not None:
        body["seed"] = sampling.seed
    if sampling.logit_bias:
        body["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias}
    if sampling.logprobs is not None:
        body |= {"logprobs": sampling.logprobs, "return_tokens_as_token_ids": True}
    return msgspec.json.encode(body)


def _refuse_unsupported(sampling: Sampling) -> None:
    for asked_for, param in (
        (sampling.beam_width > 0, "use_beam_search"),
        (sampling.prompt_logprobs is not None, "prompt_logprobs"),
    ):
        if asked_for:
            raise _unsupported(param)


def _unsupported(param: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"{param} is not supported by the server that answers for this model; leave it out.",
        param=param,
        code="unsupported_parameter",
    )


# --- the answer ----------------------------------------------------------------------------------------


class _Logprobs(msgspec.Struct, frozen=True):
    tokens: list[str] | None = None
    token_logprobs: list[float | None] | None = None
    top_logprobs: list[dict[str, float] | None] | None = None


class _Choice(msgspec.Struct, frozen=True):
    index: int = 0
    text: str | None = None
    finish_reason: str | None = None
    logprobs: _Logprobs | None = None


class _PromptTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct, frozen=True):
    completion_tokens: int | None = None
    prompt_tokens_details: _PromptTokensDetails | None = None


class _Error(msgspec.Struct, frozen=True):
    message: str = ""
    type: str | None = None
    param: str | None = None
    code: int | str | None = None


class _Event(msgspec.Struct, frozen=True):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: _Error | None = None


class _ErrorBody(_Error, frozen=True):
    """OpenAI wraps the error in an object, SGLang does not."""

    error: _Error | None = None


_event_decoder: Final = msgspec.json.Decoder(_Event)
_error_decoder: Final = msgspec.json.Decoder(_ErrorBody)


class AnswerReader:
    """Turns one answer, whole or the events of a stream, into outputs. Owned by the request.

    The end of the choice that ends last is held back until the answer's own end, which brings the counts; its text
    is not.
    """

    __slots__ = ("_counted", "_events", "_last", "_logprobs", "_open", "_usage", "done")

    def __init__(self, request: GenerationRequest) -> None:
        self.done = False
        """Whether the server has said that nothing more will come."""
        self._open = set(range(request.n))
        self._logprobs = request.sampling.logprobs
        self._last: tuple[int, str] | None = None
        self._usage = _Usage()
        self._events = 0

    def read(self, data: bytes) -> list[Output]:
        """What one event says.

        Raises:
            BrokenAnswer: It is none.
            FailedAnswer: It says that the server could not go on.
            HeadstartError: With a status below 500: the server refuses the request.
        """
        if self.done:
            return []
        if data == _DONE:
            self.done = True
            return []
        try:
            event = _event_decoder.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError):
            raise BrokenAnswer("it sent what is no event of a completion") from None
        if event.error is not None:
            raise _failure(event.error)
        if event.usage is not None:
            self._usage = event.usage
        return [output for choice in event.choices if (output := self._output(choice)) is not None]

    def read_all(self, events: Sequence[bytes]) -> tuple[list[Output], Exception | None]:
        """What several events say that came together, and how ``read`` fails after that.

        The text of one choice is one output then: whoever is late with one event has one less to send on.
        """
        if len(events) == 1:
            return self.read(events[0]), None
        outputs: list[Output] = []
        try:
            for data in events:
                outputs += self.read(data)
        except (BrokenAnswer, FailedAnswer, HeadstartError) as failure:
            return runs_merged(outputs), failure
        return runs_merged(outputs), None

    def whole(self, data: bytes) -> tuple[list[Output], CountedOutput]:
        """The outputs of an answer that is not streamed, the last one apart, as of ``end``. Raises as ``read``."""
        outputs = self.read(data)
        if outputs and self._last is not None and outputs[-1].index == self._last[0]:
            text = outputs.pop().text
            return outputs, self.end(text)
        return outputs, self.end()

    def end(self, text: str = "") -> CountedOutput:
        """The last output, to be asked for when the answer has ended, with or without saying so.

        ``text`` is what its choice has said besides.

        Raises:
            BrokenAnswer: It ended before its end.
        """
        if self._open or self._last is None:
            raise BrokenAnswer("its answer ended before its end")
        index, finish_reason = self._last
        usage = self._usage
        details = usage.prompt_tokens_details
        return CountedOutput(
            0,
            text,
            finish_reason=finish_reason,
            cached_tokens=None if details is None else details.cached_tokens,
            index=index,
            # Servers that count nothing send an event per token.
            completion_tokens=self._events if usage.completion_tokens is None else usage.completion_tokens,
        )

    def _output(self, choice: _Choice) -> Output | None:
        index, text, finish_reason = choice.index, choice.text or "", choice.finish_reason
        if index not in self._open:
            if not text:
                return None
            raise BrokenAnswer("it answered with a choice that had ended or was not asked for")
        logprobs: tuple[TokenLogprobs, ...] = ()
        if self._logprobs is not None:
            logprobs = _token_logprobs(choice, self._logprobs)
        if text or logprobs:
            self._events += 1
        if finish_reason is not None:
            if finish_reason in ("abort", "error"):
                raise FailedAnswer(f"it gave the request up ({finish_reason})")
            self._open.discard(index)
            if not self._open:
                self._last = index, finish_reason
                finish_reason = None
        if not text and not logprobs and finish_reason is None:
            return None
        token_ids = tuple([entry.token_id for entry in logprobs]) if logprobs else ()
        return Output(0, text, token_ids, finish_reason, index=index, logprobs=logprobs)


def refusal(status: int, body: bytes, retry_after: str | None) -> ReplicaRefusal:
    """A 4xx answer as the error that the caller gets: the server's own words, type, code and param."""
    error = _Error()
    with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
        told = _error_decoder.decode(body)
        error = told.error or told
    return _refusal(status, error, int(retry_after) if retry_after is not None and retry_after.isdecimal() else None)


def _refusal(status: int, error: _Error, retry_after: int | None = None) -> ReplicaRefusal:
    return ReplicaRefusal(
        error.message[:_MAX_MESSAGE] or f"The server that answers for this model refuses the request ({status}).",
        status=status,
        type=error.type,
        code=error.code if isinstance(error.code, str) else None,
        param=error.param,
        retry_after=retry_after,
    )


def _failure(error: _Error) -> HeadstartError | FailedAnswer:
    """An error in the place of an event: of the caller where its code says so, else of the server."""
    if isinstance(error.code, int) and 400 <= error.code < 500:
        return _refusal(error.code, error)
    return FailedAnswer("it failed while it answered")


def _token_logprobs(choice: _Choice, count: int) -> tuple[TokenLogprobs, ...]:
    """The log-probabilities of a choice's new tokens. ``rank`` is the place among those told.

    Raises ``InvalidRequestError`` when the server does not tell them, or not by token id.
    """
    told = choice.logprobs
    if told is None or told.tokens is None or told.token_logprobs is None:
        if choice.text:
            raise _unsupported("logprobs")
        return ()
    tops = told.top_logprobs or [None] * len(told.tokens)
    try:
        return tuple(
            [
                _token_logprob(_token_id(token), logprob, top or {}, count)
                for token, logprob, top in zip(told.tokens, told.token_logprobs, tops, strict=True)
            ]
        )
    except ValueError:
        raise _unsupported("logprobs") from None


def _token_logprob(token_id: int, logprob: float | None, top: dict[str, float], count: int) -> TokenLogprobs:
    ranked = sorted([(_token_id(token), value) for token, value in top.items()], key=lambda item: -item[1])
    own = float("-inf") if logprob is None else logprob
    rank = 1 + sum(value > own for _, value in ranked)
    return TokenLogprobs(token_id, own, rank, tuple(ranked[:count]))


def _token_id(token: str) -> int:
    """The id in ``token_id:17``. Raises ``ValueError`` for a token that is spelled out."""
    if not token.startswith(_SPELLED_ID):
        raise ValueError(token)
    return int(token[len(_SPELLED_ID) :])
