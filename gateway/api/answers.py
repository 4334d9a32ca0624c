"""The JSON of OpenAI's two generation routes, whole and as a stream of events.

An event differs from its neighbours in a few characters only, so the parts that stay are encoded once per request.
"""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Final

import msgspec

from gateway.api.errors import encode_error
from gateway.errors import HeadstartError

__all__ = ["AnswerFormat", "ChatFormat", "CompletionFormat", "Usage"]

_encode = msgspec.json.Encoder().encode

DONE: Final = b"data: [DONE]\n\n"


class _PromptTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int


class Usage(msgspec.Struct, frozen=True):
    """``usage``. ``cached_tokens`` is an integer, 0 for a miss; no details at all where the replica tells none."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: _PromptTokensDetails | None

    @classmethod
    def of(cls, *, prompt: int, cached: int | None, completion: int) -> Usage:
        """From the three counts, in tokens."""
        details = None if cached is None else _PromptTokensDetails(cached)
        return cls(prompt, completion, prompt + completion, details)


class _ChatMessage(msgspec.Struct, frozen=True):
    role: str
    content: str
    refusal: None = None


class _ChatChoice(msgspec.Struct, frozen=True):
    index: int
    message: _ChatMessage
    finish_reason: str
    logprobs: None = None


class _TextChoice(msgspec.Struct, frozen=True):
    index: int
    text: str
    finish_reason: str
    logprobs: None = None


class _Answer(msgspec.Struct, frozen=True):
    id: str
    object: str
    created: int
    model: str
    choices: list[_ChatChoice] | list[_TextChoice]
    usage: Usage


class AnswerFormat(ABC):
    """How one answer is written. Made per request; its id and time of creation are fixed with it.

    ``with_usage`` gives every event of a stream the field ``usage``, null but for the last one.
    """

    id_prefix: ClassVar[str]
    object_name: ClassVar[str]
    event_object_name: ClassVar[str]

    def __init__(self, model: str, *, with_usage: bool = False) -> None:
        self.id = f"{self.id_prefix}-{secrets.token_hex(16)}"
        self.created = int(time.time())
        self.model = model
        self._with_usage = with_usage
        head = {"id": self.id, "object": self.event_object_name, "created": self.created, "model": model}
        self._head: Final = b"data: " + _encode(head)[:-1] + b',"choices":['
        self._tail: Final = b'],"usage":null}\n\n' if with_usage else b"]}\n\n"

    def whole(self, choices: Sequence[tuple[str, str]], usage: Usage) -> bytes:
        """The body of an answer that is not streamed, from each choice's text and finish reason."""
        return _encode(_Answer(self.id, self.object_name, self.created, self.model, self._choices(choices), usage))

    def opening_event(self, index: int) -> bytes:
        """What comes before the first text of a choice."""
        return b""

    def text_event(self, index: int, text: str) -> bytes:
        """An event with new text of a choice."""
        return self._event(index, self._text_choice(_encode(text)))

    def finish_event(self, index: int, finish_reason: str) -> bytes:
        """What comes after the last text of a choice."""
        return self._event(index, self._end_choice(_encode(finish_reason)))

    def closing_events(self, usage: Usage) -> bytes:
        """What comes after the last choice's end, down to ``[DONE]``."""
        if not self._with_usage:
            return DONE
        return b"".join((self._head, b'],"usage":', _encode(usage), b"}\n\n", DONE))

    @staticmethod
    def error_event(error: HeadstartError) -> bytes:
        """What ends a stream that cannot be finished. No ``[DONE]`` follows, so that nobody takes it for complete."""
        return b"data: " + encode_error(error) + b"\n\n"

    def _event(self, index: int, choice: bytes) -> bytes:
        """An event with one choice; ``choice`` is what follows its index."""
        return b"".join((self._head, b'{"index":%d,' % index, choice, self._tail))

    @abstractmethod
    def _choices(self, choices: Sequence[tuple[str, str]]) -> list[_ChatChoice] | list[_TextChoice]: ...

    @abstractmethod
    def _text_choice(self, text: bytes) -> bytes: ...

    @abstractmethod
    def _end_choice(self, finish_reason: bytes) -> bytes: ...


class ChatFormat(AnswerFormat):
    """``chat.completion`` and ``chat.completion.chunk``."""

    id_prefix = "chatcmpl"
    object_name = "chat.completion"
    event_object_name = "chat.completion.chunk"

    def opening_event(self, index: int) -> bytes:
        """The role."""
        return self._event(index, b'"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}')

    def _choices(self, choices: Sequence[tuple[str, str]]) -> list[_ChatChoice]:
        return [
            _ChatChoice(index, _ChatMessage("assistant", text), finish_reason)
            for index, (text, finish_reason) in enumerate(choices)
        ]

    def _text_choice(self, text: bytes) -> bytes:
        return b'"delta":{"content":' + text + b'},"logprobs":null,"finish_reason":null}'

    def _end_choice(self, finish_reason: bytes) -> bytes:
        return b'"delta":{},"logprobs":null,"finish_reason":' + finish_reason + b"}"


class CompletionFormat(AnswerFormat):
    """``text_completion``, the same name for both."""

    id_prefix = "cmpl"
    object_name = "text_completion"
    event_object_name = "text_completion"

    def _choices(self, choices: Sequence[tuple[str, str]]) -> list[_TextChoice]:
        return [_TextChoice(index, text, finish_reason) for index, (text, finish_reason) in enumerate(choices)]

    def _text_choice(self, text: bytes) -> bytes:
        return b'"text":' + text + b',"logprobs":null,"finish_reason":null}'

    def _end_choice(self, finish_reason: bytes) -> bytes:
        return b'"text":"","logprobs":null,"finish_reason":' + finish_reason + b"}"
