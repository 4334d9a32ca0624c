"""Lexical retrieval over the corpus: BM25, as a small RAG application would do it."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.demo.corpus import Passage
from gateway.errors import HeadstartError

__all__ = ["RetrievalUnavailable", "Retriever"]


class RetrievalUnavailable(HeadstartError):
    """The package that ranks passages is not installed."""


class Retriever:
    """Ranks passages by BM25 over title and text; built once, read only.

    Raises:
        RetrievalUnavailable: When bm25s is not installed.
    """

    def __init__(self, passages: Sequence[Passage]) -> None:
        try:
            import bm25s
        except ImportError:
            raise RetrievalUnavailable("the demo needs its extra packages: pip install 'headstart[demo]'") from None
        self._passages = passages
        self._tokenize = bm25s.tokenize
        self._index = bm25s.BM25()
        self._index.index(
            self._terms([f"{passage.title}\n{passage.text}" for passage in passages]), show_progress=False
        )

    def _terms(self, texts: list[str]) -> list[list[str]]:
        terms: list[list[str]] = self._tokenize(texts, stopwords="en", return_ids=False, show_progress=False)
        return terms

    def top(self, question: str, k: int) -> list[Passage]:
        """The ``k`` best passages, best first; equal scores in the order of the passages."""
        scores = self._index.get_scores(self._terms([question])[0])
        ranked = sorted(range(len(self._passages)), key=lambda index: (-float(scores[index]), index))
        return [self._passages[index] for index in ranked[:k]]
