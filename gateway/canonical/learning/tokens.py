"""Texts as tokens, and values by their shape.

A date, an address or an id is one token however it is punctuated, so that a span which differs in its last digit alone
is found as a whole.
"""

from __future__ import annotations

import re
from typing import Final, Literal

__all__ = ["MAX_TEXT_CHARS", "SHAPES", "Shape", "is_joint", "is_word", "shape_of", "split_tokens"]

Shape = Literal["date-time", "uuid", "hex-id", "id", "number", "address", "name", "text"]
"""What a value looks like. ``id`` mixes letters and digits, ``address`` is a URL or an e-mail address."""

SHAPES: Final[tuple[Shape, ...]] = ("date-time", "uuid", "hex-id", "id", "number", "address", "name", "text")

MAX_TEXT_CHARS: Final = 32_768
"""Longest system text that is learned from."""

_MONTH: Final = (
    r"(?:Jan(?:uary)?|Feb(?:ruary)?|Mar(?:ch)?|Apr(?:il)?|May|June?|July?|Aug(?:ust)?|Sept?(?:ember)?|Oct(?:ober)?"
    r"|Nov(?:ember)?|Dec(?:ember)?)\.?"
)
_WEEKDAY: Final = r"(?:Mon|Tue(?:s)?|Wed(?:nes)?|Thu(?:rs)?|Fri|Sat(?:ur)?|Sun)(?:day)?"
_ORDINAL: Final = r"\d{1,2}(?:st|nd|rd|th)?"
_TIME: Final = (
    r"\d{1,2}:\d{2}(?::\d{2}(?:[.,]\d{1,9})?)?(?: ?[AaPp]\.?[Mm]\.?(?!\w))?"
    r"(?: ?(?:Z|UTC|GMT|[A-Z]{2,3}T|[+-]\d{2}:?\d{2})(?!\w))?"
)
_DATE: Final = "|".join(
    (
        r"\d{4}[-/.]\d{1,2}[-/.]\d{1,2}",
        r"\d{1,2}[-/.]\d{1,2}[-/.](?:\d{4}|\d{2})",
        rf"(?:{_WEEKDAY},? {{1,2}})?{_MONTH} {{1,2}}{_ORDINAL}(?:,? \d{{4}})?",
        rf"(?:{_WEEKDAY},? {{1,2}})?{_ORDINAL} {_MONTH}(?:,? \d{{4}})?",
    )
)
_DATE_TIME: Final = rf"(?:{_DATE})(?:(?:T|,? | at |, at ){_TIME}(?: \d{{4}})?)?|{_TIME}"
# Bounded repetitions: a hostile text must not make the search start over and over.
_ADDRESS: Final = r"https?://\S{0,2048}[^\s.,;:!?()\[\]{}'\"<>]|[\w.+-]{1,64}@[\w-]{1,63}(?:\.[\w-]{1,63}){1,8}"
_NUMBER: Final = r"\d+(?:[.,]\d+)*"
_TOKEN: Final = re.compile(rf"(?:{_DATE_TIME})(?![\w-])|{_ADDRESS}|{_NUMBER}(?![\w-])|\w+(?:-\w+)*|\s+|[^\w\s]")

_JOINTS: Final = frozenset(" _-./:@+#'")
_SHAPE_PATTERNS: Final[tuple[tuple[Shape, re.Pattern[str]], ...]] = (
    ("date-time", re.compile(rf"(?:{_DATE_TIME}|{_WEEKDAY})")),
    ("uuid", re.compile(r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")),
    ("number", re.compile(rf"[+-]?{_NUMBER}%?")),
    ("hex-id", re.compile(r"(?:0x)?(?=[0-9a-fA-F]*\d)[0-9a-fA-F]{8,128}")),
    ("address", re.compile(_ADDRESS)),
    ("name", re.compile(r"[^\W\d_][\w'’-]{0,40}(?:\.? [\w'’-]{1,40}){0,3}")),
    ("id", re.compile(r"(?=[\w.:/#-]*\d)[\w.:/#-]{2,128}")),
)


def split_tokens(text: str) -> list[str]:
    """``text`` cut into dates, addresses, numbers, words, runs of white space and single signs; joined they are it."""
    return _TOKEN.findall(text)


def is_word(token: str) -> bool:
    """Whether a token is made of letters: what templates are told apart by. Values mostly hold a digit."""
    return token.isalpha() or token.replace("-", "").isalpha()


def is_joint(token: str) -> bool:
    """Whether a token that stands alone between two parts that differ belongs to them: ``Ann Lee``, ``10.0.0.7``."""
    return token in _JOINTS


def shape_of(value: str) -> Shape:
    """What ``value`` looks like."""
    if len(value) <= 160:
        for shape, pattern in _SHAPE_PATTERNS:
            if pattern.fullmatch(value) and (shape != "name" or _is_name(value)):
                return shape
    return "text"


def _is_name(value: str) -> bool:
    """One to four words, each with a capital or all digits."""
    words = value.split()
    return words[0][0].isupper() and all(word[0].isupper() or word.isdigit() for word in words)
