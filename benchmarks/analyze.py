"""How fast ``headstart analyze`` reads a RAG request log, and what it finds there.

    python -m benchmarks.analyze ../shared/data/rag_xquad_en

The folder holds ``corpus.jsonl``, ``templates.json`` and ``requests.jsonl.gz`` (see its README). The log is written as
request bodies, one a line, as the applications would send them, and analyzed by the command itself, in a process of its
own: ``seconds`` are from its start to its end, with Python's imports and the tokenizer's loading. Nothing is declared:
the fields are learned from the log. ``declared`` is the same with the log's templates in a configuration. Prints one
JSON object; rates are fractions of 1.
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

from benchmarks.learning import read_log
from gateway.analysis.suggestion import toml_text
from gateway.cli.terminal import fetch_model, print_json

COMMAND = [sys.executable, "-c", "from gateway.cli.main import main; main()", "analyze"]


def write_bodies(folder: Path, file: Path, requests: int, k: int) -> dict[str, str]:
    """Write the log's bodies to ``file``, and return its templates."""
    bodies, templates = read_log(folder, requests, k)
    with file.open("wb") as lines:
        for body in bodies:
            messages = [{"role": turn.role, "content": turn.content} for turn in body.messages]
            line = {"model": body.model, "messages": messages, "documents": body.documents}
            lines.write(msgspec.json.encode(line) + b"\n")
    return templates


def analyze(log: Path, *options: str) -> tuple[dict[str, Any], float]:
    """What the command prints with ``--json``, and how many seconds it took."""
    started = time.perf_counter()
    output = subprocess.run([*COMMAND, str(log), "--json", *options], check=True, stdout=subprocess.PIPE).stdout
    return json.loads(output), time.perf_counter() - started


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Both analyses."""
    model = str(fetch_model(arguments.model, for_engine=False))
    figures: dict[str, Any] = {"k": arguments.k}
    with tempfile.TemporaryDirectory() as folder:
        log, config = Path(folder) / "log.jsonl", Path(folder) / "headstart.toml"
        templates = write_bodies(arguments.folder, log, arguments.requests, arguments.k)
        sections = [f"[templates.{name}]\nsystem = {toml_text(text)}\n" for name, text in templates.items()]
        config.write_text("".join(sections))
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the log's folder")
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--k", type=int, default=5, help="documents per request")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    print_json(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
