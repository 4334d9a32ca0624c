"""The command line: which parts are measured, in which order, and what is printed."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.side_by_side.contest import Contest, Contestants, ContestRound
from benchmarks.side_by_side.in_process import InProcessEngine
from benchmarks.side_by_side.kernel import (
    BATCHES,
    PREFILL_TOKENS,
    KernelRound,
    KernelSize,
    kernel_verdicts,
    measure_round,
)
from benchmarks.side_by_side.limits import model_shape
from benchmarks.side_by_side.report import contest_tables, contest_verdicts, kernel_tables, verdict_table
from benchmarks.side_by_side.rounds import LoadSize
from benchmarks.side_by_side.servers import ServerError
from benchmarks.side_by_side.targets import Verdict
from engine.errors import EngineError
from engine.models.loading import resolve_dtype
from gateway.cli.terminal import NOTES, fetch_model, print_json, progress_bar

__all__ = ["main"]

_PARTS: Final = ("kernel", "ttft", "closed")
_WIDTH: Final = 120
_PEERS: Final = ("headstart", "vllm", "transformers")


def main(description: str | None, arguments: Sequence[str] | None = None) -> int:
    """Parse the arguments (default: of the command line), measure, print; return the exit status."""
    options = _parser(description).parse_args(arguments)
    try:
        results, tables, verdicts = _measure(options)
    except (EngineError, ServerError, ValueError) as error:
        NOTES.print(f"error: {error}", style="red", markup=False)
        return 1
    except KeyboardInterrupt:
        return 130
    console = Console(stderr=options.json, width=_WIDTH)
    for table in [*tables, verdict_table(verdicts.values())]:
        console.print(table)
    if options.json:
        print_json(msgspec.to_builtins({**results, "verdicts": verdicts}, str_keys=True))
    return 0


def _measure(options: argparse.Namespace) -> tuple[dict[str, Any], list[Table], dict[str, Verdict]]:
    """All parts that were asked for."""
    folder = fetch_model(options.model)
    results: dict[str, Any] = {"threads": torch.get_num_threads(), "seed": options.seed}
    tables: list[Table] = []
    verdicts: dict[str, Verdict] = {}
    if "kernel" in options.only:
        kernel_rounds, results["method"] = _measure_kernel(options, folder)
        results["kernel"] = kernel_rounds
        tables += kernel_tables(kernel_rounds)
        verdicts |= kernel_verdicts(kernel_rounds)
    if {"ttft", "closed"} & set(options.only):
        contest_rounds, results["vllm_trial"] = asyncio.run(_measure_servers(options, folder))
        results["servers"] = contest_rounds
        tables += contest_tables(contest_rounds)
        verdicts |= contest_verdicts(contest_rounds)
    return results, tables, verdicts


def _measure_kernel(options: argparse.Namespace, folder: Path) -> tuple[list[KernelRound], str]:
    shape = model_shape(folder)
    size = KernelSize(steps=5, requests=1, loop=8) if options.short else KernelSize()
    rounds = []
    with progress_bar() as bar:
        task = bar.add_task("loading the model", total=options.rounds * (4 + len(BATCHES)))
        engine = InProcessEngine(folder, dtype=options.dtype)
        NOTES.print(f"{engine.method}, {engine.dtype}", markup=False)
        engine.prefill_seconds(PREFILL_TOKENS)  # so that the pool's memory has been touched
        for index in range(options.rounds):

            def advance(step: str, index: int = index) -> None:
                bar.update(task, advance=1, description=f"round {index + 1} of {options.rounds}: {step}")

            rounds.append(measure_round(engine, shape, options.seed + index, size, advance))
    return rounds, engine.method


async def _measure_servers(options: argparse.Namespace, folder: Path) -> tuple[list[ContestRound], dict[str, float]]:
    dtype = str(resolve_dtype(options.dtype)).removeprefix("torch.")
    contestants = Contestants(
        names=options.peers,
        model=folder,
        dtype=dtype,
        vllm=options.vllm,
        vllm_dtypes=("float32", "bfloat16") if options.vllm_dtype == "faster" else (options.vllm_dtype,),
        vllm_preload=options.vllm_preload,
        transformers=options.transformers,
    )
    size = LoadSize(
        requests=(options.requests or (8 if options.short else 64)) if "closed" in options.only else 0,
        first_tokens=(1 if options.short else 4) if "ttft" in options.only else 0,
    )
    rounds: list[ContestRound] = []
    with progress_bar() as bar:
        task = bar.add_task("", total=None)

        def say(step: str) -> None:
            bar.update(task, description=f"round {len(rounds) + 1} of {options.rounds}: {step}")

        contest = Contest(contestants, options.seed, say)
        async with contest.started():
            for index in range(options.rounds):
                rounds.append(await contest.round(index, size))
    return rounds, contest.trial


def _parser(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--only", type=_choice(_PARTS), default=_PARTS, metavar="PARTS", help="of kernel,ttft,closed (default: all)")
    add("--peers", type=_choice(_PEERS), default=_PEERS, metavar="NAMES", help="of headstart,vllm,transformers")
    add("--model", default="smollm2-135m-instruct", help="name of `headstart model list`, or a Hugging Face folder")
    add("--dtype", choices=["auto", "float32", "bfloat16"], default="auto", help="that serves (default: auto)")
    add("--rounds", type=_count, default=3, help="how often everything is measured (default: 3)")
    add("--requests", type=_count, help="of each server's closed loop in a round (default: 64, short: 8)")
    add("--seed", type=int, default=100, help="of the workload of the first round (default: 100)")
    add("--short", action="store_true", help="less of everything, to see that it works")
    add("--vllm", type=_python, metavar="PYTHON", help="of the virtual environment that vLLM is installed in")
    add("--vllm-dtype", choices=["faster", "float32", "bfloat16"], default="faster", help="default: by a trial")
    add("--vllm-preload", metavar="LIBRARIES", help="LD_PRELOAD of vLLM (default: tcmalloc and libiomp5 as found)")
    add(
        "--transformers",
        type=_python,
        default=Path(sys.executable),
        metavar="PYTHON",
        help="that transformers' server is installed in (default: this one)",
    )
    add("--json", action="store_true", help="one JSON value on stdout, tables on stderr")
    return parser


def _choice(known: tuple[str, ...]) -> Callable[[str], tuple[str, ...]]:
    def names(text: str) -> tuple[str, ...]:
        chosen = tuple(text.split(","))
        if unknown := set(chosen) - set(known):
            raise argparse.ArgumentTypeError(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(known)}")
        return chosen

    return names


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def _python(text: str) -> Path:
    """Not resolved: what a virtual environment's Python links to does not see its packages."""
    return Path(text).expanduser().absolute()
