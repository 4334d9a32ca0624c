from __future__ import annotations

from typing import Any

import pytest

from gateway.canonical.documents import Document, read_documents
from gateway.errors import InvalidRequestError


def read(*documents: dict[str, Any]) -> tuple[Document, ...]:
    return read_documents(documents)[0]


def test_a_document_is_labelled_by_id_and_keeps_text_and_title_byte_for_byte() -> None:
    (document,) = read({"id": "d1", "title": "Té  ", "text": " \tline\r\n\n  e\u0301 "})
    assert document.block == "[Document d1] Té  \n \tline\r\n\n  e\u0301 "


def test_every_attribute_survives_as_a_line_whatever_its_order() -> None:
    attributes = {"url": "https://x/?a=b", "page": 4, "score": 0.5, "tags": ["b", "a"], "meta": {"z": 1, "a": None}}
    (one,) = read({"id": "d", "text": "T", **attributes})
    (other,) = read({**dict(reversed(attributes.items())), "text": "T", "id": "d"})
    assert one == other
    assert one.block == (
        '[Document d]\nmeta: {"a":null,"z":1}\npage: 4\nscore: 0.5\ntags: ["b","a"]\nurl: https://x/?a=b\nT'
    )


def test_content_stands_for_text_and_is_an_attribute_beside_it() -> None:
    assert read({"id": "d", "content": "C"}) == (Document("d", "", "C"),)
    assert read({"id": "d", "content": "C", "text": None}) == (Document("d", "", "C", (("text", "null"),)),)
    assert read({"id": "d", "content": "C", "text": "T"}) == (Document("d", "", "T", (("content", "C"),)),)


def test_an_id_is_made_from_the_content_and_from_nothing_else() -> None:
    one, other = read({"text": "a"}, {"text": "b"})
    assert one.id != other.id
    assert read({"text": "b"}, {"text": "a"}) == (other, one)
    assert read({"text": "a", "title": "t"})[0].id != one.id
    assert len(one.id) == 12


def test_integer_ids_are_labels_too() -> None:
    assert [document.id for document in read({"id": 7, "text": "a"}, {"id": 0, "text": "b"})] == ["7", "0"]


def test_exact_repetitions_are_left_out_once_and_reported() -> None:
    given = [{"id": "a", "text": "A"}, {"text": "x"}, {"id": "a", "text": "A"}, {"text": "x"}, {"id": "b", "text": "A"}]
    documents, changes = read_documents(given)
    assert [document.text for document in documents] == ["A", "x", "A"]
    assert [change.step for change in changes] == ["documents"]
    assert read_documents(given[:2])[1] == ()


def test_the_same_text_with_other_attributes_is_kept() -> None:
    assert len(read({"id": "a", "text": "A", "score": 1}, {"id": "a", "text": "A", "score": 2})) == 2


@pytest.mark.parametrize(
    ("document", "param"),
    [
        ({}, "documents[1].text"),
        ({"id": "x", "title": "only"}, "documents[1].text"),
        ({"text": 4}, "documents[1].text"),
        ({"text": ""}, "documents[1].text"),
        ({"content": " \n"}, "documents[1].content"),
        ({"text": "x", "title": 4}, "documents[1].title"),
        ({"text": "x", "id": True}, "documents[1].id"),
        ({"text": "x", "id": 1.5}, "documents[1].id"),
        ({"text": "x", "id": ""}, "documents[1].id"),
        ({"text": "x", "id": "a\nb"}, "documents[1].id"),
        ({"text": "other", "id": "first"}, "documents[1].id"),
        ({"text": "A", "title": "other", "id": "first"}, "documents[1].id"),
    ],
)
def test_what_is_wrong_with_a_document_is_named_by_its_place(document: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        read({"id": "first", "text": "A"}, document)
    assert caught.value.param == param
    assert caught.value.status == 400


def test_a_document_that_was_read_before_is_read_the_same_and_still_checked() -> None:
    given = {"id": "d", "title": "T", "text": "text", "url": "u"}
    (first,), (again,) = read(dict(given)), read(dict(given))
    assert first == again
    assert read(given | {"url": "v"})[0].attributes == (("url", "v"),)
    for place in (0, 1):
        documents = [given, given]
        documents[place] = {"id": "d", "text": " "}
        with pytest.raises(InvalidRequestError) as caught:
            read(*documents)
        assert caught.value.param == f"documents[{place}].text"
