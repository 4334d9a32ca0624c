"""The reference RAG log as request bodies, its documents in one of the forms in which applications send them.

A log's folder holds ``corpus.jsonl``, ``templates.json`` and ``requests.jsonl.gz`` (see its README).
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any, Final, Literal, get_args

import msgspec

from gateway.canonical.recognized import LLAMA_INDEX_CLOSING, LLAMA_INDEX_OPENING
from gateway.config import DocumentFormat, TemplateConfig
from gateway.schema import ChatRequest

__all__ = ["FORMS", "Form", "log_parser", "read_log"]

Form = Literal["structured", "langchain", "llama-index", "xml"]
FORMS: Final[tuple[Form, ...]] = get_args(Form)

_PASTED: Final[dict[Form, DocumentFormat]] = {"langchain": "langchain", "llama-index": "llama-index", "xml": "xml"}


def log_parser(description: str | None, requests: int = 5000) -> argparse.ArgumentParser:
    """A parser of what every benchmark on the log is told; ``requests`` is how many of them by default."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the log's folder")
    parser.add_argument("--requests", type=int, default=requests)
    parser.add_argument("--k", type=int, default=5, help="documents per request")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    return parser


def read_log(
    folder: Path, requests: int, k: int, form: Form = "structured"
) -> tuple[list[ChatRequest], dict[str, TemplateConfig]]:
    """The log's first ``requests`` bodies with their ``k`` best documents each, and its templates, declared.

    Documents are a field of the body (``structured``), or stand in its text: in the system message, joined by blank
    lines (``langchain``), in LlamaIndex's default prompt with their titles as metadata, or as XML blocks before the
    question. The templates of the latter allow any order.
    """
    rows = map(json.loads, (folder / "corpus.jsonl").read_text().splitlines())
    corpus = {row["doc_id"]: {"id": row["doc_id"], "title": row["title"], "text": row["text"]} for row in rows}
    templates: dict[str, str] = json.loads((folder / "templates.json").read_text())
    bodies = []
    with gzip.open(folder / "requests.jsonl.gz", "rt") as lines:
        for line, _ in zip(lines, range(requests), strict=False):
            row = json.loads(line)
            system = templates[row["template_id"]].format(**row["volatile"])
            documents = [corpus[doc_id] for doc_id in row["doc_ids"][:k]]
            bodies.append(
                msgspec.convert({"model": "m", **_written(system, row["query"], documents, form)}, ChatRequest)
            )
    return bodies, {name: _declared(text, form) for name, text in templates.items()}


def _declared(system: str, form: Form) -> TemplateConfig:
    if form == "structured":
        return TemplateConfig(system)
    place = "\n\n{context}" if form == "langchain" else ""
    return TemplateConfig(system + place, documents=_PASTED[form], order="cache-aware")


def _written(system: str, question: str, documents: Sequence[dict[str, Any]], form: Form) -> dict[str, Any]:
    texts = [document["text"] for document in documents]
    if form == "langchain":
        system = "\n\n".join([system, *texts])
    elif form == "llama-index":
        nodes = "\n\n".join(f"title: {document['title']}\n\n{document['text']}" for document in documents)
        question = f"{LLAMA_INDEX_OPENING}{nodes}{LLAMA_INDEX_CLOSING}{question}\nAnswer: "
    elif form == "xml":
        blocks = [_xml_block(**document) for document in documents]
        question = "\n".join(["<documents>", *blocks, "</documents>", "", question])
    messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    return {"messages": messages, **({"documents": documents} if form == "structured" else {})}


def _xml_block(id: str, title: str, text: str) -> str:
    return f'<document id="{escape(id)}" title="{escape(title)}">\n{text}\n</document>'
