"""The demo's passages: what is read from the running Python."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.demo.corpus import MAX_CHARACTERS, MIN_CHARACTERS, Passage, read_corpus, split_text


@pytest.fixture(scope="module")
def corpus() -> list[Passage]:
    return read_corpus()


def test_the_corpus_is_large_and_its_ids_are_unique(corpus: list[Passage]) -> None:
    assert len(corpus) >= 800
    assert len({passage.id for passage in corpus}) == len(corpus)
    assert {"json.load", "subprocess.run", "str.split", "os.path.join"} <= {passage.id for passage in corpus}


def test_passages_have_the_size_of_a_paragraph(corpus: list[Passage]) -> None:
    assert all(MIN_CHARACTERS <= len(passage.text) <= MAX_CHARACTERS for passage in corpus)


def test_no_passage_depends_on_this_process(corpus: list[Passage]) -> None:
    assert not [passage.id for passage in corpus if " at 0x" in passage.title + passage.text]
    script = (
        "import hashlib\nfrom gateway.demo.corpus import read_corpus\n"
        "print(hashlib.sha256(repr([(p.id, p.title, p.text) for p in read_corpus()]).encode()).hexdigest())"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    runs = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={**environment, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(runs) == 1


def test_a_python_without_docstrings_is_refused_with_advice() -> None:
    script = (
        "from gateway.demo.corpus import CorpusError, read_corpus\n"
        "try:\n    read_corpus()\nexcept CorpusError as error:\n    print(error)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    run = subprocess.run(
        [sys.executable, "-OO", "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    assert "without -OO" in run.stdout


@given(st.text(alphabet="ab \n", max_size=400), st.integers(5, 40))
def test_splitting_keeps_every_word_and_the_limit(text: str, limit: int) -> None:
    parts = split_text(text, limit, least=1)
    assert all(len(part) <= limit for part in parts)
    assert "".join("".join(parts).split()) == "".join(text.split())
