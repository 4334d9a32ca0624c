"""Several turns: earlier ones never change, and what they hold need not be said twice."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest

from gateway.canonical.documents import Document
from gateway.canonical.messages import Message
from gateway.canonical.pipeline import Canonicalizer
from gateway.canonical.registry import TemplateRegistry
from gateway.canonical.repetition import given_above
from gateway.config import CanonicalConfig, LayoutConfig, TemplateConfig
from gateway.schema import ChatRequest

FORM = LayoutConfig(document='<d id="{id}">\n{text}\n</d>')
TEMPLATES = {
    "full": TemplateConfig("Full, {now}."),
    "refer": TemplateConfig("Refer, {now}.", repeat="refer"),
    "own": TemplateConfig("Own, {now}.", repeat="refer", layout=FORM),
    "xml": TemplateConfig("Xml, {now}.", repeat="refer", documents="xml"),
    "nodes": TemplateConfig("Nodes, {now}.", repeat="refer", documents="llama-index"),
}
CANONICALIZER = Canonicalizer(CanonicalConfig(), TemplateRegistry(TEMPLATES, normalize=True))
DOCUMENTS = [
    {"id": "a", "title": "A", "text": "First.\n\nWith  blanks\t."},
    {"id": "b", "text": "Second.", "page": 3},
    {"id": "c", "text": "Third."},
]


def converse(template: str, history: list[str], question: str = "And?", **fields: Any) -> list[str]:
    """What the model reads after a conversation whose turns are ``history``."""
    roles = itertools.cycle(("user", "assistant"))
    turns = [{"role": role, "content": text} for role, text in zip(roles, [*history, question], strict=False)]
    turns.insert(0, {"role": "system", "content": f"{template.capitalize()}, 9."})
    body = msgspec.convert({"model": "m", "messages": turns, **fields}, ChatRequest)
    layout = CANONICALIZER.canonicalize(body).layout
    return [message.content for message in layout.arrange(layout.documents)]


def test_documents_of_an_earlier_turn_are_referred_to_by_their_labels() -> None:
    first = converse("refer", [], "What?", documents=DOCUMENTS[:2])[-1]
    second = converse("refer", [first, "This."], documents=DOCUMENTS)
    assert second[1:3] == [first, "This."]
    assert second[3] == (
        "\n[Document c]\nThird.\n\n[Document a] A\n(given above)\n\n[Document b]\n(given above)"
        "\n\nMetadata: now=9\n\nQuestion: And?"
    )
    third = converse("refer", [first, "This."], documents=DOCUMENTS[1::-1])[-1]
    assert third.startswith("\n[Document b]\n(given above)\n\n[Document a] A\n(given above)\n\nMetadata: ")


def test_they_are_repeated_where_no_template_allows_to_refer() -> None:
    first = converse("full", [], "What?", documents=DOCUMENTS)[-1]
    second = converse("full", [first, "This."], documents=DOCUMENTS)
    assert second[1] == first
    assert "above" not in second[3]
    assert second[3].count("[Document ") == 3


def test_a_template_refers_in_its_own_form() -> None:
    first = converse("own", [], "What?", documents=DOCUMENTS[2:])[-1]
    assert first.startswith('\n<d id="c">\nThird.\n</d>\n\n')
    assert converse("own", [first, "This."], documents=DOCUMENTS[2:])[-1].startswith(
        '\n<d id="c">\n(given above)\n</d>\n\nMetadata: now=9'
    )


@pytest.mark.parametrize(
    "earlier",
    [
        "[Document c]\nThird. And more.",
        "[Document c]\nThird",
        "[Document c] C\nThird.",
        "[Document c]\npage: 3\nThird.",
        "[Document c]\n Third.",
        "x [Document c]\nThird.",
        "[Document d]\nThird.",
        "Third.",
    ],
)
def test_another_text_or_label_is_another_document(earlier: str) -> None:
    assert "[Document c]\nThird.\n\n" in converse("refer", [earlier, "This."], documents=DOCUMENTS[2:])[-1]


def test_pasted_blocks_are_referred_to_in_place_and_keep_their_tags() -> None:
    blocks = [f'<document id="{id}" page="1">\n{id} text\n</document>' for id in "abc"]
    first = f"Read:\n{blocks[0]}\n{blocks[1]}\nWhat?"
    second = f"Now:\n{blocks[2]}\n{blocks[1]}\nAnd?"
    turns = converse("xml", [first, "This."], second)
    assert turns[1] == first
    reference = '<document id="b" page="1">(given above)</document>'
    assert turns[3] == f"Now:\n{blocks[2]}\n{reference}\n\nMetadata: now=9\n\nAnd?".replace("\n\nAnd?", "\nAnd?")


def test_what_has_no_label_is_never_referred_to() -> None:
    rule = "-" * 21
    pasted = f"Context:\n{rule}\nOne.\n\nTwo.\n{rule}\nWhy?"
    turns = converse("nodes", [pasted, "This."], pasted)
    assert "above" not in turns[3]
    assert "One.\n\nTwo." in turns[3]


@pytest.mark.timeout(60)
def test_a_long_conversation_of_look_alikes_takes_no_more_time_than_reading_it() -> None:
    documents = [Document(str(number), "", "x" * 50, written=f"<d>\n{number}") for number in range(10_000)]
    earlier = [Message("user", "<d>\n" * 200_000)] * 3
    assert given_above(documents, earlier) == frozenset()
