"""The command line: which parts are measured, in which order, and what is printed."""

from __future__ import annotations

import argparse
import platform
from collections.abc import Sequence
from typing import Any, Final

import msgspec
import torch
from rich.console import Console
from rich.table import Table

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
from benchmarks.side_by_side.report import kernel_tables, verdict_table
from benchmarks.side_by_side.targets import Verdict
from gateway.cli.terminal import NOTES, fetch_model, print_json, progress_bar

__all__ = ["main"]

_PARTS: Final = ("kernel",)


def main(description: str | None, arguments: Sequence[str] | None = None) -> int:
    """Parse the arguments (default: of the command line), measure, print; return the exit status."""
    options = _parser(description).parse_args(arguments)
    results: dict[str, Any] = {"machine": _machine()}
    tables: list[Table] = []
    verdicts: dict[str, Verdict] = {}
    if "kernel" in options.only:
        rounds, method = _measure_kernel(options)
        results["kernel"] = {"method": method, "rounds": rounds}
        tables += kernel_tables(rounds)
        verdicts |= kernel_verdicts(rounds)
    results["verdicts"] = verdicts
    console = NOTES if options.json else Console(width=120)
    for table in [*tables, verdict_table(verdicts.values())]:
        console.print(table)
    if options.json:
        print_json(msgspec.to_builtins(results, str_keys=True))
    return 0


def _measure_kernel(options: argparse.Namespace) -> tuple[list[KernelRound], str]:
    folder = fetch_model(options.model)
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


def _machine() -> dict[str, Any]:
    return {"processor": platform.processor() or platform.machine(), "threads": torch.get_num_threads()}


def _parser(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--only", type=_parts, default=_PARTS, metavar="PARTS", help=f"of {','.join(_PARTS)} (default: all)")
    add("--model", default="smollm2-135m-instruct", help="name of `headstart model list`, or a Hugging Face folder")
    add("--dtype", choices=["auto", "float32", "bfloat16"], default="auto", help="that serves (default: auto)")
    add("--rounds", type=int, default=3, help="how often everything is measured (default: 3)")
    add("--seed", type=int, default=100, help="of the workload of the first round (default: 100)")
    add("--short", action="store_true", help="less of everything, to see that it works")
    add("--json", action="store_true", help="one JSON value on stdout, tables on stderr")
    return parser


def _parts(text: str) -> tuple[str, ...]:
    parts = tuple(text.split(","))
    if unknown := set(parts) - set(_PARTS):
        raise argparse.ArgumentTypeError(f"no such part: {', '.join(sorted(unknown))}")
    return parts
