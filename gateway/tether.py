"""Run a command that ends when its parent process does, even when the parent is killed with SIGKILL.

Executed by path in a bare interpreter, so that it costs few milliseconds:

    python -I -S tether.py PARENT_PID COMMAND [ARGUMENT…]

On Linux the kernel watches (``PR_SET_PDEATHSIG`` survives ``exec``) and this process becomes the command. Elsewhere it
stays and looks after both.
"""

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time

__all__ = ["main"]

_PR_SET_PDEATHSIG = 1
_POLL_S = 0.2


def main(arguments: list[str]) -> int:
    """Become or guard the command; returns its exit status where it is guarded."""
    parent, command = int(arguments[0]), arguments[1:]
    if sys.platform == "linux":
        if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
        if os.getppid() != parent:  # it died before the kernel was asked to watch
            return 1
        os.execv(command[0], command)  # noqa: S606
    return _guard(parent, command)


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
