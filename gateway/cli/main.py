"""Entry point of the ``headstart`` command."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import rich_click as click
from rich.markup import escape

from engine.errors import EngineError
from gateway import __version__
from gateway.cli.analyze import analyze
from gateway.cli.build_kernels import build_kernels
from gateway.cli.demo import demo
from gateway.cli.engine import engine
from gateway.cli.hash_key import hash_key
from gateway.cli.model import model
from gateway.cli.serve import serve
from gateway.cli.simulate import simulate
from gateway.cli.terminal import NOTES
from gateway.errors import HeadstartError

__all__ = ["headstart", "main", "run"]

SUCCESS, FAILURE, INTERRUPTED = 0, 1, 130

click.rich_click.TEXT_MARKUP = "markdown"
click.rich_click.PADDING_HELPTEXT_FIRST_LINE = (0, 1, 1, 1)
click.rich_click.MAX_WIDTH = 110


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, "--version", prog_name="headstart")
def headstart() -> None:
    """A prefix-caching RAG gateway: the OpenAI API in front, a paged KV cache behind.

    Prompts are laid out so that as many of their first tokens as possible are tokens that an engine has computed
    before. Start with `headstart demo`.
    """


for command in (serve, engine, demo, analyze, simulate, model, build_kernels, hash_key):
    headstart.add_command(command)


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code: 0 good, 1 error, 2 a finding, 130 interrupted.

    Errors that the user can act on become one line on stderr; anything else is a fault of ours and keeps its traceback.
    """
    try:
        code = headstart.main(
            args=None if arguments is None else list(arguments), prog_name="headstart", standalone_mode=False
        )
    except click.ClickException as error:
        error.show()
        return FAILURE
    except (HeadstartError, EngineError) as error:
        NOTES.print("[bold red]Error:[/]", escape(str(error)), soft_wrap=True)  # "[keys]" is no markup
        return FAILURE
    except (KeyboardInterrupt, click.Abort):
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output has gone; nothing is left to tell it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILURE
    return code if isinstance(code, int) else SUCCESS


def main() -> None:
    """Console script."""
    sys.exit(run())
