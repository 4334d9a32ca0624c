"""Tie a process's life to its parent's, so that none is left behind however the parent ends, even by SIGKILL.

A Python process calls ``die_with_parent``. For any other command this file is executed by path, in a bare interpreter
so that it costs few milliseconds:

    python -I -S parent.py PARENT_PID COMMAND [ARGUMENT…]

On Linux it becomes the command, which the kernel watches (``PR_SET_PDEATHSIG`` survives ``exec``). Elsewhere it stays
and looks after both.
"""

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time

__all__ = ["die_with_parent", "main"]

_PR_SET_PDEATHSIG = 1
_POLL_S = 0.2


def die_with_parent(parent: int, by: signal.Signals = signal.SIGKILL) -> None:
    """Have this process ended by the signal ``by`` when ``parent``, the process that started it, has ended.

    On Linux the kernel does it, at the end of the *thread* that started this process; elsewhere a thread looks. Where
    the parent has ended already, this process ends at once.
    """
    if sys.platform == "linux":
        if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, by, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
        if os.getppid() != parent:  # it ended before the kernel was told
            os.kill(os.getpid(), by)
    else:
        threading.Thread(target=_watch, args=(parent, by), name="parent-watch", daemon=True).start()


def main(arguments: list[str]) -> int:
    """Become or guard the command; returns its exit status where it is guarded."""
    parent, command = int(arguments[0]), arguments[1:]
    if sys.platform == "linux":
        die_with_parent(parent, signal.SIGTERM)
        os.execv(command[0], command)  # noqa: S606
    return _guard(parent, command)


def _watch(parent: int, by: signal.Signals) -> None:
    while os.getppid() == parent:
        time.sleep(_POLL_S)
    os.kill(os.getpid(), by)


def _guard(parent: int, command: list[str]) -> int:
    told_to_end = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: told_to_end.set())
    child = subprocess.Popen(command)  # noqa: S603
    while child.poll() is None and os.getppid() == parent and not told_to_end.is_set():
        time.sleep(_POLL_S)
    child.terminate()
    return child.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
