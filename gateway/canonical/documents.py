"""Step 3, documents: structured ``documents`` of the body become labelled blocks of text.

The label is the document's id and never its position, so that another order changes neither a block's tokens nor what
a citation means. Text, title and every further attribute survive byte for byte.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import Any, Final, Generic, TypeVar

import msgspec
from xxhash import xxh3_64_intdigest

from gateway.errors import InvalidRequestError
from gateway.plan import Change

__all__ = ["Document", "attribute_lines", "read_documents"]

_sorted_json = msgspec.json.Encoder(order="sorted")

_REMEMBERED: Final = 2048
"""Documents remembered as they were read, and"""
_MEMORABLE_CHARS: Final = 4096
"""how long those are at most: some 10 MB of ordinary text, 60 MB in the worst case."""


_Made = TypeVar("_Made")


class _once(Generic[_Made]):
    """``functools.cached_property`` as Python 3.12 has it: the lock of older ones takes longer than a fingerprint."""

    def __init__(self, make: Callable[[Any], _Made]) -> None:
        self._make = make

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: type) -> _Made:
        made = instance.__dict__[self._name] = self._make(instance)
        return made


class Document(msgspec.Struct, frozen=True, dict=True):
    """One retrieved document. ``attributes`` are its further keys with their values as text, sorted by key.

    ``written`` is the whole document as it stands in the prompt, where that is not the usual form.
    """

    id: str
    title: str
    text: str
    attributes: tuple[tuple[str, str], ...] = ()
    written: str | None = None

    @_once
    def block(self) -> str:
        """The document as the model reads it: label and title, one line per attribute, then the text."""
        if self.written is not None:
            return self.written
        label = f"[Document {self.id}] {self.title}" if self.title else f"[Document {self.id}]"
        return "\n".join((label, *attribute_lines(self.attributes), self.text))

    @_once
    def fingerprint(self) -> int:
        """64 bits that tell this block from others, for counting: not safe against those who look for collisions."""
        return xxh3_64_intdigest(self.block.encode("utf-8", "surrogatepass"))


def attribute_lines(attributes: Iterable[tuple[str, str]]) -> list[str]:
    """One line for each attribute."""
    return [f"{key}: {value}" for key, value in attributes]


def read_documents(documents: Sequence[Mapping[str, Any]]) -> tuple[tuple[Document, ...], tuple[Change, ...]]:
    """Check the body's documents and drop exact repetitions of an earlier one.

    Raises:
        InvalidRequestError: a document has no text, a field has the wrong type, or one id names two texts.
    """
    places: dict[Document, int] = {}
    texts: dict[str, tuple[str, str]] = {}
    for index, raw in enumerate(documents):
        place = f"documents[{index}]"
        document = _remembered(raw, place)
        if texts.setdefault(document.id, (document.title, document.text)) != (document.title, document.text):
            first = next(at for known, at in places.items() if known.id == document.id)
            raise InvalidRequestError(
                f"{place} has the id of documents[{first}] but another title or text: citations would be ambiguous.",
                param=f"{place}.id",
            )
        places.setdefault(document, index)
    dropped = len(documents) - len(places)
    change = Change("documents", f"left out {dropped} exact repetition(s) of a document") if dropped else None
    return tuple(places), (change,) if change else ()


def _remembered(raw: Mapping[str, Any], place: str) -> Document:
    """``_read``; one of the documents that all ask for comes with its block and fingerprint made already."""
    values = raw.values()
    # Only text: as keys, 1 and true are the same.
    if all(type(value) is str for value in values) and sum(map(len, values)) <= _MEMORABLE_CHARS:
        try:
            return _read_once(tuple(raw.items()))
        except InvalidRequestError:
            pass  # which is not remembered, and is to name the place
    return _read(raw, place)


@lru_cache(maxsize=_REMEMBERED)
def _read_once(items: tuple[tuple[str, str], ...]) -> Document:
    return _read(dict(items), "")


def _read(raw: Mapping[str, Any], place: str) -> Document:
    text_key = "text" if raw.get("text") is not None else "content"
    text = raw.get(text_key)
    if not isinstance(text, str):
        raise InvalidRequestError(f"{place} needs 'text' (or 'content'), a string.", param=f"{place}.text")
    if not text.strip():
        raise InvalidRequestError(f"{place}.{text_key} is empty.", param=f"{place}.{text_key}")
    title = raw.get("title")
    if title is not None and not isinstance(title, str):
        raise InvalidRequestError(f"{place}.title must be a string.", param=f"{place}.title")
    attributes = tuple(
        (key, value if isinstance(value, str) else _sorted_json.encode(value).decode())
        for key, value in sorted(raw.items())
        if key not in ("id", "title", text_key) and not (key == "content" and value is None)
    )
    anonymous = Document("", title or "", text, attributes)
    identifier = _identifier(raw.get("id"), place) or _content_id(anonymous)
    return msgspec.structs.replace(anonymous, id=identifier)


def _identifier(value: object, place: str) -> str | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise InvalidRequestError(f"{place}.id must be a string or an integer.", param=f"{place}.id")
    identifier = str(value)
    if not identifier.strip() or identifier.splitlines() != [identifier]:
        raise InvalidRequestError(f"{place}.id must be one line that is not empty.", param=f"{place}.id")
    return identifier


def _content_id(document: Document) -> str:
    said = {"id": "", "title": document.title, "text": document.text, "attributes": document.attributes}
    return blake2b(msgspec.json.encode(said), digest_size=6).hexdigest()
