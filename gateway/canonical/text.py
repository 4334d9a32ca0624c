"""Step 1, text: spellings of one system prompt that differ only in encoding become one.

Editors, operating systems and template engines leave byte order marks, CRLF, blanks at line ends and decomposed
accents behind; a prefix cache misses from the first such byte on. Only texts of the operator (system messages) are
touched: user messages and documents go through byte for byte.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import islice
from typing import Final
from unicodedata import combining, is_normalized, normalize

from gateway.canonical.messages import Message
from gateway.plan import Change

__all__ = ["normalize_system_messages", "normalize_text", "original_span", "text_changes"]

_BYTE_ORDER_MARK: Final = "\ufeff"
_MAX_MARKS: Final = 30
"""Marks on one letter, as in Unicode's stream-safe text format: no language has as many."""

_LINE_END: Final = re.compile(r"\r\n|\r|\n")
_LINE_END_REVERSED: Final = re.compile(r"\n\r|\r|\n")

_MARKS_IN_DISGUISE: Final = "\u0f73\u0f75\u0f81"
"""The characters that are no marks and decompose to nothing but marks."""


def normalize_text(text: str) -> str:
    """NFC, LF line ends, no byte order mark, no blanks at line ends, no empty lines at the end. Idempotent.

    A text that piles more than 30 marks on a letter is not brought to NFC: to sort them takes Python the square of
    their number, hours for a megabyte.
    """
    text = text.lstrip(_BYTE_ORDER_MARK).replace("\r\n", "\n").replace("\r", "\n")
    if not text.isascii() and not _piles_up_marks(text) and not is_normalized("NFC", text):
        text = normalize("NFC", text)
    if " \n" in text or "\t\n" in text:
        text = "\n".join([line.rstrip(" \t") for line in text.split("\n")])
    return text.rstrip(" \t\n")


def original_span(original: str, before: str, after: str) -> tuple[int, int] | None:
    """Which part of ``original`` stands between ``before`` and ``after`` in its normalized form.

    None where it cannot be told for certain: then what is around it was not only spelled differently.
    """
    marks = len(original) - len(original.lstrip(_BYTE_ORDER_MARK))
    start = marks + _reach(original[marks:], before, _LINE_END)
    stop = len(original)
    if after:
        reversed_tail = original.rstrip(" \t\r\n")[::-1]
        stop = len(reversed_tail) - _reach(reversed_tail, after[::-1], _LINE_END_REVERSED)
    ends = normalize_text(original[:start] + "|") == before + "|", normalize_text("|" + original[stop:]) == "|" + after
    return (start, stop) if start <= stop and all(ends) else None


def _reach(original: str, normalized: str, line_end: re.Pattern[str]) -> int:
    """How far one has to read ``original``, line by line, to have read what ``normalized`` says, if it says that."""
    lines = normalized.count("\n")
    ended = next(islice(line_end.finditer(original), lines - 1, None), None) if lines else None
    return (ended.end() if ended else 0) + len(normalized) - (normalized.rfind("\n") + 1)


def _piles_up_marks(text: str) -> bool:
    """Whether more than ``_MAX_MARKS`` marks stand in a row. Looks at every 31st character: a row holds one of them."""
    for index in range(_MAX_MARKS, len(text), _MAX_MARKS + 1):
        if not _is_mark(text[index]):
            continue
        first = index
        while first and index - first <= _MAX_MARKS and _is_mark(text[first - 1]):
            first -= 1
        row = text[first : first + _MAX_MARKS + 1]
        if len(row) > _MAX_MARKS and all(map(_is_mark, row)):
            return True
    return False


def _is_mark(character: str) -> bool:
    """Whether canonical ordering may move it."""
    return combining(character) != 0 or character in _MARKS_IN_DISGUISE


def normalize_system_messages(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Normalize the text of every system message."""
    return tuple(
        message.with_content(normalize_text(message.content)) if message.is_system else message for message in messages
    )


def text_changes(given: Sequence[Message], normalized: Sequence[Message]) -> tuple[Change, ...]:
    """Says how many messages were spelled differently."""
    changed = sum(old.content != new.content for old, new in zip(given, normalized, strict=True))
    if not changed:
        return ()
    what = f"{changed} system message(s) brought to NFC, LF and no trailing blanks or byte order mark"
    return (Change("text", what),)
