"""What the commands share with the terminal: results go to stdout, everything else to stderr."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, TextColumn, TimeElapsedColumn

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["NOTES", "fetch_model", "model_progress", "print_json", "progress_bar"]

NOTES = Console(stderr=True, highlight=False)
"""Where progress, hints and errors go."""


def print_json(value: object) -> None:
    """Write ``value`` as the one JSON document on stdout."""
    print(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def progress_bar(*columns: ProgressColumn) -> Progress:
    """A progress bar on stderr; ``columns`` follow its text, bar and clock. Silent where stderr is no terminal."""
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=28),
        TimeElapsedColumn(),
        *columns,
        console=NOTES,
        disable=not NOTES.is_terminal,
    )


@contextmanager
def model_progress() -> Iterator[Callable[[str, float | None], None]]:
    """Show what ``engine.models.catalog.ensure_model`` reports: a bar on a terminal, one line per step elsewhere."""
    shown = ""
    with progress_bar() as progress:
        task = progress.add_task("", total=None, visible=False)

        def report(step: str, fraction: float | None) -> None:
            nonlocal shown
            if step != shown:
                shown = step
                progress.reset(task, description=escape(step), visible=True)
                if progress.disable:
                    NOTES.print(f"{step} ...", markup=False)
            progress.update(task, total=None if fraction is None else 1.0, completed=fraction or 0.0)

        yield report


def fetch_model(spec: str, *, for_engine: bool = True) -> Path:
    """The Hugging Face folder of ``spec``, pulled and converted under a progress bar when it is not there yet.

    ``for_engine``: an engine will run it here, whose kernels are built meanwhile, so that it finds them ready.

    Raises:
        ConfigError: No engine can run here, before anything is fetched for one.
        ModelError: It cannot be had; the message says what to do.
    """
    from engine.models.catalog import ensure_model
    from engine.native.build import BackgroundBuild
    from gateway.replicas.supervisor import require_engine_packages

    if for_engine:
        require_engine_packages()
        BackgroundBuild()
    with model_progress() as report:
        return ensure_model(spec, report)
