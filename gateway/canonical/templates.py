"""System templates: filling them in, and recognising the texts that were made from them.

A template is literal text with ``{field}`` where values differ from request to request. Recognition walks the literal
parts from left to right with ``str.find``, so its cost is linear in the text whatever the text is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from gateway.canonical.text import normalize_text
from gateway.config import TemplateConfig
from gateway.errors import ConfigError

__all__ = ["MAX_VALUE_CHARS", "UNREGISTERED", "FilledTemplate", "Template", "is_value", "split_text"]

MAX_VALUE_CHARS: Final = 1024
"""Longest value of a field. Values are one line, so that they fit the metadata line."""

UNREGISTERED: Final = "unregistered"
"""Stands for the template of requests that none of the registered ones made."""

_TOKEN: Final = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")
_FIELD_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class Template(msgspec.Struct, frozen=True):
    """One compiled template: ``literals[0] slots[0] literals[1] slots[1] … literals[-1]``.

    ``slots`` names a field per gap, so a field used twice stands there twice; ``fields`` are the names in the order
    in which they first appear. ``config`` says what else is wanted of its requests. Versions of one name count from 1;
    a template of the configuration has version 0, it changes only with a restart.
    """

    name: str
    literals: tuple[str, ...]
    slots: tuple[str, ...]
    fields: tuple[str, ...]
    config: TemplateConfig
    version: int = 0

    @classmethod
    def compile(cls, name: str, config: TemplateConfig, *, normalize: bool, version: int = 0) -> Template:
        """Parse the text of ``[templates.NAME]``, normalized first when request texts are (see ``text``).

        Raises:
            ConfigError: a brace is unmatched, a field's name is no identifier, or two fields touch.
        """
        source = normalize_text(config.system) if normalize else config.system
        literals: list[str] = []
        slots: list[str] = []
        literal, end = "", 0
        for match in _TOKEN.finditer(source):
            literal += source[end : match.start()]
            end = match.end()
            token, field = match.group(), match.group(1)
            if token in ("{{", "}}"):
                literal += token[0]
            elif field is None:
                raise ConfigError(
                    f"templates.{name}.system has an unmatched '{token}'; a literal one is written twice."
                )
            elif not _FIELD_NAME.fullmatch(field):
                raise ConfigError(
                    f"templates.{name}.system has the field {{{field}}}: a name is made of letters, digits and '_'."
                )
            elif slots and not literal:
                raise ConfigError(
                    f"templates.{name}.system has {{{slots[-1]}}} and {{{field}}} side by side: "
                    "values cannot be told apart; put text between them or make them one field."
                )
            else:
                literals.append(literal)
                slots.append(field)
                literal = ""
        literals.append(literal + source[end:])
        if not any(literals):
            raise ConfigError(f"templates.{name}.system has no text of its own.")
        return cls(name, tuple(literals), tuple(slots), tuple(dict.fromkeys(slots)), config, version)

    @property
    def literal_chars(self) -> int:
        """How much text is the template's own: the more, the more specific it is."""
        return sum(map(len, self.literals))

    def fill(self, values: Mapping[str, str]) -> str:
        """The system text with ``values`` in place. Every field must have one."""
        parts = [self.literals[0]]
        for slot, literal in zip(self.slots, self.literals[1:], strict=True):
            parts += (values[slot], literal)
        return "".join(parts)

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
    """A template together with one request's values for all of its fields."""

    template: Template
    values: dict[str, str]

    @property
    def text(self) -> str:
        """The system text as its application would write it."""
        return self.template.fill(self.values)


def is_value(value: str) -> bool:
    """Whether a field may have this value: one line, not too long."""
    return len(value) <= MAX_VALUE_CHARS and (not value or value.splitlines() == [value])
