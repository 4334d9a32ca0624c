"""The demo's requests: drawn once, honest in their repeats, and retrievable."""

from __future__ import annotations

import pytest

from gateway.demo.corpus import read_corpus
from gateway.demo.prompts import FIELDS, SYSTEM_PROMPTS, fill, template_configs
from gateway.demo.questions import QUESTIONS
from gateway.demo.retrieval import Retriever
from gateway.demo.workload import draw_workload


def test_there_are_many_questions_in_different_words() -> None:
    assert len(QUESTIONS) >= 80
    assert len({text for wordings in QUESTIONS for text in wordings}) == 2 * len(QUESTIONS)


@pytest.mark.parametrize("requests", [100, 110, 150])
@pytest.mark.parametrize("seed", [1, 2, 3, 4])
def test_few_requests_repeat_an_earlier_question_exactly(requests: int, seed: int) -> None:
    asks = draw_workload(requests, seed)
    assert len(asks) == requests
    assert 1 - len({ask.question for ask in asks}) / requests <= 0.35


def test_the_draw_is_fixed_by_its_seed_and_grows_at_the_end() -> None:
    assert draw_workload(120) == draw_workload(120)
    assert draw_workload(120)[:100] == draw_workload(100)
    assert draw_workload(100, seed=1) != draw_workload(100, seed=2)


def test_every_request_has_its_own_time_and_id() -> None:
    asks = draw_workload(150)
    assert len({ask.fields["request_id"] for ask in asks}) == 150
    assert [ask.fields["now"] for ask in asks] == sorted(ask.fields["now"] for ask in asks)
    assert {ask.template for ask in asks} == set(SYSTEM_PROMPTS)


def test_the_date_stands_early_in_one_template_and_late_in_another() -> None:
    assert len(SYSTEM_PROMPTS) == 3
    places = [text.index("{now}") for text in SYSTEM_PROMPTS.values()]
    assert min(places) < 40
    assert max(places) > 100


def test_the_registered_templates_are_the_prompts_with_their_fields() -> None:
    for name, config in template_configs().items():
        values = {field: f"<{field}>" for field in FIELDS}
        filled = fill(name, values)
        assert all(filled.count(value) == 1 for value in values.values())
        assert filled == config.system.format(**values)


def test_the_best_passages_of_most_questions_are_about_what_they_ask() -> None:
    passages = read_corpus()
    retriever = Retriever(passages)
    wanted = {
        "How do I read a JSON file into a Python object?": "json",
        "How do I copy a directory tree?": "shutil",
        "How do I cache the results of a function?": "functools",
        "How do I parse command line arguments?": "argparse",
        "How do I compute the median of some numbers?": "statistics",
    }
    for question, module in wanted.items():
        top = retriever.top(question, 5)
        assert len(top) == 5
        assert any(passage.id.startswith(module) for passage in top), (question, [passage.id for passage in top])
