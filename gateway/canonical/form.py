"""Texts with ``{fields}`` in them: taking them apart, and the forms in which a template wants its prompts laid out."""

from __future__ import annotations

import re
from typing import Final

import msgspec

from gateway.canonical.documents import Document, attribute_lines
from gateway.config import LayoutConfig
from gateway.errors import ConfigError

__all__ = ["QUESTION", "DocumentForm", "LayoutForm", "split_braces"]

QUESTION: Final[tuple[str, str]] = ("Question: ", "")
"""What stands around the question behind documents, where no template says otherwise."""

_TOKEN: Final = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")
_FIELD_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def split_braces(source: str, place: str) -> tuple[list[str], list[str]]:
    """The literal parts of ``source`` and the names of the fields between them, one literal more than fields.

    A literal brace is written twice.

    Raises:
        ConfigError: a brace is unmatched or a field's name is no identifier; the message begins with ``place``.
    """
    literals: list[str] = []
    fields: list[str] = []
    literal, end = "", 0
    for match in _TOKEN.finditer(source):
        literal += source[end : match.start()]
        end = match.end()
        token, field = match.group(), match.group(1)
        if token in ("{{", "}}"):
            literal += token[0]
        elif field is None:
            raise ConfigError(f"{place} has an unmatched '{token}'; a literal one is written twice.")
        elif not _FIELD_NAME.fullmatch(field):
            raise ConfigError(f"{place} has the field {{{field}}}: a name is made of letters, digits and '_'.")
        else:
            literals.append(literal)
            fields.append(field)
            literal = ""
    literals.append(literal + source[end:])
    return literals, fields


class DocumentForm(msgspec.Struct, frozen=True):
    """How a template writes structured documents: ``literals`` around ``fields``.

    ``id``, ``title`` and ``text`` are a document's own, every other name is an attribute. What is not named stands as a
    line before the text, so that everything survives. Blanks before a value that is not there vanish.
    """

    literals: tuple[str, ...]
    fields: tuple[str, ...]

    @classmethod
    def compile(cls, source: str, place: str) -> DocumentForm:
        """Parse the form. Raises ``ConfigError`` when it is malformed, or has not one ``{id}`` and one ``{text}``."""
        literals, fields = split_braces(source, place)
        if any(fields.count(field) != 1 for field in ("id", "text")):
            raise ConfigError(f"{place} must have {{id}} and {{text}} once each: answers quote a document by its id.")
        if literals[0][:1].isspace() or literals[-1][-1:].isspace():
            raise ConfigError(f"{place} must neither begin nor end with white space: a blank line stands between.")
        return cls(tuple(literals), tuple(fields))

    def write(self, document: Document) -> str:
        """The document as it stands in the prompt."""
        said = [("title", document.title), *document.attributes] if document.title else document.attributes
        unnamed = attribute_lines(pair for pair in said if pair[0] not in self.fields)
        values = {**dict(said), "id": document.id, "text": "\n".join((*unnamed, document.text))}
        parts: list[str] = []
        for literal, field in zip(self.literals, self.fields, strict=False):
            value = values.get(field, "")
            parts += (literal if value else literal.rstrip(" "), value)
        return "".join((*parts, self.literals[-1]))


class LayoutForm(msgspec.Struct, frozen=True):
    """How a template wants its prompts laid out. ``question`` is what stands before and behind it."""

    document: DocumentForm | None
    question: tuple[str, str]

    @classmethod
    def compile(cls, config: LayoutConfig, place: str) -> LayoutForm:
        """Parse ``[templates.NAME.layout]``. Raises ``ConfigError`` when a form is malformed."""
        document = None
        if config.document is not None:
            document = DocumentForm.compile(config.document, f"{place}.document")
        question = QUESTION
        if config.question is not None:
            literals, fields = split_braces(config.question, f"{place}.question")
            if fields != ["question"]:
                raise ConfigError(f"{place}.question must have {{question}} once, and no other field.")
            question = (literals[0], literals[1])
        return cls(document, question)
