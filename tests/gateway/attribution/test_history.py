"""Each part of a prompt gets the first difference that kept it from being there before."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from gateway.attribution.history import _LEVELS, PartHistory, _Generations
from gateway.attribution.part import Part

RULES = Part("system", "Answer from the documents. ")
TAIL = Part("system", " That is all.")


def value(text: str) -> Part:
    return Part("value", text, label="now")


def document(name: str) -> Part:
    return Part("document", f"[Document {name}] text of {name}", label=name)


def question(text: str) -> Part:
    return Part("question", text)


def causes(*prompts: Sequence[Part], namespaces: Sequence[bytes] | None = None) -> list[str]:
    """The causes of the last of these prompts."""
    history = PartHistory(1000)
    names = namespaces or [b"ns"] * len(prompts)
    verdicts = [
        history.judge(name, list(prompt), serial)
        for serial, (name, prompt) in enumerate(zip(names, prompts, strict=True))
    ]
    return [verdict.cause for verdict in verdicts[-1]]


def test_what_nobody_sent_was_never_seen() -> None:
    assert causes([RULES, question("why?")]) == ["never_seen"] * 2


def test_the_same_again_was_there() -> None:
    prompt = [RULES, value("10:00"), TAIL, document("a"), question("why?")]
    assert causes(prompt, prompt) == ["evicted"] * 5


def test_text_behind_a_new_value_is_lost_to_the_value() -> None:
    before = [RULES, value("10:00"), TAIL, document("a"), question("why?")]
    after = [RULES, value("10:01"), TAIL, document("a"), question("how?")]
    assert causes(before, after) == ["evicted", "never_seen", "volatile", "volatile", "never_seen"]


def test_documents_in_another_order_are_lost_to_their_order_and_new_ones_to_nothing() -> None:
    before = [RULES, document("a"), document("b"), document("c"), question("why?")]
    after = [RULES, document("b"), document("new"), document("a"), question("why?")]
    assert causes(before, after) == ["evicted", "document_order", "never_seen", "document_order", "never_seen"]


def test_a_question_behind_the_same_documents_is_lost_to_their_order() -> None:
    before = [RULES, document("a"), document("b"), question("why?")]
    after = [RULES, document("b"), document("a"), question("why?")]
    assert causes(before, after)[1:] == ["document_order"] * 3


def test_a_document_behind_another_system_text_was_never_there() -> None:
    before = [RULES, document("a")]
    after = [Part("system", "Another application."), document("a")]
    assert causes(before, after) == ["never_seen", "never_seen"]


def test_an_order_counts_only_as_far_as_values_do_not() -> None:
    before = [RULES, value("10:00"), document("a"), document("b")]
    after = [RULES, value("10:01"), document("b"), document("a")]
    assert causes(before, after) == ["evicted", "never_seen", "document_order", "document_order"]


def test_another_spelling_of_a_system_text_is_told_from_another_text() -> None:
    plain = Part("system", "Rules:\nbe brief")
    crlf = Part("system", "Rules:\r\nbe brief", spelling="Rules:\nbe brief")
    assert causes([plain, question("why?")], [crlf, question("why?")]) == ["text_form", "text_form"]
    assert causes([crlf, question("why?")], [plain, question("why?")]) == ["text_form", "text_form"]


def test_a_text_with_both_another_spelling_and_another_value_is_lost_to_the_value() -> None:
    cut = [RULES, value("10:00"), TAIL, question("why?")]
    whole = [
        Part(
            "system",
            "Answer from the documents. 10:01 That is all.\r\n",
            spelling="Answer from the documents. 10:01 That is all.",
            fixed="Answer from the documents. \0 That is all.",
        ),
        question("why?"),
    ]
    assert causes(cut, whole) == ["volatile", "volatile"]


def test_tools_in_another_order_are_told_from_other_tools() -> None:
    one = Part("tools", '["a","b"]')
    other = Part("tools", '["b","a"]', spelling='["a","b"]')
    assert causes([one, RULES], [other, RULES]) == ["tool_order", "tool_order"]
    assert causes([other, RULES], [one, RULES]) == ["tool_order", "tool_order"]
    assert causes([one, RULES], [Part("tools", '["c"]'), RULES]) == ["never_seen", "never_seen"]


def test_what_only_another_namespace_sent_is_lost_to_the_namespace() -> None:
    prompt = [RULES, question("why?")]
    assert causes(prompt, prompt, namespaces=[b"a", b"b"]) == ["namespace", "namespace"]
    assert causes(prompt, prompt, prompt, namespaces=[b"a", b"b", b"b"]) == ["evicted", "evicted"]


def test_differences_do_not_reach_across_namespaces() -> None:
    before = [RULES, value("10:00"), TAIL]
    after = [RULES, value("10:01"), TAIL]
    assert causes(before, after, namespaces=[b"a", b"b"]) == ["namespace", "never_seen", "never_seen"]


def test_a_verdict_names_an_earlier_request_that_was_the_same_up_to_there() -> None:
    history = PartHistory(1000)
    history.judge(b"ns", [RULES, value("10:00"), TAIL, document("a")], 10)
    history.judge(b"ns", [RULES, value("10:01"), TAIL, document("b")], 11)
    verdicts = history.judge(b"ns", [RULES, value("10:02"), TAIL, document("b"), document("a")], 12)
    assert verdicts[2].cause == "volatile"
    assert (verdicts[2].depth, verdicts[2].witness) == (1, 10)
    assert verdicts[4].cause == "document_order"
    assert (verdicts[4].depth, verdicts[4].witness) == (4, 11)


@pytest.mark.parametrize("text", ["lone \ud800 surrogate", ""])
def test_any_text_has_a_digest(text: str) -> None:
    assert causes([Part("turn", text)], [Part("turn", text)]) == ["evicted"]


def test_what_is_asked_for_again_outlives_what_is_not() -> None:
    history = PartHistory(100)
    history.judge(b"ns", [Part("system", "once")], 0)
    for serial in range(1, 400):
        history.judge(b"ns", [RULES], serial)
        history.judge(b"ns", [Part("system", f"filler {serial}")], serial)
    assert history.judge(b"ns", [RULES], 400)[0].cause == "evicted"
    assert history.judge(b"ns", [Part("system", "once")], 401)[0].cause == "never_seen"


def test_levels_that_are_one_as_long_as_they_do_not_differ_judge_as_if_they_were_not() -> None:
    rng = random.Random(5)
    for _ in range(40):
        history, apart = PartHistory(30), PartHistory(30)
        for level in _LEVELS:
            apart._seen.setdefault(level, _Generations(30))
        values, spellings, names = rng.random() < 0.5, rng.random() < 0.5, [b"a", b"b"][: rng.choice([1, 2])]
        for serial in range(30):
            prompt = [
                Part("system", rng.choice("xyz"), rng.choice([None, "x"]) if spellings else None),
                *([value(rng.choice("12"))] if values and rng.random() < 0.5 else []),
                *(document(name) for name in rng.sample("abc", rng.randrange(4))),
                question(rng.choice("qr")),
            ]
            name = rng.choice(names)
            assert history.judge(name, prompt, serial) == apart.judge(name, prompt, serial)
