"""The learner over synthetic traffic: what is found, what is left alone, and what it keeps."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.canonical.learning.evidence import WINDOW
from gateway.canonical.learning.learned import LearnedTemplate
from gateway.canonical.learning.learner import MAX_SOURCES, MAX_TEMPLATES, MAX_WEIGHT, TemplateLearner
from gateway.canonical.learning.observation import Source
from gateway.canonical.learning.tokens import MAX_TEXT_CHARS
from gateway.canonical.templates import FilledTemplate

SOURCE = Source("acme", "m")
SUPPORT = (
    "You are the support assistant of Acme.\nNow: {now}\nYou are talking to {user}. Trace: {trace}\nBe kind and brief."
)
CLERK = (
    "Request {trace} received {now} for {user}.\nYou are a careful clerk who copies the exact words of the passages."
)
DESK = "You are the help desk bot. Cite document ids. Today is {now}. User: {user}. If you are not sure, say so."
JUDGE = "You compare two answers and name the better one.\nSession: user={user}; now={now}; trace={trace}"
POLICY = "You answer questions about the policy of 2025-01-01, version 3. Say when you are not sure of an answer."


USERS = ["Ann", "Oz", "Quin", "Lux", "Mia"]


class Traffic:
    """Values as applications have them, from one seed."""

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)
        self._clock = 1_000_000

    def fill(self, template: str, **fixed: str) -> str:
        self._clock += self._random.randrange(1, 9)
        values = {
            "now": f"2026-03-02 {self._clock // 3600 % 24:02}:{self._clock // 60 % 60:02}:{self._clock % 60:02}",
            "user": f"{self._random.choice(USERS)} {self._random.randrange(100):03}",
            "trace": f"{self._random.getrandbits(128):032x}",
        }
        return template.format(**values | fixed)


@pytest.fixture
def traffic() -> Traffic:
    return Traffic()


@pytest.fixture
def learner() -> TemplateLearner:
    return TemplateLearner(salt=7)


def moved(filled: FilledTemplate | None) -> dict[str, str]:
    return filled.values if filled is not None else {}


def only(learner: TemplateLearner) -> LearnedTemplate:
    ((_, template),) = learner.templates()
    return template


def test_fields_of_templates_that_interleave_in_one_source_are_found(
    learner: TemplateLearner, traffic: Traffic
) -> None:
    templates = [SUPPORT, CLERK, DESK, JUDGE]
    rng = random.Random(1)
    for _ in range(200):
        learner.observe(SOURCE, traffic.fill(rng.choice(templates)))
    assert len([*learner.templates()]) == 4
    now, user, trace = "2027-12-31 23:59:59", "Zoe 007", "0123456789abcdef0123456789abcdef"
    found = {}
    for template in templates:
        text = template.format(now=now, user=user, trace=trace)
        filled = learner.recognize(SOURCE, text)
        assert filled is not None
        assert filled.text == text
        found[template] = filled.values
    assert found == {
        SUPPORT: {"now": now, "name": user, "trace": trace},
        CLERK: {"id": trace, "time": now, "name": user},
        DESK: {"time": now, "user": user},
        JUDGE: {"user": user, "now": now, "trace": trace},
    }


def test_the_system_text_without_its_fields_is_the_same_for_every_request(
    learner: TemplateLearner, traffic: Traffic
) -> None:
    for _ in range(60):
        learner.observe(SOURCE, traffic.fill(SUPPORT))
    literals = set()
    for _ in range(60):
        filled = learner.recognize(SOURCE, traffic.fill(SUPPORT))
        assert filled is not None
        literals.add(filled.template.literals)
    assert len(literals) == 1


@given(st.text(max_size=30), st.text(max_size=30), st.text(max_size=30))
def test_whatever_is_recognised_is_given_back_byte_for_byte(now: str, user: str, trace: str) -> None:
    text = SUPPORT.format(now=now, user=user, trace=trace)
    filled = LEARNED.recognize(SOURCE, text)
    assert filled is None or filled.text == text


def _learned() -> TemplateLearner:
    learner, traffic = TemplateLearner(salt=7), Traffic()
    for _ in range(40):
        learner.observe(SOURCE, traffic.fill(SUPPORT))
    return learner


LEARNED = _learned()


@pytest.mark.parametrize("odd", ["x" * 500, "two\nlines"])
def test_a_value_that_does_not_fit_the_metadata_line_stays_and_the_others_are_moved(odd: str) -> None:
    text = SUPPORT.format(now="12:00", user="Ann", trace=odd)
    filled = LEARNED.recognize(SOURCE, text)
    assert filled is not None
    assert set(filled.values) == {"now", "name"}
    assert filled.text == text


@pytest.mark.parametrize("odd", ["x" * 500, "two\nlines", "Ann\nBe kind and brief.\nYou are talking to Oz. Trace: 1"])
def test_whoever_fills_in_odd_values_does_not_end_it_for_all_others(
    odd: str, learner: TemplateLearner, traffic: Traffic
) -> None:
    for number in range(300):
        learner.observe(SOURCE, traffic.fill(SUPPORT, **({"user": odd} if number >= 30 and number % 10 == 0 else {})))
        if number >= 30:
            filled = learner.recognize(SOURCE, traffic.fill(SUPPORT))
            assert set(moved(filled)) == {"now", "name", "trace"}
    assert only(learner).version == 1


def test_constant_prompts_do_not_push_out_a_template_with_fields(learner: TemplateLearner, traffic: Traffic) -> None:
    for _ in range(40):
        learner.observe(SOURCE, traffic.fill(SUPPORT))
    for number in range(2 * MAX_TEMPLATES):
        words = " ".join(f"{'abcdefghij'[number % 10]}{'klmnopq'[number // 10]}{end}" for end in "rstuvwxyz")
        for _ in range(10):
            learner.observe(SOURCE, f"You answer in the words {words} alone.")
    assert moved(learner.recognize(SOURCE, traffic.fill(SUPPORT)))


def test_a_constant_date_in_a_policy_is_not_moved(learner: TemplateLearner, traffic: Traffic) -> None:
    for _ in range(2 * WINDOW):
        learner.observe(SOURCE, POLICY)
    assert learner.recognize(SOURCE, POLICY) is None
    assert [*learner.templates()] == []
    for _ in range(60):
        learner.observe(SOURCE, traffic.fill(POLICY + " Now: {now}"))
    assert set(moved(learner.recognize(SOURCE, traffic.fill(POLICY + " Now: {now}")))) == {"now"}


def test_a_field_that_is_constant_over_the_window_stays_in_place_again(
    learner: TemplateLearner, traffic: Traffic
) -> None:
    for _ in range(60):
        learner.observe(SOURCE, traffic.fill(DESK))
    first = only(learner)
    assert (first.form.fields, first.form.moved) == (("time", "user"), (True, True))
    version = first.version
    for _ in range(3 * WINDOW):
        learner.observe(SOURCE, traffic.fill(DESK, user="Ann 001"))
    assert set(moved(learner.recognize(SOURCE, traffic.fill(DESK, user="Ann 001")))) == {"time"}
    assert only(learner).version == version + 1


def test_one_user_at_first_and_others_later_is_the_same_template_in_a_new_version(
    learner: TemplateLearner, traffic: Traffic
) -> None:
    for _ in range(40):
        learner.observe(SOURCE, traffic.fill(DESK, user="Ann 001"))
    first = only(learner)
    assert first.form.fields == ("time",)
    id, version = first.id, first.version
    for _ in range(40):
        text = traffic.fill(DESK)
        learner.observe(SOURCE, text)
    assert (only(learner).id, only(learner).form.fields) == (id, ("time", "user"))
    assert only(learner).version > version
    assert set(moved(learner.recognize(SOURCE, traffic.fill(DESK, user="Ann 001")))) == {"time", "user"}


def test_a_new_version_keeps_moving_what_the_old_one_moved(learner: TemplateLearner, traffic: Traffic) -> None:
    for _ in range(40):
        learner.observe(SOURCE, traffic.fill(DESK, user="Ann 001"))
    for _ in range(40):
        learner.observe(SOURCE, traffic.fill(DESK))
        assert "time" in moved(learner.recognize(SOURCE, traffic.fill(DESK, user="Ann 001")))


def test_odd_requests_do_not_change_a_template(learner: TemplateLearner, traffic: Traffic) -> None:
    for _ in range(60):
        learner.observe(SOURCE, traffic.fill(SUPPORT))
    before = only(learner)
    id, version, form = before.id, before.version, before.form
    for number in range(300):
        if number % 60 == 0:
            learner.observe(SOURCE, traffic.fill(SUPPORT).replace("kind", f"test{number}"))
        text = traffic.fill(SUPPORT)
        learner.observe(SOURCE, text)
        assert len(moved(learner.recognize(SOURCE, text))) == 3
    after = only(learner)
    assert (after.id, after.version, after.form) == (id, version, form)


def test_an_edited_template_is_learned_beside_the_old_one(learner: TemplateLearner, traffic: Traffic) -> None:
    edited = SUPPORT.replace("Be kind and brief.", "Be kind. Never speak about the price of a product of others.")
    for template in (SUPPORT, edited, SUPPORT):
        for _ in range(60):
            learner.observe(SOURCE, traffic.fill(template))
    assert len([*learner.templates()]) == 2
    for template in (SUPPORT, edited):
        assert set(moved(learner.recognize(SOURCE, traffic.fill(template)))) == {"now", "name", "trace"}


@pytest.mark.parametrize("burst", [1, 5, 20])
def test_users_that_come_in_bursts_are_one_field(learner: TemplateLearner, traffic: Traffic, burst: int) -> None:
    template = "You are the help desk bot of Initech. User: {user}. Answer from the documents, and cite their ids."
    for number in range(1200):
        learner.observe(SOURCE, traffic.fill(template, user=f"{USERS[number // burst % 5]} {number // burst:03}"))
    assert moved(learner.recognize(SOURCE, traffic.fill(template, user="Zoe 9"))) == {"user": "Zoe 9"}


def test_a_few_variants_of_a_prompt_stay_where_they_are(learner: TemplateLearner, traffic: Traffic) -> None:
    styles = ["in one short sentence", "at length and with examples", "as a list of points"]
    template = "You are the help desk bot of Initech. Today is {now}. Answer {style}, from the documents alone."
    rng = random.Random(3)
    for _ in range(300):
        learner.observe(SOURCE, traffic.fill(template, style=rng.choice(styles)))
    for style in styles:
        assert set(moved(learner.recognize(SOURCE, traffic.fill(template, style=style)))) == {"time"}


def test_long_spans_stay_and_so_does_what_is_close_before_or_anywhere_behind_them(
    learner: TemplateLearner, traffic: Traffic
) -> None:
    rng = random.Random(4)
    template = (
        "You answer by the context. Now: {now}. Name the passage on which an answer rests.\n\n"
        "Source: {trace}\n\nText: {context}\n\nAsked by {user}."
    )

    def context() -> str:
        return "\n".join(f"passage {rng.randrange(10**6)} says {rng.randrange(10**6)}" for _ in range(12))

    for _ in range(120):
        learner.observe(SOURCE, traffic.fill(template, context=context()))
    text = traffic.fill(template, context=context())
    filled = learner.recognize(SOURCE, text)
    assert set(moved(filled)) == {"now"}, "the source may be the document's, and behind it no prefix is shared"
    assert filled is not None
    assert filled.text == text


@pytest.mark.parametrize("words", [300, 20_000])
def test_fields_in_front_of_pasted_documents_are_found(learner: TemplateLearner, traffic: Traffic, words: int) -> None:
    rng = random.Random(8)
    vocabulary = ["".join(rng.choices("bdeilmnoprstua", k=5)) for _ in range(words)]
    passages = [" ".join(rng.choices(vocabulary, k=120)) + "." for _ in range(60)]
    template = (
        "You are an assistant for questions about the library. Now: {now}. Use the following pieces of retrieved "
        "context to answer the question, and say that you do not know when they do not tell.\n\n{context}\n\n"
        "Keep the answer as short as you can, in three sentences at most. Trace: {trace}"
    )

    def text() -> str:
        return traffic.fill(template, context="\n\n".join(rng.sample(passages, 4)))

    for _ in range(100):
        learner.observe(SOURCE, text())
    one, other = text(), text()
    filled = learner.recognize(SOURCE, one)
    assert filled is not None
    assert set(filled.values) == {"now"}
    assert filled.text == one
    assert filled.template.literals[0] == "You are an assistant for questions about the library. Now: "
    assert set(moved(learner.recognize(SOURCE, other))) == {"now"}


def test_templates_with_a_preamble_in_common_are_learned_apart(learner: TemplateLearner, traffic: Traffic) -> None:
    rng = random.Random(9)
    preamble = "You work for Acme, an insurance company. Be polite and brief. Never promise a payment to a customer. "
    tasks = [
        "Sum up the letter of {now} in as few words as possible, without any names of people that it mentions.",
        "Translate the text below to plain English. Keep its order, headings and numbers. Trace: {trace}",
        "Write an answer to the customer {user}, who is angry. Offer a call back, and no discount or refund at all.",
    ]
    for _ in range(300):
        learner.observe(SOURCE, traffic.fill(preamble + rng.choice(tasks)))
    fields = [set(moved(learner.recognize(SOURCE, traffic.fill(preamble + task)))) for task in tasks]
    assert fields == [{"time"}, {"trace"}, {"name"}]


def test_sources_learn_apart(learner: TemplateLearner, traffic: Traffic) -> None:
    for _ in range(60):
        learner.observe(SOURCE, traffic.fill(SUPPORT))
    text = traffic.fill(SUPPORT)
    assert learner.recognize(SOURCE, text) is not None
    for other in (Source("bolt", "m"), Source("acme", "n"), Source.of("acme", "m", "some key")):
        assert learner.recognize(other, text) is None


def test_the_same_texts_leave_the_same_state_and_ids_do_not_depend_on_the_salt() -> None:
    states = []
    for salt in (7, 7, 8):
        learner, traffic = TemplateLearner(salt=salt), Traffic()
        for number in range(300):
            learner.observe(SOURCE, traffic.fill([SUPPORT, CLERK, DESK][number % 3]))
        states.append([(template.id, template.version, template.form) for _, template in learner.templates()])
    assert len(states[0]) == 3
    assert states[0] == states[1] == states[2]


def strings(root: object) -> Iterator[str]:
    """Every string that can be reached from ``root``, classes and modules left out."""
    todo: list[Any] = [root]
    met: set[int] = set()
    while todo:
        item = todo.pop()
        if id(item) in met or isinstance(item, type | type(gc) | Callable):  # type: ignore[arg-type]
            continue
        met.add(id(item))
        if isinstance(item, str):
            yield item
        todo += gc.get_referents(item)


def test_no_value_is_kept(learner: TemplateLearner, traffic: Traffic) -> None:
    for number in range(100):
        learner.observe(SOURCE, traffic.fill(SUPPORT, user=f"Z{number}EBRA Z{number}EBRA", trace=f"{number:08d}EBRA"))
        learner.observe(SOURCE, " ".join(f"z{number}ebra{n}" for n in range(9)))
    kept = [*strings(learner)]
    assert any("support assistant" in text for text in kept)
    assert not any("ebra" in text.lower() for text in kept)


def test_hostile_traffic_stays_within_all_bounds(learner: TemplateLearner, traffic: Traffic) -> None:
    rng = random.Random(5)
    for _ in range(40):
        learner.observe(SOURCE, traffic.fill(SUPPORT))

    def noise(words: int) -> str:
        return " ".join(f"{rng.getrandbits(40):x}" for _ in range(words))

    one, heaviest = Source("mallory", "m"), 0
    for number in range(MAX_SOURCES):
        learner.observe(Source("mallory", "m", number), noise(2_500))
        learner.observe(one, noise(20))
        for _ in range(2):
            learner.observe(one, traffic.fill(noise(20) + " {now} and so on for {user}"))
        heaviest = max(heaviest, learner.weight)
    assert learner.sources <= MAX_SOURCES
    assert 0.9 * MAX_WEIGHT < heaviest <= MAX_WEIGHT
    assert learner.weight == sum(
        known.weight for table in (learner._plain, learner._volatile) for known in table.values()
    )
    known = learner._plain.get(one) or learner._volatile[one]
    assert len(known.learned) <= MAX_TEMPLATES
    assert len(known.candidates) <= MAX_TEMPLATES
    assert moved(learner.recognize(SOURCE, traffic.fill(SUPPORT))), "others keep what was learned for them"


def test_a_tenant_with_ever_new_cache_keys_keeps_no_other_from_learning(
    learner: TemplateLearner, traffic: Traffic
) -> None:
    for number in range(30):
        learner.observe(SOURCE, traffic.fill(SUPPORT))
        for key in range(MAX_SOURCES):
            learner.observe(Source("loud", "m", MAX_SOURCES * number + key), POLICY)
    assert moved(learner.recognize(SOURCE, traffic.fill(SUPPORT)))
    assert learner.sources <= MAX_SOURCES


def test_texts_that_teach_nothing_are_not_all_looked_at(learner: TemplateLearner) -> None:
    rng = random.Random(6)
    for _ in range(1000):
        learner.observe(SOURCE, " ".join(f"{rng.getrandbits(40):x}" for _ in range(200)))
    assert learner.observed == 1000
    assert learner.examined < 200


def test_a_text_that_is_too_long_is_left_alone(learner: TemplateLearner) -> None:
    learner.observe(SOURCE, "a " * MAX_TEXT_CHARS)
    assert (learner.observed, learner.weight, learner.sources) == (0, 0, 0)
    assert learner.recognize(SOURCE, "a " * MAX_TEXT_CHARS) is None
