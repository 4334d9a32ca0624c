"""Token ids to text while they are being generated: no character is cut, no part of a stop string leaks.

Two stages, each usable alone: tokens to complete characters, then a filter that holds back only what may still
become a stop string.
"""

from __future__ import annotations

import codecs
import hashlib
from collections.abc import Iterable
from functools import lru_cache
from typing import Final, Protocol

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel

__all__ = ["IncrementalDetokenizer", "StopFilter", "spelled_bytes", "vocabulary_digest"]

_REPLACEMENT: Final = "\ufffd"
_MAX_CHARACTER_TOKENS: Final = 4
"""A UTF-8 character has at most four bytes, and a token is at least one byte."""


class IncrementalDetokenizer:
    """The text of one request, token by token. Owned by that request; not thread-safe.

    What ``push`` and ``finish`` return adds up to ``tokenizer.decode(ids)`` (special tokens left out) up to the first
    stop string, except that a character which the end of generation cuts in two is dropped rather than shown as
    U+FFFD. Bytes that can never become a character do appear as U+FFFD, at once.
    """

    __slots__ = ("_characters", "_stop")

    def __init__(self, tokenizer: Tokenizer, stop: Iterable[str] = ()) -> None:
        self._characters: _CharacterStream = (
            _ByteStream(tokenizer) if isinstance(tokenizer.decoder, ByteLevel) else _WindowStream(tokenizer)
        )
        self._stop = StopFilter(stop)

    def push(self, token_id: int) -> tuple[str, bool]:
        """Add one generated token; return the text that is now certain and whether a stop string was completed.

        After True the request is over: nothing more may be pushed and ``finish`` returns nothing.
        """
        text = self._characters.push(token_id)
        return self._stop.push(text) if text else ("", False)

    def finish(self) -> str:
        """The end of generation: the text held back because it might have become a stop string."""
        text, stopped = self._stop.push(self._characters.finish())
        return text if stopped else text + self._stop.finish()


class StopFilter:
    """Cuts a stream of text before the first stop string, whatever pieces it arrives in.

    Of several stop strings complete in the text so far the one that starts first wins. Held back is only the longest
    tail of the text that is a proper prefix of a stop string. Empty stop strings are ignored.
    """

    __slots__ = ("_held", "_stopped", "_stops")

    def __init__(self, stops: Iterable[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""
        self._stopped = False

    def push(self, piece: str) -> tuple[str, bool]:
        """Add text; return what may be shown now and whether a stop string is complete."""
        if self._stopped:
            return "", True
        if not self._stops:
            return piece, False
        text = self._held + piece
        starts = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        if starts:
            self._held, self._stopped = "", True
            return text[: min(starts)], True
        shown = len(text) - self._tail(text)
        self._held = text[shown:]
        return text[:shown], False

    def finish(self) -> str:
        """No more text will come: return what was held back."""
        held, self._held = self._held, ""
        return held

    def _tail(self, text: str) -> int:
        """Length of the longest end of ``text`` that a stop string starts with."""
        longest = max(len(stop) for stop in self._stops) - 1
        for length in range(min(longest, len(text)), 0, -1):
            tail = text[-length:]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0


class _CharacterStream(Protocol):
    """Tokens in, complete characters out."""

    def push(self, token_id: int) -> str: ...

    def finish(self) -> str: ...


class _ByteStream:
    """For byte-level vocabularies (GPT-2, Llama 3, Qwen, SmolLM): every token is a fixed string of bytes.

    An incremental UTF-8 decoder is then exact, in constant time per token, and cannot be stalled by invalid bytes.
    """

    __slots__ = ("_decode", "_vocabulary")

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._vocabulary = _vocabulary(tokenizer)
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def push(self, token_id: int) -> str:
        return self._decode(self._vocabulary[token_id])

    def finish(self) -> str:
        return ""


class _WindowStream:
    """For every other decoder (SentencePiece with byte fallback, Metaspace, …): decode a short window again and again.

    The window is the previous piece, for its context (whether a leading blank is kept depends on it), and the tokens
    not shown yet. Tokens wait while the text ends in U+FFFD, the mark of an unfinished character, but no longer
    than a character can be.
    """

    __slots__ = ("_context", "_ids", "_shown", "_special", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._special = _vocabulary(tokenizer).special
        self._ids: list[int] = []
        self._context = 0  # leading ids of the window whose text has been shown
        self._shown = 0  # the length of that text

    def push(self, token_id: int) -> str:
        if token_id in self._special:  # without text it would be no context for the next token
            return ""
        self._ids.append(token_id)
        text = self._tokenizer.decode(self._ids)
        waiting = len(self._ids) - self._context
        if text.endswith(_REPLACEMENT) and waiting < _MAX_CHARACTER_TOKENS:
            return ""
        new = text[self._shown :]
        del self._ids[: self._context]
        self._context = len(self._ids)
        self._shown = len(self._tokenizer.decode(self._ids))
        return new

    def finish(self) -> str:
        if len(self._ids) == self._context:
            return ""
        return self._tokenizer.decode(self._ids)[self._shown :].rstrip(_REPLACEMENT)


class _Vocabulary(dict[int, bytes]):
    """The bytes of each token of one byte-level tokenizer, filled as tokens are met. ``special`` ids have none."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self.special = frozenset(i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special)

    def __missing__(self, token_id: int) -> bytes:
        data = self[token_id] = b"" if token_id in self.special else spelled_bytes(self._tokenizer, token_id)
        return data


def spelled_bytes(tokenizer: Tokenizer, token_id: int) -> bytes:
    """The bytes that one token of a byte-level vocabulary stands for, those of its name for an added token.

    Empty where the vocabulary ends below the model's.
    """
    token = tokenizer.id_to_token(token_id)
    if token is None:
        return b""
    try:
        return bytes(_BYTE_OF[character] for character in token)
    except KeyError:  # an added token, spelled as it is
        return bytes(token.encode())


@lru_cache(maxsize=8)
def _vocabulary(tokenizer: Tokenizer) -> _Vocabulary:
    return _Vocabulary(tokenizer)


def _byte_of_character() -> dict[str, int]:
    """GPT-2's printable alphabet for bytes: printable Latin-1 stands for itself, the rest starts at U+0100."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF: Final = _byte_of_character()


def vocabulary_digest(tokenizer: Tokenizer) -> str:
    """Equal where every token has the same id. Prompts travel as ids: to another vocabulary they are another text."""
    digest = hashlib.sha256()
    for token, id in sorted(tokenizer.get_vocab(with_added_tokens=True).items()):
        digest.update(f"{len(token)} {token} {id} ".encode("utf-8", "surrogatepass"))
    return digest.hexdigest()[:32]
