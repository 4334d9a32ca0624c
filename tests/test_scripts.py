"""The set-up scripts of the README, with a stand-in for Python that writes down what it is asked to do."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

STAND_IN = """#!/bin/sh
echo "$@" >>"$CALLS"
case "$*" in
    "-m venv "*)
        for folder; do :; done
        mkdir -p "$folder/bin"
        cp "$0" "$folder/bin/python"
        printf '#!/bin/sh\\necho headstart "$@"\\n' >"$folder/bin/headstart"
        chmod +x "$folder/bin/headstart"
        ;;
esac
"""


class Checkout:
    """A copy of the scripts, and a record of calls to Python."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        shutil.copytree(ROOT / "scripts", folder / "scripts")
        shutil.copy(ROOT / "pyproject.toml", folder)
        self.python = folder / "stand-in"
        self.python.write_text(STAND_IN)
        self.python.chmod(0o755)

    def run(self, script: str, *arguments: str, python: str | None = None) -> subprocess.CompletedProcess[str]:
        environment = {
            "PATH": os.environ["PATH"],
            "PYTHON": python or str(self.python),
            "CALLS": str(self.folder / "calls"),
        }
        command = [str(self.folder / "scripts" / script), *arguments]
        return subprocess.run(command, cwd="/", env=environment, capture_output=True, text=True)

    def installs(self) -> list[str]:
        calls = (self.folder / "calls").read_text().splitlines()
        return [call.split()[-1] for call in calls if " install " in call]


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def test_the_demo_installs_once_and_passes_its_arguments_on(checkout: Checkout) -> None:
    for _ in range(2):
        run = checkout.run("demo", "--exit", "--json")
        assert (run.returncode, run.stdout) == (0, "headstart demo --exit --json\n")
    assert checkout.installs() == [".[demo]"]


def test_a_changed_project_is_installed_again(checkout: Checkout) -> None:
    checkout.run("demo")
    with (checkout.folder / "pyproject.toml").open("a") as file:
        file.write("\n# changed\n")
    checkout.run("demo")
    assert checkout.installs() == [".[demo]", ".[demo]"]


def test_the_test_environment_serves_the_demo_too(checkout: Checkout) -> None:
    assert checkout.run("test", "-k", "nothing").returncode == 0
    assert checkout.run("demo").returncode == 0
    assert checkout.installs() == [".[test]"]
    assert "-m pytest -k nothing" in (checkout.folder / "calls").read_text()


def test_all_tests_run_in_two_processes_and_chosen_ones_as_they_are_asked_for(checkout: Checkout) -> None:
    assert checkout.run("test").returncode == 0
    assert checkout.run("test", "tests/one.py").returncode == 0
    calls = (checkout.folder / "calls").read_text().splitlines()
    everything, chosen = [call for call in calls if call.startswith("-m pytest")]
    assert everything == "-m pytest --numprocesses 2 --dist worksteal"
    assert chosen == "-m pytest tests/one.py"


@pytest.mark.parametrize("script", ["demo", "test", "check"])
def test_a_python_that_is_too_old_is_one_clear_line(checkout: Checkout, script: str) -> None:
    run = checkout.run(script, python="/bin/false")
    assert (run.returncode, run.stdout) == (1, "")
    assert run.stderr.count("\n") == 1
    assert "not Python 3.11 or newer" in run.stderr
