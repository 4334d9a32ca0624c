"""The form of a learned template: what of it is constant, and the fields between.

A form is recognised like a registered template. Only those of its fields that the evidence calls volatile are moved;
the others (variants of one prompt, long texts) stay where they are and count as the template's own text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Any, Final

import msgspec

from gateway.canonical.learning.evidence import FieldEvidence
from gateway.canonical.learning.tokens import Shape
from gateway.canonical.templates import FilledTemplate, Template, split_text

__all__ = ["Form", "field_name", "form_id"]

_LABEL: Final = re.compile(r"([A-Za-z][\w-]*(?: [\w-]+){0,3}) ?[:=] ?[\"'(\[<]?$", re.ASCII)
_APART: Final = 6
_LABEL_CHARS: Final = 64
_NAMES: Final[dict[Shape, str]] = {
    "date-time": "time",
    "uuid": "id",
    "hex-id": "id",
    "id": "id",
    "number": "number",
    "address": "address",
    "name": "name",
    "text": "value",
}


class Form(msgspec.Struct, frozen=True):
    """``literals[0] fields[0] literals[1] … literals[-1]``; ``moved`` says which fields leave the prefix.

    A field has a name once it is moved, and keeps it; until then it is the empty string.
    """

    literals: tuple[str, ...]
    fields: tuple[str, ...]
    moved: tuple[bool, ...]

    @classmethod
    def between(cls, literals: Sequence[str]) -> Form:
        """The form with these constant parts, no field of which is moved."""
        fields = len(literals) - 1
        return cls(tuple(literals), ("",) * fields, (False,) * fields)

    def decided(self, evidence: Sequence[FieldEvidence]) -> Form:
        """The same form with those fields moved that ``evidence`` calls volatile.

        A bulky field mostly holds documents. No prefix is shared behind it, so fields there stay; so do those with
        fewer than 6 words between them and it, which may be a document's own title, source or number.
        """
        names, moved = list(self.fields), [seen.moving for seen in evidence]
        bulk = next((index for index, seen in enumerate(evidence) if seen.bulky), None)
        if bulk is not None:
            words = 0
            for index in reversed(range(bulk)):
                words += len(self.literals[index + 1].split())
                moved[index] &= words >= _APART
            moved[bulk:] = [False] * (len(moved) - bulk)
        for index, (seen, before) in enumerate(zip(evidence, self.literals, strict=False)):
            if moved[index] and not names[index]:
                names[index] = field_name(before, seen.shape, names)
        return Form(self.literals, tuple(names), tuple(moved))

    @property
    def literal_chars(self) -> int:
        """How much text is constant: the more, the more specific the form is."""
        return sum(map(len, self.literals))

    def split(self, text: str) -> list[str] | None:
        """The fields' values when all of ``text`` has this form, else None. Linear in the text."""
        return split_text(self.literals, text)

    def covers(self, other: Form) -> list[int | None] | None:
        """Which of ``other``'s fields each of this form's is, if any; None unless all that has that form has this."""
        marks = [f"\0{index}\0" for index in range(len(other.fields))]
        values = self.split(other.fill(marks))
        return None if values is None else [marks.index(value) if value in marks else None for value in values]

    def fill(self, values: Sequence[str]) -> str:
        """The text with these values."""
        parts = [self.literals[0]]
        for value, literal in zip(values, self.literals[1:], strict=True):
            parts += (value, literal)
        return "".join(parts)

    def filled(self, values: Sequence[str], moved: Iterable[bool], **about: Any) -> FilledTemplate:
        """The text with these values as a template whose fields are those that are ``moved``.

        ``about`` are the other attributes of ``Template``.
        """
        literals = [self.literals[0]]
        fields: dict[str, str] = {}
        for field, value, moves, literal in zip(self.fields, values, moved, self.literals[1:], strict=True):
            if moves:
                fields[field] = value
                literals.append(literal)
            else:
                literals[-1] += value + literal
        return FilledTemplate(
            Template(literals=tuple(literals), slots=tuple(fields), fields=tuple(fields), **about), fields
        )


def form_id(tenant: str, model: str, literals: Sequence[str]) -> str:
    """The identity of a form, the same in every process: 12 hex digits."""
    return blake2b(msgspec.json.encode([tenant, model, *literals]), digest_size=6).hexdigest()


def field_name(before: str, shape: Shape, taken: Iterable[str]) -> str:
    """What to call a field: by the label in the text ``before`` it (``Trace:``, ``user=``), else by its shape."""
    match = _LABEL.search(before[-_LABEL_CHARS:])
    base = match.group(1).lower().replace(" ", "_").replace("-", "_") if match else _NAMES[shape]
    used = set(taken)
    name, number = base, 1
    while name in used:
        number += 1
        name = f"{base}_{number}"
    return name
