"""``headstart simulate``: what other eviction policies and cache sizes would give on a recorded key trace."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import rich_click as click
from rich.console import Console
from rich.progress import TaskProgressColumn
from rich.table import Table

from cache_policy.replay import REPLAY_POLICY_NAMES, SEMANTICS, Semantics, replay
from cache_policy.traces import TraceError, read_trace
from gateway.cli.terminal import NOTES, print_json, progress_bar

if TYPE_CHECKING:
    from collections.abc import Callable

    from cache_policy.traces import Trace

__all__ = ["SimulationRow", "simulate"]

_DEFAULT_SIZES = "1%,2%,5%,10%,20%"


class SimulationRow(msgspec.Struct, frozen=True):
    """One replay. Rates are fractions of 1; ``blocks`` is the size of the cache."""

    trace: str
    policy: str
    semantics: Semantics
    blocks: int
    token_hit_rate: float
    block_hit_rate: float
    requests: int


@click.command()
@click.argument("traces", metavar="TRACE...", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False))
@click.option(
    "--policies",
    metavar="NAME,...",
    default=",".join(REPLAY_POLICY_NAMES),
    help=f"Which of {', '.join(REPLAY_POLICY_NAMES)}.  [default: all]",
)
@click.option(
    "--sizes",
    metavar="N|P%,...",
    default=_DEFAULT_SIZES,
    show_default=True,
    help="Cache sizes, in blocks or in percent of the trace's different blocks (rounded, at least 1). A size that "
    "all of them fit into never evicts.",
)
@click.option(
    "--semantics",
    type=click.Choice(SEMANTICS),
    default="prefix",
    show_default=True,
    help="prefix: an engine's cache, where a block counts only after all before it and leaves before them. "
    "object: every block by itself, as general cache simulators have it.",
)
@click.option(
    "--trace-block-size",
    metavar="TOKENS",
    type=click.IntRange(min=1),
    help="Tokens per block.  [default: the power of two that fits the trace]",
)
@click.option(
    "--html", "html", metavar="FILE", type=click.Path(dir_okay=False, writable=True), help="Write the curves as a page."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON array.")
def simulate(
    traces: Sequence[str],
    policies: str,
    sizes: str,
    semantics: Semantics,
    trace_block_size: int | None,
    html: str | None,
    as_json: bool,
) -> None:
    """Replay key traces against eviction policies and cache sizes.

    A TRACE has one JSON object a line with `input_length` and `hash_ids` (Mooncake's format, and what the gateway
    records), or one id a line (libCacheSim's); both also gzipped. `opt` knows the future: no policy gets more.
    """
    names = _parse_policies(policies)
    wanted = [_parse_size(text) for text in sizes.split(",")]
    rows: list[SimulationRow] = []
    with progress_bar(TaskProgressColumn()) as bar:
        for path in traces:
            task = bar.add_task(f"Reading {Path(path).name}", total=1.0)

            def report(fraction: float, offset: float = 0.0, task: int = task) -> None:
                bar.update(task, completed=offset + fraction)  # type: ignore[arg-type]

            try:
                trace = read_trace(Path(path), trace_block_size, report)
                blocks = list(dict.fromkeys(size(trace) for size in wanted))
                _note_large_sizes(trace, blocks)
                bar.reset(task, total=len(names) * len(blocks))
                for done, (name, size) in enumerate((name, size) for name in names for size in blocks):
                    bar.update(task, description=f"{Path(path).name}: {name}, {size:,} blocks")

                    def step(fraction: float, done: int = done, report: Callable[..., None] = report) -> None:
                        report(fraction, done)

                    result = replay(trace, name, size, semantics, step)
                    rows.append(
                        SimulationRow(
                            path, name, semantics, size, result.token_hit_rate, result.block_hit_rate, result.requests
                        )
                    )
                bar.update(task, completed=len(names) * len(blocks), description=Path(path).name)
            except TraceError as error:
                raise click.ClickException(str(error)) from None
    if html is not None:
        from gateway.cli.simulate_page import render_page

        _write_page(Path(html), render_page(rows))
    if as_json:
        print_json(rows)
        return
    for path in dict.fromkeys(traces):
        Console().print(_table(path, [row for row in rows if row.trace == path]))


def _parse_policies(text: str) -> list[str]:
    names = list(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        if name not in REPLAY_POLICY_NAMES:
            raise click.UsageError(f"Unknown policy {name!r}; known: {', '.join(REPLAY_POLICY_NAMES)}.")
    return names


def _parse_size(text: str) -> Callable[[Trace], int]:
    """From ``N`` or ``P%`` to blocks of a trace."""
    text = text.strip()
    try:
        if text.endswith("%"):
            percent = float(text[:-1])
            if not 0 < percent <= 100:
                raise click.UsageError(f"Size {text!r}: give more than 0 % and at most 100 %.")
            return lambda trace: max(1, round(trace.unique_blocks * percent / 100))
        blocks = int(text)
    except ValueError:
        raise click.UsageError(f"Size {text!r}: give a number of blocks (4096) or a percentage (5%).") from None
    if blocks < 1:
        raise click.UsageError(f"Size {text!r}: a cache has at least 1 block.")
    return lambda trace: blocks


def _note_large_sizes(trace: Trace, blocks: Sequence[int]) -> None:
    for size in blocks:
        if size >= trace.unique_blocks:
            NOTES.print(
                f"{trace.name} has {trace.unique_blocks:,} different blocks: a cache of {size:,} never evicts, "
                "all policies are alike.",
                markup=False,
            )


def _write_page(path: Path, page: str) -> None:
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise click.ClickException(f"{path}: cannot be written: {error.strerror}") from None
    NOTES.print(f"Curves: {path}", markup=False)


def _table(path: str, rows: Sequence[SimulationRow]) -> Table:
    """Token hit rates in percent, policies by sizes; the best policy of each size but the optimum stands out."""
    sizes = sorted({row.blocks for row in rows})
    rates = {(row.policy, row.blocks): row.token_hit_rate for row in rows}
    names = list(dict.fromkeys(row.policy for row in rows))
    table = Table(
        title=f"{Path(path).name}: token hit rate in %, {rows[0].semantics} semantics, {rows[0].requests:,} requests",
        title_justify="left",
    )
    table.add_column("Policy")
    for size in sizes:
        table.add_column(f"{size:,} blocks", justify="right")
    best = {size: max((rates[name, size] for name in names if name != "opt"), default=None) for size in sizes}
    for name in names:
        cells = [f"{100 * rates[name, size]:.2f}" for size in sizes]
        marked = [
            f"[bold]{cell}[/]" if name != "opt" and rates[name, size] == best[size] else cell
            for size, cell in zip(sizes, cells, strict=True)
        ]
        table.add_row(name, *marked)
    return table
