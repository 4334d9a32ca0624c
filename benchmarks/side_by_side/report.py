"""The tables at the end of a run."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping

from rich.table import Table

from benchmarks.side_by_side.contest import ContestRound
from benchmarks.side_by_side.kernel import BATCHES, KernelRound, median_of
from benchmarks.side_by_side.rounds import CONCURRENCY, ClosedLoop, agreement
from benchmarks.side_by_side.targets import Verdict, judge

__all__ = ["contest_tables", "contest_verdicts", "kernel_tables", "verdict_table"]


def kernel_tables(rounds: list[KernelRound]) -> Iterable[Table]:
    """What the machine can do, and what the engine does of it: medians of the rounds."""
    first = rounds[0].limits
    limits = Table(
        "limit of the machine", "", title=f"{first.shape.weights / 1e6:.1f} M weights of {first.itemsize} bytes"
    )
    bandwidth = median_of(rounds, lambda each: each.limits.bandwidth)
    read = median_of(rounds, lambda each: each.limits.read_seconds())
    whole = median_of(rounds, lambda each: each.limits.whole_read_seconds())
    limits.add_row("reading memory", f"{bandwidth / 1e9:.1f} GB/s: {_ms(whole)} for all weights")
    limits.add_row(
        "reading weights as they are kept", f"{_ms(read)} for {first.bytes_read / first.shape.weights:.2f} bytes each"
    )
    for rows in sorted(first.rates):
        parts = []
        for name in first.rates[rows]:
            rate = median_of(rounds, lambda each, rows=rows, name=name: each.limits.rates[rows][name])  # type: ignore[misc]
            parts.append(f"{name} {rate / 1e9:.0f}")
        limits.add_row(f"products at {rows} rows, GFLOP/s", ", ".join(parts))
    yield limits

    steps = Table(
        "step", "measured", "limit", "share", f"share at {first.itemsize} bytes", "", title="the engine in process"
    )
    tokens = rounds[0].prefill_tokens
    seconds, limit = (
        median_of(rounds, lambda each: each.prefill_s),
        median_of(rounds, lambda each: each.prefill_limit_s),
    )
    share = median_of(rounds, lambda each: each.prefill_share())
    steps.add_row(
        f"prefill of {tokens:,}", _ms(seconds), _ms(limit), f"{100 * share:.0f} %", "", f"{tokens / seconds:,.0f} tok/s"
    )
    for batch in BATCHES:
        seconds = median_of(rounds, lambda each, batch=batch: each.decode_s[batch])  # type: ignore[misc]
        limit = median_of(rounds, lambda each, batch=batch: each.decode_limit_s[batch])  # type: ignore[misc]
        share = median_of(rounds, lambda each, batch=batch: each.decode_share(batch))  # type: ignore[misc]
        whole = median_of(rounds, lambda each, batch=batch: each.decode_whole_share(batch))  # type: ignore[misc]
        shares = f"{100 * share:.0f} %", f"{100 * whole:.0f} %"
        steps.add_row(f"decode of {batch}", _ms(seconds), _ms(limit), *shares, f"{batch / seconds:,.1f} tok/s")
    yield steps

    rest = Table("in process", "", title="first token, and what is not the model")
    cold = median_of(rounds, lambda each: each.cold.seconds)
    rest.add_row("TTFT cold", _ms(cold))
    for name, pick in (("warm: another question", "warm"), ("warm: the same prompt", "repeated")):
        ttft = median_of(rounds, lambda each, pick=pick: getattr(each, pick)[-1].seconds)  # type: ignore[misc]
        decode = median_of(rounds, lambda each, pick=pick: getattr(each, pick)[-1].decode_seconds)  # type: ignore[misc]
        one = getattr(rounds[0], pick)[-1]
        rest.add_row(
            f"TTFT {name}",
            f"{_ms(ttft)}, {one.cached_tokens} of {one.prompt_tokens} tokens cached; a decode step there {_ms(decode)}",
        )
    rest.add_row(
        "outside the model, decode steps", f"{100 * median_of(rounds, lambda each: each.overhead()):.1f} % of a step"
    )
    rest.add_row(
        "outside the model, all steps", f"{100 * median_of(rounds, lambda each: each.overhead_of_all()):.1f} %"
    )
    yield rest


def contest_tables(rounds: list[ContestRound]) -> Iterable[Table]:
    """The servers side by side: medians of the rounds, ratios of those within each round."""
    if names := [*rounds[0].first]:
        yield _first_token_table(rounds, names)
    if names := [*rounds[0].closed]:
        yield _closed_loop_table(rounds, names)


def contest_verdicts(rounds: list[ContestRound]) -> dict[str, Verdict]:
    """The targets that need servers, as far as those took part."""
    verdicts = {}
    if "headstart" in rounds[0].first:
        verdicts["served_ttft"] = judge("served_ttft", [each.first["headstart"].warm_steps() for each in rounds])
    if {"headstart", "vllm"} <= set(rounds[0].closed):
        verdicts["closed_loop"] = judge("closed_loop", [_ratio(each.closed, "vllm") for each in rounds])
    return verdicts


def _first_token_table(rounds: list[ContestRound], names: list[str]) -> Table:
    columns = ("cold", "other question", "same prompt", "decode step", "other question, steps", "cached")
    table = Table(
        "server", *columns, title=f"first token of a lone prompt of {rounds[0].first[names[0]].prompt_tokens:,} tokens"
    )
    for name in names:
        each = [one.first[name] for one in rounds]
        table.add_row(
            each[0].name,
            *(
                _ms(statistics.median(getattr(one, kind) for one in each))
                for kind in ("cold_s", "warm_s", "repeated_s", "decode_s")
            ),
            f"{statistics.median(one.warm_steps() for one in each):.2f}",
            "not told" if each[0].cached_tokens is None else f"{each[0].cached_tokens:,}",
        )
    return table


def _closed_loop_table(rounds: list[ContestRound], names: list[str]) -> Table:
    columns = ("requests/s", "headstart is", "TTFT p50", "p95", "TPOT p50", "cached", "answers as headstart")
    table = Table(
        "server", *columns, title=f"closed loop at {CONCURRENCY}, {rounds[0].closed[names[0]].requests} requests"
    )
    ours = "headstart" in names
    for name in names:
        each = [one.closed[name] for one in rounds]
        shares = [one.cached_share for one in each if one.cached_share is not None]
        table.add_row(
            each[0].name,
            f"{statistics.median(one.requests_per_s for one in each):.2f}",
            f"{statistics.median(_ratio(one.closed, name) for one in rounds):.2f} x" if ours else "",
            *(
                _ms(statistics.median(getattr(one, kind) for one in each))
                for kind in ("ttft_p50_s", "ttft_p95_s", "tpot_p50_s")
            ),
            f"{100 * statistics.median(shares):.1f} %" if shares else "not told",
            f"{100 * statistics.median(agreement(one.closed, name, 'headstart') for one in rounds):.0f} %"
            if ours
            else "",
        )
    return table


def _ratio(loops: Mapping[str, ClosedLoop], other: str) -> float:
    return loops["headstart"].requests_per_s / loops[other].requests_per_s


def verdict_table(verdicts: Iterable[Verdict]) -> Table:
    """Each target with what was measured."""
    table = Table("target", "wanted", "measured", "lowest to highest round", "", title="targets")
    for verdict in verdicts:
        target = verdict.target
        table.add_row(
            target.name,
            f"{'≤' if target.upper else '≥'} {target.shown(target.bound)}",
            target.shown(verdict.measured),
            f"{target.shown(verdict.lowest)} to {target.shown(verdict.highest)}",
            "[green]met[/]" if verdict.met else "[red]missed[/]",
        )
    return table


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.1f} ms"
