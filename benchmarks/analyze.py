"""How fast ``headstart analyze`` reads a RAG request log, and what it finds there.

    python -m benchmarks.analyze DATA/rag_xquad_en

The folder holds ``corpus.jsonl``, ``templates.json`` and ``requests.jsonl.gz`` (see its README). The log is written as
request bodies, one a line, as the applications would send them, and analyzed by the command itself, in a process of its
own: ``seconds`` are from its start to its end, with Python's imports and the tokenizer's loading. Nothing is declared:
the fields are learned from the log. ``declared`` is the same with the log's templates in a configuration. With
``--form`` the documents stand in the bodies' text, as LangChain, LlamaIndex and prompts with XML have them; put in
another order they are only where a template is declared that allows it. Prints one JSON object; rates are fractions of
1.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.reference_log import FORMS, Form, log_parser, read_log
from gateway.analysis.suggestion import toml_text
from gateway.cli.terminal import fetch_model, print_json
from gateway.config import TemplateConfig

COMMAND = [sys.executable, "-c", "from gateway.cli.main import main; main()", "analyze"]


def write_bodies(
    folder: Path, file: Path, requests: int, k: int, form: Form = "structured"
) -> dict[str, TemplateConfig]:
    """Write the log's bodies to ``file``, and return its templates."""
    bodies, templates = read_log(folder, requests, k, form)
    with file.open("wb") as lines:
        for body in bodies:
            messages = [{"role": turn.role, "content": turn.content} for turn in body.messages]
            line: dict[str, Any] = {"model": body.model, "messages": messages}
            if body.documents is not None:
                line["documents"] = body.documents
            lines.write(msgspec.json.encode(line) + b"\n")
    return templates


def _section(name: str, template: TemplateConfig) -> str:
    said = {"documents": template.documents, "order": template.order}
    lines = [f"{key} = {value!r}" for key, value in said.items() if value is not None]
    return "\n".join([f"[templates.{name}]", f"system = {toml_text(template.system)}", *lines, ""])


def analyze(log: Path, *options: str) -> tuple[dict[str, Any], float]:
    """What the command prints with ``--json``, and how many seconds it took."""
    started = time.perf_counter()
    output = subprocess.run([*COMMAND, str(log), "--json", *options], check=True, stdout=subprocess.PIPE).stdout
    return json.loads(output), time.perf_counter() - started


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Both analyses."""
    model = str(fetch_model(arguments.model, for_engine=False))
    figures: dict[str, Any] = {"k": arguments.k, "form": arguments.form}
    with tempfile.TemporaryDirectory() as folder:
        log, config = Path(folder) / "log.jsonl", Path(folder) / "headstart.toml"
        templates = write_bodies(arguments.folder, log, arguments.requests, arguments.k, arguments.form)
        config.write_text("".join(_section(name, template) for name, template in templates.items()))
        for name, options in (("learned", ()), ("declared", ("--config", str(config), "--hoist", "declared"))):
            found, seconds = analyze(log, "--model", model, *options)
            lost: dict[str, float] = {}
            for row in found["causes"]:
                lost[row["cause"]] = lost.get(row["cause"], 0.0) + row["tokens"] / found["tokens"]
            figures[name] = {
                "requests": found["requests"],
                "seconds": seconds,
                "requests_per_s": found["requests"] / seconds,
                "hit_rate": found["hit_rate"],
                "causes": lost,
            }
    return figures


def main() -> None:
    """Parse, measure, print."""
    parser = log_parser(__doc__)
    parser.add_argument("--form", choices=FORMS, default="structured", help="how bodies hold their documents")
    print_json(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
