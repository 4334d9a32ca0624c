"""Send a RAG request log through a real gateway and engine, as written and canonicalized, on a cold cache each.

    python -m benchmarks.rag_log DATA/rag_xquad_en --requests 300

The folder holds ``corpus.jsonl``, ``templates.json`` and ``requests.jsonl.gz`` (see its README). Both passes send the
same bodies with structured ``documents``: first with ``order: preserve, hoist: off``, then by the gateway's defaults,
with the volatile fields of the templates declared. Prints one JSON object; hit rates are those of the usage fields.
"""

from __future__ import annotations

import argparse
import functools
import gzip
import json
from pathlib import Path
from typing import Any

from rich.progress import MofNCompleteColumn, Progress, TaskID

from benchmarks.reference_log import log_parser
from gateway.cli.terminal import NOTES, fetch_model, print_json, progress_bar
from gateway.config import Config
from gateway.configuration import load_config, model_spec
from gateway.demo.client import Client, Outcome
from gateway.demo.passes import run_pass
from gateway.logs import configure_logging
from gateway.server import run, serving
from gateway.service import configured_gateway

AS_WRITTEN = {"order": "preserve", "hoist": "off"}


def read_bodies(folder: Path, *, requests: int, k: int, model: str) -> list[dict[str, Any]]:
    """The first ``requests`` requests of the log as chat bodies with their ``k`` best documents."""
    corpus = {}
    for line in (folder / "corpus.jsonl").read_text().splitlines():
        document = json.loads(line)
        corpus[document["doc_id"]] = {"id": document["doc_id"], "title": document["title"], "text": document["text"]}
    bodies = []
    with gzip.open(folder / "requests.jsonl.gz", "rt") as lines:
        for line, _ in zip(lines, range(requests), strict=False):
            row = json.loads(line)
            bodies.append(
                {
                    "model": model,
                    "messages": [{"role": "user", "content": row["query"]}],
                    "documents": [corpus[doc_id] for doc_id in row["doc_ids"][:k]],
                    "headstart": {"template": row["template_id"], "fields": row["volatile"]},
                    "max_tokens": 1,
                    "temperature": 0,
                    "stream": True,
                    "stream_options": {"include_usage": True},
                }
            )
    return bodies


def log_config(folder: Path, *, model: str, kv_blocks: int, **overrides: object) -> Config:
    """A gateway's configuration with the templates of the log; ``overrides`` as ``section__key``."""
    templates = json.loads((folder / "templates.json").read_text())
    settings: dict[str, object] = {f"templates.{name}.system": system for name, system in templates.items()}
    settings |= {"server.port": 0, "server.log_level": "warning"}
    settings |= {"engine.model": model, "engine.kv_blocks": kv_blocks}
    return load_config(overrides=settings | {name.replace("__", "."): value for name, value in overrides.items()})


async def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Both passes and their figures."""
    config = log_config(arguments.folder, model=arguments.model, kv_blocks=arguments.kv_blocks)
    configure_logging(config.server.log_level)
    gateway = configured_gateway(config, fetch_model(model_spec(config.engine)))
    bodies = read_bodies(arguments.folder, requests=arguments.requests, k=arguments.k, model=gateway.model)
    as_written = [body | {"headstart": body["headstart"] | AS_WRITTEN} for body in bodies]
    figures: dict[str, Any] = {"k": arguments.k, "kv_blocks": arguments.kv_blocks, "model": gateway.model}
    async with serving(gateway) as url, Client(url) as client:
        await gateway.wait_ready(600)
        for name, passed in (("as_written", as_written), ("canonical", bodies)):
            with progress_bar(MofNCompleteColumn()) as progress:
                advance = functools.partial(_advance, progress, progress.add_task(name, total=len(bodies)))
                figures[name], outcomes = await run_pass(
                    client, passed, concurrency=arguments.concurrency, on_outcome=advance
                )
            for failure in {outcome.failure for outcome in outcomes if outcome.failure}:
                NOTES.print(failure, markup=False)
    return figures


def _advance(progress: Progress, task: TaskID, _: Outcome) -> None:
    progress.advance(task)


def main() -> None:
    """Parse, measure, print."""
    parser = log_parser(__doc__, requests=300)
    parser.add_argument("--kv-blocks", type=int, default=4096)
    parser.add_argument("--concurrency", type=int, default=2)
    arguments = parser.parse_args()
    figures = run(measure(arguments))
    print_json(figures)


if __name__ == "__main__":
    main()
