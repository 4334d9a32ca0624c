"""Tie this process's life to its parent's, so that none is left behind however the parent ends."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from typing import Final

__all__ = ["die_with_parent"]

_PR_SET_PDEATHSIG: Final = 1
_POLL_SECONDS: Final = 1.0


def die_with_parent() -> None:
    """Have this process killed when its parent ends, even by SIGKILL.

    On Linux the kernel does it, at the end of the *thread* that started this process; elsewhere a thread looks once
    a second.
    """
    parent = os.getppid()
    if sys.platform == "linux":
        if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
        if os.getppid() != parent:  # it ended before the kernel was told
            os.kill(os.getpid(), signal.SIGKILL)
    else:
        threading.Thread(target=_watch, args=(parent,), name="parent-watch", daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_POLL_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)
