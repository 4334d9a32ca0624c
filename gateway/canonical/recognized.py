"""Documents that an application pasted into a message: found where RAG libraries put them, and put together again.

A recogniser only says where in a text documents begin and end. What it found is cut out of that very text, so that
putting it together in the order in which it came gives the text back byte for byte.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from itertools import chain, islice, pairwise
from typing import Final

import msgspec

from gateway.canonical.documents import Document
from gateway.config import DocumentFormat

__all__ = [
    "LLAMA_INDEX_CLOSING",
    "LLAMA_INDEX_OPENING",
    "MAX_DOCUMENTS",
    "Region",
    "cut_documents",
    "find_in_message",
    "find_undeclared",
]

MAX_DOCUMENTS: Final = 10_000
"""In a text that seems to hold more than any model could read, none are looked for: it would take seconds."""

_MAX_PARAGRAPHS: Final = 4 * MAX_DOCUMENTS
_MAX_NAMES: Final = 64
"""Keys of a node's metadata, and elements in an XML document, that are told from its text."""

_BLANK_LINES: Final = re.compile("\n{2,}")
_BLANK_LINE: Final = "\n\n"

_XML_OPENING: Final = re.compile(r"<document(?=[\s>])[^<>]*>")
_XML_CLOSING: Final = "</document>"
# Begins where a name does and gives nothing back: a tag of a megabyte without "=" is read once, not once a character.
_XML_ATTRIBUTE: Final = re.compile(r"(?<![\w:.-])([A-Za-z_][\w:.-]*+)\s*+=\s*+(?:\"([^\"]*+)\"|'([^']*+)')")
_XML_ELEMENT: Final = re.compile(r"\s*<([A-Za-z_][\w:.-]*)>")
_XML_WRAPPER: Final = re.compile(r"\s*</documents>\n*")

_RULE: Final = re.compile(r"^-{10,}$", re.MULTILINE)
_METADATA_LINE: Final = re.compile(r"([^\s:][^:\n]{0,63}): ")
_NUMBER: Final = re.compile(r"^(?:\[(\d{1,4})\]|(\d{1,4})[.)])[ \t]+", re.MULTILINE)

LLAMA_INDEX_OPENING: Final = "Context information is below.\n---------------------\n"
LLAMA_INDEX_CLOSING: Final = (
    "\n---------------------\nGiven the context information and not prior knowledge, answer the query.\nQuery: "
)
"""What stands around the nodes in LlamaIndex's default question-answering prompt; the question follows."""

_LANGCHAIN_OPENING: Final = (
    "Use the following pieces of context to answer the user's question.\nIf you don't know the answer, "
    "just say that you don't know, don't try to make up an answer.\n----------------\n"
)


class Region(msgspec.Struct, frozen=True):
    """A text cut up: ``lead``, ``documents`` (their blocks as they came) with ``separators`` between, ``tail``.

    The first ``closing`` characters of the tail belong to what encloses the documents: a line of dashes, a closing tag.
    """

    lead: str
    documents: tuple[Document, ...]
    separators: tuple[str, ...]
    tail: str
    closing: int = 0

    @property
    def separator(self) -> str | None:
        """What stands between all of the documents, or in front of the only one; None when that differs."""
        if not self.separators:
            return _BLANK_LINE if self.lead.endswith(_BLANK_LINE) else "\n"
        return self.separators[0] if len(set(self.separators)) == 1 else None

    def text(self, documents: Sequence[Document], metadata: str | None = None) -> str:
        """The text with ``documents``, a permutation of this region's, and a line of ``metadata`` behind them."""
        parts = [self.lead]
        for document, separator in zip(documents, (*self.separators, ""), strict=True):
            parts += (document.block, separator)
        if metadata is None:
            return "".join((*parts, self.tail))
        closing, rest = self.tail[: self.closing], self.tail[self.closing :]
        before = "" if closing.endswith("\n") else _BLANK_LINE
        after = "" if not rest or rest.startswith("\n") else _BLANK_LINE
        return "".join((*parts, closing, before, metadata, after, rest))


class _Found(msgspec.Struct, frozen=True):
    """One document: where its block starts and stops, the text without label and markup, and what is said of it."""

    start: int
    stop: int
    text: str
    id: str | None = None
    attributes: tuple[tuple[str, str], ...] = ()


def cut_documents(
    text: str, format: DocumentFormat, start: int, stop: int, separator: str | None = None
) -> Region | None:
    """Cut the documents out of ``text[start:stop]``, which holds nothing else; None when there is none.

    ``separator`` is what the application joins them with, where it is no blank line (``langchain`` alone).
    """
    if format == "langchain" and separator is not None:
        return _region(text, _joined_by(separator, text, start, stop))
    return _region(text, _CUTTERS[format](text, start, stop))


def find_in_message(text: str, format: DocumentFormat) -> Region | None:
    """Find documents of a declared format in a user message; None when there are none.

    ``llama-index``: between the only two lines of dashes. ``xml`` and ``numbered``: wherever they
    stand. Documents of ``langchain`` have no form of their own, only a place in the system message.
    """
    if format == "llama-index":
        rules = [*_RULE.finditer(text)]
        if len(rules) != 2 or rules[0].group() != rules[1].group():
            return None  # a document or the question holds lines of dashes too
        return _enclosed(text, format, rules[0].end() + 1, rules[1].start() - 1, min(rules[1].end() + 1, len(text)))
    if format == "xml":
        return _xml_region(text)
    return cut_documents(text, format, 0, len(text)) if format == "numbered" else None


def find_undeclared(text: str, *, system: bool) -> Region | None:
    """Find documents in a message of which nobody has said how it holds them: only where there is no doubt.

    These are XML blocks, the default prompt of LangChain's ``stuff`` chain in a ``system`` message, and LlamaIndex's
    default question-answering prompt in a user message.
    """
    if system and text.startswith(_LANGCHAIN_OPENING):
        return cut_documents(text, "langchain", len(_LANGCHAIN_OPENING), len(text))
    if not system and text.startswith(LLAMA_INDEX_OPENING):
        stop = text.find(LLAMA_INDEX_CLOSING, len(LLAMA_INDEX_OPENING))
        if stop >= 0:
            rule = 1 + LLAMA_INDEX_CLOSING.index("\n", 1)
            return _enclosed(text, "llama-index", len(LLAMA_INDEX_OPENING), stop, stop + rule)
    return _xml_region(text)


def _xml_region(text: str) -> Region | None:
    found = [*_xml_blocks(text, 0, len(text))]
    wrapper = _XML_WRAPPER.match(text, found[-1].stop) if found else None
    return _region(text, found, wrapper.end() if wrapper else None)


def _enclosed(text: str, format: DocumentFormat, start: int, stop: int, closed: int) -> Region | None:
    return _region(text, _CUTTERS[format](text, start, stop), closed)


def _region(text: str, documents: Iterable[_Found], closed: int | None = None) -> Region | None:
    found = [*islice(documents, MAX_DOCUMENTS + 1)]
    if not 0 < len(found) <= MAX_DOCUMENTS:
        return None
    stop = found[-1].stop
    return Region(
        lead=text[: found[0].start],
        documents=_documents(text, found),
        separators=tuple(text[one.stop : other.start] for one, other in pairwise(found)),
        tail=text[stop:],
        closing=0 if closed is None else closed - stop,
    )


def _documents(text: str, found: Sequence[_Found]) -> tuple[Document, ...]:
    """Ids are those the application gave where each is given once, else they are made from the document."""
    given = [one.id for one in found]
    own = len(set(given)) == len(given) and None not in given
    return tuple(
        Document(
            one.id if own and one.id is not None else _content_id(one),
            "",
            one.text,
            one.attributes,
            text[one.start : one.stop],
        )
        for one in found
    )


def _content_id(found: _Found) -> str:
    return blake2b(msgspec.json.encode((found.text, found.id, found.attributes)), digest_size=6).hexdigest()


def _paragraphs(text: str, start: int, stop: int) -> Iterator[_Found]:
    """LangChain joins the texts of documents by blank lines; so each paragraph counts as one."""
    for piece in _pieces(text, start, stop, _BLANK_LINES):
        yield _Found(*piece, text[slice(*piece)])


def _joined_by(separator: str, text: str, start: int, stop: int) -> Iterator[_Found]:
    for piece in _pieces(text, start, stop, re.compile(re.escape(separator))):
        yield _Found(*piece, text[slice(*piece)])


def _pieces(text: str, start: int, stop: int, separator: re.Pattern[str]) -> Iterator[tuple[int, int]]:
    """What stands between separators, without newlines at its ends and without what is blank."""
    begins = start
    for end, resumes in chain((match.span() for match in separator.finditer(text, start, stop)), [(stop, stop)]):
        piece = text[begins:end]
        if piece and not piece.isspace():
            yield begins + len(piece) - len(piece.lstrip("\n")), end - len(piece) + len(piece.rstrip("\n"))
        begins = resumes


def _nodes(text: str, start: int, stop: int) -> Iterator[_Found]:
    """LlamaIndex writes the metadata of a node as ``key: value`` lines, a blank line, and its text; then the next node.

    Texts may hold blank lines, but all nodes of an index have the same keys: a paragraph of these begins a node.
    Without metadata each paragraph counts as a node.
    """
    paragraphs = [*islice(_pieces(text, start, stop, _BLANK_LINES), _MAX_PARAGRAPHS + 1)]
    if len(paragraphs) > _MAX_PARAGRAPHS:
        return
    keys = [*_metadata(text, paragraphs[0])] if len(paragraphs) > 1 else []
    if not keys:
        yield from _paragraphs(text, start, stop)
        return
    opening = f"{keys[0]}: "
    heads = [
        index
        for index, piece in enumerate(paragraphs)
        if text.startswith(opening, piece[0]) and [*_metadata(text, piece)] == keys
    ]
    for head, following in zip(heads, [*heads[1:], len(paragraphs)], strict=True):
        first, last = paragraphs[head][0], paragraphs[following - 1][1]
        body = paragraphs[head + 1][0] if head + 1 < following else last
        yield _Found(first, last, text[body:last], attributes=tuple(_metadata(text, paragraphs[head]).items()))


def _metadata(text: str, piece: tuple[int, int]) -> Mapping[str, str]:
    """The values of a paragraph that is nothing but ``key: value`` lines; empty for another one."""
    lines = text[slice(*piece)].split("\n", _MAX_NAMES)
    if len(lines) > _MAX_NAMES:
        return {}
    values: dict[str, str] = {}
    for line in lines:
        match = _METADATA_LINE.match(line)
        if match is None:
            return {}
        values[match[1]] = line[match.end() :]
    return values


def _xml_blocks(text: str, start: int, stop: int) -> Iterator[_Found]:
    """``<document …>…</document>`` blocks, one after another with nothing but white space between.

    Where tags are nested, left open, or strewn over the text, nothing is certain and nothing is found.
    """
    found: list[_Found] = []
    at = start
    for opening in _XML_OPENING.finditer(text, start, stop):
        if opening.start() < at or len(found) == MAX_DOCUMENTS or (found and text[at : opening.start()].strip()):
            return
        closing = text.find(_XML_CLOSING, opening.end(), stop)
        if closing < 0:
            return
        at = closing + len(_XML_CLOSING)
        found.append(_xml_document(text, opening, closing, at))
    if found and text.find(_XML_CLOSING, at, stop) < 0 and text.find(_XML_CLOSING, start, found[0].start) < 0:
        yield from found


def _xml_document(text: str, opening: re.Match[str], closing: int, stop: int) -> _Found:
    """Its attributes are those of the tag and the nested elements, but for ``document_content``, which is its text."""
    values = {
        match[1]: match[2] if match[2] is not None else match[3] for match in _XML_ATTRIBUTE.finditer(opening.group())
    }
    at, body = opening.end(), text[opening.end() : closing]
    for _ in range(_MAX_NAMES):
        element = _XML_ELEMENT.match(text, at, closing)
        end = -1 if element is None else text.find(f"</{element[1]}>", element.end(), closing)
        if element is None or end < 0:
            break
        if element[1] in ("document_content", "document_contents"):
            body = text[element.end() : end]
            break
        values[element[1]] = text[element.end() : end]
        at = end + len(element[1]) + 3
    identifier = values.get("id")
    attributes = tuple((key, value) for key, value in sorted(values.items()) if key != "id")
    return _Found(opening.start(), stop, body, identifier, attributes)


def _numbered(text: str, start: int, stop: int) -> Iterator[_Found]:
    """``1. …``, ``2) …`` or ``[3] …`` at the beginnings of lines, counted from 1; the last ends at a blank line.

    Its number is a document's label: the application knows it by its place in the list.
    """
    labels: list[re.Match[str]] = []
    for match in _NUMBER.finditer(text, start, stop):
        if int(match[1] or match[2]) == len(labels) + 1:
            labels.append(match)
    if not labels:
        return
    blank = _BLANK_LINES.search(text, labels[-1].end(), stop)
    ends = [*(match.start() for match in labels[1:]), blank.start() if blank else stop]
    for number, (label, end) in enumerate(zip(labels, ends, strict=True), start=1):
        last = label.end() + len(text[label.end() : end].rstrip("\n"))
        yield _Found(label.start(), last, text[label.end() : last], attributes=(("number", str(number)),))


_CUTTERS: Final[Mapping[DocumentFormat, Callable[[str, int, int], Iterator[_Found]]]] = {
    "langchain": _paragraphs,
    "llama-index": _nodes,
    "xml": _xml_blocks,
    "numbered": _numbered,
}
