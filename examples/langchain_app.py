"""A RAG application with LangChain: the passages are pasted into the system message, as its "stuff" chains do.

Start the gateway with ``headstart serve --config examples/headstart.toml``, then run
``python examples/langchain_app.py``. Needs the package ``langchain-openai``. ``OPENAI_BASE_URL`` names another gateway.
"""

from __future__ import annotations

import os
from datetime import datetime
from typing import Any

from handbook import QUESTIONS, search
from langchain_core.callbacks import CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import RunnableLambda, RunnablePassthrough
from langchain_openai import ChatOpenAI
from openai import OpenAI

PROMPT = ChatPromptTemplate.from_messages(
    [
        (
            "system",
            "It is {now}. You answer questions about the tool library in one or two sentences, from these passages "
            "only:\n\n{context}",
        ),
        ("human", "{question}"),
    ]
)


class HandbookRetriever(BaseRetriever):
    """Finds passages of the handbook."""

    def _get_relevant_documents(self, query: str, *, run_manager: CallbackManagerForRetrieverRun) -> list[Document]:
        return [Document(passage.text, id=passage.id) for passage in search(query)]


def joined(documents: list[Document]) -> str:
    """What LangChain makes of documents in a prompt: their texts with a blank line between."""
    return "\n\n".join(document.page_content for document in documents)


def clock(_: Any) -> str:
    """The time, as the prompt says it."""
    return f"{datetime.now():%Y-%m-%d %H:%M:%S}"


def main() -> None:
    """Ask all questions, and tell what of each prompt was cached."""
    base_url = os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1")
    api_key = os.environ.get("OPENAI_API_KEY", "none")
    model = OpenAI(base_url=base_url, api_key=api_key).models.list().data[0].id
    chat = ChatOpenAI(model=model, base_url=base_url, api_key=api_key, temperature=0, max_tokens=64)
    chain = (
        {
            "context": HandbookRetriever() | RunnableLambda(joined),
            "question": RunnablePassthrough(),
            "now": RunnableLambda(clock),
        }
        | PROMPT
        | chat
    )
    for question in QUESTIONS:
        answer = chain.invoke(question)
        usage = answer.usage_metadata
        cached = usage.get("input_token_details", {}).get("cache_read")
        print(f"{question}\n  {answer.content}")
        print(f"  {cached} of {usage['input_tokens']} prompt tokens were cached")


if __name__ == "__main__":
    main()
