from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.canonical.documents import Document
from gateway.canonical.form import DocumentForm, LayoutForm
from gateway.canonical.pipeline import Canonicalizer
from gateway.canonical.registry import TemplateRegistry
from gateway.config import CanonicalConfig, LayoutConfig, TemplateConfig
from gateway.errors import ConfigError
from gateway.schema import ChatRequest

USUAL = "[Document {id}] {title}\n{text}"
XML = '<document id="{id}" source="{source}">\n{text}\n</document>'


def written(form: str, document: Document) -> str:
    return DocumentForm.compile(form, "form").write(document)


TEXT = st.text(alphabet="ab {}\n<é", min_size=1, max_size=8)
DOCUMENTS = st.builds(
    Document,
    id=st.text(alphabet="abc1", min_size=1, max_size=3),
    title=st.text(alphabet="ab {}", max_size=4),
    text=TEXT,
    attributes=st.dictionaries(st.sampled_from(["source", "page", "url"]), TEXT).map(
        lambda attributes: tuple(sorted(attributes.items()))
    ),
)


@given(DOCUMENTS)
def test_the_usual_form_is_a_form_like_others(document: Document) -> None:
    assert written(USUAL, document) == document.block


@given(DOCUMENTS, st.sampled_from([USUAL, XML, "{text} ({id})", "{{{id}}}: {text}"]))
def test_no_form_loses_id_text_or_attributes(document: Document, form: str) -> None:
    block = written(form, document)
    for value in (document.id, document.title, document.text, *(value for _, value in document.attributes)):
        assert value in block


def test_attributes_that_are_named_are_not_written_twice() -> None:
    document = Document("d", "T", "Text.", (("page", "3"), ("source", "a.txt")))
    assert written(XML, document) == '<document id="d" source="a.txt">\ntitle: T\npage: 3\nText.\n</document>'
    assert written(XML, Document("d", "", "Text.")) == '<document id="d" source="">\nText.\n</document>'


@pytest.mark.parametrize(
    "form", ["{id}", "{text}", "{id} {text} {text}", "{id} {text", " {id} {text}", "{id} {text}\n", ""]
)
def test_a_form_that_could_lose_something_is_refused_by_name(form: str) -> None:
    with pytest.raises(ConfigError, match="form"):
        DocumentForm.compile(form, "form")


@pytest.mark.parametrize("question", ["Q", "{question} {question}", "{question} {id}", "{q}"])
def test_a_question_is_asked_once(question: str) -> None:
    with pytest.raises(ConfigError, match=r"layout\.question"):
        LayoutForm.compile(LayoutConfig(question=question), "layout")


def test_a_template_lays_out_its_requests_in_its_own_form() -> None:
    config = TemplateConfig("It is {now}.", layout=LayoutConfig(document=XML, question="<q>{question}</q>"))
    canonicalizer = Canonicalizer(CanonicalConfig(), TemplateRegistry({"own": config}, normalize=True))

    def content(system: str, **fields: Any) -> str:
        turns = [{"role": "system", "content": system}, {"role": "user", "content": "Why?"}]
        body = msgspec.convert({"model": "m", "messages": turns, **fields}, ChatRequest)
        layout = canonicalizer.canonicalize(body).layout
        return layout.arrange(layout.documents)[-1].content

    documents = [{"id": "a", "text": "A.", "source": "s"}, {"id": "b", "text": "B."}]
    assert content("It is 9.", documents=documents) == (
        '\n<document id="a" source="s">\nA.\n</document>\n\n<document id="b" source="">\nB.\n</document>'
        "\n\nMetadata: now=9\n\n<q>Why?</q>"
    )
    assert content("It is 9.") == "Metadata: now=9\n\nWhy?"
    assert content("Other.", documents=documents[1:]) == "\n[Document b]\nB.\n\nQuestion: Why?"
