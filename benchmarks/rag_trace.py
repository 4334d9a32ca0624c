"""Make a key trace from a RAG request log, for ``headstart simulate``.

    python -m benchmarks.rag_trace DATA/rag_xquad_en TOKENIZER.json --hoist > rag.jsonl

The prompts have the form of the reference measurements (see the data's README); blocks are full ones of 16 tokens.
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tokenizers import Tokenizer

from cache_policy.keys import TOKEN_BYTES, token_bytes

__all__ = ["RagPrompt", "rag_prompts", "rag_trace_lines"]

_VOLATILE = ("now", "user", "trace_id")


class RagPrompt(NamedTuple):
    """One request of the log as token bytes (``cache_policy.keys.token_bytes``): system message, documents, the rest.

    Every segment begins with its separator, so that segments tokenize as the whole does, in whatever order.
    """

    template: str
    head: bytes
    documents: tuple[str, ...]
    blocks: tuple[bytes, ...]
    tail: bytes


def rag_prompts(folder: Path, tokenizer_file: Path, *, hoist: bool, documents: int = 5) -> Iterator[RagPrompt]:
    """Yield the requests of ``folder``, which is ``rag_xquad_en``, with their best ``documents`` as retrieved.

    With ``hoist`` the volatile fields stand in one line before the question.
    """
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    data_of: dict[str, bytes] = {}

    def encode(segment: str) -> bytes:
        data = data_of.get(segment)
        if data is None:
            data = data_of[segment] = token_bytes(tokenizer.encode(segment, add_special_tokens=False).ids)
        return data

    corpus = {}
    for line in (folder / "corpus.jsonl").read_text().splitlines():
        document = json.loads(line)
        corpus[document["doc_id"]] = f"\n\n[Document {document['doc_id']}] {document['title']}\n{document['text']}"
    templates = json.loads((folder / "templates.json").read_text())
    with gzip.open(folder / "requests.jsonl.gz", "rt") as requests:
        for line in requests:
            request = json.loads(line)
            volatile = request["volatile"]
            template = templates[request["template_id"]]
            metadata = ""
            if hoist:
                metadata = "\n\nMetadata: now={now}; user={user}; trace={trace_id}".format_map(volatile)
                volatile = dict.fromkeys(volatile, "(see metadata)")
            for field in _VOLATILE:
                template = template.replace("{" + field + "}", volatile[field])
            names = tuple(request["doc_ids"][:documents])
            yield RagPrompt(
                request["template_id"],
                encode(f"<|im_start|>system\n{template}<|im_end|>\n<|im_start|>user"),
                names,
                tuple([encode(corpus[name]) for name in names]),
                encode(f"{metadata}\n\nQuestion: {request['query']}<|im_end|>\n<|im_start|>assistant\n"),
            )


def rag_trace_lines(
    folder: Path, tokenizer_file: Path, *, hoist: bool, documents: int = 5, block_size: int = 16
) -> Iterator[str]:
    """Yield one JSON line per request: its tokens and the ids of its full blocks, equal where all before is equal.

    ``folder`` and ``hoist`` are those of ``rag_prompts``.
    """
    numbers: dict[tuple[int, bytes], int] = {}
    stride = block_size * TOKEN_BYTES
    for prompt in rag_prompts(folder, tokenizer_file, hoist=hoist, documents=documents):
        data = b"".join((prompt.head, *prompt.blocks, prompt.tail))
        parent, blocks = -1, []
        for start in range(0, len(data) - stride + 1, stride):
            parent = numbers.setdefault((parent, data[start : start + stride]), len(numbers))
            blocks.append(parent)
        yield json.dumps({"input_length": len(data) // TOKEN_BYTES, "hash_ids": blocks})


def main() -> None:
    """Write the trace to stdout."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder with corpus.jsonl, templates.json and requests.jsonl.gz")
    parser.add_argument("tokenizer", type=Path, help="a tokenizer.json")
    parser.add_argument("--hoist", action="store_true", help="volatile fields in one line before the question")
    parser.add_argument("--documents", type=int, default=5, help="documents per request")
    arguments = parser.parse_args()
    lines = rag_trace_lines(arguments.folder, arguments.tokenizer, hoist=arguments.hoist, documents=arguments.documents)
    for line in lines:
        print(line)


if __name__ == "__main__":
    main()
