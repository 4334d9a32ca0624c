"""How modules of these packages are run as processes of their own, wherever this program was started from."""

from __future__ import annotations

import os
import sys
from pathlib import Path

__all__ = ["module_command", "module_environment"]


def module_command(module: str) -> list[str]:
    """The command that runs ``module`` in our own Python; options follow. Give it ``module_environment``."""
    # -P: a folder named "engine" where the user happens to stand must not be taken for ours.
    return [sys.executable, "-P", "-m", module]


def module_environment() -> dict[str, str]:
    """This process's environment, with our own packages found first."""
    root = str(Path(__file__).resolve().parents[1])
    rest = os.environ.get("PYTHONPATH")
    return os.environ | {"PYTHONPATH": root if not rest else os.pathsep.join((root, rest))}
