"""Step 1, text: spellings of one system prompt that differ only in encoding become one.

Editors, operating systems and template engines leave byte order marks, CRLF, blanks at line ends and decomposed
accents behind; a prefix cache misses from the first such byte on. Only texts of the operator (system messages) are
touched: user messages and documents go through byte for byte.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final
from unicodedata import is_normalized, normalize

from gateway.canonical.messages import Message
from gateway.plan import Change

__all__ = ["normalize_system_messages", "normalize_text"]

_BYTE_ORDER_MARK: Final = "\ufeff"
_LINE_BREAKS: Final = re.compile(r"\r\n?")


def normalize_text(text: str) -> str:
    """NFC, LF line ends, no byte order mark, no blanks at line ends, no empty lines at the end. Idempotent."""
    text = _LINE_BREAKS.sub("\n", text.lstrip(_BYTE_ORDER_MARK))
    if not is_normalized("NFC", text):
        text = normalize("NFC", text)
    if " \n" in text or "\t\n" in text:
        text = "\n".join([line.rstrip(" \t") for line in text.split("\n")])
    return text.rstrip(" \t\n")


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
