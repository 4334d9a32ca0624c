"""Step 5, layout: where documents, moved values and the question stand in the conversation.

Unless its template says otherwise, the last user message becomes ``\\n\\n[Document {id}] {title}\\n{text}`` per
document, then ``\\n\\nMetadata: …``, then ``\\n\\nQuestion: {question}``; the first of its newlines is the one with
which chat templates end the role line. Earlier turns stay as they are, since whatever was sent once may be cached.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from gateway.canonical.documents import Document
from gateway.canonical.form import QUESTION
from gateway.canonical.messages import Message
from gateway.canonical.recognized import Region

__all__ = ["SEPARATOR", "Layout", "Pasted"]

SEPARATOR: Final = "\n\n"
"""What stands before every segment of the laid out user message."""


class Pasted(msgspec.Struct, frozen=True):
    """Documents that the application itself put into a message: which one, and what of its text is what."""

    message: int
    region: Region


class Layout(msgspec.Struct, frozen=True):
    """A canonical conversation whose documents still may take any order.

    ``messages`` are all turns; ``target`` is the index of the user message that takes ``documents`` and ``metadata``
    (None when there is neither). Documents that were ``pasted`` stay in the message where they were found.
    ``question`` is what stands before and behind the question that follows documents, ``references`` the labels of
    documents that earlier turns hold. With ``hint``, documents in another order than this are followed by a line that
    says which came first here.
    """

    messages: tuple[Message, ...]
    target: int | None = None
    documents: tuple[Document, ...] = ()
    metadata: str | None = None
    tools: tuple[dict[str, Any], ...] = ()
    pasted: Pasted | None = None
    question: tuple[str, str] = QUESTION
    references: tuple[str, ...] = ()
    hint: bool = False

    @property
    def separator(self) -> str | None:
        """What stands between two documents, whichever they are; None when that depends on their places."""
        return SEPARATOR if self.pasted is None else self.pasted.region.separator

    def arrange(self, documents: Sequence[Document]) -> tuple[Message, ...]:
        """The final messages with ``documents``, a permutation of this layout's, in this order."""
        contents: dict[int, str] = {}
        if self.target is not None:
            question = self.messages[self.target].content
            contents[self.target] = (
                self.leading_text(documents) + self._hint_text(documents) + self.trailing_text(question)
            )
        if self.pasted is not None:
            here = self.pasted.message
            contents[here] = self.pasted.region.text(documents, self.metadata if here == self.target else None)
        if not contents:
            return self.messages
        return tuple(
            message.with_content(contents[index]) if index in contents else message
            for index, message in enumerate(self.messages)
        )

    def leading_text(self, documents: Sequence[Document]) -> str:
        """Documents and references, as they open the target message; empty without, or where documents are pasted."""
        if not (documents or self.references) or self.pasted is not None:
            return ""
        return "\n" + SEPARATOR.join([*(document.block for document in documents), *self.references])

    def _hint_text(self, documents: Sequence[Document]) -> str:
        if not self.hint or self.pasted is not None or tuple(documents) == self.documents:
            return ""
        return f"{SEPARATOR}Documents by relevance: {', '.join([document.id for document in self.documents])}"

    def trailing_text(self, question: str) -> str:
        """What follows the documents: the metadata line and the question, labelled only behind documents."""
        if not (self.documents or self.references) or self.pasted is not None:
            return question if self.metadata is None else f"{self.metadata}{SEPARATOR}{question}"
        metadata = "" if self.metadata is None else f"{SEPARATOR}{self.metadata}"
        before, after = self.question
        return f"{metadata}{SEPARATOR}{before}{question}{after}"
