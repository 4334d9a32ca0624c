"""Options that several commands share. One that is not given is None, so that the configuration decides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import rich_click as click

from cache_policy.policy import POLICY_NAMES

__all__ = ["engine_options"]

_Command = TypeVar("_Command", bound=Callable[..., Any])


def engine_options(*, kv_blocks: int = 0) -> Callable[[_Command], _Command]:
    """Add ``--model``, ``--device``, ``--dtype``, ``--kv-dtype``, ``--kv-blocks``, ``--block-size`` and ``--policy``.

    ``kv_blocks`` is the default that the help text names.
    """
    options = (
        click.option(
            "--model",
            metavar="MODEL",
            help="A name of `headstart model list`, a Hugging Face folder, a GGUF file or a hub id.  "
            "[default: smollm2-135m-instruct]",
        ),
        click.option(
            "--device",
            metavar="DEVICE",
            help="cpu, or cuda (cuda:N for one of several) for a GPU by our Triton kernels.  [default: cpu]",
        ),
        click.option(
            "--dtype",
            type=click.Choice(["auto", "float32", "bfloat16"]),
            help="Number format of weights and cache; auto takes bfloat16 where the processor computes in it.  "
            "[default: auto]",
        ),
        click.option(
            "--kv-dtype",
            type=click.Choice(["auto", "float32", "bfloat16", "int8"]),
            help="Number format of the cache alone; a smaller one holds more tokens, less exactly.  "
            "[default: auto, as --dtype]",
        ),
        click.option(
            "--kv-blocks",
            type=click.IntRange(min=0),
            metavar="N",
            help=f"Blocks of the KV cache; 0 sizes it from free memory.  [default: {kv_blocks}]",
        ),
        click.option(
            "--block-size", type=click.IntRange(1, 1024), metavar="TOKENS", help="Tokens per block.  [default: 16]"
        ),
        click.option(
            "--policy",
            type=click.Choice(sorted(POLICY_NAMES)),
            help="Which cached block leaves first.  [default: lru]",
        ),
    )

    def add(command: _Command) -> _Command:
        for option in reversed(options):
            command = option(command)
        return command

    return add
