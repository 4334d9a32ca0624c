"""System templates: filling them in, and recognising the texts that were made from them.

A template is literal text with ``{field}`` where values differ from request to request. Recognition walks the literal
parts from left to right with ``str.find``, so its cost is linear in the text whatever the text is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from gateway.canonical.form import LayoutForm, split_braces
from gateway.canonical.text import normalize_text
from gateway.config import TemplateConfig
from gateway.errors import ConfigError

__all__ = ["MAX_VALUE_CHARS", "RESERVED_NAMES", "UNREGISTERED", "FilledTemplate", "Template", "is_value", "split_text"]

MAX_VALUE_CHARS: Final = 1024
"""Longest value of a field. Values are one line, so that they fit the metadata line."""

UNREGISTERED: Final = "unregistered"
"""Stands for the template of requests that none of the registered ones made."""

RESERVED_NAMES: Final = (UNREGISTERED, "other")
"""No template has these names: statistics put what exceeds their number of labels under ``other``."""

_DOCUMENT_SLOTS: Final = frozenset({"context", "context_str", "documents"})
"""What LangChain and LlamaIndex call the place of documents in a prompt, and we."""


class Template(msgspec.Struct, frozen=True):
    """One compiled template: ``literals[0] slots[0] literals[1] slots[1] … literals[-1]``.

    ``slots`` names a field per gap, so a field used twice stands there twice; ``fields`` are the names in the order
    in which they first appear. ``config`` says what else is wanted of its requests. Versions of one name count from 1;
    a template of the configuration has version 0, it changes only with a restart. ``documents_slot`` is the gap where
    the application pastes documents, if it does so in its system message; it is no field. ``layout`` is how structured
    documents and the question are written, where that is not the usual form.
    """

    name: str
    literals: tuple[str, ...]
    slots: tuple[str, ...]
    fields: tuple[str, ...]
    config: TemplateConfig
    version: int = 0
    documents_slot: str | None = None
    layout: LayoutForm | None = None

    @classmethod
    def compile(cls, name: str, config: TemplateConfig, *, normalize: bool, version: int = 0) -> Template:
        """Parse the text of ``[templates.NAME]``, normalized first when request texts are (see ``text``).

        Raises:
            ConfigError: a brace is unmatched, a field's name is no identifier, two fields touch, or what is said of
                documents cannot be.
        """
        source = normalize_text(config.system) if normalize else config.system
        literals, slots = split_braces(source, f"templates.{name}.system")
        for left, right, literal in zip(slots, slots[1:], literals[1:], strict=False):
            if not literal:
                raise ConfigError(
                    f"templates.{name}.system has {{{left}}} and {{{right}}} side by side: "
                    "values cannot be told apart; put text between them or make them one field."
                )
        if not any(literals):
            raise ConfigError(f"templates.{name}.system has no text of its own.")
        documents_slot = _documents_slot(name, config, slots)
        fields = tuple(field for field in dict.fromkeys(slots) if field != documents_slot)
        layout = None if config.layout is None else LayoutForm.compile(config.layout, f"templates.{name}.layout")
        return cls(name, tuple(literals), tuple(slots), fields, config, version, documents_slot, layout)

    @property
    def literal_chars(self) -> int:
        """How much text is the template's own: the more, the more specific it is."""
        return sum(map(len, self.literals))

    def fill(self, values: Mapping[str, str], documents: str = "") -> str:
        """The system text with ``values`` in place, and ``documents`` in theirs. Every field must have a value."""
        before, after = self.around_documents(values)
        return f"{before}{documents}{after}"

    def around_documents(self, values: Mapping[str, str]) -> tuple[str, str]:
        """The system text before and after the place of documents; all of it is before where there is none."""
        parts = [self.literals[0]]
        before = None
        for slot, literal in zip(self.slots, self.literals[1:], strict=True):
            if slot == self.documents_slot:
                before = "".join(parts)
                parts = [literal]
            else:
                parts += (values[slot], literal)
        text = "".join(parts)
        return (text, "") if before is None else (before, text)

    def read(self, text: str) -> FilledTemplate | None:
        """What ``text`` was filled in with, when all of it has this template's form, else None.

        The documents reach from the text before them to the text behind them, both taken as far out as they go.
        """
        if self.documents_slot is None:
            values = self.match(text)
            return None if values is None else FilledTemplate(self, values)
        gap = self.slots.index(self.documents_slot)
        start, stop = len(self.literals[0]), len(text) - len(self.literals[-1])
        if stop < start or not (text.startswith(self.literals[0]) and text.endswith(self.literals[-1])):
            return None
        given: list[tuple[str, str]] = []
        for slot, literal in zip(self.slots[:gap], self.literals[1 : gap + 1], strict=True):
            end = text.find(literal, start, stop)
            if end < 0:
                return None
            given.append((slot, text[start:end]))
            start = end + len(literal)
        for slot, literal in zip(self.slots[:gap:-1], self.literals[-2:gap:-1], strict=True):
            end = text.rfind(literal, start, stop)
            if end < 0:
                return None
            given.append((slot, text[end + len(literal) : stop]))
            stop = end
        found: dict[str, str] = {}
        if not all(is_value(value) and found.setdefault(slot, value) == value for slot, value in given):
            return None
        return FilledTemplate(self, {field: found[field] for field in self.fields}, text[start:stop])

    def match(self, text: str) -> dict[str, str] | None:
        """The fields' values when all of ``text`` has this template's form, else None.

        Taking each literal at its first occurrence is enough: a later one would make the value before it longer and
        leave no more room for those after it, and the last literal is tied to the end. (A field used twice could match
        otherwise; such a text counts as unregistered.)
        """
        found = split_text(self.literals, text)
        if found is None:
            return None
        values: dict[str, str] = {}
        for slot, value in zip(self.slots, found, strict=True):
            if not is_value(value) or values.setdefault(slot, value) != value:
                return None
        return values


def split_text(literals: Sequence[str], text: str) -> list[str] | None:
    """What stands between ``literals`` when all of ``text`` is made of them in this order, else None.

    Each literal is taken at its first occurrence, the last one at the end; linear in the text.
    """
    first, last = literals[0], literals[-1]
    if not text.startswith(first):
        return None
    if len(literals) == 1:
        return [] if text == first else None
    start, end = len(first), len(text) - len(last)
    if end < start or not text.endswith(last):
        return None
    values = []
    for literal in literals[1:-1]:
        stop = text.find(literal, start, end)
        if stop < 0:
            return None
        values.append(text[start:stop])
        start = stop + len(literal)
    values.append(text[start:end])
    return values


class FilledTemplate(msgspec.Struct, frozen=True):
    """A template together with one request's values for all of its fields, and its documents as one text."""

    template: Template
    values: dict[str, str]
    documents: str = ""

    @property
    def text(self) -> str:
        """The system text as its application would write it."""
        return self.template.fill(self.values, self.documents)


def is_value(value: str) -> bool:
    """Whether a field may have this value: one line, not too long."""
    return len(value) <= MAX_VALUE_CHARS and (not value or value.splitlines() == [value])


def _documents_slot(name: str, config: TemplateConfig, slots: Sequence[str]) -> str | None:
    """Which gap of ``slots`` is for documents. Raises ``ConfigError`` when what is said of them contradicts itself."""
    if config.document_separator is not None and config.documents != "langchain":
        raise ConfigError(f"templates.{name}.document_separator goes with documents = 'langchain' alone.")
    if config.documents is None:
        return None
    if config.documents == "numbered" and config.order not in (None, "preserve"):
        raise ConfigError(
            f"templates.{name}.order must be 'preserve': the numbers of a numbered list mean places, and answers "
            "that quote them would name other documents."
        )
    places = [slot for slot in slots if slot in _DOCUMENT_SLOTS]
    if len(places) > 1:
        raise ConfigError(f"templates.{name}.system has several places for documents: {{{'}, {'.join(places)}}}.")
    if not places and config.documents == "langchain":
        raise ConfigError(
            f"templates.{name}.documents: such documents have no form of their own; mark their place in system with "
            "{context}."
        )
    return places[0] if places else None
