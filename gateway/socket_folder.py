"""Private directories for the unix sockets of child processes: owner-only, short enough a path, swept after a crash."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import stat
import tempfile
from pathlib import Path
from typing import Final

__all__ = ["NoSocketFolder", "make_socket_folder"]

_MAX_PATH_BYTES: Final = 100  # of a socket; the kernel's limit is 108 bytes on Linux, 104 on macOS
_MAX_NAME_BYTES: Final = 16


class NoSocketFolder(Exception):
    """No directory on this machine will do; the message says what to set."""


def make_socket_folder(purpose: str) -> Path:
    """A new directory (mode 0700) for sockets with names of up to 16 bytes; the caller removes it.

    Those that killed gateways have left for the same ``purpose`` are removed.

    Raises:
        NoSocketFolder: There is no writable place with a short path.
    """
    prefix = f"headstart-{purpose}-"
    for parent in (os.environ.get("XDG_RUNTIME_DIR"), tempfile.gettempdir(), "/tmp"):  # noqa: S108
        if not parent or not os.access(parent, os.W_OK | os.X_OK):
            continue
        if len(os.fsencode(parent)) + len(f"/{prefix}1234567-xxxxxxxx/") + _MAX_NAME_BYTES <= _MAX_PATH_BYTES:
            for folder in Path(parent).glob(f"{prefix}*"):
                if _is_left_over(folder, prefix):
                    shutil.rmtree(folder, ignore_errors=True)
            return Path(tempfile.mkdtemp(prefix=f"{prefix}{os.getpid()}-", dir=parent))
    raise NoSocketFolder(f"No writable directory with a path short enough for a socket ({purpose}): set TMPDIR to one.")


def _is_left_over(folder: Path, prefix: str) -> bool:
    """Whether a directory like ours belongs to a gateway that is gone, and no server answers in it any more.

    Both are asked, because a process of another container may be alive and yet invisible from here.
    """
    owner = folder.name.removeprefix(prefix).partition("-")[0]
    if not owner.isdigit() or _exists(int(owner)):
        return False
    try:
        return not any(_answers(path) for path in folder.iterdir())
    except OSError:
        return False


def _answers(path: Path) -> bool:
    """Whether ``path`` is a socket on which somebody listens. What cannot be asked counts as answering."""
    if not stat.S_ISSOCK(path.lstat().st_mode):
        return False
    with socket.socket(socket.AF_UNIX) as probe, contextlib.suppress(ConnectionRefusedError):
        probe.connect(str(path))
        return True
    return False


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
