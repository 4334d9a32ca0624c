"""``headstart analyze``: what a prefix cache finds in a log of request bodies, and why not more."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import rich_click as click
from rich.console import Console
from rich.markup import escape
from rich.progress import TaskProgressColumn
from rich.table import Table

from cache_policy.policy import POLICY_NAMES
from gateway.cli.terminal import NOTES, fetch_model, print_json, progress_bar
from gateway.config import HoistMode, OrderMode

if TYPE_CHECKING:
    from gateway.analysis.passes import Job
    from gateway.analysis.report import Report

__all__ = ["analyze"]

FINDING = 2
_SHOWN_BAD_LINES = 20
_SHOWN_EXAMPLES = 3
_STDIN = "-"
_BATCH = "batch"


@click.command()
@click.argument("log", metavar="LOG.jsonl", type=click.Path(exists=True, dir_okay=False, allow_dash=True))
@click.option(
    "--model",
    metavar="MODEL",
    help="Whose tokenizer and chat template count: a Hugging Face folder (no weights are read), or a name of "
    "`headstart model list`.  [default: smollm2-135m-instruct]",
)
@click.option(
    "--config",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="A headstart.toml: its templates and [canonical] are used; options win over it.",
)
@click.option(
    "--order",
    type=click.Choice((*get_args(OrderMode), _BATCH)),
    help="Order of documents; batch is one that knows the whole log, for requests that are sent together.  "
    "[default: cache-aware]",
)
@click.option(
    "--hoist",
    type=click.Choice(get_args(HoistMode)),
    default="apply",
    show_default=True,
    help="Fields that are moved: off none, declared and suggest those of templates, apply also those that were learned "
    "from the log itself.",
)
@click.option(
    "--kv-blocks",
    metavar="N,...",
    default="inf,8192",
    show_default=True,
    help="Sizes of the cache in blocks; inf never forgets. The causes are those of the smallest.",
)
@click.option("--block-size", type=click.IntRange(1, 1024), metavar="TOKENS", help="Tokens per block.  [default: 16]")
@click.option("--policy", type=click.Choice(sorted(POLICY_NAMES)), help="Which block leaves first.  [default: lru]")
@click.option(
    "--fail-on",
    "conditions",
    metavar="CONDITION",
    multiple=True,
    help="Exit with 2 when this holds, as in `hit_rate.as_is.inf<0.5` or `volatile>0.1` (a cause's share of all "
    "tokens); may be repeated.",
)
@click.option("--strict", is_flag=True, help="Exit with 1 when a line could not be used.")
@click.option(
    "--html", metavar="FILE", type=click.Path(dir_okay=False, writable=True), help="Write the report as a page."
)
@click.option(
    "--suggest",
    metavar="FILE",
    type=click.Path(dir_okay=False, writable=True),
    help="Write the suggested configuration.",
)
@click.option(
    "--write-ordered",
    "ordered",
    metavar="FILE",
    type=click.Path(dir_okay=False, writable=True),
    help="With --order batch, write the log with documents in that order, which the gateway then leaves as it is.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def analyze(
    log: str,
    model: str | None,
    config: Path | None,
    conditions: tuple[str, ...],
    strict: bool,
    html: str | None,
    suggest: str | None,
    ordered: str | None,
    as_json: bool,
    **options: str | int | None,
) -> int:
    """Analyze a log of request bodies offline: one `/v1/chat/completions` body a line, also gzipped, `-` for stdin.

    It is read once to learn what changes from request to request, then replayed through the gateway's own
    canonicalization and keys: as it is, and as the gateway would lay it out. Every missed token gets a cause. The model
    that bodies name is ignored.
    """
    from gateway.analysis.run import analyze as run_analysis
    from gateway.analysis.threshold import Threshold, figures

    try:
        thresholds = [Threshold.parse(condition) for condition in conditions]
    except ValueError as error:
        raise click.UsageError(f"--fail-on {error}.") from None
    if ordered is not None and options["order"] != _BATCH:
        raise click.UsageError("--write-ordered needs --order batch.")
    with _readable(log) as path, progress_bar(TaskProgressColumn()) as bar:
        job = _job(path, "standard input" if log == _STDIN else log, model, config, options)
        task = bar.add_task("", total=1.0)

        def progress(step: str, fraction: float) -> None:
            bar.update(task, description=step, completed=fraction)

        report = run_analysis(job, progress, None if ordered is None else Path(ordered))
        bar.update(task, description="Replayed", completed=1.0)
    known = figures(report)
    try:
        found = [finding for threshold in thresholds if (finding := threshold.finding(known)) is not None]
    except ValueError as error:
        raise click.UsageError(f"--fail-on: {error}.") from None
    _note_bad_lines(report)
    if html is not None:
        from gateway.analysis.page import render_page

        _write(Path(html), render_page(report), "Report")
    if ordered is not None:
        NOTES.print(f"Batch in its order: {ordered}", markup=False)
    if suggest is not None:
        _write(Path(suggest), report.configuration, "Suggested configuration")
    if as_json:
        print_json(report.analysis)
    else:
        _print(report)
    for finding in found:
        NOTES.print(f"[bold red]Finding:[/] {escape(finding)}")
    if strict and report.bad_lines:
        return 1
    return FINDING if found else 0


@contextmanager
def _readable(log: str) -> Iterator[Path]:
    """The log as a file that can be read more than once."""
    if log != _STDIN:
        yield Path(log)
        return
    with tempfile.TemporaryDirectory(prefix="headstart-") as folder:  # nobody else can look into it
        path = Path(folder) / "log"
        with path.open("wb") as file:
            shutil.copyfileobj(sys.stdin.buffer, file)
        yield path


def _job(path: Path, name: str, model: str | None, config: Path | None, options: dict[str, str | int | None]) -> Job:
    from gateway.analysis.cache import parse_size
    from gateway.analysis.passes import Job
    from gateway.configuration import load_config, model_spec

    batch = options["order"] == _BATCH
    if batch:
        options = options | {"order": "cache-aware"}  # of what is in no batch
    overrides = {setting: options[option] for option, setting in _SETTING.items()}
    settings = load_config(config, os.environ, overrides | {"engine.model": model})
    try:
        sizes = tuple(dict.fromkeys(parse_size(text.strip()) for text in str(options["kv_blocks"]).split(",")))
    except ValueError:
        raise click.UsageError(
            f"--kv-blocks {options['kv_blocks']!r}: give numbers of blocks, or inf, with commas between."
        ) from None
    spec = model_spec(settings.engine)
    folder = Path(spec).expanduser().resolve()
    if not folder.is_dir():  # a tokenizer is all that is needed: of a folder no weights are read
        folder = fetch_model(spec, for_engine=False)
    return Job(
        log=path,
        name=name,
        folder=folder,
        canonical=settings.canonical,
        templates=settings.templates,
        sizes=sizes,
        policy=settings.engine.policy,
        block_size=settings.engine.block_size,
        batch=batch,
    )


_SETTING = {
    "order": "canonical.order",
    "hoist": "canonical.hoist",
    "policy": "engine.policy",
    "block_size": "engine.block_size",
}


def _note_bad_lines(report: Report) -> None:
    for bad in report.bad_lines[:_SHOWN_BAD_LINES]:
        NOTES.print(str(bad), markup=False, soft_wrap=True)
    if report.bad_lines:
        NOTES.print(
            f"Lines left out: {len(report.bad_lines):,}; requests that were analyzed: {report.analysis.requests:,}."
        )


def _write(path: Path, text: str, what: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise click.ClickException(f"{path}: cannot be written: {error.strerror}") from None
    NOTES.print(f"{what}: {path}", markup=False)


def _print(report: Report) -> None:
    from gateway.analysis.findings import findings

    console = Console()
    analysis, rates = report.analysis, report.analysis.hit_rate
    console.print(f"{analysis.requests:,} requests, {analysis.tokens:,} prompt tokens.\n")
    table = Table(title="Tokens found in the cache", title_justify="left")
    for heading in ("Cache", "as is", "canonical"):
        table.add_column(heading, justify="left" if heading == "Cache" else "right")
    for size in rates.as_is:
        name = "without end" if size == "inf" else f"{int(size):,} blocks"
        table.add_row(name, f"{100 * rates.as_is[size]:.2f} %", f"{100 * rates.canonical[size]:.2f} %")
    table.add_row("bound for any order", "", f"{100 * rates.position_independent:.2f} %")
    console.print(table)
    at = "without end" if report.causes_at == "inf" else f"of {int(report.causes_at):,} blocks"
    console.print(f"\nWhy tokens of the prompts as they are were missed, in a cache {at}:")
    for finding in findings(report):
        console.print(
            f"  {100 * finding.share:6.2f} %  [bold]{finding.cause}[/]: {escape(finding.text)}", soft_wrap=True
        )
    console.print("\nWhere prompts part:")
    for row in analysis.causes[:_SHOWN_EXAMPLES]:
        if row.example is not None:
            console.print(f"  {row.cause}, {row.template}, at token {row.example.token:,}:", markup=False)
            for label, text in (
                ("", row.example.text_before),
                ("here ", row.example.here),
                ("there", row.example.there),
            ):
                console.print(f"    {label:5} {text!r}", markup=False, highlight=False, soft_wrap=True)
    console.print("\nSuggested configuration:\n")
    click.echo(report.configuration)
