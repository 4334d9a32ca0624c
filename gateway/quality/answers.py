"""How far two answers are apart, and whether one holds what it should: the measures of SQuAD, for any script."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

__all__ = ["contains_any", "distance"]

_MOST_CHARS: Final = 20_000
"""Of an answer so much is compared."""

_SHORT_WORDS: Final = 2
"""Answers of so few words agree or do not: half of a yes and a no is nothing."""

_ARTICLES: Final = frozenset(("a", "an", "the"))

# Thai to Khmer, kana and Han put no blanks between words: a character is a word there.
_WORD: Final = re.compile(
    r"[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]|"
    r"[^\s\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]+"
)


def distance(one: str, other: str) -> float:
    """1 less the F1 of the words that two answers share, from 0 to 1; of very short answers whether they differ.

    Case, punctuation, English articles and white space do not count (Rajpurkar et al., "SQuAD", EMNLP 2016).
    """
    ours, theirs = _words(one), _words(other)
    if max(len(ours), len(theirs)) <= _SHORT_WORDS or not ours or not theirs:
        return float(ours != theirs)
    shared = sum((Counter(ours) & Counter(theirs)).values())
    return 1 - 2 * shared / (len(ours) + len(theirs))


def contains_any(answer: str, golds: Iterable[str]) -> bool:
    """Whether one of ``golds`` stands in the answer, word for word after the same normalization."""
    words = _words(answer)
    return any(_contains(words, gold) for text in golds if (gold := _words(text)))


def _contains(words: Sequence[str], sought: Sequence[str]) -> bool:
    length = len(sought)
    return any(words[start : start + length] == sought for start in range(len(words) - length + 1))


def _words(text: str) -> list[str]:
    folded = unicodedata.normalize("NFKC", text[:_MOST_CHARS]).casefold()
    plain = "".join([char for char in folded if unicodedata.category(char)[0] not in "PS"])
    return [word for word in _WORD.findall(plain) if word not in _ARTICLES]
