"""One span of a prompt."""

from __future__ import annotations

from typing import Literal

import msgspec

__all__ = ["Part"]

Kind = Literal["system", "value", "tools", "document", "metadata", "question", "turn"]


class Part(msgspec.Struct, frozen=True):
    """One span. ``text`` is how it stands in the prompt.

    ``spelling`` is its text after canonicalization where that is another one: a system text normalized, tools sorted.
    ``fixed`` is the same without the values of fields, for a system text that is not cut at them. ``label`` is the name
    of a value's field, or the id of a document.
    """

    kind: Kind
    text: str
    spelling: str | None = None
    fixed: str | None = None
    label: str = ""
