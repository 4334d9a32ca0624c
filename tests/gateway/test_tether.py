"""The tether where the kernel does not watch: a small process looks after command and parent."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GUARD = "import sys; sys.platform = 'elsewhere'; from gateway import tether; sys.exit(tether.main(sys.argv[1:]))"
PARENT = f"""
import os, subprocess, sys, time
guard = subprocess.Popen([sys.executable, "-c", {GUARD!r}, str(os.getpid()), "/bin/sleep", "600"])
print(guard.pid, flush=True)
time.sleep(600)
"""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def ended(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.02)


def test_the_command_ends_when_the_parent_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        guard = int(parent.stdout.readline())
        wait_for(lambda: children(guard))
        (command,) = children(guard)
        parent.kill()
        parent.wait()
    wait_for(lambda: ended(command) and ended(guard))


def test_the_command_ends_with_the_guard_and_its_status_is_passed_on() -> None:
    run = [sys.executable, "-c", GUARD, str(os.getpid())]
    assert subprocess.run([*run, "/bin/sh", "-c", "exit 7"], cwd=ROOT, check=False).returncode == 7
    with subprocess.Popen([*run, "/bin/sleep", "600"], cwd=ROOT) as guard:
        wait_for(lambda: children(guard.pid))
        (command,) = children(guard.pid)
        guard.terminate()
        guard.wait(10)
    assert ended(command)
