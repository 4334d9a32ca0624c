"""The RAG application itself: it retrieves passages and words requests for the OpenAI API.

``as_written`` is what such an application sends to any OpenAI-compatible server. ``structured`` is the one change
that Headstart asks for: the same system text and question, but the passages as ``documents`` instead of pasted text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from gateway.demo.corpus import Passage
from gateway.demo.prompts import fill
from gateway.demo.retrieval import Retriever
from gateway.demo.workload import Ask

__all__ = ["TOP_K", "Application"]

TOP_K: Final = 5
"""Passages per question."""

Body = dict[str, Any]


class Application:
    """Words request bodies. ``max_tokens`` bounds each answer; answers are greedy, so that both passes are alike."""

    def __init__(self, retriever: Retriever, model: str, *, max_tokens: int) -> None:
        self._retriever = retriever
        self._model = model
        self._max_tokens = max_tokens

    def as_written(self, ask: Ask) -> Body:
        """Plain messages: everything is text, nothing is declared; the gateway is told to leave the prompt alone."""
        excerpts = "\n\n".join(
            f"[{number}] {passage.title}\n{passage.text}" for number, passage in enumerate(self._passages(ask), start=1)
        )
        user = f"Documentation excerpts:\n\n{excerpts}\n\nQuestion: {ask.question}"
        return self._body(ask, user) | {"headstart": {"hoist": "off", "order": "preserve"}}

    def structured(self, ask: Ask) -> Body:
        """The same request with its passages as ``documents``; template and fields are recognised by the gateway."""
        documents = [
            {"id": passage.id, "title": passage.title, "text": passage.text} for passage in self._passages(ask)
        ]
        return self._body(ask, ask.question) | {"documents": documents}

    def _passages(self, ask: Ask) -> Sequence[Passage]:
        return self._retriever.top(ask.question, TOP_K)

    def _body(self, ask: Ask, user: str) -> Body:
        return {
            "model": self._model,
            "messages": [
                {"role": "system", "content": fill(ask.template, ask.fields)},
                {"role": "user", "content": user},
            ],
            "temperature": 0,
            "max_tokens": self._max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
