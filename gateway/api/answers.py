"""The JSON of OpenAI's two generation routes, whole and as a stream of events.

An event differs from its neighbours in a few characters only, so the parts that stay are encoded once per request.
"""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import ClassVar, Final

import msgspec
from msgspec import UNSET, Raw, UnsetType

from engine.wire import Output, TokenLogprobs
from gateway.api.errors import encode_error
from gateway.api.logprobs import ChatLogprobs, CompletionLogprobs, LogprobsWriter, Piece, prompt_logprobs
from gateway.errors import HeadstartError
from gateway.spelling import TokenSpellings

__all__ = ["AnswerFormat", "ChatFormat", "Choice", "CompletionFormat", "Shown", "Usage"]

_encode = msgspec.json.Encoder().encode

DONE: Final = b"data: [DONE]\n\n"
_NULL: Final = b"null"
_TEXT: Final = b"\0"  # stands for it: in JSON there is none


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


class Shown(msgspec.Struct, frozen=True):
    """What an answer shows besides its text.

    ``usage`` gives every event of a stream that field, null but for the last one. ``logprobs`` and ``prompt_logprobs``
    are how many alternatives there are per token, None for no log-probabilities at all.
    """

    usage: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None


class Choice:
    """One choice of an answer that is not streamed, as it comes. Owned by the request."""

    __slots__ = ("_sum", "_texts", "_tokens", "finish_reason", "logprobs")

    def __init__(self) -> None:
        self.finish_reason = ""
        self.logprobs: list[Piece] = []
        self._texts: list[str] = []
        self._sum = 0.0
        self._tokens = 0

    def add(self, output: Output, logprobs: Piece | None) -> None:
        """What has come of it, with what ``AnswerFormat.logprobs`` made of its log-probabilities."""
        self._texts.append(output.text)
        if logprobs is not None:
            self.logprobs.append(logprobs)
        self._sum += sum([entry.logprob for entry in output.logprobs])
        self._tokens += len(output.logprobs)
        self.finish_reason = output.finish_reason or ""

    @property
    def text(self) -> str:
        """All of its text."""
        return "".join(self._texts)

    @property
    def mean_logprob(self) -> float:
        """Per token; 0 when none were asked for."""
        return self._sum / max(1, self._tokens)


class _ChatMessage(msgspec.Struct, frozen=True):
    role: str
    content: str
    refusal: None = None


class _ChatChoice(msgspec.Struct, frozen=True):
    index: int
    message: _ChatMessage
    finish_reason: str
    logprobs: Raw


class _TextChoice(msgspec.Struct, frozen=True):
    index: int
    text: str
    finish_reason: str
    logprobs: Raw
    prompt_logprobs: Raw | UnsetType


class _Answer(msgspec.Struct, frozen=True):
    id: str
    object: str
    created: int
    model: str
    choices: list[_ChatChoice] | list[_TextChoice]
    usage: Usage
    prompt_logprobs: Raw | UnsetType = UNSET


class AnswerFormat(ABC):
    """How one answer is written. Made per request; its id and time of creation are fixed with it."""

    id_prefix: ClassVar[str]
    object_name: ClassVar[str]
    event_object_name: ClassVar[str]

    def __init__(self, model: str, spellings: TokenSpellings, shown: Shown) -> None:
        self.id = f"{self.id_prefix}-{secrets.token_hex(16)}"
        self.created = int(time.time())
        self.model = model
        self._spellings = spellings
        self._shown = shown
        self._writer: LogprobsWriter | None = None
        self._prompt_logprobs: Raw | UnsetType = UNSET
        self._frames: dict[int, tuple[bytes, bytes]] = {}
        self._tail: Final = b'],"usage":null}\n\n' if shown.usage else b"]}\n\n"

    @property
    def shows_prompt(self) -> bool:
        """Whether it takes the prompt to write the answer."""
        return self._shown.prompt_logprobs is not None

    @cached_property
    def _head(self) -> bytes:
        """What stands before the choices in every event."""
        head = {"id": self.id, "object": self.event_object_name, "created": self.created, "model": self.model}
        return b"data: " + _encode(head)[:-1] + b',"choices":['

    def take_prompt(self, token_ids: Sequence[int], entries: Sequence[TokenLogprobs]) -> None:
        """The prompt, and its log-probabilities if they were asked for.

        Called once, before anything is written, where ``shows_prompt``.
        """
        if self._shown.prompt_logprobs is not None:
            self._prompt_logprobs = Raw(prompt_logprobs(entries, self._spellings, self._shown.prompt_logprobs))

    def logprobs(self, index: int, entries: Sequence[TokenLogprobs]) -> Piece | None:
        """The log-probabilities of a choice's next tokens as JSON; None when there are none or nobody wants them.

        Called once for each output of the choice, in order.
        """
        return self._writer.piece(index, entries) if self._writer is not None and entries else None

    def whole(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        """The body of an answer that is not streamed."""
        return _encode(self._answer(choices, usage))

    def opening_event(self, index: int) -> bytes:
        """What comes before the first text of a choice."""
        return b""

    def text_event(self, index: int, text: str, logprobs: Piece | None) -> bytes:
        """An event with new text of a choice, or with new tokens whose text is not certain yet."""
        if logprobs is None:
            before, after = self._frames.get(index) or self._frame(index)
            return before + _encode(text) + after
        return self._event(index, self._text_choice(_encode(text), self._logprobs([logprobs] if logprobs else [])))

    def finish_event(self, index: int, finish_reason: str) -> bytes:
        """What comes after the last text of a choice."""
        return self._event(index, self._end_choice(_encode(finish_reason)))

    def closing_events(self, usage: Usage) -> bytes:
        """What comes after the last choice's end, down to ``[DONE]``."""
        if not self._shown.usage:
            return DONE
        return b"".join((self._head, b'],"usage":', _encode(usage), b"}\n\n", DONE))

    @staticmethod
    def error_event(error: HeadstartError) -> bytes:
        """What ends a stream that cannot be finished. No ``[DONE]`` follows, so that nobody takes it for complete."""
        return b"data: " + encode_error(error) + b"\n\n"

    def _frame(self, index: int) -> tuple[bytes, bytes]:
        """What stands around the text in each event of a choice without log-probabilities."""
        before, _, after = self._event(index, self._text_choice(_TEXT, _NULL)).partition(_TEXT)
        self._frames[index] = before, after
        return before, after

    def _event(self, index: int, choice: bytes) -> bytes:
        """An event with one choice; ``choice`` is what follows its index."""
        return b"".join((self._head, b'{"index":%d,' % index, choice, self._tail))

    def _logprobs(self, pieces: Sequence[Piece]) -> bytes:
        return self._writer.joined(pieces) if self._writer is not None and pieces else _NULL

    @abstractmethod
    def _answer(self, choices: Sequence[Choice], usage: Usage) -> _Answer: ...

    @abstractmethod
    def _text_choice(self, text: bytes, logprobs: bytes) -> bytes: ...

    @abstractmethod
    def _end_choice(self, finish_reason: bytes) -> bytes: ...


class ChatFormat(AnswerFormat):
    """``chat.completion`` and ``chat.completion.chunk``."""

    id_prefix = "chatcmpl"
    object_name = "chat.completion"
    event_object_name = "chat.completion.chunk"

    def __init__(self, model: str, spellings: TokenSpellings, shown: Shown) -> None:
        super().__init__(model, spellings, shown)
        self._writer = None if shown.logprobs is None else ChatLogprobs(spellings)

    def opening_event(self, index: int) -> bytes:
        """The role."""
        return self._event(index, b'"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}')

    def _answer(self, choices: Sequence[Choice], usage: Usage) -> _Answer:
        written = [
            _ChatChoice(
                index,
                _ChatMessage("assistant", choice.text),
                choice.finish_reason,
                Raw(self._logprobs(choice.logprobs)),
            )
            for index, choice in enumerate(choices)
        ]
        return _Answer(self.id, self.object_name, self.created, self.model, written, usage, self._prompt_logprobs)

    def _text_choice(self, text: bytes, logprobs: bytes) -> bytes:
        return b'"delta":{"content":' + text + b'},"logprobs":' + logprobs + b',"finish_reason":null}'

    def _end_choice(self, finish_reason: bytes) -> bytes:
        return b'"delta":{},"logprobs":null,"finish_reason":' + finish_reason + b"}"


class CompletionFormat(AnswerFormat):
    """``text_completion``, the same name for both."""

    id_prefix = "cmpl"
    object_name = "text_completion"
    event_object_name = "text_completion"

    def __init__(
        self,
        model: str,
        spellings: TokenSpellings,
        shown: Shown,
        echo: Callable[[Sequence[int]], str] | None = None,
    ) -> None:
        """``echo`` makes the text of the prompt's tokens, to be written in front of each choice's own."""
        super().__init__(model, spellings, shown)
        self._echo = echo
        self._prompt = ""
        self._prompt_pieces: list[Piece] = []

    @property
    def shows_prompt(self) -> bool:
        """See ``AnswerFormat``; where tokens begin in the text is told from the beginning of the prompt."""
        return self._echo is not None or self._shown.logprobs is not None or super().shows_prompt

    def take_prompt(self, token_ids: Sequence[int], entries: Sequence[TokenLogprobs]) -> None:
        """See ``AnswerFormat``."""
        super().take_prompt(token_ids, entries)
        if self._echo is not None:
            self._prompt = self._echo(token_ids)
        if self._shown.logprobs is None:
            return
        self._writer = CompletionLogprobs(self._spellings, self._shown.logprobs, self._prompt)
        if self._echo is not None:
            self._prompt_pieces = [self._writer.prompt_piece(token_ids, entries)]

    def opening_event(self, index: int) -> bytes:
        """The prompt, where it is echoed."""
        if self._echo is None:
            return b""
        return self._event(index, self._text_choice(_encode(self._prompt), self._logprobs(self._prompt_pieces)))

    def _answer(self, choices: Sequence[Choice], usage: Usage) -> _Answer:
        written = [
            _TextChoice(
                index,
                self._prompt + choice.text,
                choice.finish_reason,
                Raw(self._logprobs([*self._prompt_pieces, *choice.logprobs])),
                self._prompt_logprobs,
            )
            for index, choice in enumerate(choices)
        ]
        return _Answer(self.id, self.object_name, self.created, self.model, written, usage)

    def _text_choice(self, text: bytes, logprobs: bytes) -> bytes:
        return b'"text":' + text + b',"logprobs":' + logprobs + b',"finish_reason":null}'

    def _end_choice(self, finish_reason: bytes) -> bytes:
        return b'"text":"","logprobs":null,"finish_reason":' + finish_reason + b"}"
