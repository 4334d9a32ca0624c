"""Small files of the gateway's own on this machine: read as a whole, replaced as a whole."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from pathlib import Path
from typing import TypeVar

import msgspec

from gateway.errors import ConfigError

__all__ = ["read_file", "replace_file"]

_Content = TypeVar("_Content", bound=msgspec.Struct)


def read_file(path: Path, type: type[_Content], *, setting: str) -> _Content | None:
    """What ``replace_file`` wrote; None when there is no file yet. ``setting`` names the path in errors.

    For the start of the one gateway that writes the file: what it left half written when it was killed is removed.

    Raises:
        ConfigError: The file cannot be used, or its folder is missing.
    """
    if not path.parent.is_dir():
        raise ConfigError(f"{setting}: there is no folder {path.parent}.")
    half_written = re.compile(rf"\.{re.escape(path.name)}\.[a-z0-9_]{{8}}")  # as tempfile names them
    with contextlib.suppress(OSError):
        for entry in path.parent.iterdir():
            if half_written.fullmatch(entry.name):
                entry.unlink()
    try:
        return msgspec.json.decode(path.read_bytes(), type=type)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"{setting}: {path}: {error.strerror or error}.") from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"{setting}: {path} is not what the gateway writes there: {error}.") from error


def replace_file(path: Path, content: msgspec.Struct) -> None:
    """Write ``content`` as JSON: after a crash there is the old file or the new one. Raises ``OSError``."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # readable by its owner alone
    try:
        with os.fdopen(handle, "wb") as written:
            written.write(msgspec.json.format(msgspec.json.encode(content), indent=1))
            written.flush()
            os.fsync(written.fileno())
        Path(name).replace(path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            Path(name).unlink()
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the new name itself must outlast a crash too
    finally:
        os.close(folder)
