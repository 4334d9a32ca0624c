"""Step 1, text: spellings of one system prompt that differ only in encoding become one.

Editors, operating systems and template engines leave byte order marks, CRLF, blanks at line ends and decomposed
accents behind; a prefix cache misses from the first such byte on. Only texts of the operator (system messages) are
touched: user messages and documents go through byte for byte.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final
from unicodedata import combining, is_normalized, normalize

from gateway.canonical.messages import Message
from gateway.plan import Change

__all__ = ["normalize_system_messages", "normalize_text"]

_BYTE_ORDER_MARK: Final = "\ufeff"
_MAX_MARKS: Final = 30
"""Marks on one letter, as in Unicode's stream-safe text format: no language has as many."""

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


def normalize_system_messages(messages: Sequence[Message]) -> tuple[tuple[Message, ...], tuple[Change, ...]]:
    """Normalize the text of every system message; says how many of them were spelled differently."""
    normalized = tuple(
        message.with_content(normalize_text(message.content)) if message.is_system else message for message in messages
    )
    changed = sum(old.content != new.content for old, new in zip(messages, normalized, strict=True))
    if not changed:
        return tuple(messages), ()
    return normalized, (
        Change("text", f"{changed} system message(s) brought to NFC, LF and no trailing blanks or byte order mark"),
    )
