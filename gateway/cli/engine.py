"""``headstart engine``: one engine alone, for gateways that connect to its socket."""

from __future__ import annotations

import os
from pathlib import Path

import rich_click as click

from gateway.cli.options import engine_options
from gateway.cli.terminal import fetch_model

__all__ = ["engine"]


@click.command()
@click.argument("address", metavar="unix:PATH|tcp:HOST:PORT")
@engine_options()
@click.option("--served-name", metavar="NAME", help="The model name that clients use.  [default: the model's name]")
@click.option("--max-batch-tokens", type=click.IntRange(min=1), help="Tokens of one step.  [default: 512]")
@click.option("--max-running", type=click.IntRange(min=1), help="Requests computed side by side.  [default: 32]")
@click.option("--threads", type=click.IntRange(min=0), help="Cores to compute on.  [default: all]")
def engine(address: str, **options: str | int | None) -> None:
    """Run one engine on a socket, without a gateway.

    The process serves the protocol of `engine.wire` until it is told to stop. `headstart serve` starts its own engines
    by itself; those on other machines listen on TCP, and `headstart serve --replica tcp://HOST:PORT` uses them. Both
    must know the same secret then, in the environment as HEADSTART__ENGINE__SECRET. The connection is not encrypted:
    keep it in a network you trust.
    """
    from engine.launch import module_environment
    from gateway.configuration import load_config, model_spec, served_model_name
    from gateway.replicas.supervisor import engine_command

    where = _where(address)
    overrides = {f"engine.{name}": value for name, value in options.items()}
    config = load_config(None, os.environ, overrides).engine
    if where[0] == "--tcp" and config.secret is None:
        raise click.UsageError("An engine on TCP needs a secret: set HEADSTART__ENGINE__SECRET, here and at gateways.")
    folder = fetch_model(model_spec(config))
    command = engine_command(config, folder, served_model_name(config))
    command += where
    # It takes this process's place, so that signals and the exit code are its own.
    os.execve(command[0], command, module_environment())  # noqa: S606 - our own interpreter and arguments


def _where(address: str) -> list[str]:
    """The worker's options for an address. Raises ``click.UsageError`` for what is none."""
    from engine.tcp import parse_endpoint

    scheme, _, rest = address.partition(":")
    if scheme == "unix" and rest:
        return ["--socket", str(Path(rest).absolute())]
    if scheme == "tcp":
        try:
            parse_endpoint(rest)
        except ValueError as error:
            raise click.UsageError(f"{address!r} is no address: {error}.") from None
        return ["--tcp", rest]
    raise click.UsageError(f"{address!r} is no address: give unix:PATH or tcp:HOST:PORT.")
