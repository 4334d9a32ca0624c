from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.canonical.registry import TemplateRegistry
from gateway.canonical.templates import MAX_VALUE_CHARS, UNREGISTERED, Template
from gateway.config import LayoutConfig, TemplateConfig
from gateway.errors import ConfigError, InvalidRequestError

SUPPORT = "You help {user}.\nToday is {now}. Trace: {trace}"


def compiled(system: str, name: str = "t") -> Template:
    return Template.compile(name, TemplateConfig(system), normalize=True)


def test_a_template_is_literals_around_fields_and_doubled_braces_are_text() -> None:
    template = compiled('Reply with {{"a": 1}} to {user} at {now}{{!}}')
    assert template.literals == ('Reply with {"a": 1} to ', " at ", "{!}")
    assert template.fields == ("user", "now")
    filled = template.fill({"user": "{now}", "now": "9"})
    assert filled == 'Reply with {"a": 1} to {now} at 9{!}'  # a value is never parsed again


@pytest.mark.parametrize(
    ("system", "word"),
    [
        ("a { b", "unmatched"),
        ("a } b", "unmatched"),
        ("a {} b", "name"),
        ("a {0} b", "name"),
        ("a {x!r} b", "name"),
        ("a {x.y} b", "name"),
        ("{a}{b} c", "side by side"),
        ("{a}", "no text"),
        ("", "no text"),
    ],
)
def test_a_malformed_template_is_refused_at_load_by_name(system: str, word: str) -> None:
    with pytest.raises(ConfigError, match=word) as caught:
        compiled(system, "greeting")
    assert "greeting" in caught.value.message


def test_the_name_for_unregistered_requests_is_reserved() -> None:
    with pytest.raises(ConfigError, match=UNREGISTERED):
        TemplateRegistry({UNREGISTERED: TemplateConfig("x")}, normalize=True)


VALUE = st.text(alphabet="ab :.{}()é;!", max_size=8)


@given(user=VALUE, now=VALUE, trace=VALUE)
def test_what_is_extracted_reproduces_the_text_even_where_values_hold_literals(user: str, now: str, trace: str) -> None:
    template = compiled("[{user}] at {now}; trace={trace}!")
    text = template.fill({"user": user, "now": now, "trace": trace})
    values = template.match(text)
    assert values is not None
    assert template.fill(values) == text


@given(st.text(alphabet="ab", max_size=6), st.text(alphabet="ab", max_size=6))
def test_plain_values_are_extracted_exactly(user: str, now: str) -> None:
    template = compiled("You help {user}. Today is {now}.")
    assert template.match(f"You help {user}. Today is {now}.") == {"user": user, "now": now}


@pytest.mark.parametrize(
    "text",
    [
        "You help Ann.\nToday is Monday. Trace: 1\nAnd more.",  # a field at the end takes no second line
        "Well: You help Ann.\nToday is Monday. Trace: 1",
        "You help Ann\nToday is Monday. Trace: 1",
        "You help Ann\nand Bob.\nToday is Monday. Trace: 1",  # a value is one line
        "You help " + "x" * (MAX_VALUE_CHARS + 1) + ".\nToday is Monday. Trace: 1",
        "",
    ],
)
def test_only_the_whole_text_in_the_templates_form_is_recognised(text: str) -> None:
    assert compiled(SUPPORT).match(text) is None


def test_overlapping_literals_do_not_match_a_shorter_text() -> None:
    assert compiled("aba{x}aba").match("ababa") is None
    assert compiled("aba{x}aba").match("abaaba") == {"x": ""}


def test_a_repeated_field_must_repeat_its_value() -> None:
    template = compiled("{user}, hello {user}!")
    assert template.match("Ann, hello Ann!") == {"user": "Ann"}
    assert template.match("Ann, hello Bob!") is None


def test_of_several_matching_templates_the_most_specific_wins() -> None:
    templates = {
        "a loose one": TemplateConfig("You help {everything}."),
        "close": TemplateConfig("You help {user} with taxes on {day}."),
        "another": TemplateConfig("You answer {user}."),
    }
    for names in (("a loose one", "close", "another"), ("close", "another", "a loose one")):
        registry = TemplateRegistry({name: templates[name] for name in names}, normalize=True)
        found = registry.recognize("You help Ann with taxes on Monday.")
        assert found is not None
        assert (found.template.name, found.values) == ("close", {"user": "Ann", "day": "Monday"})
    assert registry.recognize("You sing.") is None


def test_recognition_sees_through_the_spelling_of_the_template_file() -> None:
    template = Template.compile("t", TemplateConfig("\ufeffHi {user} \r\nbye\r\n"), normalize=True)
    assert template.match("Hi Ann\nbye") == {"user": "Ann"}
    as_it_is = Template.compile("t", TemplateConfig("Hi {user} \r\nbye"), normalize=False)
    assert as_it_is.match("Hi Ann \r\nbye") == {"user": "Ann"}


def test_fields_are_filled_in_by_name() -> None:
    registry = TemplateRegistry({"support": TemplateConfig(SUPPORT)}, normalize=True)
    filled = registry.fill("support", {"trace": "7", "user": "Ann", "now": "noon"})
    assert filled.text == "You help Ann.\nToday is noon. Trace: 7"
    assert list(filled.values) == ["user", "now", "trace"]  # the template's order, not the caller's


@pytest.mark.parametrize(
    ("name", "values", "param"),
    [
        ("sales", {}, "headstart.template"),
        ("support", {"user": "a", "now": "b"}, "headstart.fields.trace"),
        ("support", {"user": "a", "now": "b", "trace": "c", "mood": "d"}, "headstart.fields.mood"),
        ("support", {"user": "a\nb", "now": "b", "trace": "c"}, "headstart.fields.user"),
        ("support", {"user": "a", "now": "b\u2028", "trace": "c"}, "headstart.fields.now"),
        ("support", {"user": "a", "now": "b", "trace": "c" * (MAX_VALUE_CHARS + 1)}, "headstart.fields.trace"),
    ],
)
def test_wrong_names_and_fields_are_named(name: str, values: dict[str, str], param: str) -> None:
    registry = TemplateRegistry({"support": TemplateConfig(SUPPORT)}, normalize=True)
    with pytest.raises(InvalidRequestError) as caught:
        registry.fill(name, values)
    assert caught.value.param == param


@pytest.mark.timeout(60)
def test_recognition_of_a_hostile_text_ends() -> None:
    template = compiled("{a}x{b}x{c}x{d}x{e}y")
    assert template.match("x" * 2_000_000) is None  # a backtracking matcher would need years


def pasting(system: str, **config: Any) -> Template:
    return Template.compile("t", TemplateConfig(system, **config), normalize=True)


def test_the_place_of_documents_is_no_field_and_takes_any_text() -> None:
    template = pasting("Hi {user}.\n\n{context}\n\nIt is {now}; be kind.", documents="langchain")
    assert (template.fields, template.documents_slot) == (("user", "now"), "context")
    documents = "a\n\nIt is 9; be kind.\n\nb\r\n" + "x" * 5000
    text = f"Hi Ann.\n\n{documents}\n\nIt is noon; be kind."
    filled = template.read(text)
    assert filled is not None
    assert (filled.values, filled.documents, filled.text) == ({"user": "Ann", "now": "noon"}, documents, text)
    for other in ("Hi Ann.\n\nIt is noon; be kind.", text + "!", "Hi Ann\n.\n\na\n\nIt is noon; be kind.", ""):
        assert template.read(other) is None
    assert pasting("Hi {context}").fields == ("context",)  # a field like others where nothing is said of documents


@given(st.text(alphabet="ab\n {}", max_size=12), VALUE, VALUE)
def test_what_is_read_around_documents_reproduces_the_text(documents: str, user: str, now: str) -> None:
    template = pasting("[{user}]\n{documents}\n{now}: go", documents="xml")
    text = template.fill({"user": user, "now": now}, documents)
    filled = template.read(text)
    assert filled is not None
    assert filled.text == text


@pytest.mark.parametrize(
    ("system", "config", "word"),
    [
        ("S {context}{documents}", {"documents": "xml"}, "side by side"),
        ("S", {"layout": LayoutConfig(document="{text}")}, "layout.document"),
        ("S", {"layout": LayoutConfig(question="Q")}, "layout.question"),
        ("S {context} {documents}", {"documents": "xml"}, "several places"),
        ("S {context} {context}", {"documents": "xml"}, "several places"),
        ("S", {"documents": "langchain"}, "context"),
        ("S {context}", {"documents": "xml", "document_separator": "-"}, "document_separator"),
        ("S {context}", {"document_separator": "-"}, "document_separator"),
        ("S", {"documents": "numbered", "order": "canonical"}, "places"),
        ("S", {"documents": "numbered", "order": "cache-aware"}, "places"),
    ],
)
def test_what_cannot_be_said_of_documents_is_refused(system: str, config: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        pasting(system, **config)
