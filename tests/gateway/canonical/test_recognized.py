"""Where documents are found in messages, and that what is found can be put together again."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.canonical.recognized import MAX_DOCUMENTS, Region, cut_documents, find_in_message, find_undeclared
from gateway.config import DocumentFormat

# As LangChain 1 (langchain-classic) and LlamaIndex 0.14 send them.
STUFF = (
    "Use the following pieces of context to answer the user's question.\nIf you don't know the answer, just say that "
    "you don't know, don't try to make up an answer.\n----------------\n"
)
RULE = "---------------------"
QA = f"Context information is below.\n{RULE}\n"
ASKS = (
    f"\n{RULE}\nGiven the context information and not prior knowledge, answer the query.\nQuery: Which block?\nAnswer: "
)
NODES = "file_name: a.txt\npage: 3\n\nFirst.\n\nSecond paragraph.\n\nfile_name: b.txt\npage: 4\n\nOther."
GUIDE = (
    "<documents>\n"
    '<document index="1">\n<source>report.pdf</source>\n<document_content>\nOne.\n</document_content>\n</document>\n'
    '<document index="2">\n<source>plan.xlsx</source>\n<document_content>\nTwo <b>.\n</document_content>\n</document>\n'
    "</documents>\n\nWhat follows from both?"
)


def texts(region: Region | None) -> list[str]:
    assert region is not None
    return [document.text for document in region.documents]


def blocks(region: Region | None) -> list[str]:
    assert region is not None
    return [document.block for document in region.documents]


def test_langchains_stuff_prompt_is_known() -> None:
    region = find_undeclared(f"{STUFF}First text.\n\nOther text.", system=True)
    assert texts(region) == ["First text.", "Other text."]
    assert region is not None
    assert (region.lead, region.separators, region.tail) == (STUFF, ("\n\n",), "")
    assert find_undeclared(f"{STUFF}First text.", system=False) is None
    assert find_undeclared("Answer.\n\nFirst text.\n\nOther text.", system=True) is None


def test_llama_indexs_question_answering_prompt_is_known() -> None:
    region = find_undeclared(f"{QA}{NODES}{ASKS}", system=False)
    assert blocks(region) == [
        "file_name: a.txt\npage: 3\n\nFirst.\n\nSecond paragraph.",
        "file_name: b.txt\npage: 4\n\nOther.",
    ]
    assert region is not None
    assert texts(region) == ["First.\n\nSecond paragraph.", "Other."]
    assert [dict(document.attributes) for document in region.documents] == [
        {"file_name": "a.txt", "page": "3"},
        {"file_name": "b.txt", "page": "4"},
    ]
    assert region.tail[: region.closing] == f"\n{RULE}\n"
    assert find_undeclared(f"{QA}{NODES}{ASKS}", system=True) is None


def test_nodes_without_metadata_are_paragraphs() -> None:
    assert texts(find_in_message(f"{QA}First.\n\nOther.{ASKS}", "llama-index")) == ["First.", "Other."]
    assert texts(find_in_message(f"{QA}Note: this.\n\nOther.{ASKS}", "llama-index")) == ["Other."]


def test_a_prompt_of_ones_own_needs_its_two_lines_of_dashes() -> None:
    own = "Here is what we found:\n----------\nOne.\n\nTwo.\n----------\nNow answer {}"
    assert texts(find_in_message(own.format("quickly."), "llama-index")) == ["One.", "Two."]
    assert find_in_message(own.format("this:\n----------\nWhy?"), "llama-index") is None
    assert find_in_message("----------\n----------\nWhy?", "llama-index") is None
    assert find_in_message("No dashes.", "llama-index") is None


def test_xml_blocks_keep_attributes_and_elements() -> None:
    region = find_undeclared(GUIDE, system=False)
    assert region is not None
    assert texts(region) == ["\nOne.\n", "\nTwo <b>.\n"]
    assert [dict(document.attributes) for document in region.documents] == [
        {"index": "1", "source": "report.pdf"},
        {"index": "2", "source": "plan.xlsx"},
    ]
    assert (region.lead, region.separators) == ("<documents>\n", ("\n",))
    assert region.tail[: region.closing] == "\n</documents>\n\n"
    own = find_undeclared(
        "Read <document id=\"d7\" title='A'>x</document> <document id='d8'>y</document> and say.", system=True
    )
    assert own is not None
    assert [document.id for document in own.documents] == ["d7", "d8"]
    assert dict(own.documents[0].attributes) == {"title": "A"}


def test_ids_are_the_callers_where_each_has_its_own_and_else_made_from_the_document() -> None:
    same = "<document id='a'>x</document><document id='a'>y</document>"
    region = find_undeclared(same, system=False)
    assert region is not None
    one, other = region.documents
    assert one.id != other.id
    assert re.fullmatch("[0-9a-f]{12}", one.id)
    swapped = cut_documents("B.\n\nA.", "langchain", 0, 6)
    given_order = cut_documents("A.\n\nB.", "langchain", 0, 6)
    assert swapped is not None
    assert given_order is not None
    assert [d.id for d in swapped.documents] == [d.id for d in reversed(given_order.documents)]


@pytest.mark.parametrize(
    "text",
    [
        "<document>open",
        "<document>a <document>nested</document></document>",
        "<document>a</document> and <document>b</document>",
        "</document><document>a</document>",
        "<document>a</document> b</document>",
        "<documentary>a</documentary>",
        "no documents",
        "",
    ],
)
def test_doubtful_xml_is_left_alone(text: str) -> None:
    assert find_undeclared(text, system=False) is None


def test_numbered_lists_are_read_only_when_declared() -> None:
    text = "Sources:\n1. One\n   goes on.\n2. Two.\n3. Three.\n\n1. Not a source\nWhich?"
    assert find_undeclared(text, system=False) is None
    region = find_in_message(text, "numbered")
    assert blocks(region) == ["1. One\n   goes on.", "2. Two.", "3. Three."]
    assert texts(region) == ["One\n   goes on.", "Two.", "Three."]
    assert texts(find_in_message("[1] One\n\n[2] Two\n\nWhy?", "numbered")) == ["One", "Two"]
    assert find_in_message("2. Two\n3. Three", "numbered") is None


def test_no_more_documents_are_found_than_a_request_may_have() -> None:
    for unit, format in (("<document>a</document>", "xml"), ("a\n\n", "langchain"), ("k: v\n\na\n\n", "llama-index")):
        for count, found in ((MAX_DOCUMENTS, True), (MAX_DOCUMENTS + 1, False)):
            text = unit * count
            assert (cut_documents(text, format, 0, len(text)) is not None) is found, format  # type: ignore[arg-type]


def test_a_separator_of_ones_own_keeps_paragraphs_together() -> None:
    text = "One.\n\nStill one.\n\n###\n\nTwo."
    assert texts(cut_documents(text, "langchain", 0, len(text), "###")) == ["One.\n\nStill one.", "Two."]


def test_a_line_of_metadata_goes_behind_what_encloses_the_documents() -> None:
    def filled(text: str) -> str:
        region = find_undeclared(text, system=False)
        assert region is not None
        return region.text(region.documents, "Metadata: now=9")

    closing = f"\n{RULE}\n"
    asked = ASKS.removeprefix(closing)
    assert filled(f"{QA}{NODES}{ASKS}") == f"{QA}{NODES}{closing}Metadata: now=9\n\n{asked}"
    assert filled(GUIDE).endswith("</documents>\n\nMetadata: now=9\n\nWhat follows from both?")
    assert filled("<document>a</document> Why?") == "<document>a</document>\n\nMetadata: now=9\n\n Why?"
    assert filled("Why? <document>a</document>") == "Why? <document>a</document>\n\nMetadata: now=9"


PIECES = st.sampled_from(
    [
        "<document>", '<document id="1">', "</document>", "<documents>\n", "\n</documents>\n", "<source>s</source>",
        "<document_content>", "</document_content>", STUFF, QA, ASKS, f"\n{RULE}\n", NODES, "\n\n", "\n", " ", "\t",
        "1. ", "\n2. ", "[1] ", "\n[2] ", "a: b\n", "text", "e\u0301", "\r\n", "",
    ]
)  # fmt: skip
TEXT = st.lists(PIECES, max_size=14).map("".join)
FORMATS: list[DocumentFormat] = ["langchain", "llama-index", "xml", "numbered"]


@given(
    text=TEXT, ends=st.tuples(st.integers(0, 400), st.integers(0, 400)), separator=st.sampled_from([None, "\n", "---"])
)
def test_whatever_is_found_is_put_together_byte_for_byte(
    text: str, ends: tuple[int, int], separator: str | None
) -> None:
    start, stop = sorted(min(end, len(text)) for end in ends)
    found = [find_undeclared(text, system=True), find_undeclared(text, system=False)]
    for format in FORMATS:
        found += [find_in_message(text, format), cut_documents(text, format, start, stop, separator)]
    for region in found:
        if region is not None:
            assert region.text(region.documents) == text
            assert all(document.text in document.block for document in region.documents)
            moved = region.text(region.documents[::-1])
            assert sorted(moved) == sorted(text)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "unit", ["<document ", "<document>", "<document></document>", "\n", "-", "1. ", "a: b\n", " ", f"\n{RULE}\n", QA]
)
def test_hostile_texts_take_time_in_proportion_to_their_length(unit: str) -> None:
    text = unit * (1_000_000 // len(unit))
    for head in ("", QA, STUFF):
        find_undeclared(head + text, system=False)
        find_undeclared(head + text, system=True)
    for format in FORMATS:
        find_in_message(text, format)
        cut_documents(text, format, 0, len(text))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("unit", ["a", "a =", 'a="', "a='", "a:", " ", "é"])
def test_hostile_tags_take_time_in_proportion_to_their_length(unit: str) -> None:
    """Read again from each of its characters, a tag of this length would take an hour."""
    tag = f"<document {unit * (1_000_000 // len(unit))}>"
    assert blocks(find_undeclared(f"{tag}text</document>", system=False)) == [f"{tag}text</document>"]


def test_elements_and_keys_without_end_are_text() -> None:
    """No application names so much: to tell them all apart would only take time."""
    many = "".join(f"<a{index}></a{index}>" for index in range(1000))
    region = find_undeclared(f"<document><source>s</source>{many}</document>", system=False)
    assert region is not None
    (document,) = region.documents
    assert ("source", "s") in document.attributes
    assert len(document.attributes) < 100
    keys = "\n".join(f"k{index}: v" for index in range(1000))
    assert texts(find_in_message(f"{RULE}\n{keys}\n\nOne.\n\n{keys}\n\nTwo.\n{RULE}\nWhy?", "llama-index")) == [
        keys,
        "One.",
        keys,
        "Two.",
    ]
    paragraphs = "a: b\n\n" + "word\n\n" * 50_000
    assert find_in_message(f"{RULE}\n{paragraphs}{RULE}\nWhy?", "llama-index") is None
