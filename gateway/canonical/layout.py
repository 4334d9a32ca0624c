"""Step 5, layout: where documents, moved values and the question stand in the conversation.

The last user message becomes ``\\n\\n[Document {id}] {title}\\n{text}`` per document, then ``\\n\\nMetadata: …``, then
``\\n\\nQuestion: {question}``; the first of its newlines is the one with which chat templates end the role line.
Earlier turns stay as they are, since whatever was sent once may be cached.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from gateway.canonical.documents import Document
from gateway.canonical.messages import Message

__all__ = ["SEPARATOR", "Layout"]

SEPARATOR: Final = "\n\n"
"""What stands before every segment of the laid out user message."""


class Layout(msgspec.Struct, frozen=True):
    """A canonical conversation whose documents still may take any order.

    ``messages`` are all turns; ``target`` is the index of the user message that takes ``documents`` and ``metadata``
    (None when there is neither).
    """

    messages: tuple[Message, ...]
    target: int | None = None
    documents: tuple[Document, ...] = ()
    metadata: str | None = None
    tools: tuple[dict[str, Any], ...] = ()

    def arrange(self, documents: Sequence[Document]) -> tuple[Message, ...]:
        """The final messages with ``documents``, a permutation of this layout's, in this order."""
        if self.target is None:
            return self.messages
        message = self.messages[self.target]
        content = self.leading_text(documents) + self.trailing_text(message.content)
        return (*self.messages[: self.target], message.with_content(content), *self.messages[self.target + 1 :])

    def leading_text(self, documents: Sequence[Document]) -> str:
        """The documents, as they open the target message; empty without documents."""
        return "\n" + SEPARATOR.join([document.block for document in documents]) if documents else ""

    def trailing_text(self, question: str) -> str:
        """What follows the documents: the metadata line and the question, labelled only behind documents."""
        if not self.documents:
            return question if self.metadata is None else f"{self.metadata}{SEPARATOR}{question}"
        metadata = "" if self.metadata is None else f"{SEPARATOR}{self.metadata}"
        return f"{metadata}{SEPARATOR}Question: {question}"
