"""A RAG application with the OpenAI SDK: the passages go along as ``documents``.

Start the gateway with ``headstart serve --config examples/headstart.toml``, then run ``python examples/openai_sdk.py``.
Needs the package ``openai``. ``OPENAI_BASE_URL`` names another gateway.
"""

from __future__ import annotations

import os
from datetime import datetime

from handbook import QUESTIONS, search
from openai import OpenAI

SYSTEM = (
    "You answer questions about the tool library. It is {now}, and you are talking to {user}.\n"
    "Answer in one or two sentences, from the documents only, and quote the id of the document that you used."
)


def main() -> None:
    """Ask all questions, and tell what of each prompt was cached."""
    client = OpenAI(
        base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"),
        api_key=os.environ.get("OPENAI_API_KEY", "none"),
    )
    model = client.models.list().data[0].id
    for number, question in enumerate(QUESTIONS):
        system = SYSTEM.format(now=f"{datetime.now():%Y-%m-%d %H:%M:%S}", user=f"member-{number:03}")
        passages = search(question)
        answer = client.chat.completions.create(
            model=model,
            messages=[{"role": "system", "content": system}, {"role": "user", "content": question}],
            max_tokens=64,
            temperature=0,
            extra_body={
                "documents": [{"id": passage.id, "title": passage.title, "text": passage.text} for passage in passages]
            },
        )
        usage = answer.usage
        assert usage is not None
        cached = usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details else None
        print(f"{question}\n  {answer.choices[0].message.content}")
        print(f"  {cached} of {usage.prompt_tokens} prompt tokens were cached")


if __name__ == "__main__":
    main()
