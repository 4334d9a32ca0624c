"""Compare real answers in another order of documents with those in the application's, by the quality gate.

    python -m benchmarks.quality DATA/rag_xquad_en --requests 60

Sends the log's requests with their gold answers through a gateway that reorders documents, has every one of them
compared, and prints what ``/admin/quality`` says of each template, as one JSON object. Nothing is switched off.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import itertools
import json
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from rich.progress import MofNCompleteColumn

from benchmarks.rag_log import read_bodies
from gateway.cli.terminal import fetch_model, print_json, progress_bar
from gateway.configuration import load_config, model_spec
from gateway.logs import configure_logging
from gateway.server import run, serving
from gateway.service import Gateway, configured_gateway

MEASURED_ONLY = {
    "quality.sample": 1.0,
    "quality.max_disagreement": 1.0,
    "quality.max_logprob_loss": 1.0,
    "quality.max_gold_loss": 1.0,
}


async def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of the gate's report, one for each template."""
    templates = json.loads((arguments.folder / "templates.json").read_text())
    config = load_config(
        overrides={
            **{f"templates.{name}.system": system for name, system in templates.items()},
            **MEASURED_ONLY,
            "canonical.order": arguments.order,
            "engine.model": arguments.model,
            "engine.dtype": arguments.dtype,
            "server.port": 0,
        }
    )
    gateway = configured_gateway(config, fetch_model(model_spec(config.engine)))
    async with serving(gateway) as url:
        await gateway.wait_ready(600)
        await _send(gateway, url, arguments)
        return [msgspec.to_builtins(row) for row in gateway.quality.report()]


async def _send(gateway: Gateway, url: str, arguments: argparse.Namespace) -> None:
    bodies = read_bodies(arguments.folder, requests=arguments.requests, k=arguments.k, model=gateway.model)
    with gzip.open(arguments.folder / "requests.jsonl.gz", "rt") as lines:
        golds = [json.loads(line)["gold_answers"] for line in itertools.islice(lines, arguments.requests)]
    with progress_bar(MofNCompleteColumn()) as bar:
        task = bar.add_task("asked and compared", total=len(bodies))
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as http:
            for body, gold in zip(bodies, golds, strict=True):
                body |= {"max_tokens": arguments.max_tokens, "stream": False}
                del body["stream_options"]
                body["headstart"]["gold"] = gold
                async with http.post(f"{url}/v1/chat/completions", json=body) as response:
                    response.raise_for_status()
                while gateway.shadows.status.kept or gateway.shadows.comparing:  # noqa: ASYNC110 - no event says so
                    await asyncio.sleep(0.05)
                bar.advance(task)


def main() -> None:
    """Parse the arguments and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("-k", type=int, default=5, help="documents a request")
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--order", default="canonical", choices=("canonical", "cache-aware"))
    parser.add_argument("--dtype", default="auto")
    arguments = parser.parse_args()
    configure_logging("warning")
    print_json({"templates": run(measure(arguments))})


if __name__ == "__main__":
    main()
