"""Hold estimates of saved prefill time against what is measured, on a RAG request log sent one request at a time.

    python -m benchmarks.saved_time ../shared/data/rag_xquad_en --requests 500

A share of the requests (a fifth) is kept from the cache, drawn with a fixed seed. Of each of them the prefill that was
foretold before it was sent is compared with what the engine then took. Prints one JSON object: the median error and
the share of requests within the interval that is meant to hold nine of ten, and whether both are as good as they should
be (10 %, 85 to 95 %).
"""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path
from typing import Any

from rich.progress import MofNCompleteColumn

from benchmarks.rag_log import log_config, read_bodies
from gateway.cli.terminal import NOTES, fetch_model, print_json, progress_bar
from gateway.configuration import model_spec
from gateway.demo.client import Client
from gateway.logs import configure_logging
from gateway.server import run, serving
from gateway.service import configured_gateway

MOST_ERROR = 0.10
COVERAGE = (0.85, 0.95)


async def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Send the log and return what the gateway then says."""
    config = log_config(
        arguments.folder, model=arguments.model, kv_blocks=arguments.kv_blocks, savings__holdout=arguments.holdout
    )
    configure_logging(config.server.log_level)
    random.seed(arguments.seed)  # draws who is held out
    gateway = configured_gateway(config, fetch_model(model_spec(config.engine)))
    bodies = read_bodies(arguments.folder, requests=arguments.requests, k=arguments.k, model=gateway.model)
    async with serving(gateway) as url, Client(url) as client:
        await gateway.wait_ready(600)
        outcomes, deadline = [], time.monotonic() + arguments.seconds
        with progress_bar(MofNCompleteColumn()) as progress:
            task = progress.add_task("requests", total=len(bodies))
            for body in bodies:
                if time.monotonic() > deadline:
                    break
                outcomes.append(await client.complete(body))
                progress.advance(task)
        for failure in {outcome.failure for outcome in outcomes if outcome.failure}:
            NOTES.print(failure, markup=False)
        totals = (await client.get_json("/admin/stats"))["totals"]
        calibration = totals["calibration"]
        engine = gateway.statistics.prefill_cost("engine-0")
    return {
        "requests": totals["requests"],
        "token_hit_rate": totals["token_hit_rate"],
        "saved_prefill_s": totals["saved_prefill_s"],
        "saved_prefill_low_s": totals["saved_prefill_low_s"],
        "saved_prefill_high_s": totals["saved_prefill_high_s"],
        "calibration": calibration,
        "curve": engine.coefficients,
        "median_error_met": calibration is not None and calibration["median_error"] <= MOST_ERROR,
        "coverage_met": calibration is not None and COVERAGE[0] <= calibration["coverage"] <= COVERAGE[1],
    }


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the log's folder")
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=3600.0, help="send no more after that time")
    parser.add_argument("--holdout", type=float, default=0.2, help="share kept from the cache")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--k", type=int, default=5, help="documents per request")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--kv-blocks", type=int, default=4096)
    print_json(run(measure(parser.parse_args())))


if __name__ == "__main__":
    main()
