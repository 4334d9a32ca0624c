"""Documents that an earlier turn holds already: they can be referred to by their label instead of standing there twice.

Earlier turns themselves never change. A document counts as given only where its whole block stands there, byte for
byte, label and attributes included: an id alone proves nothing about a text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from gateway.canonical.documents import Document
from gateway.canonical.form import DocumentForm
from gateway.canonical.messages import Message

__all__ = ["GIVEN_ABOVE", "given_above", "reference", "reference_in_xml"]

GIVEN_ABOVE: Final = "(given above)"
"""What a reference says in place of the text."""

_PLACES: Final = 8
"""Places at which a block is looked for, of those that begin with its first line."""


def given_above(documents: Sequence[Document], earlier: Sequence[Message]) -> frozenset[int]:
    """Which of ``documents`` (indexes) stand in ``earlier`` messages. Reads each of these once."""
    places: dict[str, list[tuple[str, int]]] = {_first_line(document.block): [] for document in documents}
    for message in earlier:
        at = 0
        for line in message.content.split("\n"):
            known = places.get(line)
            if known is not None and len(known) < _PLACES:
                known.append((message.content, at))
            at += len(line) + 1
    return frozenset(
        index
        for index, document in enumerate(documents)
        if any(_stands_at(document.block, *place) for place in places[_first_line(document.block)])
    )


def reference(document: Document, form: DocumentForm | None) -> str:
    """The document's label, in the form of its template, with a word on where its text is."""
    named = Document(document.id, document.title, GIVEN_ABOVE)
    return named.block if form is None else form.write(named)


def reference_in_xml(document: Document) -> Document:
    """The same for a pasted ``<document …>`` block: its tags stay, and so do the attributes that they hold."""
    opening = document.block[: document.block.index(">") + 1]
    return msgspec.structs.replace(document, text=GIVEN_ABOVE, written=f"{opening}{GIVEN_ABOVE}</document>")


def _first_line(block: str) -> str:
    return block.split("\n", 1)[0]


def _stands_at(block: str, text: str, place: int) -> bool:
    end = place + len(block)
    return text.startswith(block, place) and text[end : end + 1] in ("", "\n")
