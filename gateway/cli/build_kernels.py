"""``headstart build-kernels``: compile the engine's C++ kernels ahead of the first start."""

from __future__ import annotations

import time

import rich_click as click

from gateway.cli.terminal import NOTES

__all__ = ["build_kernels"]


@click.command("build-kernels")
@click.option("--force", is_flag=True, help="Build them again even when they are there.")
def build_kernels(force: bool) -> None:
    """Compile the engine's C++ kernels for this machine and print where they are.

    An engine builds them by itself beside its first start when it finds a C++ compiler, and computes without them
    otherwise, with the same results but more slowly. This command is for images and for machines whose first start has
    to be fast already. They are kept in `$HEADSTART_CACHE`, else in `headstart` in the user's cache directory. The
    compiler is `$CXX`, else g++ or c++; it is given `$HEADSTART_KERNEL_FLAGS` last.
    """
    from engine.native.build import build_kernels as build

    started = time.monotonic()
    with NOTES.status("Compiling ..."):
        path = build(again=force)
    NOTES.print(f"Ready after {time.monotonic() - started:.1f} s:")
    click.echo(path)
