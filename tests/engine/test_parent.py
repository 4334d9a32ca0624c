"""No child outlives its parent: neither a Python process nor a guarded command, whoever watches."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ELSEWHERE = "import sys; sys.platform = 'elsewhere'; "
GUARD = ELSEWHERE + "from engine.parent import main; sys.exit(main(sys.argv[1:]))"
DYING = (
    "import os; from engine.parent import die_with_parent; die_with_parent(os.getppid()); print(flush=True); input()"
)
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
    deadline = time.monotonic() + 60
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


@pytest.mark.parametrize("child", [DYING, ELSEWHERE + DYING], ids=["kernel", "thread"])
def test_a_python_process_dies_with_its_parent(child: str) -> None:
    parent = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {child!r}], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
input()
"""
    command = [sys.executable, "-c", parent]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        assert not ended(pid)
        process.kill()
    wait_for(lambda: ended(pid))


def test_a_process_whose_parent_is_gone_already_ends_at_once() -> None:
    code = "import os; from engine.parent import die_with_parent; die_with_parent(os.getpid()); input()"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, stdin=subprocess.PIPE, check=False)
    assert run.returncode == -signal.SIGKILL
