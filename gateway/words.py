"""Tokenizing ASCII text word by word, from memory.

Tokenizers of the BPE family cut a text into words before they look into their vocabulary, and do that with each word on
its own. In ordinary text nearly every word was there before, so that cutting it in the same way and looking the words
up gives the same ids, several times as fast. For ASCII the examined patterns say the same to Python's ``re`` as to the
tokenizer: which characters are letters, numbers and white space is beyond doubt. A word on its own is cut into nothing
but itself, as no pattern looks at what stands before, and what follows can only end a run of white space.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import chain
from string import digits
from typing import Any, Final

from tokenizers import Tokenizer

from cache_policy.keys import token_bytes
from gateway.segments import EXAMINED_PATTERNS, GPT2_PATTERN

__all__ = ["WordEncoder"]

_MAX_WORDS: Final = 1 << 16
"""Words remembered, some 12 MB; when there are more, all are forgotten."""
_MAX_CHARS: Final = 32
_MAX_DIGITS: Final = 4  # with the blank before them
_BEFORE_DIGITS: Final = f" {digits}"

_CLASS: Final = re.compile(r"\[[^\]]*\]")
_PROPERTY: Final = re.compile(r"\\p\{(\w+)\}")
_ASCII: Final[Mapping[str, str]] = {
    "L": "A-Za-z",
    "Lu": "A-Z",
    "Ll": "a-z",
    "Lt": "",
    "Lm": "",
    "Lo": "",
    "M": "",
    "N": "0-9",
}
_BYTE_LEVEL: Final = {byte: 256 + place for place, byte in enumerate((*range(33), 127))}
"""How byte-level vocabularies write the ASCII characters that do not stand for themselves."""


class WordEncoder:
    """A tokenizer with a memory of words. Owns it, at most 65,536 words; belongs to one thread."""

    def __init__(self, tokenizer: Tokenizer, definition: Mapping[str, Any]) -> None:
        """``definition`` is the tokenizer's ``tokenizer.json``. Raises ``ValueError`` unless ``fits`` holds of it."""
        steps = _steps(definition)
        if steps is None:
            raise ValueError("this tokenizer's words are not known for certain")
        self._steps: Final = steps
        self._words: Final = _Words(tokenizer, definition)
        added = [token for token in definition.get("added_tokens") or () if token["content"].isascii()]
        self._added: Final = {token["content"]: token_bytes([token["id"]]) for token in added}
        # Those that are looked for in the text as it came are found first, however it continues.
        self._splits: Final = [
            _any_of([token["content"] for token in added if bool(token.get("normalized")) is normalized])
            for normalized in (False, True)
            if any(bool(token.get("normalized")) is normalized for token in added)
        ]

    @staticmethod
    def fits(definition: Mapping[str, Any]) -> bool:
        """Whether the words of a tokenizer with this ``tokenizer.json`` are known for certain."""
        return _steps(definition) is not None

    def encode(self, text: str) -> bytes | None:
        """The ids of ``text`` (``cache_policy.keys.token_bytes``), no special tokens added; None unless it is ASCII."""
        return self._cut(text, 0) if text.isascii() else None

    def _cut(self, text: str, splits: int) -> bytes:
        """The ids of a text from which the added tokens of the first ``splits`` were taken out."""
        if splits == len(self._splits):
            return self._encode(text)
        pieces = self._splits[splits].split(text)  # text, token, text, …
        if len(pieces) == 1:
            return self._cut(text, splits + 1)
        return b"".join(
            [self._added[piece] if at % 2 else self._cut(piece, splits + 1) for at, piece in enumerate(pieces)]
        )

    def _encode(self, text: str) -> bytes:
        found: Sequence[str] = self._steps[0].findall(text)
        for step in self._steps[1:]:
            found = [*chain.from_iterable(map(step.findall, found))]
        return b"".join(map(self._words.__getitem__, found))


class _Words(dict[str, bytes]):
    """The ids of each word, looked up once; those of numbers put together from their digits, where they are just that.

    Hardly a number comes twice, unless it is a short one.
    """

    def __init__(self, tokenizer: Tokenizer, definition: Mapping[str, Any]) -> None:
        super().__init__()
        self._model = tokenizer.model  # what is left to do once a text is cut into words
        whole = ("ignore_merges", "fuse_unk", "continuing_subword_prefix", "end_of_word_suffix")
        # Merges begin with two characters, whose token is in the vocabulary.
        merged = (f"{one}{digit}" for one in f"{' '.translate(_BYTE_LEVEL)}{digits}" for digit in digits)
        self._digits_alone = not any(definition["model"].get(key) for key in whole) and not any(
            tokenizer.token_to_id(pair) is not None for pair in merged
        )

    def __missing__(self, word: str) -> bytes:
        if self._digits_alone and len(word) > 1 and word[1:].isdigit() and word[0] in _BEFORE_DIGITS:
            data = b"".join(map(self.__getitem__, word))
            most = _MAX_DIGITS
        else:
            data = token_bytes([token.id for token in self._model.tokenize(word.translate(_BYTE_LEVEL))])
            most = _MAX_CHARS
        if len(word) <= most:
            if len(self) >= _MAX_WORDS:
                self.clear()
            self[word] = data
        return data


def _steps(definition: Mapping[str, Any]) -> list[re.Pattern[str]] | None:
    """What cuts a text into words, one step after another; None where that is not certain."""
    model = definition.get("model") or {}
    normalizer = definition.get("normalizer")
    if model.get("type") != "BPE" or model.get("dropout") or (normalizer and normalizer.get("type") != "NFC"):
        return None
    if any(token.get("single_word") or token.get("lstrip") or token.get("rstrip") for token in _added(definition)):
        return None
    pre_tokenizer = definition.get("pre_tokenizer") or {}
    steps = pre_tokenizer["pretokenizers"] if pre_tokenizer.get("type") == "Sequence" else [pre_tokenizer]
    patterns = [_pattern(step) for step in steps]
    if None in patterns or not any(patterns) or all(step.get("type") != "ByteLevel" for step in steps):
        return None
    return [re.compile(pattern, re.ASCII) for pattern in patterns if pattern]


def _added(definition: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    return definition.get("added_tokens") or ()


def _pattern(step: Mapping[str, Any]) -> str | None:
    """What finds the words of one pre-tokenizer in ASCII text; empty for one that cuts nothing, None for any other."""
    kind = step.get("type")
    if kind == "Digits":
        return "[0-9]|[^0-9]+" if step.get("individual_digits") else "[0-9]+|[^0-9]+"
    if kind == "ByteLevel":
        if step.get("add_prefix_space"):
            return None
        return _in_ascii(GPT2_PATTERN) if step.get("use_regex", True) else ""
    if kind == "Split" and (step.get("behavior"), step.get("invert")) in (("Isolated", False), ("Removed", True)):
        regex = (step.get("pattern") or {}).get("Regex")
        return _in_ascii(regex) if regex in EXAMINED_PATTERNS else None
    return None


def _in_ascii(pattern: str) -> str:
    """An examined pattern as Python writes it, for ASCII."""
    pattern = _CLASS.sub(lambda found: _PROPERTY.sub(lambda name: _ASCII[name[1]], found[0]), pattern)
    return _PROPERTY.sub(lambda name: f"[{_ASCII[name[1]]}]", pattern)


def _any_of(texts: Sequence[str]) -> re.Pattern[str]:
    """Of those that begin at one place the longest is found."""
    return re.compile("(" + "|".join(map(re.escape, sorted(texts, key=len, reverse=True))) + ")")
