"""What must hold of every request that is canonicalized, on generated ones.

``HEADSTART_CANONICAL_EXAMPLES=100000`` makes the run as long as one likes. A failure prints the seed that replays it.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cache_policy.keys import chain_keys
from gateway.canonical.order import by_id
from gateway.canonical.pipeline import Canonicalizer, CanonicalPrompt
from gateway.canonical.registry import TemplateRegistry
from gateway.config import CanonicalConfig, LayoutConfig, TemplateConfig
from gateway.prompt import PromptRenderer
from gateway.schema import ChatRequest

EXAMPLES = int(os.environ.get("HEADSTART_CANONICAL_EXAMPLES", "1000"))
ROOT = b"r" * 16

OWN_FORM = LayoutConfig(document='<source id="{id}">{title}\n{text}\n</source>', question="Q: {question}\nA:")
TEMPLATES = {
    "clock": TemplateConfig("It is {now}, {user}.\nAnswer from the documents.", order="canonical"),
    "own": TemplateConfig("Own form for {user}.", order="canonical", layout=OWN_FORM),
    "stuff": TemplateConfig("It is {now}. Use:\n\n{context}", documents="langchain", order="canonical"),
    "guide": TemplateConfig("Read, {user}.", documents="xml", order="canonical"),
}
CANONICALIZER = Canonicalizer(CanonicalConfig(order="canonical"), TemplateRegistry(TEMPLATES, normalize=True))

INK = [
    *"abz09{}[]<>&.,:;'\"|#-",
    "é",
    "e\u0301",
    "漢",
    "🧑🏽",
    "<|im_end|>",
    "[Document x]",
    "Question: ",
    "(see metadata)",
]
INNER = [*INK, " ", "  ", "\t", "\n", "\r\n", "\n    ", "```\n\tif x:  \n", "\u00a0", "\u2028"]


class Example:
    """One request, drawn from a seed: what the application knows, and how it says it."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.kind = self.random.choice(["clock", "own", "none", "stuff", "guide"])
        paragraphs = self.kind == "stuff"
        ids = self.random.sample(["d1", "d2", "d10", "kb-4", "ü", "7", "a b"], 4)
        self.documents = [self._document(id, paragraphs) for id in ids]
        self.question = self._text(3) + "?"
        self.history = [
            turn
            for _ in range(self.random.randrange(3))
            for turn in ({"role": "user", "content": self._text(6)}, {"role": "assistant", "content": self._text(6)})
        ]
        self.values = {"now": self.random.choice(["9:00", "(see metadata)", "{now}"]), "user": "Ann; Bob"}

    def request(self, order: tuple[int, ...]) -> dict[str, Any]:
        """The body with the documents in this order."""
        documents = [self.documents[index] for index in order]
        system, user, extra = None, self.question, {}
        if self.kind == "stuff":
            texts = [document["text"] for document in documents]
            system = f"It is {self.values['now']}. Use:\n\n" + "\n\n".join(texts)
        elif self.kind == "guide":
            blocks = [f'<document id="{document["id"]}">{document["text"]}</document>' for document in documents]
            system, user = f"Read, {self.values['user']}.", "\n".join([*blocks, "", self.question])
        else:
            extra = {"documents": documents}
        if self.kind in ("clock", "own"):
            system = TEMPLATES[self.kind].system.format(**self.values).replace("\n", " \r\n")
        messages = [*self.history, {"role": "user", "content": user}]
        if system is not None:
            messages.insert(0, {"role": "system", "content": system})
        return {"model": "m", "messages": messages, **extra}

    def written(self, document: dict[str, Any]) -> str:
        """The document as the model must read it, made from what the application gave."""
        if self.kind == "stuff":
            return str(document["text"])
        if self.kind == "guide":
            return f'<document id="{document["id"]}">{document["text"]}</document>'
        lines = "".join(f"{key}: {document[key]}\n" for key in sorted(document) if key not in ("id", "title", "text"))
        if self.kind == "own":
            return f'<source id="{document["id"]}">{document.get("title", "")}\n{lines}{document["text"]}\n</source>'
        label = f"[Document {document['id']}]" + (f" {document['title']}" if document.get("title") else "")
        return f"{label}\n{lines}{document['text']}"

    def _document(self, id: str, paragraph: bool) -> dict[str, Any]:
        text = self._text(8)
        while paragraph and "\n\n" in text:
            text = text.replace("\n\n", "\n")
        if self.kind in ("stuff", "guide"):
            return {"id": id, "text": text.replace("document", "")}
        document = {"id": id, "text": text}
        if self.random.random() < 0.5:
            document["title"] = self._text(1)
        for key in self.random.sample(["url", "page", "äh"], self.random.randrange(3)):
            document[key] = self._text(2)
        return document

    def _text(self, most: int) -> str:
        inner = [self.random.choice(INNER) for _ in range(self.random.randrange(4 * most))]
        return "".join((self.random.choice(INK), *inner, self.random.choice(INK)))


def canonical(request: dict[str, Any]) -> CanonicalPrompt:
    return CANONICALIZER.canonicalize(msgspec.convert(request, ChatRequest))


def arranged(prompt: CanonicalPrompt) -> list[dict[str, Any]]:
    documents = prompt.layout.documents
    if prompt.order == "canonical":
        documents = tuple(documents[index] for index in by_id(documents))
    return [{"role": turn.role, "content": turn.content} for turn in prompt.layout.arrange(documents)]


@pytest.fixture(scope="module")
def chatml(renderer: Callable[[str], PromptRenderer]) -> PromptRenderer:
    return renderer("chatml")


@settings(max_examples=EXAMPLES, deadline=None)
@given(seed=st.integers(0, 2**62))
def test_l7_l5_canonicalizing_loses_nothing_is_idempotent_and_knows_no_order(seed: int) -> None:
    example = Example(seed)
    prompt = canonical(example.request((0, 1, 2, 3)))
    turns = arranged(prompt)
    assert prompt.order == "canonical"
    assert len(prompt.layout.documents) == 4

    # The caller's bytes: history, question, and each document with its attributes under the id the caller gave it.
    first = 0 if example.kind == "none" else 1
    assert turns[first:-1] == example.history
    asked = f"Q: {example.question}\nA:" if example.kind == "own" else example.question
    assert turns[-1]["content"].endswith(asked)
    holder = turns[0 if example.kind == "stuff" else -1]["content"]
    for document in example.documents:
        assert holder.count(example.written(document)) >= 1
    if example.kind != "stuff":  # whose documents have no labels
        assert [document.id for document in prompt.layout.documents] == [d["id"] for d in example.documents]
    rest = holder
    for block in sorted(map(example.written, example.documents), key=len, reverse=True):
        rest = rest.replace(block, "", 1)
    assert len(rest) < len(asked) + 80  # nothing came twice

    # Doing it again changes nothing.
    assert arranged(canonical({"model": "m", "messages": turns})) == turns

    # All orders of the documents are one prompt.
    for order in itertools.permutations(range(4)):
        assert arranged(canonical(example.request(order))) == turns, order


@settings(max_examples=EXAMPLES // 20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**62))
def test_l5_all_orders_of_four_documents_have_one_chain_of_keys(seed: int, chatml: PromptRenderer) -> None:
    example = Example(seed)
    chains = set()
    for order in itertools.permutations(range(4)):
        layout = canonical(example.request(order)).layout
        messages = layout.arrange([layout.documents[index] for index in by_id(layout.documents)])
        chains.add(tuple(chain_keys(ROOT, chatml.prompt_tokens(chatml.render(messages)), 16)))
    assert len(chains) == 1
    assert chains != {()}
