"""The workload of the engine's benchmark: what it is said to be, and the same for everyone who is measured."""

from __future__ import annotations

import itertools
from collections import Counter

from benchmarks.side_by_side.workload import CORPUS, DOCUMENTS, Workload


def words(text: str) -> int:
    return len(text.split())


def test_a_seed_gives_the_same_prompts_always_and_another_seed_shares_nothing() -> None:
    prompts = Workload(100, words).prompts(8)
    assert Workload(100, words).prompts(8) == prompts
    other = Workload(101, words)
    assert other.system != Workload(100, words).system
    assert not set(other.documents) & set(Workload(100, words).documents)


def test_a_prompt_is_system_text_documents_in_drawing_order_and_a_question() -> None:
    workload = Workload(100, words)
    assert len(set(workload.documents)) == CORPUS
    for text in (workload.system, *workload.documents):
        assert 185 <= words(text) <= 210
    for prompt in workload.prompts(20):
        assert len(set(prompt.documents)) == DOCUMENTS
        shared = "\n\n".join([workload.system, *(workload.documents[number] for number in prompt.documents)])
        assert prompt.text.startswith(shared + "\n\nQuestion ")
        assert 15 <= words(prompt.text) - words(shared) <= 28
    assert len({prompt.documents for prompt in workload.prompts(20)}) > 15


def test_documents_are_drawn_by_zipfs_law() -> None:
    workload = Workload(7, words)
    draws = [workload.prompt(index).documents for index in range(3000)]
    first = Counter(documents[0] for documents in draws)
    harmonic = sum(1 / rank for rank in range(1, CORPUS + 1))
    for rank, number in enumerate(workload.by_popularity[:5], 1):
        expected = 3000 / harmonic / rank
        assert abs(first[number] - expected) < 4 * expected**0.5
    # A second draw is of what the first one has left.
    most = workload.by_popularity[0]
    second = [documents[1] for documents in draws if documents[0] == most]
    expected = len(second) / 2 / (harmonic - 1)
    assert abs(second.count(workload.by_popularity[1]) - expected) < 4 * expected**0.5
    assert workload.by_popularity != sorted(workload.by_popularity)


def test_questions_are_unique_and_go_with_the_documents_of_another_prompt_where_asked() -> None:
    workload = Workload(100, words)
    base, like = workload.prompt(0), workload.prompt(5, like=0)
    assert like.documents == base.documents
    common = "".join(
        itertools.takewhile(bool, (a if a == b else "" for a, b in zip(base.text, like.text, strict=False)))
    )
    assert common.endswith("\n\nQuestion ") or common[common.rindex("Question ") :].removeprefix("Question ").isdigit()
    questions = {prompt.text.rsplit("\n\n", 1)[1] for prompt in workload.prompts(50)}
    assert len(questions) == 50
