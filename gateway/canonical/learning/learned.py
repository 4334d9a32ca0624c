"""A template that was found: its form, the evidence for its fields, and what of it outlasts the gateway."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from gateway.canonical.learning.evidence import FieldEvidence
from gateway.canonical.learning.form import Form
from gateway.canonical.learning.observation import Source
from gateway.canonical.learning.skeleton import GAP
from gateway.canonical.learning.tokens import is_word, split_tokens

__all__ = ["KeptTemplate", "LearnedTemplate"]

_FIELD_WEIGHT: Final = 16


class KeptTemplate(msgspec.Struct, frozen=True):
    """A learned template without its evidence, which has to be gathered anew. No value is in it.

    ``moving`` and ``bulky`` say of each field what its evidence said, ``moved`` what follows from that.
    """

    id: str
    version: int
    source: Source
    requests: int
    literals: tuple[str, ...]
    fields: tuple[str, ...]
    moved: tuple[bool, ...]
    moving: tuple[bool, ...]
    bulky: tuple[bool, ...]

    @property
    def is_whole(self) -> bool:
        """Whether its parts fit together."""
        count = len(self.literals) - 1
        return count > 0 and all(len(part) == count for part in (self.fields, self.moved, self.moving, self.bulky))


class LearnedTemplate:
    """A template that was found, with the evidence for its fields. Owned by the learner; ``requests`` had its form.

    Of the ``requests``, ``earlier`` ones are not in the evidence, which began anew with the gateway.

    ``id`` stays through all versions; ``version`` counts the changes of what is moved, from 1.
    """

    __slots__ = ("digests", "earlier", "evidence", "form", "id", "requests", "version", "words")

    def __init__(self, id: str, form: Form, digests: array[int], words: frozenset[int]) -> None:
        self.id = id
        self.version = 0
        self.form = form
        self.digests = digests
        self.words = words
        self.requests = 0
        self.earlier = 0
        self.evidence = [FieldEvidence() for _ in form.fields]

    @property
    def name(self) -> str:
        """What statistics call it."""
        return f"learned-{self.id}"

    @property
    def volatile(self) -> bool:
        """Whether it has a field to move."""
        return any(self.form.moved)

    @property
    def weight(self) -> int:
        """See ``MAX_WEIGHT``."""
        return len(self.digests) + _FIELD_WEIGHT * len(self.evidence)

    def kept(self, source: Source) -> KeptTemplate:
        """What outlasts the gateway, of a template of ``source``."""
        form, evidence = self.form, self.evidence
        return KeptTemplate(
            self.id,
            self.version,
            source,
            self.requests,
            form.literals,
            form.fields,
            form.moved,
            tuple([seen.moving for seen in evidence]),
            tuple([seen.bulky for seen in evidence]),
        )

    @classmethod
    def restored(cls, kept: KeptTemplate, digest: Callable[[str], int]) -> LearnedTemplate:
        """The template that was ``kept``; ``digest`` is the learner's."""
        digests = array("Q")
        words: set[int] = set()
        for index, literal in enumerate(kept.literals):
            tokens = split_tokens(literal)
            digests.extend([*([GAP] if index else []), *map(digest, tokens)])
            words.update(digest(token) for token in tokens if is_word(token))
        template = cls(kept.id, Form(kept.literals, kept.fields, kept.moved), digests, frozenset(words))
        template.version, template.requests, template.earlier = kept.version, kept.requests, kept.requests
        for seen, moving, bulky in zip(template.evidence, kept.moving, kept.bulky, strict=True):
            seen.moving, seen.bulky = moving, bulky
        return template

    def follow(self, other: LearnedTemplate, fields: Sequence[int | None]) -> None:
        """Be the next version of ``other``, whose fields these are: they keep name and evidence."""
        self.version, self.requests, self.earlier = other.version + 1, other.requests, other.earlier
        names = [""] * len(fields)
        for index, before in enumerate(fields):
            if before is not None:
                names[index] = other.form.fields[before]
                self.evidence[index] = other.evidence[before]
        self.form = msgspec.structs.replace(self.form, fields=tuple(names)).decided(self.evidence)
