from __future__ import annotations

from gateway.canonical.documents import Document
from gateway.canonical.layout import Layout
from gateway.canonical.messages import Message

DOCUMENTS = (Document("d1", "One", "First."), Document("d2", "", "Second.", (("url", "u"),)))
TURNS = (Message("system", "S"), Message("user", "old"), Message("assistant", "answer"), Message("user", "new?"))


def content(layout: Layout) -> str:
    return layout.arrange(layout.documents)[-1].content


def test_documents_metadata_and_question_stand_in_this_order() -> None:
    layout = Layout(TURNS, 3, DOCUMENTS, "Metadata: now=9")
    assert content(layout) == (
        "\n[Document d1] One\nFirst.\n\n[Document d2]\nurl: u\nSecond.\n\nMetadata: now=9\n\nQuestion: new?"
    )


def test_documents_alone_need_no_metadata_line() -> None:
    assert content(Layout(TURNS, 3, DOCUMENTS[:1])) == "\n[Document d1] One\nFirst.\n\nQuestion: new?"


def test_metadata_alone_leaves_the_question_without_a_label() -> None:
    assert content(Layout(TURNS, 3, (), "Metadata: now=9")) == "Metadata: now=9\n\nnew?"


def test_earlier_turns_never_change() -> None:
    assert Layout(TURNS, 3, DOCUMENTS).arrange(DOCUMENTS)[:3] == TURNS[:3]
    followed = (*TURNS, Message("assistant", "partial"))
    arranged = Layout(followed, 3, DOCUMENTS).arrange(DOCUMENTS)
    assert (arranged[:3], arranged[4]) == (TURNS[:3], followed[4])


def test_a_hint_names_the_callers_order_where_another_one_stands() -> None:
    layout = Layout(TURNS, 3, DOCUMENTS, "Metadata: now=9", hint=True)
    assert "relevance" not in content(layout)
    assert layout.arrange(DOCUMENTS[::-1])[-1].content.endswith(
        "One\nFirst.\n\nDocuments by relevance: d1, d2\n\nMetadata: now=9\n\nQuestion: new?"
    )


def test_nothing_to_lay_out_leaves_everything_as_it_is() -> None:
    assert Layout(TURNS).arrange(()) == TURNS


def test_a_documents_block_is_the_same_at_every_place() -> None:
    layout = Layout(TURNS, 3, DOCUMENTS)
    for order in (DOCUMENTS, DOCUMENTS[::-1]):
        text = layout.arrange(order)[-1].content
        assert all(f"\n{document.block}\n\n" in text for document in DOCUMENTS)
