"""Documents that applications paste into their messages, through all stages."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest

from gateway.canonical.pipeline import Canonicalizer, CanonicalPrompt
from gateway.canonical.registry import TemplateRegistry
from gateway.config import CanonicalConfig, TemplateConfig
from gateway.schema import ChatRequest

from .test_recognized import ASKS, GUIDE, NODES, QA, RULE, STUFF

TEMPLATES = {
    "stuff": TemplateConfig("It is {now}. Use:\n\n{context}", documents="langchain", order="canonical"),
    "fixed": TemplateConfig("Keep these:\n\n{context}\n\nBe kind.", documents="xml"),
    "nodes": TemplateConfig("It is {now}. Answer.", documents="llama-index", order="canonical"),
    "list": TemplateConfig("Answer by number.", documents="numbered"),
    "guide": TemplateConfig("It is {now}. Read.", documents="xml", order="canonical"),
}
CANONICALIZER = Canonicalizer(CanonicalConfig(), TemplateRegistry(TEMPLATES, normalize=True))


def canonical(system: str | None, user: str = "Why?", **fields: Any) -> CanonicalPrompt:
    turns = [] if system is None else [{"role": "system", "content": system}]
    turns.append({"role": "user", "content": user})
    return CANONICALIZER.canonicalize(msgspec.convert({"model": "m", "messages": turns, **fields}, ChatRequest))


def contents(done: CanonicalPrompt, order: tuple[int, ...] | None = None) -> list[str]:
    documents = done.layout.documents
    arranged = done.layout.arrange(documents if order is None else [documents[index] for index in order])
    return [message.content for message in arranged]


@pytest.mark.parametrize(
    ("system", "user", "count"),
    [
        (f"{STUFF}One.  \r\n\r\n\tstill e\u0301.\n\nTwo. \n", "Why?", 2),
        (None, f"{QA}{NODES}{ASKS}", 2),
        ("Be brief.", GUIDE, 2),
        (GUIDE, "Why? \n", 2),
        ("Keep these:\n\n<document>\r\n a  \n</document>\n\nBe kind.", "Why?", 1),
        ("Answer by number.", "1. One \n2. Two\n\nWhich?", 2),
    ],
)
def test_recognised_documents_keep_order_and_every_byte_until_a_template_allows_more(
    system: str | None, user: str, count: int
) -> None:
    for order in (None, "cache-aware", "canonical"):
        done = canonical(system, user, headstart={"order": order})
        assert done.order == "preserve"
        assert len(done.layout.documents) == count
        given = [text for text in (system, user) if text is not None]
        assert contents(done) == given
        assert [change.step for change in done.changes] == ["documents"]
        assert done.note is not None
        assert "keep their order" in done.note


def test_around_documents_the_operators_text_is_normalized_and_they_are_not() -> None:
    documents = "Un e\u0301.  \r\n goes on\t\n\n\ufeffTwo.  "
    done = canonical("\ufeffIt is 9. Use:  \r\n\r\n" + documents)
    assert contents(done)[0] == f"It is (see metadata). Use:\n\n{documents}"
    assert contents(done)[1] == "Metadata: now=9\n\nWhy?"
    assert {change.step for change in done.changes} == {"text", "volatile", "documents"}
    done = canonical("Keep these: \r\n\r\n<document>\r\n a  \n</document>\n\nBe kind. \n\n")
    assert contents(done)[0] == "Keep these:\n\n<document>\r\n a  \n</document>\n\nBe kind."


def test_where_the_template_allows_it_every_order_of_the_documents_becomes_one() -> None:
    paragraphs = ["One.", "Two\nlines.", "Three.", "Four."]
    prompts = set()
    for permutation in itertools.permutations(paragraphs):
        done = canonical("It is 9. Use:\n\n" + "\n\n".join(permutation))
        assert (done.template, done.order, done.note) == ("stuff", "canonical", None)
        by_id = sorted(range(4), key=lambda index: done.layout.documents[index].id)
        (system, user) = contents(done, tuple(by_id))
        assert sorted(system.removeprefix("It is (see metadata). Use:\n\n").split("\n\n")) == sorted(paragraphs)
        prompts.add((system, user))
    assert len(prompts) == 1
    asked = canonical("It is 9. Use:\n\nOne.\n\nTwo.", headstart={"order": "preserve"})
    assert asked.order == "preserve"


def test_nodes_of_llama_index_move_as_wholes_and_the_metadata_stands_behind_them() -> None:
    done = canonical("It is 9. Answer.", f"{QA}{NODES}{ASKS}")
    first, second = NODES.split("\n\nfile_name: b.txt")
    swapped = f"file_name: b.txt{second}\n\n{first}"
    rest = ASKS.removeprefix(f"\n{RULE}\n")
    assert done.order == "canonical"
    assert contents(done, (1, 0)) == [
        "It is (see metadata). Answer.",
        f"{QA}{swapped}\n{RULE}\nMetadata: now=9\n\n{rest}",
    ]


def test_numbers_mean_places_so_that_numbered_lists_never_move() -> None:
    done = canonical("Answer by number.", "1. One\n2. Two\n\nWhich?", headstart={"order": "canonical"})
    assert done.order == "preserve"
    assert [dict(document.attributes)["number"] for document in done.layout.documents] == ["1", "2"]


def test_structured_documents_go_before_the_question_whatever_is_pasted() -> None:
    done = canonical(None, GUIDE, documents=[{"id": "d", "text": "D."}])
    assert done.layout.pasted is None
    assert contents(done) == [f"\n[Document d]\nD.\n\nQuestion: {GUIDE}"]


def test_a_template_that_says_how_documents_are_pasted_looks_for_no_others() -> None:
    done = canonical("It is 9. Answer.", GUIDE)
    assert (done.template, done.layout.documents) == ("nodes", ())
    assert contents(done) == ["It is (see metadata). Answer.", f"Metadata: now=9\n\n{GUIDE}"]


def test_canonicalizing_pasted_documents_again_changes_nothing() -> None:
    for system, user in (
        ("It is 9. Use:\n\nOne.  \r\n\nTwo.", "Why?"),
        ("It is 9. Answer.", f"{QA}{NODES}{ASKS}"),
        ("It is 9. Read.", GUIDE),
        ("It is 9. Read.", "<document>a</document>Why?"),
        (f"{STUFF}One.  \n\nTwo.\n", "Why?"),
    ):
        once = contents(canonical(system, user))
        assert contents(canonical(*once)) == once
