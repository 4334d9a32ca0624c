"""A RAG application with LlamaIndex: the passages are pasted into the user message, between two lines of dashes.

Start the gateway with ``headstart serve --config examples/headstart.toml``, then run
``python examples/llama_index_app.py``. Needs the packages ``llama-index-core`` and ``llama-index-llms-openai-like``.
``OPENAI_BASE_URL`` names another gateway.
"""

from __future__ import annotations

import os
from datetime import datetime

import httpx
from handbook import QUESTIONS, search
from llama_index.core import ChatPromptTemplate, QueryBundle
from llama_index.core.llms import ChatMessage
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.retrievers import BaseRetriever
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.llms.openai_like import OpenAILike
from openai import OpenAI

PROMPT = ChatPromptTemplate(
    [
        ChatMessage(
            role="system",
            content="It is {now}. You answer questions about the tool library in one or two sentences, from the "
            "passages that you are given.",
        ),
        ChatMessage(
            role="user", content="Passages:\n--------------------\n{context_str}\n--------------------\n{query_str}"
        ),
    ],
    function_mappings={"now": lambda **_: f"{datetime.now():%Y-%m-%d %H:%M:%S}"},
)


class HandbookRetriever(BaseRetriever):
    """Finds passages of the handbook."""

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return [
            NodeWithScore(
                node=TextNode(id_=passage.id, text=passage.text, metadata={"id": passage.id, "title": passage.title})
            )
            for passage in search(query_bundle.query_str)
        ]


def tell(response: httpx.Response) -> None:
    """LlamaIndex does not pass usage on; the gateway tells the same in its headers."""
    cached, total = (response.headers.get(f"x-headstart-{kind}-tokens") for kind in ("cached", "prompt"))
    print(f"  {cached} of {total} prompt tokens were cached")


def main() -> None:
    """Ask all questions, and tell what of each prompt was cached."""
    base_url = os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1")
    api_key = os.environ.get("OPENAI_API_KEY", "none")
    llm = OpenAILike(
        model=OpenAI(base_url=base_url, api_key=api_key).models.list().data[0].id,
        api_base=base_url,
        api_key=api_key,
        is_chat_model=True,
        temperature=0,
        max_tokens=64,
        http_client=httpx.Client(event_hooks={"response": [tell]}),
    )
    engine = RetrieverQueryEngine.from_args(HandbookRetriever(), llm=llm, text_qa_template=PROMPT)
    for question in QUESTIONS:
        print(question)
        print(f"  {engine.query(question)}")


if __name__ == "__main__":
    main()
