"""Log-probabilities as the two routes write them: JSON in pieces, each made when its tokens come.

So an answer that is not streamed costs the event loop no more at a time than one that is, and a token's entry is there
exactly once, whatever becomes of its text.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import ClassVar, Final

import msgspec

from engine.wire import TokenLogprobs
from gateway.spelling import TextOffsets, TokenSpellings

__all__ = ["ChatLogprobs", "CompletionLogprobs", "LogprobsWriter", "Piece", "prompt_logprobs"]

Piece = tuple[bytes, ...]
"""Elements of each of an object's lists, without the brackets around them."""

_LEAST: Final = -9999.0
"""Stands for the logarithm of 0, which JSON has no number for; the same as OpenAI's."""

_encode: Final = msgspec.json.Encoder().encode


class _Alternative(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]


class _Entry(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[_Alternative]


class _Ranked(msgspec.Struct, frozen=True):
    logprob: float
    rank: int
    decoded_token: str


class LogprobsWriter(ABC):
    """Writes ``choices[].logprobs`` of one answer."""

    lists: ClassVar[tuple[bytes, ...]]
    closing: ClassVar[bytes] = b"}"

    @abstractmethod
    def piece(self, index: int, entries: Sequence[TokenLogprobs]) -> Piece:
        """What the next tokens of a choice, at least one, add to its lists."""

    def joined(self, pieces: Iterable[Piece]) -> bytes:
        """The object made of ``pieces``."""
        parts = list(zip(*pieces, strict=True)) or [()] * len(self.lists)
        written = [b'"%b":[%b]' % (name, b",".join(part)) for name, part in zip(self.lists, parts, strict=True)]
        return b"{" + b",".join(written) + self.closing


class ChatLogprobs(LogprobsWriter):
    """For chats: ``{"content": [{token, logprob, bytes, top_logprobs}, …]}``."""

    lists = (b"content",)
    closing = b',"refusal":null}'

    def __init__(self, spellings: TokenSpellings) -> None:
        self._spellings = spellings

    def piece(self, index: int, entries: Sequence[TokenLogprobs]) -> Piece:
        """See ``LogprobsWriter``."""
        return (_elements([self._entry(entry) for entry in entries]),)

    def _entry(self, entry: TokenLogprobs) -> _Entry:
        data = self._spellings.bytes_of(entry.token_id)
        top = [self._alternative(*pair) for pair in entry.top]
        return _Entry(_text(data), _finite(entry.logprob), list(data), top)

    def _alternative(self, token_id: int, logprob: float) -> _Alternative:
        data = self._spellings.bytes_of(token_id)
        return _Alternative(_text(data), _finite(logprob), list(data))


class CompletionLogprobs(LogprobsWriter):
    """For completions: ``{tokens, token_logprobs, top_logprobs, text_offset}``. Keeps the offsets of each choice.

    ``top_logprobs`` has an object per token, from spelling to log-probability: the token itself and the most likely
    ones, ``alternatives`` of them. Of several with one spelling (parts of characters) the first is shown.
    """

    lists = (b"tokens", b"token_logprobs", b"top_logprobs", b"text_offset")

    def __init__(self, spellings: TokenSpellings, alternatives: int, prompt: str = "") -> None:
        """``prompt`` is the text in front of each choice's own."""
        self._spellings = spellings
        self._alternatives = alternatives
        self._prompt = prompt
        self._offsets: dict[int, TextOffsets] = {}

    def piece(self, index: int, entries: Sequence[TokenLogprobs]) -> Piece:
        """See ``LogprobsWriter``."""
        offsets = self._offsets.get(index)
        if offsets is None:
            offsets = self._offsets[index] = TextOffsets(self._spellings, start=len(self._prompt))
        return self._piece([entry.token_id for entry in entries], entries, offsets)

    def prompt_piece(self, token_ids: Sequence[int], entries: Sequence[TokenLogprobs]) -> Piece:
        """What the prompt adds in front: nothing foretells its first token, so ``entries`` are those of the others."""
        return self._piece(token_ids, [None, *entries], TextOffsets(self._spellings, prompt=self._prompt))

    def _piece(self, token_ids: Sequence[int], entries: Sequence[TokenLogprobs | None], offsets: TextOffsets) -> Piece:
        return (
            _elements([_text(self._spellings.bytes_of(token)) for token in token_ids]),
            _elements([entry and _finite(entry.logprob) for entry in entries]),
            _elements([entry and self._top(entry) for entry in entries]),
            _elements([offsets.place(token) for token in token_ids]),
        )

    def _top(self, entry: TokenLogprobs) -> dict[str, float]:
        shown: dict[str, float] = {}
        for token, logprob in ((entry.token_id, entry.logprob), *entry.top[: self._alternatives]):
            shown.setdefault(_text(self._spellings.bytes_of(token)), _finite(logprob))
        return shown


def prompt_logprobs(entries: Sequence[TokenLogprobs], spellings: TokenSpellings, alternatives: int) -> bytes:
    """``prompt_logprobs`` in vLLM's shape: null, then ``{token id: {logprob, rank, decoded_token}}`` per token."""
    rows: list[dict[str, _Ranked] | None] = [None]
    for entry in entries:
        row = {
            str(token): _Ranked(_finite(logprob), rank, _text(spellings.bytes_of(token)))
            for rank, (token, logprob) in enumerate(entry.top[:alternatives], 1)
        }
        row[str(entry.token_id)] = _Ranked(
            _finite(entry.logprob), entry.rank, _text(spellings.bytes_of(entry.token_id))
        )
        rows.append(row)
    return _encode(rows)


def _text(data: bytes) -> str:
    """Part of a character shows as U+FFFD; its bytes tell more, where they are told."""
    return data.decode("utf-8", "replace")


def _finite(logprob: float) -> float:
    return max(_LEAST, logprob)  # in this order NaN gives the first


def _elements(values: Sequence[object]) -> bytes:
    return _encode(values)[1:-1]
