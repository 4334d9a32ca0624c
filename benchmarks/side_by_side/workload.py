"""The engine workload: RAG prompts with a shared system text, popular documents and a question nobody asked before.

A prompt is a system text (about 200 tokens), five of a hundred documents (about 200 tokens each) and a question (about
20). The documents are drawn without replacement, the popularity of the r-th being 1 / r (Zipf's law), and stand in the
order in which they were drawn, as a retriever would give them by relevance. What two prompts share from their first
token on is the system text and as many documents as were drawn first by both.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Final

import msgspec

__all__ = ["CORPUS", "DOCUMENTS", "OUTPUT_TOKENS", "Prompt", "Workload"]

CORPUS: Final = 100
DOCUMENTS: Final = 5
OUTPUT_TOKENS: Final = 32
_SYSTEM_TOKENS: Final = 200
_DOCUMENT_TOKENS: Final = 200
_QUESTION_TOKENS: Final = 20


def _words(text: str, separator: str = " ") -> tuple[str, ...]:
    return tuple(text.split(separator))


_SUBJECTS: Final = _words(
    "baker captain clerk doctor driver engineer farmer gardener guard guide judge keeper lawyer manager miner "
    "nurse officer owner painter pilot planner porter printer sailor student surveyor teacher tenant trader worker"
)
_VERBS: Final = _words(
    "accepts arranges builds carries changes checks closes counts covers delivers describes drops finds follows "
    "gathers guards hides keeps leaves lists measures moves opens orders paints plans reads repairs sells writes"
)
_OBJECTS: Final = _words(
    "account barrel basket bell boat book box bridge bucket cabin carpet cart chain clock cloth coat contract "
    "counter door engine fence ferry field file garden gate harbor house invoice key ladder lamp letter machine map "
    "market meadow mirror order package paper pipe plate pump record river road roof room sample schedule shelf ship "
    "station stone store street table tower train tunnel valley wagon wall well wheel window yard"
)
_QUALITIES: Final = _words(
    "broken brown careful cheap clean cold dark deep distant dry early empty famous fast foreign green heavy hidden "
    "large late light local long low narrow new old open painted plain quiet rough round sharp short slow small "
    "strong tall thin warm white wide wooden"
)
_PLACES: Final = _words(
    "behind the mill, beside the canal, near the border, at the north gate, under the old arch, in the lower town, "
    "on the second floor, across the square, below the dam, along the coast, before the holidays, after the storm, "
    "during the night, without a permit, for the council, by the first ferry",
    separator=", ",
)


class Prompt(msgspec.Struct, frozen=True):
    """One request's text, and the numbers of its documents in their order."""

    text: str
    documents: tuple[int, ...]


class Workload:
    """All prompts of one seed; the same seed always gives the same. Another seed shares no document with it."""

    def __init__(self, seed: int, count_tokens: Callable[[str], int]) -> None:
        """``count_tokens`` measures a text by the model's tokenizer, so that sizes are what they are said to be."""
        self._seed = seed
        self._count = count_tokens
        # The seed comes first: less than a block is the same in another one.
        start = f"Archive {seed}. Answer from its notes only, as its assistant, and name the note that you used. "
        self.system = self._text(random.Random(f"{seed} system"), start, _SYSTEM_TOKENS)
        self.documents = tuple(
            self._text(random.Random(f"{seed} document {number}"), f"[note {number:03d}] ", _DOCUMENT_TOKENS)
            for number in range(CORPUS)
        )
        # Popularity must not follow the numbering, which a reader of the prompts could see.
        self.by_popularity = random.Random(f"{seed} popularity").sample(range(CORPUS), CORPUS)

    def prompt(self, index: int, *, like: int | None = None) -> Prompt:
        """The prompt ``index``; with ``like`` it has the documents of that other one, and a question of its own."""
        drawn = self._draw(index if like is None else like)
        question = self._question(random.Random(f"{self._seed} question {index}"), index)
        parts = [self.system, *(self.documents[number] for number in drawn), f"{question}\nAnswer:"]
        return Prompt("\n\n".join(parts), drawn)

    def prompts(self, count: int) -> list[Prompt]:
        """The first ``count`` prompts."""
        return [self.prompt(index) for index in range(count)]

    def _draw(self, index: int) -> tuple[int, ...]:
        """Documents without replacement, each draw by Zipf's law over those that are left."""
        source = random.Random(f"{self._seed} draw {index}")
        weights = {number: 1 / rank for rank, number in enumerate(self.by_popularity, 1)}
        drawn: list[int] = []
        for _ in range(DOCUMENTS):
            (number,) = source.choices(list(weights), list(weights.values()))
            del weights[number]
            drawn.append(number)
        return tuple(drawn)

    def _text(self, source: random.Random, start: str, tokens: int) -> str:
        text = start + _sentence(source)
        while self._count(text) < tokens - 6:  # half a sentence
            text += " " + _sentence(source)
        return text

    def _question(self, source: random.Random, index: int) -> str:
        """A question whose first words are in no other one, so that nothing of it is cached."""
        subject, thing = source.choice(_SUBJECTS), source.choice(_OBJECTS)
        text = f"Question {source.randrange(10**6)}/{index}: which {subject} keeps the {thing}"
        while self._count(text) < _QUESTION_TOKENS - 2:
            text += f" or the {source.choice(_QUALITIES)} {source.choice(_OBJECTS)}"
        return text + "?"


def _sentence(source: random.Random) -> str:
    pick = source.choice
    subject, thing = f"{pick(_QUALITIES)} {pick(_SUBJECTS)}", f"{pick(_QUALITIES)} {pick(_OBJECTS)}"
    return f"The {subject} {pick(_VERBS)} the {thing} {pick(_PLACES)}."
