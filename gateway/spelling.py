"""How single tokens are written, and where in a text each of them begins: what answers with log-probabilities show."""

from __future__ import annotations

import codecs
import re
from functools import lru_cache
from typing import Final

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel

from engine.detokenize import spelled_bytes

__all__ = ["TextOffsets", "TokenSpellings"]

_BYTE_FALLBACK: Final = re.compile(r"<0x([0-9A-F]{2})>")
_ANCHOR: Final = "a"
_CAPACITY: Final = 16_384  # tokens: the frequent ones of any vocabulary


class TokenSpellings:
    """The bytes of each token of one tokenizer, control tokens as they are named.

    Exact for byte-level vocabularies and for those with byte fallback; a token that is part of a character has the
    bytes of its part. ``special`` are the ids of control tokens, which are left out of generated text.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._byte_level = isinstance(tokenizer.decoder, ByteLevel)
        self.special: Final = frozenset(i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special)
        self.bytes_of: Final = lru_cache(_CAPACITY)(self._bytes_of)

    def text_at_start(self, token_id: int) -> bytes:
        """A token's bytes at the start of a text, where vocabularies of words drop a leading blank."""
        return self.bytes_of(token_id) if self._byte_level else bytes(self._tokenizer.decode([token_id]).encode())

    def _bytes_of(self, token_id: int) -> bytes:
        if self._byte_level:
            return spelled_bytes(self._tokenizer, token_id)
        piece = self._tokenizer.id_to_token(token_id)
        if piece is None:
            return b""
        fallback = _BYTE_FALLBACK.fullmatch(piece)
        if fallback is not None:
            return bytes.fromhex(fallback[1])
        decoder = self._tokenizer.decoder
        if decoder is None or token_id in self.special:
            return bytes(piece.encode())
        # Behind another one: alone it would lose its leading blank.
        text = decoder.decode([_ANCHOR, piece])
        return bytes((text[1:] if text.startswith(_ANCHOR) else piece).encode())


class TextOffsets:
    """Where the tokens of one text begin, in characters. Owned by one answer.

    A token that ends or continues a character begins where that character does.
    """

    __slots__ = ("_at", "_decode", "_first", "_prompt", "_spellings")

    def __init__(self, spellings: TokenSpellings, *, start: int = 0, prompt: str | None = None) -> None:
        """Count from ``start``. ``prompt`` is the text if the tokens are those of a prompt, else they are generated."""
        self._spellings = spellings
        self._prompt = prompt
        self._at = start
        self._first = True
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def place(self, token_id: int) -> int:
        """The offset of the next token."""
        offset = self._at
        self._at += self._generated(token_id) if self._prompt is None else self._given(token_id, self._prompt)
        return offset

    def _generated(self, token_id: int) -> int:
        """Characters that a generated token completes."""
        if token_id in self._spellings.special:
            return 0
        first, self._first = self._first, False
        spelling = self._spellings.text_at_start if first else self._spellings.bytes_of
        return len(self._decode(spelling(token_id)))

    def _given(self, token_id: int, prompt: str) -> int:
        """Characters of ``prompt`` that its next token completes."""
        text = self._decode(self._spellings.bytes_of(token_id))
        if token_id in self._spellings.special and not prompt.startswith(text, self._at):
            return 0  # one that the tokenizer has added
        if self._at == 0 and text.startswith(" ") and not prompt.startswith(" "):
            text = text[1:]  # so has it this blank
        return min(len(text), len(prompt) - self._at)
