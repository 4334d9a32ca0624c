"""``headstart demo``: what prefix caching with canonicalized prompts saves, seen on a real application."""

from __future__ import annotations

import asyncio
import platform
import signal
from typing import TYPE_CHECKING

import rich_click as click
from rich.console import Console
from rich.markup import escape
from rich.progress import MofNCompleteColumn, TextColumn

from gateway.cli.options import engine_options
from gateway.cli.terminal import NOTES, fetch_model, print_json, progress_bar

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gateway.demo.application import Application, Body
    from gateway.demo.client import Client, Outcome
    from gateway.demo.report import PassFigures, Report
    from gateway.demo.workload import Ask
    from gateway.service import Gateway

__all__ = ["demo"]

DEFAULT_REQUESTS = 100
DEFAULT_KV_BLOCKS = 1536
"""1.1 GiB in float32 for the default model: room for its popular passages, and with everything else under 3 GB."""

CONCURRENCY = 2
MAX_TOKENS = 12
ANSWER_TOKENS = 80
ANSWERS = 3

_START_TIMEOUT_S = 600.0


@click.command()
@click.option("--exit", "exit_at_once", is_flag=True, help="End after the results; do not keep the dashboard up.")
@click.option("--json", "as_json", is_flag=True, help="Print the results as one JSON object; the rest goes to stderr.")
@click.option(
    "--requests", type=click.IntRange(2, 10_000), default=DEFAULT_REQUESTS, show_default=True, metavar="N",
    help="Requests in each of the two passes.",
)  # fmt: skip
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="Port of gateway and dashboard.  [default: any]")
@engine_options(kv_blocks=DEFAULT_KV_BLOCKS)
def demo(exit_at_once: bool, as_json: bool, requests: int, port: int, **engine: str | int | None) -> int:
    """Ask the Python standard library: a RAG application, sent as written and then canonicalized.

    The documents are the docstrings of your own Python, the questions come in many wordings, and the three system
    prompts carry date, user and request id where applications put them. A real gateway with a real engine serves
    both passes from a cold cache; the table shows what the second one saves. Takes some minutes on two cores.
    """
    from gateway.config import Config
    from gateway.configuration import load_config, model_spec
    from gateway.demo.application import Application
    from gateway.demo.corpus import read_corpus
    from gateway.demo.prompts import template_configs
    from gateway.demo.retrieval import Retriever
    from gateway.demo.workload import draw_workload
    from gateway.logs import configure_logging
    from gateway.server import run
    from gateway.service import configured_gateway

    passages = read_corpus()
    retriever = Retriever(passages)
    NOTES.print(f"Corpus: {len(passages):,} passages from the documentation of Python {platform.python_version()}")

    if engine["kv_blocks"] is None:
        engine["kv_blocks"] = DEFAULT_KV_BLOCKS
    overrides: dict[str, object] = {f"engine.{name}": value for name, value in engine.items()}
    overrides |= {"server.port": port, "server.log_level": "warning", "server.drain_grace_s": 1.0}
    overrides |= {f"templates.{name}.system": template.system for name, template in template_configs().items()}
    config: Config = load_config(overrides=overrides)
    configure_logging(config.server.log_level)
    gateway = configured_gateway(config, fetch_model(model_spec(config.engine)))
    application = Application(retriever, gateway.model, max_tokens=MAX_TOKENS)
    out = NOTES if as_json else Console(highlight=False)
    show = _Show(gateway, application, draw_workload(requests), out)
    report = run(show(stay=not exit_at_once, as_json=as_json))
    failed = report.as_is.failed + report.canonical.failed
    if failed:
        NOTES.print(f"[bold red]Error:[/] {failed} requests failed.")
    return 1 if failed else 0


class _Show:
    """The demo from the engine's start to the last answer, on ``out`` and stderr."""

    def __init__(self, gateway: Gateway, application: Application, asks: Sequence[Ask], out: Console) -> None:
        self._gateway = gateway
        self._application = application
        self._asks = asks
        self._out = out

    async def __call__(self, *, stay: bool, as_json: bool) -> Report:
        from gateway.demo.client import Client
        from gateway.demo.report import Report, table
        from gateway.server import serving

        async with serving(self._gateway) as url, Client(url) as client:
            await self._wait_ready()
            NOTES.print(f"Watch it live: {url}/dashboard")
            as_is = await self._pass(client, "As written", [self._application.as_written(ask) for ask in self._asks])
            canonical = await self._pass(
                client, "Canonicalized", [self._application.structured(ask) for ask in self._asks]
            )
            report = Report(as_is=as_is, canonical=canonical, model=self._gateway.model)
            self._out.print()
            self._out.print(table(report))
            if not report.as_is.failed + report.canonical.failed:
                await self._answers(client)
            if as_json:
                print_json(report)
            if stay:
                NOTES.print(f"\nThe dashboard stays up at [bold]{url}/dashboard[/] until you press Ctrl-C.")
                await _interrupted()
        return report

    async def _wait_ready(self) -> None:
        NOTES.print("Starting the engine ...")
        await self._gateway.wait_ready(_START_TIMEOUT_S)

    async def _pass(self, client: Client, name: str, bodies: Sequence[Body]) -> PassFigures:
        from gateway.demo.passes import run_pass
        from gateway.demo.report import hit_rate

        seen: list[Outcome] = []
        with progress_bar(MofNCompleteColumn(), TextColumn("{task.fields[note]}")) as progress:
            if progress.disable:
                NOTES.print(f"{name}: {len(bodies)} requests ...")
            task = progress.add_task(f"{name:13}", total=len(bodies), note="")

            def show(outcome: Outcome) -> None:
                if outcome.failure is not None:
                    NOTES.print("[bold red]Failed:[/]", escape(outcome.failure))
                seen.append(outcome)
                progress.update(task, advance=1, note=f"hit rate {hit_rate(seen) or 0:.1%}")

            figures, _ = await run_pass(client, bodies, concurrency=CONCURRENCY, on_outcome=show)
        return figures

    async def _answers(self, client: Client) -> None:
        """Ask one question per system prompt again, and show the whole answers as they come."""
        one_each = {ask.template: ask for ask in reversed(self._asks)}
        for ask in list(one_each.values())[:ANSWERS]:
            self._out.print(f"\n[bold]{escape(ask.question)}[/]  [dim]({ask.template})[/]")
            # Not greedy: a model this small would go round in circles.
            body = self._application.structured(ask) | {"max_tokens": ANSWER_TOKENS, "temperature": 0.7, "seed": 1}
            outcome = await client.complete(body, lambda text: self._out.print(text, end="", markup=False))
            self._out.print(
                f"\n[dim]{outcome.cached_tokens} of {outcome.prompt_tokens} prompt tokens from the cache, first token "
                f"after {1000 * outcome.ttft_s:.0f} ms[/]"
            )


async def _interrupted() -> None:
    """Wait for SIGINT or SIGTERM."""
    interrupted = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, interrupted.set)
    await interrupted.wait()
